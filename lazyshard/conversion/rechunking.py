"""Rechunking: makes a stream with another number of rows in a chunk out of one that is there.

The rows keep their bytes, their order, their arrays and their lengths in tokens. The new stream is an ordinary one,
whose seals hold how far the old one was copied, as its producer's position:

```
{"kind": "rechunk", "stream_id": the old stream's identity, or null, "samples": rows copied}
```

So it can be killed at any moment, and called again goes on after the last chunk that it has published. Before it does,
the last row of the new stream is compared with that of the old one: a foreign directory has no identity to compare.

The old stream is only read. Each row is checked against its digest, if it has one, before it is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lazyshard.conversion.rechunking_rows import DAMAGE, SourceRows
from lazyshard.conversion.rechunking_target import check_directories, check_position, look_at_target, position
from lazyshard.errors import StreamEnded, StreamInvalid, StreamMismatch
from lazyshard.stream.opening import open_now, rows_of_first_chunk
from lazyshard.stream.published import Published
from lazyshard.stream.reader import StreamReader
from lazyshard.stream.writer import HEARTBEAT_S, ChunkWriter

MAX_WAIT_S: Final = 600.0

Report = Callable[[str, int, int], None]
"""Called with what is done, how many chunks of the old stream are copied, and how many it has."""


@dataclass(frozen=True, slots=True)
class Rechunked:
    """The stream that was made.

    Attributes:
        chunks: chunks published.
        samples: rows in them.
        copied: rows copied by this call.
        size: bytes of these.
        new: False if it had been made before, so that nothing was to do.
        damage: what of the old stream could not be read, so that the new one ends there; None where it has all.
    """

    chunks: int
    samples: int
    copied: int
    size: int
    new: bool
    damage: str | None = None


def rechunk(
    source: Path,
    target: Path,
    samples_per_chunk: int,
    *,
    source_samples_per_chunk: int | None = None,
    follow: bool = False,
    max_wait: float = MAX_WAIT_S,
    end_at_damage: bool = False,
    report: Report = lambda phase, done, total: None,
) -> Rechunked:
    """Copies a stream, or goes on where an earlier call was stopped, and ends the copy where the stream has ended.

    Args:
        source: the directory of the old stream, one of ours or a foreign one.
        target: the directory of the new one; made if it is not there.
        samples_per_chunk: rows in a chunk of the new one.
        source_samples_per_chunk: of a foreign directory, rows in every chunk but the last; None for those of its first.
        follow: whether to wait for what a stream that has not ended will publish; otherwise it is refused.
        max_wait: how many seconds to wait at the most for each thing that a producer has still to publish.
        end_at_damage: whether to end the copy before the first row that is damaged, if there is a row before it.
        report: is told how far it is.

    Raises:
        StreamInvalid: the old stream has not ended, or the first rows that are to be copied are deleted.
        StreamMissing: there is no old stream.
        StreamMismatch: the new directory holds something else than a copy of this stream, or one with another
            samples_per_chunk.
        LazyShardError: a row of the old stream is damaged or lost (see `DAMAGE`); those of the new chunks before it are
            copied. With `end_at_damage` only where that is the first row of all.
        ChunkRetired: a chunk of the old stream was deleted meanwhile.
        WaitTimeout: nothing was published within `max_wait`.
        ProducerLocked, ProducerFenced: another process is writing to the new directory.
        WriterFailed, OSError: the filesystem refused.
        ValueError: the new directory is the old one or lies in it, or a number is impossible.
    """
    check_directories(source, target)
    if source_samples_per_chunk is None:
        source_samples_per_chunk = rows_of_first_chunk(source)
    if not follow:
        open_now(source, source_samples_per_chunk)
    reader = StreamReader(source, source_samples_per_chunk, max_wait=max_wait if follow else 0.0)
    rows = SourceRows(reader)
    there = look_at_target(target, samples_per_chunk, rows)
    if there.ended:
        return _already(target, there.chunks, there.samples, rows, end_at_damage)
    # In this order: no waiting brings back what is deleted.
    if rows.is_deleted(there.samples):
        raise _deleted(rows, there.samples)
    _check_source(reader, follow)
    try:
        # In a thread, it writes one chunk while the next is read.
        writer = ChunkWriter(target, samples_per_chunk, overlap=True, arrays=reader.arrays, encoding=reader.encoding)
    except StreamEnded as ended:
        # All was there but the end, which opening it has written.
        samples = ended.samples or 0
        return _already(target, -(-samples // samples_per_chunk), samples, rows, end_at_damage)
    with writer:
        first = writer.published_samples
        if first:
            check_position(target, writer.source, first, rows)
        size, damage = _copy(rows, writer, report, end_at_damage)
    copied = writer.published_samples - first
    return Rechunked(writer.published_chunks, writer.published_samples, copied, size, new=True, damage=damage)


def _copy(rows: SourceRows, writer: ChunkWriter, report: Report, end_at_damage: bool) -> tuple[int, str | None]:
    """Copies all rows that are not there yet; returns their bytes, and at which damage it has ended."""
    reader = rows.reader
    sample, size = writer.samples, 0
    while True:
        published = _wait(reader, writer, sample + 1)
        report("copying", -(-sample // reader.samples_per_chunk), published.chunks)
        if published.samples <= sample:
            return size, None
        while sample < published.samples:
            try:
                taken = rows.take(sample, min(published.samples, sample + writer.room))
            except DAMAGE as cause:
                if end_at_damage and sample:
                    return size, str(cause)
                raise
            sample += len(taken)
            size += len(taken.data)
            writer.write_lines(taken, source=position(reader.stream_id, sample))
            report("copying", -(-sample // reader.samples_per_chunk), published.chunks)


def _wait(reader: StreamReader, writer: ChunkWriter, samples: int) -> Published:
    """Returns once so many rows are published in the old stream, or it has ended; tells the new one's readers of it."""
    if reader.seen.ended or reader.seen.samples >= samples:
        return reader.seen
    told_at = 0.0

    def tell() -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= HEARTBEAT_S:
            told_at = time.monotonic()
            writer.heartbeat("waiting", f"sample {samples - 1} of {reader.directory}, which is still being produced")

    reader.on_wait = tell
    try:
        return reader.wait_for(samples)
    finally:
        reader.on_wait = None
        writer.state = "running"


