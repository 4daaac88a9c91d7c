"""Runs a writer in a fork that kills itself at the N-th durable step, and checks what it leaves behind. `kill -9` shows
wrong orders, torn files and leftovers. It cannot show a missing fsync: that takes a power cut."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import LazyShardError, StreamEnded
from lazyshard.format.names import arrays_name
from lazyshard.format.records import End, Head
from lazyshard.format.row import parse_row
from lazyshard.format.seal import Seal
from lazyshard.store import durable
from lazyshard.stream import head, lock, open_chunk, publishing, recovery, retire
from lazyshard.stream.listing import list_chunks
from tests.harness.tally import Violation
from tests.stream.streams import forked, names

SAMPLES: Final = 7
PER_CHUNK: Final = 2  # Three full chunks and a partial one
WHEN: Final = ("before", "after", "half")
_STREAM: Final = [".producer.lock", "head.json", "stream.end", "stream.json", "stream.owner"]
CLEAN: Final = sorted(_STREAM + [f"chunk_0000{n}.jsonl{end}" for n in range(4) for end in ("", ".completed")])
CLEAN_WITH_ARRAYS: Final = sorted([*CLEAN, *(f"chunk_0000{n}.arrays" for n in range(4))])
_DURABLE: Final = ("create", "write_all", "sync", "sync_directory", "rename", "remove")
_SYSTEM: Final = ("unlink", "rmdir", "mkdir", "rename")
_MODULES: Final = (durable, head, lock, open_chunk, publishing, recovery, retire)
Mutant = Callable[[], None]


@dataclass
class Killer:
    at: int
    when: str
    steps: int = 0

    def wrap(self, step: Callable[..., Any], halves: bool) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            self.steps += 1
            due = self.steps == self.at
            if due and self.when == "half" and halves:
                fd, data = arguments
                step(fd, bytes(data)[: len(data) // 2])
            if due and self.when != "after":
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return step(*arguments, **named)
            finally:
                if due:
                    os.kill(os.getpid(), signal.SIGKILL)

        return wrapped

    def install(self) -> None:
        """Wraps the steps wherever they were imported; a fork needs no undoing."""
        for name in _DURABLE:
            wrapped = self.wrap(getattr(durable, name), name == "write_all")
            for module in _MODULES:
                if hasattr(module, name):
                    setattr(module, name, wrapped)
        for name in _SYSTEM:
            setattr(os, name, self.wrap(getattr(os, name), False))


def arrays_of(sample: int) -> list[int]:
    """What the array of a row holds: rows of different sizes, one of them empty."""
    return [sample] * (sample % 3)


def run(
    directory: Path,
    at: int = 0,
    when: str = "before",
    mutant: Mutant | None = None,
    *,
    overlap: bool = False,
    arrays: bool = False,
) -> int | None:
    """Runs the producer; returns None if it was killed at step `at`, else how many steps it took."""
    count, told = os.pipe()

    def work() -> None:
        if mutant is not None:
            mutant()
        killer = Killer(at, when)
        killer.install()
        try:
            with ChunkWriter(directory, PER_CHUNK, overlap=overlap, arrays=arrays) as stream:
                if (stream.source or 0) != stream.published_samples:
                    raise Violation(f"goes on from source {stream.source}, published are {stream.published_samples}")
                for sample in range(stream.published_samples, SAMPLES):
                    row: dict[str, Any] = {"id": sample}
                    if arrays:
                        row["x"] = np.array(arrays_of(sample), np.int64)
                    stream.write(row, tokens=sample, source=sample + 1)
        except StreamEnded:
            pass
        os.write(told, str(killer.steps).encode())

    try:
        code = forked(work)
        os.close(told)
        text = os.read(count, 20)
    finally:
        os.close(count)
    if code == -signal.SIGKILL:
        return None
    if code:
        raise Violation(f"the producer failed with exit code {code}")
    return int(text)


def check(directory: Path, before: dict[str, bytes]) -> dict[str, bytes]:
    """Checks what every instant must keep; returns what is sealed, for the next check."""
    try:
        return _check(directory, before)
    except LazyShardError as error:
        raise Violation(f"a file cannot be read: {error}") from error


def _check(directory: Path, before: dict[str, bytes]) -> dict[str, bytes]:
    if not directory.is_dir():
        return {}
    listing = list_chunks(directory)
    if listing.gap is not None or listing.complete != len(listing.seals):
        raise Violation(f"sealed are {sorted(listing.seals)}, with data {sorted(listing.data)}")
    sealed: dict[str, bytes] = {}
    ids: list[int] = []
    for chunk in range(listing.complete):
        for name in (listing.data[chunk], listing.seals[chunk]):
            sealed[name] = (directory / name).read_bytes()
        seal = Seal.decode(sealed[listing.seals[chunk]], chunk)
        lines = sealed[listing.data[chunk]].splitlines(keepends=True)
        if [xxhash.xxh3_64_intdigest(line) for line in lines] != seal.digests.tolist():
            raise Violation(f"chunk {chunk} is not what was sealed")
        found = [parse_row(line)["id"] for line in lines]
        if seal.arrays is not None:
            name = arrays_name(chunk)
            if not (directory / name).exists():
                raise Violation(f"chunk {chunk} is sealed, its side file is missing")
            sealed[name] = (directory / name).read_bytes()
            wanted = [np.array(arrays_of(sample), np.int64).tobytes() for sample in found]
            if sealed[name] != b"".join(wanted):
                raise Violation(f"{name} is not what was sealed")
            if [xxhash.xxh3_64_intdigest(part) for part in wanted] != seal.arrays.digests.tolist():
                raise Violation(f"the seal of chunk {chunk} tells of other arrays")
        ids += found
        if seal.source != len(ids):
            raise Violation(f"chunk {chunk} ends at sample {len(ids)}, its seal says source {seal.source}")
    if ids != list(range(len(ids))):
        raise Violation(f"sealed samples are {ids}")
    changed = [name for name in before if sealed.get(name) != before[name]]
    if changed:
        raise Violation(f"what was sealed has changed or gone: {changed}")
    _check_claims(directory, listing.complete, len(ids))
    return sealed


def _check_claims(directory: Path, chunks: int, samples: int) -> None:
    if (directory / "stream.end").exists():
        end = End.decode((directory / "stream.end").read_bytes())
        if (end.chunks, end.samples) != (chunks, samples):
            raise Violation(f"stream.end says {end}, sealed are {chunks} chunks with {samples} samples")
    if (directory / "head.json").exists():
        head = Head.decode((directory / "head.json").read_bytes())
        if head.chunks > chunks or head.samples > samples:
            raise Violation(f"head.json names {head.chunks} chunks, sealed are {chunks}")
        if head.ended and not (directory / "stream.end").exists():
            raise Violation("head.json says that the stream has ended, stream.end is missing")
    if (directory / "stream.json").exists():
        try:
            reader = StreamReader(directory, max_wait=0)
            rows = [reader.read(sample) for sample in range(reader.seen.samples)]
            if reader.arrays and [row["x"].tolist() for row in rows] != [arrays_of(row["id"]) for row in rows]:
                raise Violation(f"a reader read {rows}")
            found = [row["id"] for row in rows]
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"a reader died: {type(error).__name__}: {error}") from error
        if found != list(range(len(found))) or len(found) > samples or (reader.seen.ended and len(found) != samples):
            raise Violation(f"a reader read {found}")


def finish(directory: Path, before: dict[str, bytes], mutant: Mutant | None = None, *, arrays: bool = False) -> None:
    """Restarts the producer until it is through, and checks the whole."""
    if arrays:
        _clear(directory, mutant)
    run(directory, mutant=mutant, arrays=arrays)
    sealed = check(directory, before)
    clean = CLEAN_WITH_ARRAYS if arrays else CLEAN
    if names(directory) != clean:
        raise Violation(f"left over: {sorted(set(names(directory)) ^ set(clean))}")
    if arrays:
        return
    data = b"".join(sealed[f"chunk_0000{n}.jsonl"] for n in range(4))
    if data != b"".join(b'{"id":%d}\n' % sample for sample in range(SAMPLES)):
        raise Violation(f"the data is {data!r}")


def _clear(directory: Path, mutant: Mutant | None) -> None:
    """Opens the stream without writing: by then nothing may be left of what was never sealed."""

    def work() -> None:
        if mutant is not None:
            mutant()
        with contextlib.suppress(StreamEnded):
            ChunkWriter(directory, PER_CHUNK, arrays=True).close(end=False)

    if forked(work):
        raise Violation("the producer failed as it was opened again")
    sealed = {path.name.removesuffix(".jsonl.completed") for path in directory.glob("*.completed")}
    files = {path.stem for path in directory.iterdir() if path.suffix in (".jsonl", ".arrays")}
    if files != sealed or (directory / ".tmp").exists():
        raise Violation(f"left over by a start: {names(directory)}")


def sweep(root: Path, when: str, mutant: Mutant | None = None, *, overlap: bool = False, arrays: bool = False) -> int:
    at = 0
    while True:
        at += 1
        directory = root / f"{when}_{at}"
        if run(directory, at, when, mutant, overlap=overlap, arrays=arrays) is not None:
            finish(directory, check(directory, {}), mutant, arrays=arrays)
            return at - 1
        finish(directory, check(directory, {}), mutant, arrays=arrays)
