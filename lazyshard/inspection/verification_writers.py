"""The part of a verification that concerns several writers: their pieces, and the positions in the seals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from lazyshard.errors import LazyShardError, StreamMissing
from lazyshard.format.records import MANIFEST, Manifest, seal_name
from lazyshard.format.writers import WRITERS, Sequenced, piece_stream_id
from lazyshard.inspection.verification_files import Fault, file_fault
from lazyshard.stream.members import writer_names

if TYPE_CHECKING:
    from lazyshard.inspection.verification import Verified

Taken: TypeAlias = Mapping[str, tuple[int, int]]  # by writer: rows in the stream, and the last chunk with some
_OWN: Final = "use another writer's name, and remove this folder"


class SealedPositions:
    """Checks that the rows of each writer are contiguous over the chunks, whose seals are given in order.

    Attributes:
        findings: what is wrong; at most one finding for a chunk.
        taken: rows of each writer up to the last chunk, None if they are unknown.
    """

    def __init__(self) -> None:
        self.findings: list[Fault] = []
        self.taken: Taken | None = {}
        self._next = 0

    def add(self, chunk: int, position: Sequenced | None, samples: int | None) -> None:
        """Adds the position in a chunk's seal; None if it has none or cannot be read."""
        # Nothing is known after chunks that are deleted or damaged.
        before = self.taken if chunk == self._next else None
        self._next, self.taken = chunk + 1, None
        if position is None:
            return
        self.taken = position.taken
        told = next(_compare(chunk, position, samples, before), None)
        if told is not None:
            self.findings.append(Fault("position", seal_name(chunk), *told, chunk=chunk))


def _compare(chunk: int, position: Sequenced, samples: int | None, before: Taken | None) -> Iterator[tuple[str, str]]:
    """Yields what was expected and what was found, where a position does not continue the one before."""
    counted = sum(one.count for one in position.rows)
    if samples is not None and counted != samples:
        yield f"{samples:,} rows of writers, as in the chunk", f"{counted:,}"
    if before is None:
        return
    for one in position.rows:
        if one.first != (first := before.get(one.writer, (0, 0))[0]):
            yield f"the rows of writer {one.writer!r} from row {first:,} on, as in chunk {chunk - 1}", f"{one.first:,}"
    after = {**before, **{one.writer: (one.first + one.count, chunk) for one in position.rows}}
    for name in sorted({*after, *position.taken}):
        expected, found = after.get(name, (0, 0)), position.taken.get(name, (0, 0))
        if expected != found:
            told = [f"{rows:,} rows, the last in chunk {last}" for rows, last in (expected, found)]
            yield f"writer {name!r} with {told[0]}", told[1]


def check_writers(
    directory: Path, manifest: Manifest, taken: Taken | None, verify: Callable[[Path, int], Verified]
) -> tuple[list[Fault], int]:
    """Checks pieces that are not in the stream, by `verify` of a folder from one on; returns findings and pieces."""
    findings, waiting = list[Fault](), 0
    for name in writer_names(directory):
        rows = 0 if taken is None else taken.get(name, (0, 0))[0]
        folder, first = f"{WRITERS}/{name}", rows // manifest.samples_per_chunk
        try:
            found = verify(directory / folder, first)
        except StreamMissing:
            continue
        except (LazyShardError, OSError) as error:
            findings.append(file_fault(f"{folder}/{MANIFEST}", error))
            continue
        # Pieces have numbers of their own.
        findings += [replace(one, file=f"{folder}/{one.file}", chunk=None) for one in found.findings]
        if first * manifest.samples_per_chunk + found.samples > rows:
            waiting += found.chunks - first
        expected = piece_stream_id(manifest.stream_id, name)
        if found.stream_id not in (None, expected):
            told = f"stream {expected}", f"stream {found.stream_id}, of another writer or another shared stream"
            findings.append(Fault("other-stream", f"{folder}/{MANIFEST}", *told, _OWN))
        if found.chunks * manifest.samples_per_chunk < rows:
            told = f"{rows:,} rows of this writer, as in the stream", f"{found.chunks:,} pieces"
            findings.append(Fault("position", folder, *told, f"restore the folder from a copy, or {_OWN}"))
    return findings, waiting
