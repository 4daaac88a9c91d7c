"""Other writers of training data on the same rows, each in its own environment.

None of them syncs to the device, digests rows or numbers samples for a restart; what they do instead is their own
format, in shards of about as many rows. Each is used as its documentation shows, with compression off and one process
where it lets itself be told. Run by `bench_producer.py`, and by itself within those environments.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import json
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bench_producer_process import Taken, timed


def rows_of(path: str) -> Iterator[dict[str, Any]]:
    """Yields the parsed rows of a file."""
    import orjson

    with open(path, "rb", buffering=1 << 20) as file:
        for line in file:
            yield orjson.loads(line)


def write_mds(source: str, out: str, samples_per_shard: int) -> None:
    """MosaicML's MDSWriter; the messages as a column of JSON, a digest a shard."""
    from streaming import MDSWriter

    columns = {"id": "int", "messages": "json"}
    with MDSWriter(out=out, columns=columns, hashes=["xxh64"], size_limit=samples_per_shard * 2048) as writer:
        for row in rows_of(source):
            writer.write(row)


def write_litdata(source: str, out: str, samples_per_shard: int) -> None:
    """litdata's optimize with one worker, which is a process of its own."""
    from litdata import optimize

    optimize(fn=rows_of, inputs=[source], output_dir=out, chunk_size=samples_per_shard, num_workers=1)


def write_arrow(source: str, out: str, samples_per_shard: int) -> None:
    """The JSON reader of `datasets`, which leaves an Arrow file."""
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    load_dataset("json", data_files=source, cache_dir=out, split="train")


def stand_in_for_torchvision() -> None:
    """Lets MosaicML's package be imported where torchvision cannot be: the one from PyPI wants torch with CUDA.

    Its data sets of images are imported with the package; none of them is used here.
    """
    with contextlib.suppress(Exception):
        import torchvision  # noqa: F401

        return
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]

    def lookup(name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})

    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.__getattr__ = lookup  # type: ignore[method-assign]
        sys.modules[name] = module


WRITERS: Final = {
    "mosaicml-streaming": ("streaming", "MDSWriter", write_mds),
    "litdata": ("litdata", "litdata optimize", write_litdata),
    "datasets": ("datasets", "datasets to Arrow", write_arrow),
}


class Peer:
    """One of them, as a variant of the benchmark.

    Attributes:
        name: its name and version.
    """

    def __init__(self, package: str, environments: Path, samples_per_shard: int) -> None:
        self._package = package
        self._python = str(environments / package / "bin" / "python")
        self._samples_per_shard = samples_per_shard
        code = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
        version = subprocess.check_output([self._python, "-c", code], text=True).strip()
        self.name = f"{WRITERS[package][1]} ({version})"

    def run(self, source: Path, out: Path) -> Taken:
        """Returns what the writing took, without the start of the interpreter and the imports."""
        command = [self._python, __file__, self._package, str(source), str(out), str(self._samples_per_shard)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=out.parent)
        if done.returncode:
            raise SystemExit(f"{self.name}: failed\n{done.stderr}")
        return Taken(*json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    """Writes once and prints what it took."""
    package, source, out, samples_per_shard = sys.argv[1:]
    module, _, write = WRITERS[package]
    if module == "streaming":
        stand_in_for_torchvision()
    importlib.import_module(module)
    print(json.dumps(timed(lambda: write(source, out, int(samples_per_shard)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
