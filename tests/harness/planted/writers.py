"""Mistakes of a writer of which the crash points and the races of writers must find each."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest import mock

from lazyshard.store import durable
from lazyshard.stream import lock, publishing
from lazyshard.stream.listing import Listing
from lazyshard.stream.lock import WriterLock
from lazyshard.stream.publishing import OpenChunk, WriteSteps
from lazyshard.stream.writer import ChunkWriter
from tests.harness.planted import points
from tests.harness.planted.planting import around
from tests.harness.writers.crashes import Mutant


def head_before_seal() -> None:
    def publish(original: Any, self: ChunkWriter, chunks: list[tuple[OpenChunk, Any]], *given: Any) -> None:
        ((chunk, _),) = chunks
        self.published_chunks += 1
        self.published_samples += len(chunk)
        self._tell(self.state)
        self.published_chunks -= 1
        self.published_samples -= len(chunk)
        original(self, chunks, *given)

    around(ChunkWriter, "_publish_chunks", publish)


def data_in_place() -> None:  # Writes rows under the chunk's own name, and takes what is there for published

    def recover(original: Any, directory: Path, *given: Any) -> Any:
        for path in directory.glob("chunk_*.jsonl"):
            path.with_name(path.name + ".completed").touch()
        return original(directory, *given)

    around(lock, "recover", recover)


def end_before_last_chunk() -> None:
    def end(original: Any, self: ChunkWriter) -> None:
        chunks = self.published_chunks + (self.samples > self.published_samples)
        publishing.publish_end(self.directory, chunks, self.samples, None, self._lock.path("end"))
        original(self)

    around(ChunkWriter, "_end", end)


def next_chunk_overtakes() -> None:
    original = WriteSteps.do
    held: list[Callable[[], object]] = []

    def do(self: WriteSteps, step: Callable[[], object], size: int = 0) -> int:
        if size or not isinstance(step, functools.partial):
            return original(self, step, size)
        held.append(step)
        while len(held) > 1:
            held.pop()()
        return 0

    def wait(self: WriteSteps, number: int | None = None) -> None:
        if number is None:
            while held:
                held.pop()()

    WriteSteps.do = do  # type: ignore[method-assign]
    WriteSteps.wait = wait  # type: ignore[method-assign]


def side_files_not_cleared() -> None:
    def clear(original: Any, directory: Path, listing: Listing, *given: Any) -> None:
        listing.arrays.clear()
        original(directory, listing, *given)

    around(lock, "_clear", clear)


MUTANTS: Final[dict[str, tuple[Mutant, int]]] = {
    "seal_before_data": (points.seal_before_data, 32),
    "head_before_seal": (head_before_seal, 30),
    "data_in_place": (data_in_place, 29),
    "nothing_cleared": (points.leftovers_stay, 6),
    "end_before_last_chunk": (end_before_last_chunk, 69),
    "torn_seal": (points.seal_in_place, 31),
    "next_chunk_overtakes": (next_chunk_overtakes, 36),
}
"""To be found with rows, by kills from this call on; `MUTANTS_OF_ARRAYS` with arrays."""

MUTANTS_OF_ARRAYS: Final[dict[str, tuple[Mutant, int]]] = {
    "arrays_after_seal": (points.side_file_named_after_the_seal, 36),
    "side_files_not_cleared": (side_files_not_cleared, 32),
}


def owner_first() -> Any:  # Writes its name before all others are fenced, who may write theirs over it
    publish, destroyed = durable.publish_bytes, lock.destroy
    waiting: list[Path] = []

    def publishing(data: bytes, target: Path, temporary: Path) -> None:
        publish(data, target, temporary)
        while waiting:
            destroyed(waiting.pop())

    return mock.patch.multiple(lock, destroy=waiting.append, publish_bytes=publishing)


_put: Final = mock.patch.object
MISTAKES: Final[dict[str, tuple[Callable[[], Any], str, int, int]]] = {
    # Leaves it to those who came before to look at the owner before each rename, as the code once did.
    "others_stay": (lambda: _put(lock, "destroy", lambda directory: None), "sealed", 42, 11),
    # Removes what is not sealed in a way in which somebody fenced can, too.
    "unsealed_unlinked": (lambda: _put(WriterLock, "take_out", lambda _, path: durable.remove(path)), "sealed", 14, 23),
    # Fences the owner, and nobody who is about to become it.
    "owner_alone_believed": (lambda: _put(lock, "list_workplaces", lambda temporary: {}), "sealed", 6, 29),
    "owner_first": (owner_first, "nobody has got through", 5, 9),
    # Takes a directory that is gone for a mistake of the filesystem, as the code once did.
    "missing_file_told": (lambda: _put(WriterLock, "is_gone", lambda self: False), "No such file", 0, 5),
}
"""Of races: how to make it, what is said of it, and before which change of each of two writers it is stopped first."""
