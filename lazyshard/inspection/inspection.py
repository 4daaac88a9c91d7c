"""What a stream holds, at a glance: its facts, how long its rows are, and what is in the first ones.

Nothing is waited for and nothing is changed. Lengths come from the seals, so that rows need not be read; of a stream
with many chunks evenly spaced ones are looked at, so that the cost does not grow with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from lazyshard.errors import LazyShardError
from lazyshard.format.batch import decode_pack
from lazyshard.format.names import chunk_name
from lazyshard.format.records import Manifest
from lazyshard.format.row import parse_row
from lazyshard.format.seal import DealtByCost, Made, Seal, SourceRows
from lazyshard.inspection.disk_use import sampled_chunks
from lazyshard.inspection.row_facts import Keys, Lengths
from lazyshard.store.files import read_seal
from lazyshard.stream.listing import Published
from lazyshard.stream.manifest import read_manifest
from lazyshard.stream.stream import Stream, open_now

SAMPLED_CHUNKS: Final = 200
"""Seals that are looked at: enough that the median is known to about a percent, and read within a second or two from a
network filesystem."""

SAMPLED_ROWS: Final = 4_000_000
SCANNED_ROWS: Final = 200_000
"""So many rows at the most, where chunks are large: their seals take about 27 bytes a row. Without seals the rows
themselves have to be read."""

GIVE_UP_CHUNKS: Final = 1000
"""After so many chunks in turn that could not be looked at, the others count as such too."""

FIRST_ROWS: Final = 100
_FIRST_BYTES: Final = 8 << 20
"""First rows whose keys are told; no more of them than fit into so many bytes."""

LOOKED_AT_PACKS: Final = 100_000
_PACKS_BYTES: Final = 64 << 20
"""Packs whose rows are counted, no more of them than fit into so many bytes; two chunks in any case."""


class ChunkPoint(NamedTuple):
    """A chunk that was looked at.

    Attributes:
        chunk: its number.
        rows: rows in it.
        size: bytes of its data file.
        sealed_at: when it was published, in seconds since 1970.
    """

    chunk: int
    rows: int
    size: int
    sealed_at: float


@dataclass(slots=True)
class Overview:
    """A stream at a glance.

    Attributes:
        directory: the stream's directory.
        manifest: its manifest, None for a foreign directory.
        samples_per_chunk: rows in every chunk but possibly the last.
        published: what is published.
        retired: the chunks of the half-open range [0, retired) are deleted.
        looked_at: how many chunks were looked at; more would not tell more where it is all of them.
        unread: how many more could not be, and the first reason.
        lengths: bytes of the rows in them, newlines included.
        arrays: bytes of the arrays of each row, in a stream whose rows hold some.
        tokens: lengths of the rows in tokens, as far as they were sealed.
        last_sealed_at: when the newest chunk was published, in seconds since 1970; None where nothing tells.
        keys: top-level keys of the first rows.
        packs: how many packs were looked into, evenly spaced; 0 where rows are none.
        packed: source rows in those.
        source_rows: source rows up to the newest chunk that was looked at; None where its seal does not tell.
        made: how the rows of that chunk were made, as its seal tells.
        dealt: for which training they were dealt by cost; None where they were not.
        points: the chunks that were looked at, in order; none of a foreign directory.
    """

    directory: Path
    manifest: Manifest | None
    samples_per_chunk: int
    published: Published
    retired: int
    looked_at: int = 0
    unread: int = 0
    reason: str = ""
    lengths: Lengths = field(default_factory=Lengths)
    arrays: Lengths = field(default_factory=Lengths)
    tokens: Lengths = field(default_factory=Lengths)
    last_sealed_at: float | None = None
    keys: Keys = field(default_factory=Keys)
    packs: int = 0
    packed: int = 0
    source_rows: SourceRows | None = None
    made: Made = field(default_factory=Made)
    dealt: DealtByCost | None = None
    points: list[ChunkPoint] = field(default_factory=list)

    @property
    def chunks(self) -> int:
        """Chunks that are there."""
        return self.published.chunks - self.retired

    @property
    def samples(self) -> int:
        """Rows in them."""
        return max(0, self.published.samples - self.retired * self.samples_per_chunk)

    @property
    def complete(self) -> bool:
        """Whether every chunk was looked at."""
        return self.looked_at == self.chunks

    @property
    def size(self) -> int:
        """Bytes of their data files: exact where every chunk was looked at, else estimated."""
        return self.lengths.total if self.complete else round(self.lengths.mean * self.samples)


@dataclass(frozen=True, slots=True)
class ShownRow:
    """A row, and where it is.

    Attributes:
        sample: its number in the stream.
        chunk: its chunk.
        row: its number in the chunk.
        byte: where it starts in the chunk's data file.
        line: its bytes, newline included; checked against their digest if there is one.
        tokens: its length in tokens, None where not measured.
        value: the object that it is.
        arrays: bytes of its arrays, None in a stream whose rows hold none.
    """

    sample: int
    chunk: int
    row: int
    byte: int
    line: bytes
    tokens: int | None
    value: dict[str, Any]
    arrays: int | None = None


@dataclass(frozen=True, slots=True)
class ShownChunk:
    """A chunk.

    Attributes:
        file: its data file.
        number: its number.
        first: its first sample.
        rows: rows in it.
        size: bytes of its data file.
        seal: its seal, None in a foreign directory.
        lengths: bytes of its rows, newlines included.
        tokens: lengths of its rows in tokens.
        arrays: bytes of its side file, None where it has none.
    """

    file: Path
    number: int
    first: int
    rows: int
    size: int
    seal: Seal | None
    lengths: Lengths
    tokens: Lengths
    arrays: int | None = None


def _most_chunks(samples_per_chunk: int, rows: int) -> int:
    """Returns how many chunks are looked at that may hold so many rows; two in any case."""
    return max(2, min(SAMPLED_CHUNKS, rows // samples_per_chunk))


def overview(
    directory: Path, samples_per_chunk: int | None = None, *, every: bool = False, rows: bool = True
) -> Overview:
    """Looks at a stream.

    Args:
        directory: the stream's directory.
        samples_per_chunk: of a foreign directory, rows in every chunk but the last; None for those of its first one.
        every: whether to look at every chunk.
        rows: whether to look into rows too, for their keys and what packs hold. Without, seals alone are read.

    Raises:
        StreamMissing: there is no stream in it.
        LazyShardError, OSError: as `open_stream` and `Stream.published`.
    """
    stream = open_now(directory, samples_per_chunk)
    published = stream.published()
    retired = min(stream.retired(), published.chunks)
    found = Overview(directory, read_manifest(directory, None), stream.samples_per_chunk, published, retired)
    chunks = range(retired, published.chunks)
    _look_at_chunks(stream, chunks, every, found)
    if chunks and rows:
        _count_keys(stream, retired, found)
        _count_packs(stream, chunks, found)
    return found


def _look_at_chunks(stream: Stream, chunks: range, every: bool, found: Overview) -> None:
    most = _most_chunks(stream.samples_per_chunk, SCANNED_ROWS if found.manifest is None else SAMPLED_ROWS)
    numbers = chunks if every else sampled_chunks(chunks.start, chunks.stop, most)
    failed = 0
    for number in numbers:
        try:
            shown = describe_chunk(stream, number)
        except (LazyShardError, OSError) as error:
            found.unread += 1
            found.reason = found.reason or str(error)
            failed += 1
            if failed >= GIVE_UP_CHUNKS:
                # The stream's files name chunks that are not there, and no number is too large to be named.
                found.unread += chunks.stop - 1 - number if every else 0
                break
            continue
        failed = 0
        found.looked_at += 1
        found.lengths.merge(shown.lengths)
        found.tokens.merge(shown.tokens)
        if shown.seal is not None:
            _note_seal(shown, shown.seal, found)


def _note_seal(shown: ShownChunk, seal: Seal, found: Overview) -> None:
    found.last_sealed_at = seal.sealed_at
    found.source_rows = SourceRows.read_source(seal.source)
    found.made, found.dealt = Made.read_source(seal.source), DealtByCost.read(seal.source)
    found.points.append(ChunkPoint(shown.number, shown.rows, shown.size, seal.sealed_at))
    if seal.arrays is not None:
        found.arrays.add(np.diff(seal.arrays.offsets.astype(np.int64)))


def describe_chunk(stream: Stream, number: int) -> ShownChunk:
    """Looks at a chunk: by its seal, or where it has none of ours by its rows.

    Raises:
        ChunkCorrupt, SealInvalid, FileNotFoundError, FileRefused, OSError: it cannot be looked at.
    """
    lengths, tokens = Lengths(), Lengths()
    if stream.stream_id is None:
        chunk = stream.open_chunk(number)
        offsets = np.array([chunk.offset(row) for row in range(len(chunk) + 1)], np.int64)
        seal, file = None, chunk.path
    else:
        seal = read_seal(stream.directory, number)
        offsets = seal.offsets.astype(np.int64)
        file = stream.directory / chunk_name(number)
        if seal.tokens is not None:
            tokens.add(seal.tokens)
    lengths.add(np.diff(offsets))
    first = number * stream.samples_per_chunk
    arrays = None if seal is None or seal.arrays is None else seal.arrays.size
    return ShownChunk(file, number, first, len(offsets) - 1, int(offsets[-1]), seal, lengths, tokens, arrays)


def read_rows(stream: Stream, chunk: int, first: int, count: int) -> Iterator[ShownRow]:
    """Yields rows of a chunk, from its row `first` on: so many, or to its end.

    Raises:
        ChunkCorrupt, RowInvalid: a row is not as it should be; those before it were yielded.
        FileNotFoundError, OSError: it cannot be read.
    """
    opened = stream.open_chunk(chunk)
    tokens = None if stream.stream_id is None else read_seal(stream.directory, chunk).tokens
    for row in range(first, min(first + count, len(opened))):
        line = opened.line(row)
        yield ShownRow(
            sample=chunk * stream.samples_per_chunk + row,
            chunk=chunk,
            row=row,
            byte=opened.offset(row),
            line=line,
            tokens=None if tokens is None else int(tokens[row]),
            value=opened.parse([line], row)[0],
            arrays=None if opened.arrays is None else opened.arrays.size(row, row + 1),
        )


def _count_keys(stream: Stream, chunk: int, found: Overview) -> None:
    size = 0
    try:
        for shown in read_rows(stream, chunk, 0, FIRST_ROWS):
            found.keys.add(shown.value)
            size += len(shown.line) + (shown.arrays or 0)
            if size > _FIRST_BYTES:
                break
    except (LazyShardError, OSError) as error:
        found.unread += not found.unread
        found.reason = found.reason or str(error)


def _count_packs(stream: Stream, chunks: range, found: Overview) -> None:
    """Counts the source rows in packs, in whole chunks: of a buffer the first packs hold the longest and fewest rows.

    Nothing is counted where a row is no pack; what cannot be read was told already.
    """
    size = stream.samples_per_chunk
    rows = min(LOOKED_AT_PACKS, int(_PACKS_BYTES / max(1.0, found.lengths.mean)))
    packs, packed = 0, 0
    with contextlib.suppress(LazyShardError, OSError):
        for number in sampled_chunks(chunks.start, chunks.stop, _most_chunks(size, rows)):
            chunk = stream.open_chunk(number)
            for row in range(len(chunk)):
                pack = decode_pack(parse_row(chunk.line(row)))
                if pack is None:
                    return
                packs, packed = packs + 1, packed + len(pack.rows)
    found.packs, found.packed = packs, packed