def _check_source(reader: StreamReader, follow: bool) -> None:
    seen = reader.seen
    if seen.ended or follow:
        return
    gap = "" if seen.gap is None else f": chunk {seen.gap} lacks its data or its marker"
    raise StreamInvalid(
        f"{reader.directory}: has not ended{gap}; wait for its end, or copy what is published as it comes: --follow",
        directory=str(reader.directory),
        chunk=seen.gap,
    )


def _deleted(rows: SourceRows, sample: int) -> StreamInvalid:
    retired = rows.retired()
    directory = rows.reader.directory
    last = retired * rows.reader.samples_per_chunk - 1
    which = f"row {sample} is" if sample == last else f"the rows from {sample} to {last} are"
    chunks = "chunk 0 is" if retired == 1 else f"chunks below {retired} are"
    return StreamInvalid(
        f"{directory}: its {chunks} deleted, so {which} not there any more, and a copy would lack "
        f"{'it' if sample == last else 'them'}; take a stream that was produced with --retain all",
        directory=str(directory),
        chunk=sample // rows.reader.samples_per_chunk,
    )


def _already(target: Path, chunks: int, samples: int, rows: SourceRows, end_at_damage: bool) -> Rechunked:
    reader = rows.reader
    seen = reader.seen
    if end_at_damage and samples < seen.samples:
        try:
            rows.take(samples, samples + 1)
        except DAMAGE as cause:
            return Rechunked(chunks, samples, 0, 0, new=False, damage=str(cause))
    if not seen.ended or samples != seen.samples:
        expected = f"{seen.samples} rows, as {reader.directory} holds{'' if seen.ended else ' so far'}"
        raise StreamMismatch(
            f"{target}: expected {expected}, but it has ended with {samples}; choose another directory",
            directory=str(target),
            expected=expected,
            actual=f"{samples} rows",
        )
    return Rechunked(chunks, samples, 0, 0, new=False)
