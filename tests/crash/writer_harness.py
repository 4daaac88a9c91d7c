"""Runs a writer in a fork that kills itself at the N-th durable step, and checks what it leaves behind.

`kill -9` shows wrong orders, torn files and leftovers. It cannot show a missing fsync: that takes a power cut.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import LazyShardError, StreamEnded
from lazyshard.format import End, Head, Seal, parse_row
from lazyshard.storage import announcer, durable, lock, piece_file, publishing, recovery, retire, writer_opening
from lazyshard.storage.listing import list_chunks
from tests.storage.streams import forked, names

SAMPLES: Final = 7
PER_CHUNK: Final = 2
"""Three full chunks and a partial one."""

WHEN: Final = ("before", "after", "half")

CLEAN: Final = sorted(
    [".producer.lock", "head.json", "stream.end", "stream.json", "stream.owner"]
    + [f"chunk_0000{n}.jsonl{end}" for n in range(4) for end in ("", ".completed")]
)

_DURABLE: Final = ("create", "write_all", "sync", "sync_directory", "rename", "remove")
_SYSTEM: Final = ("unlink", "rmdir", "mkdir")
_MODULES: Final = (durable, announcer, lock, piece_file, publishing, recovery, retire, writer_opening)

Mutant = Callable[[], None]


class Violation(AssertionError):
    """A promise that was not kept."""


@dataclass
class Killer:
    """Counts steps and kills this process at one of them."""

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


def run(
    directory: Path, at: int = 0, when: str = "before", mutant: Mutant | None = None, *, overlap: bool = False
) -> int | None:
    """Runs the producer; returns None if it was killed at step `at`, else how many steps it took."""
    count, told = os.pipe()

    def work() -> None:
        if mutant is not None:
            mutant()
        killer = Killer(at, when)
        killer.install()
        try:
            with ChunkWriter(directory, PER_CHUNK, overlap=overlap) as stream:
                if (stream.source or 0) != stream.published_samples:
                    raise Violation(f"goes on from source {stream.source}, published are {stream.published_samples}")
                for sample in range(stream.published_samples, SAMPLES):
                    stream.write({"id": sample}, tokens=sample, source=sample + 1)
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
        ids += [parse_row(line)["id"] for line in lines]
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
            found = [reader.read(sample)["id"] for sample in range(reader.seen.samples)]
        except Exception as error:
            raise Violation(f"a reader died: {type(error).__name__}: {error}") from error
        if found != list(range(len(found))) or len(found) > samples or (reader.seen.ended and len(found) != samples):
            raise Violation(f"a reader read {found}")


def finish(directory: Path, before: dict[str, bytes], mutant: Mutant | None = None) -> None:
    """Restarts the producer until it is through, and checks the whole."""
    run(directory, mutant=mutant)
    sealed = check(directory, before)
    if names(directory) != CLEAN:
        raise Violation(f"left over: {sorted(set(names(directory)) ^ set(CLEAN))}")
    data = b"".join(sealed[f"chunk_0000{n}.jsonl"] for n in range(4))
    if data != b"".join(b'{"id":%d}\n' % sample for sample in range(SAMPLES)):
        raise Violation(f"the data is {data!r}")


def sweep(root: Path, when: str, mutant: Mutant | None = None, *, overlap: bool = False) -> int:
    """Kills at every step in turn; returns at how many."""
    at = 0
    while True:
        at += 1
        directory = root / f"{when}_{at}"
        if run(directory, at, when, mutant, overlap=overlap) is not None:
            finish(directory, check(directory, {}), mutant)
            return at - 1
        finish(directory, check(directory, {}), mutant)


@contextmanager
def fast_directory(fallback: Path) -> Iterator[Path]:
    """A directory in memory, where syncing costs nothing; killing shows the same there."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else fallback) as directory:
        yield Path(directory)
