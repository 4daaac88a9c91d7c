"""The samples of WebDataset tars, audio as bytes, become a stream; the producer is stopped in the middle of a tar.

    python examples/webdataset_tars.py [FOLDER]

`rows` is the source: `lazyshard-producer run --source python:webdataset_tars:rows --embed wav` calls it with the
position after the last published row, so a new start continues at that byte of that tar. `--embed wav` lets rows hold
bytes, and refuses audio that is empty or cut off. Other containers are read alike, for instance Lance by row numbers.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TARS, PER_TAR, PER_CHUNK = 3, 40, 10


def rows(position: list[int] | None) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Yields each sample of the tars in the current directory, and where the next one begins: tar, byte."""
    first, offset = position or (0, 0)
    for number, path in enumerate(sorted(Path().glob("*.tar"))[first:], first):
        with path.open("rb") as file:
            file.seek(offset)
            sample: dict[str, Any] = {}
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for member in filter(tarfile.TarInfo.isfile, tar):
                    folder, name = os.path.split(member.name)
                    stem, _, kind = name.partition(".")
                    key = os.path.join(folder, stem)
                    if sample and sample["__key__"] != key:
                        yield sample, [number, member.offset]
                        sample = {}
                    content = tar.extractfile(member)
                    assert content is not None
                    data = content.read()
                    sample["__key__"] = key
                    sample[kind] = json.loads(data) if kind == "json" else data.decode() if kind == "txt" else data
            if sample:
                yield sample, [number + 1, 0]
        offset = 0


def sound(number: int) -> bytes:
    """Returns a WAV file of some samples of a number."""
    with io.BytesIO() as file:
        with wave.open(file, "wb") as audio:
            audio.setparams((1, 2, 16000, 0, "NONE", ""))
            audio.writeframes(number.to_bytes(2, "little") * 400)
        return file.getvalue()


def make_tars(folder: Path) -> None:
    """Writes tars as WebDataset does: files of one sample have one name and follow each other."""
    for number in range(TARS):
        with tarfile.open(folder / f"audio-{number:05d}.tar", "w") as tar:
            for sample in range(number * PER_TAR, (number + 1) * PER_TAR):
                for kind, data in (("wav", sound(sample)), ("json", json.dumps({"id": sample}).encode())):
                    info = tarfile.TarInfo(f"{sample:06d}.{kind}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def main() -> None:
    """Makes tars and publishes them in two runs, then reads every sample."""
    from lazyshard import LazyShardedDataset, StreamReader  # with torch, which the producer does not import

    folder = Path(*sys.argv[1:] or ["runs/webdataset_tars"]).absolute()
    if folder.exists():
        sys.exit(f"{folder} already exists: remove it, or give another folder")
    folder.mkdir(parents=True)
    make_tars(folder)
    command = [sys.executable, "-m", "lazyshard_producer", "run", "--source", f"python:{Path(__file__).stem}:rows"]
    command += ["--out", "stream", "--samples-per-chunk", str(PER_CHUNK), "--embed", "wav", "--no-progress"]
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    for more in (["--max-ahead", "6"], []):
        producer = subprocess.Popen([*command, *more], cwd=folder, env={**os.environ, "PYTHONPATH": paths})
        if more:
            StreamReader(folder / "stream", max_wait=60).wait_for(6 * PER_CHUNK)
            producer.kill()
            print(f"the producer was killed after {6 * PER_CHUNK} samples, in the middle of the second tar")
        assert producer.wait(120) == (-9 if more else 0)
    dataset = LazyShardedDataset(folder / "stream", dp_rank=0, dp_size=1)
    read = [dataset[index] for index in dataset.rank_indices]
    assert [row["json"]["id"] for row in read] == list(range(TARS * PER_TAR))
    assert all(row["wav"] == sound(row["json"]["id"]) for row in read), "a sample has other bytes"
    print(f"ok: {len(read)} samples of {TARS} tars, each once and with the bytes of its files")


if __name__ == "__main__":
    main()
