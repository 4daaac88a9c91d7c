"""A stream as a source of rows: a lazyshard stream or chunk files of another program, in a directory or object store.

Rows keep their bytes, their arrays and their lengths in tokens. The source waits for a stream that is still being
produced. The position is the number of samples read, with the stream's identity, or for a foreign directory with a
digest of the last row.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import xxhash

from lazyshard import errors
from lazyshard.format.batch import EncodedRow
from lazyshard.format.records import MANIFEST, chunk_name
from lazyshard.format.seal import Seal
from lazyshard.store.files import UrlPath, is_url, read_seal, stream_path
from lazyshard.stream.head import describe_producer, expected_wait
from lazyshard.stream.listing import Published, list_chunks, read_retired
from lazyshard.stream.reader import GRACE_S, StreamReader
from lazyshard.stream.stream import rows_of_first_chunk
from lazyshard.stream.waiting import first_poll, next_poll
from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.position import plain_name, read_entry
from lazyshard_producer.sources import source
from lazyshard_producer.sources.source import Context, Line, RowOrigin, Rows, Source, bad_row, line_size, refusing

KIND: Final = "stream"

_LOST: Final = (errors.ChunkCorrupt, errors.FileRefused)
"""Errors of a chunk of which no row can be read until its files are restored."""

_STREAM: Final = "a readable stream"
_BLANKS: Final = b" \t\r"


class StreamPosition(NamedTuple):
    """A position between two rows: samples before it, and the bytes of their rows, including arrays."""

    sample: int
    size: int


class StreamSource(Source):
    """A stream, read until it ends. A damaged row is a bad row, and so is each row of a chunk that cannot be read.

    Deleted chunks are an error instead, since a copy without them would be incomplete.
    """

    def __init__(self, settings: SourceSettings, position: dict[str, Any] | None, context: Context) -> None:
        self.name: Final = plain_name(settings.path)
        self._directory = stream_path(settings.path)
        self._most = context.max_row_bytes
        self._reader = open_reader(settings.path)
        self._size: Final = self._reader.samples_per_chunk
        self.live, self._ending = not self._reader.seen.ended, False
        self._least_poll = first_poll(self._directory)
        self._polled_at = self._row_at = time.monotonic()
        self._missing_since: float | None = None
        self._seal: Seal | None = None
        self.start = StreamPosition(0, 0)
        if position is not None:
            self.start = StreamPosition(*read_entry(position, self.name, KIND, sample=int, bytes=int))
            if self.start.sample:
                self._check_same("stream_id", position.get("stream_id"), self._reader.stream_id)
            if self.start.sample and self._reader.stream_id is None and (xxh3 := position.get("xxh3")):
                self._check_same("XXH3 of the last row read", xxh3, self._digest(self.start.sample))
        self._reach(self.start)
        if (stream_id := self._reader.stream_id) is not None:
            with refusing(self.name, _STREAM):
                retired = read_retired(self._directory, stream_id)
            if (chunk := self.start.sample // self._size) < retired:
                actual = f"those below {retired} deleted by its producer"
                hint = "; use a stream that is produced with --retain all"
                raise source.refuse_source(self.name, f"all chunks from {chunk} on", actual, hint)

    def _reach(self, at: StreamPosition) -> None:
        # The total size of a stream that has ended is estimated from the rows that were read.
        self.reached, seen = at, self._reader.seen
        self.progress = at.size, at.size * seen.samples // at.sample if seen.ended and at.sample else None

    def read(self) -> Rows | None:
        """Returns the next rows, empty if none are published now, None if the stream has ended."""
        sample, size = self.reached
        with refusing(self.name, _STREAM):
            published = self._poll()
            if sample < published.samples:
                lines = self._take(sample, published.samples)
            elif published.ended and sample > published.samples:
                expected = f"at least the {sample} samples that were read"
                raise source.refuse_source(self.name, expected, str(published.samples))
            else:
                return None if published.ended or self._ending else Rows()
        if not lines:
            return Rows()

        def position(index: int) -> StreamPosition:
            return StreamPosition(sample + index + 1, size + sum(map(line_size, lines[: index + 1])))

        def place(index: int) -> RowOrigin:
            number, row = divmod(sample + index, self._size)
            return RowOrigin(str(self._directory / chunk_name(number)), row + 1, None)

        self._reach(position(len(lines) - 1))
        self._row_at = time.monotonic()
        return Rows(lines, position, place)

    def wait(self, seconds: float) -> None:
        """Waits until the next poll of the stream is due, at most `seconds`."""
        time.sleep(max(0.0, min(seconds, self._due() - time.monotonic())))

    def waits_for(self) -> str:
        """Returns in words what the source waits for, and the state of the stream's producer."""
        sample = self.reached.sample
        if self._missing_since is not None:
            return f"the files of chunk {sample // self._size} of {self.name} to appear"
        return f"sample {sample} of {self.name}: {describe_producer(self._reader.seen, sample + 1, time.time())}"

    def entry(self, position: StreamPosition) -> dict[str, Any]:
        """Returns the entry of a position."""
        identity = {"stream_id": self._reader.stream_id, "xxh3": self._digest(position.sample)}
        return {"kind": KIND, "path": self.name, "sample": position.sample, "bytes": position.size} | identity

    def end(self) -> None:
        """Requests the end: `read` returns the samples published by now, and then None."""
        self._ending = True
        self._polled_at = float("-inf")

    def _poll(self) -> Published:
        seen = self._reader.seen
        if self.reached.sample < seen.samples or seen.ended or time.monotonic() < self._due():
            return seen
        found = self._reader.refresh(self.reached.sample + 1)
        self._polled_at = time.monotonic()
        return found

    def _due(self) -> float:
        expected, waited = expected_wait(self.reached.sample + 1, self._reader.seen), self._polled_at - self._row_at
        return self._polled_at + next_poll(max(0.0, waited), expected, self._least_poll)

    def _take(self, first: int, stop: int) -> Sequence[Line]:
        """Returns rows of [first, stop) from the first on: at least one, of one chunk; empty if files are missing."""
        number = first // self._size
        stop = min(stop, (number + 1) * self._size)
        try:
            self._reader.chunk(number)
            if self._reader.stream_id is not None and (self._seal is None or self._seal.chunk != number):
                self._seal = read_seal(self._directory, number)
        except (errors.WaitTimeout, errors.ChunkMissing, *_LOST) as cause:
            # WaitTimeout: a chunk of a foreign directory has no marker although later chunks have. Retry from now on.
            now, wait = time.monotonic(), isinstance(cause, errors.WaitTimeout)
            if isinstance(cause, errors.ChunkMissing):
                # A network filesystem may cache for a while that a name does not exist.
                self._missing_since = self._missing_since or now
                wait = now - self._missing_since < GRACE_S
            if not wait:
                return [_refused(cause) for _ in range(first, stop)]
            self._polled_at = now
            return []
        self._missing_since = None
        try:
            lines = self._lines(first, stop)
        except (errors.ChunkCorrupt, errors.RowInvalid) as cause:
            return [_refused(cause)]
        reason, most = source.too_long(self._most, ": {} bytes, its arrays included"), self._most + 1
        if max(map(line_size, lines)) <= most:
            return lines
        return [line if (size := line_size(line)) <= most else bad_row(reason.format(size - 1)) for line in lines]

    def _lines(self, first: int, stop: int) -> Sequence[bytes | EncodedRow]:
        """Returns rows up to a bad one. Raises errors.ChunkCorrupt, errors.RowInvalid if the first row is bad."""
        reader, seal, row = self._reader, self._seal, first % self._size
        lines = reader.lines_published(first, reader.stop_for_arrays(first, stop) if reader.arrays else stop)
        if reader.stream_id is None or seal is None:
            return [plain_line(line) for line in lines]
        if seal.tokens is None and not reader.arrays:
            return lines
        parts = self._arrays(first, len(lines)) if reader.arrays else [b""] * len(lines)
        tokens = [None] * len(parts) if seal.tokens is None else seal.tokens[row : row + len(parts)].tolist()
        patches = [0] * len(parts) if seal.patches is None else seal.patches[row : row + len(parts)].tolist()
        return [EncodedRow(*of) for of in zip(lines[: len(parts)], parts, tokens, patches, strict=True)]

    def _arrays(self, first: int, count: int) -> list[bytes]:
        """Returns the bytes of the arrays of rows up to the first bad one; raises ChunkCorrupt if that is the first."""
        try:
            found = self._reader.arrays_published(first, first + count)
        except errors.ChunkCorrupt as cause:
            if not (good := 0 if cause.row is None else cause.row - first % self._size):
                raise
            found = self._reader.arrays_published(first, first + good)
        ends = found.ends.tolist()
        return [found.data[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def _digest(self, samples: int) -> str:
        """Returns the XXH3 of the row before a place in a foreign stream; "" for a stream that has an identity."""
        if samples and self._reader.stream_id is None:
            with contextlib.suppress(*_LOST, errors.RowInvalid, errors.ChunkMissing, IndexError):
                return xxhash.xxh3_64_hexdigest(plain_line(self._reader.line(samples - 1)))
        return ""

    def _check_same(self, what: str, expected: Any, actual: Any) -> None:
        if expected != actual:
            hint = "; restore the stream that was read, or choose another --out"
            raise source.refuse_source(self.name, f"{what} {expected}", str(actual or "none"), hint)


def is_stream(path: str) -> bool:
    """Returns whether a path is a stream: a URL, or a directory with `stream.json` or with chunk files and markers."""
    return is_url(path) or os.path.lexists(os.path.join(path, MANIFEST)) or bool(list_chunks(Path(path)).seals)


def plain_line(line: bytes) -> bytes:
    r"""Returns a row of a foreign chunk in the form of a lazyshard stream, without blank lines around it.

    >>> plain_line(b' \n{"id": 1} \r\n\n'), plain_line(b'{"id": 2}')
    (b'{"id": 1}\n', b'{"id": 2}\n')
    """
    return next(part for part in line.split(b"\n") if part.strip(_BLANKS)).rstrip(_BLANKS) + b"\n"


def open_reader(path: str) -> StreamReader:
    """Opens the stream at a path or URL."""
    directory = stream_path(path)
    with refusing(plain_name(path), _STREAM):
        rows = None if isinstance(directory, UrlPath) else rows_of_first_chunk(directory)
        reader = StreamReader(directory, rows, max_wait=0.0)
    # The run reports waits itself, see `waits_for`.
    reader.quiet = True
    return reader


def _refused(cause: errors.LazyShardError) -> errors.RowInvalid:
    if isinstance(cause, errors.RowInvalid):
        return bad_row(cause.reason or str(cause))
    damaged = getattr(cause, "row", None) is not None and f"damaged: expected {cause.expected}, found {cause.actual}"
    return bad_row(damaged or f"its chunk cannot be read: {cause}")
