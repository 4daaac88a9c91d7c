"""An overview of a stream: facts, lengths, keys of the first rows; advice on what to change; and its history.

It never waits and changes nothing. Of many chunks it looks at evenly spaced ones, so that the cost does not grow with
their number.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from lazyshard.errors import LazyShardError
from lazyshard.format.batch import decode_pack
from lazyshard.format.records import QUARANTINE, Manifest, chunk_name
from lazyshard.format.row import parse_row
from lazyshard.format.seal import DealtByCost, Made, Seal, SourceRows
from lazyshard.format.state import Cursor
from lazyshard.inspection.row_facts import Keys, Lengths, RefusedRows, read_refusals
from lazyshard.inspection.survey import sampled_chunks, tolerate
from lazyshard.inspection.tracing_sources import sequenced
from lazyshard.part import Array, Int64Array
from lazyshard.plan.balance import Cost
from lazyshard.plan.shuffle import expected_neighbours
from lazyshard.store.files import read_seal, size_of
from lazyshard.stream import Consumer, Published, list_consumers
from lazyshard.stream.listing import read_manifest
from lazyshard.stream.stream import Stream, open_now

SAMPLED_CHUNKS: Final = 200  # seals to read: enough for a median to a percent, and read within seconds from a share
LOOKED_AT_PACKS: Final = 100_000
FEW_ROWS: Final = 200  # below this number of rows there is no advice: the stream may be a trial
MOST_TRAINED: Final = 20  # consumers in a history: those furthest behind


class At(NamedTuple):
    """An amount at a time."""

    time: float
    amount: float


@dataclass(slots=True)
class Overview:
    """An overview of a stream."""

    directory: Path
    manifest: Manifest | None  # None for a foreign directory
    samples_per_chunk: int
    published: Published
    retired: int  # the chunks [0, retired) are deleted
    looked_at: int = 0  # number of chunks
    unread: int = 0  # number of further chunks that could not be read, and the first reason
    reason: str = ""
    lengths: Lengths = field(default_factory=Lengths)  # bytes of the rows in them, newlines included
    arrays: Lengths = field(default_factory=Lengths)  # bytes of the arrays of each row, if rows hold some
    tokens: Lengths = field(default_factory=Lengths)  # of the rows in tokens, as far as they were sealed
    patches: int = 0  # of the images of these rows, as far as they were sealed
    keys: Keys = field(default_factory=Keys)  # at the top level of the first rows
    packs: int = 0  # packs that were looked into, evenly spaced; 0 if rows are not packs
    packed: int = 0  # source rows in them
    last_sealed_at: float | None = None  # of the newest chunk that was read, like the following:
    source_rows: SourceRows | None = None  # source rows up to it
    made: Made = field(default_factory=Made)  # how its rows were made
    dealt: DealtByCost | None = None  # the training for which they were dealt by cost
    course: list[At] = field(default_factory=list)  # rows up to the ends of these chunks; empty for a foreign directory

    @property
    def chunks(self) -> int:
        """The number of chunks that are not deleted."""
        return self.published.chunks - self.retired

    @property
    def samples(self) -> int:
        """Rows in them."""
        return max(0, self.published.samples - self.retired * self.samples_per_chunk)

    @property
    def complete(self) -> bool:
        """Whether every chunk was read."""
        return self.looked_at == self.chunks

    @property
    def size(self) -> int:
        """Bytes of their data files: exact if every chunk was read, else estimated."""
        return self.lengths.total if self.complete else round(self.lengths.mean * self.samples)


class ShownRow(NamedTuple):
    """A row, and its place."""

    sample: int
    chunk: int
    row: int  # its number in the chunk
    byte: int  # its start in the chunk's data file
    line: bytes  # newline included; checked against its digest if there is one
    tokens: int | None  # its length, None if it was not measured
    value: dict[str, Any]
    arrays: int | None = None  # bytes of its arrays, None if the stream holds no arrays


class ShownChunk(NamedTuple):
    """A chunk, and its facts."""

    file: Path
    number: int
    first: int  # its first sample
    seal: Seal | None  # None in a foreign directory
    lengths: Int64Array  # bytes of its rows, newlines included
    tokens: Array  # empty if they were not sealed
    arrays: int | None = None  # bytes of its side file


def _some(chunks: range, samples_per_chunk: int, rows: int) -> list[int]:
    """Returns evenly spaced chunks that together have about `rows` rows, but at least two."""
    return sampled_chunks(chunks.start, chunks.stop, max(2, min(SAMPLED_CHUNKS, rows // samples_per_chunk)))


def overview(
    directory: Path, samples_per_chunk: int | None = None, *, every: bool = False, rows: bool = True
) -> Overview:
    """Looks at every chunk or some; without `rows`, at seals only. Raises as `open_now` and `published`."""
    stream = open_now(directory, samples_per_chunk)
    published = stream.published()
    retired = min(stream.retired(), published.chunks)
    found = Overview(directory, read_manifest(directory, None), stream.samples_per_chunk, published, retired)
    chunks, size = range(retired, published.chunks), 0
    _look_at_chunks(stream, chunks, every, found)
    if chunks and rows:
        try:
            for shown in read_rows(stream, retired, 0, 100):
                found.keys.add(shown.value)
                if (size := size + len(shown.line) + (shown.arrays or 0)) > 8 << 20:
                    break
        except (LazyShardError, OSError) as error:
            found.unread += not found.unread
            found.reason = found.reason or str(error)
        _count_packs(stream, chunks, found)
    return found


def _look_at_chunks(stream: Stream, chunks: range, every: bool, found: Overview) -> None:
    # Reads seals, with 27 bytes per row, or if there are none the rows themselves.
    rows, failed = 200_000 if found.manifest is None else 4_000_000, 0
    read = dict[str, SourceRows | None]()  # by writer; "" is the only producer of a stream
    for number in chunks if every else _some(chunks, stream.samples_per_chunk, rows):
        try:
            shown = describe_chunk(stream, number)
        except (LazyShardError, OSError) as error:
            found.unread, found.reason, failed = found.unread + 1, found.reason or str(error), failed + 1
            if failed >= 1000:
                # The stream's files name chunks that do not exist, and their numbers may be arbitrarily large.
                found.unread += chunks.stop - 1 - number if every else 0
                break
            continue
        failed = 0
        found.looked_at += 1
        found.lengths.add(shown.lengths)
        found.tokens.add(shown.tokens)
        if (seal := shown.seal) is not None:
            found.patches += 0 if seal.patches is None else int(seal.patches.sum())
            found.last_sealed_at, rows_of = seal.sealed_at, sequenced(seal, stream.samples_per_chunk).rows
            read |= {one.writer: SourceRows.read_source(one.source) for one in rows_of}
            if len(rows_of) == 1:
                found.made, found.dealt = Made.read_source(seal.source), DealtByCost.read(seal.source)
            # Clocks may be set back.
            at = max(seal.sealed_at, found.course[-1].time if found.course else seal.sealed_at)
            found.course.append(At(at, shown.first + len(shown.lengths)))
            if seal.arrays is not None:
                found.arrays.add(np.diff(seal.arrays.offsets.astype(np.int64)))
    found.source_rows = SourceRows.sum(read.values())


def describe_chunk(stream: Stream, number: int) -> ShownChunk:
    """Describes a chunk from its seal, or from its rows if it has none."""
    seal = arrays = None
    tokens: Array = np.zeros(0)
    if stream.stream_id is None:
        chunk = stream.open_chunk(number)
        offsets, file = np.array([chunk.offset(row) for row in range(len(chunk) + 1)], np.int64), chunk.path
    else:
        seal = read_seal(stream.directory, number)
        offsets, file = seal.offsets.astype(np.int64), stream.directory / chunk_name(number)
        tokens = tokens if seal.tokens is None else seal.tokens
        arrays = None if seal.arrays is None else seal.arrays.size
    return ShownChunk(file, number, number * stream.samples_per_chunk, seal, np.diff(offsets), tokens, arrays)


def read_rows(stream: Stream, chunk: int, first: int, count: int) -> Iterator[ShownRow]:
    """Yields up to `count` rows of a chunk, from row `first` on; raises at a damaged row when it is reached."""
    opened = stream.open_chunk(chunk)
    tokens = None if stream.stream_id is None else read_seal(stream.directory, chunk).tokens
    for row in range(first, min(first + count, len(opened))):
        sample, line = chunk * stream.samples_per_chunk + row, opened.line(row)
        length = None if tokens is None else int(tokens[row])
        arrays = None if opened.arrays is None else opened.arrays.size(row, row + 1)
        yield ShownRow(sample, chunk, row, opened.offset(row), line, length, opened.parse([line], row)[0], arrays)


def _count_packs(stream: Stream, chunks: range, found: Overview) -> None:
    """Counts source rows in packs, in whole chunks: the first packs of a buffer hold the longest rows."""
    # As many packs as fit into 64 MiB
    rows, packs, packed = min(LOOKED_AT_PACKS, int((64 << 20) / max(1.0, found.lengths.mean))), 0, 0
    with contextlib.suppress(LazyShardError, OSError):
        for number in _some(chunks, stream.samples_per_chunk, rows):
            chunk = stream.open_chunk(number)
            for row in range(len(chunk)):
                pack = decode_pack(parse_row(chunk.line(row)))
                if pack is None:
                    return
                packs, packed = packs + 1, packed + len(pack.rows)
    found.packs, found.packed = packs, packed


class Advice(NamedTuple):
    """What to change: a sentence with the reason, and the option or command that does it."""

    text: str
    setting: str


class Training(NamedTuple):
    """How a stream is trained, as far as its consumers report."""

    ranks: int = 8  # the ranks of a node, if no consumer reports a number
    micro_batch_size: int = 1  # samples per rank
    window: int | None = None  # chunks of a rank that are shuffled together; 0: in order, None: unknown


def training_of(consumers: Sequence[Consumer], samples_per_chunk: int) -> Training:
    """Returns the training of the consumer that last saved a checkpoint; the defaults if none has."""
    cursors = [one.cursor for one in consumers if one.cursor is not None and one.cursor.state is not None]
    newest = max(cursors, key=lambda cursor: cursor.updated_at).state if cursors else None
    if newest is None:
        return Training()
    part = newest.parts[-1]
    return Training(part.dp, part.batch_size, -(-newest.window // samples_per_chunk))


def advise(found: Overview, training: Training) -> list[Advice]:
    """Returns what to change about a stream, the most useful first; nothing for fewer than `FEW_ROWS` rows."""
    if found.samples < FEW_ROWS or not found.lengths.count:
        return []
    return [*_of_lengths(found), *_of_order(found, training), *_of_chunks(found, training)]


def _of_lengths(found: Overview) -> Iterator[Advice]:
    tokens, made, run = found.tokens, found.made, "lazyshard-producer run"
    full = tokens.mean / made.size if made.size else 1.0
    if made.patches and tokens.count:
        full = max(full, found.patches / tokens.count / made.patches)
    if not tokens.count:
        text = "lengths in tokens are unknown, so packing and balance cannot be judged: have a producer seal them"
        yield Advice(text, f"{run} --source {shlex.quote(str(found.directory))} --out NEW --measure TOKENIZER …")
    elif made.form == "pad" and full < 0.95:
        yield Advice(f"{100 - 100 * full:.0f} % of sequences is padding: pack the rows", f"{run} … --pack {made.size}")
    elif made.form == "pack" and full < 0.95:
        yield Advice(f"packs are {100 * full:.0f} % full: choose from more rows", f"{run} … --pack-buffer 100000")
    elif made.form is None and not found.packs:
        # The power of two, from 512 on, that holds the longest row.
        size = max(512, 1 << (max(1, tokens.largest) - 1).bit_length())
        if (saved := 1 - tokens.mean / size) >= 0.2:
            text = f"rows have {tokens.mean:,.0f} of at most {size:,} tokens on average: packed they make up to "
            yield Advice(f"{text}{100 * saved:.0f} % fewer sequences", f"{run} … --pack {size}")


def _of_order(found: Overview, training: Training) -> Iterator[Advice]:
    ranks, size, chunks = training.ranks, found.samples_per_chunk, found.published.chunks // training.ranks
    plain = found.made.form is None and not found.packs and found.dealt is None
    if plain and found.tokens.count and (uneven := unevenness(found.tokens, training)) >= 1.1:
        text = f"in a step of {ranks:,} ranks the slowest has {uneven:.2f} times the mean work, if rows"
        option = f"--balance {ranks} --micro-batch-size {training.micro_batch_size}"
        yield Advice(f"{text} of these lengths meet at random: deal them by cost", f"lazyshard-producer run … {option}")
    if not (training.window or found.made.shuffled or found.dealt is not None or chunks < 2):
        # The default of ms-swift for a stream with enough chunks
        window = min(8, chunks)
        now, then = (expected_neighbours(ranks, size, width * size, None) for width in (0, window))
        text = f"nothing shuffles the rows: a window puts {then:,.0f} draws of a rank between neighbours, not {now:.1f}"
        yield Advice(text, f"shuffle_window={window}")


def _of_chunks(found: Overview, training: Training) -> Iterator[Advice]:
    chunks, rows, told = found.published.chunks, found.samples_per_chunk, found.source_rows
    size, text = found.lengths.mean * rows, ""
    if found.published.ended and chunks < training.ranks:
        text = f"fewer chunks ({chunks:,}) than --ranks ({training.ranks:,}): rows are read singly; make smaller chunks"
        rows = found.samples // (2 * training.ranks)
    elif size > 2e9 and rows > 1:
        text = f"a chunk has {size / 1e9:,.1f} GB, and no row is trained before all of it is there: make smaller chunks"
        rows = int(rows * 256e6 / size)
    elif size < 100e3 and chunks >= 10_000:
        text = f"{chunks:,} chunks of {size / 1e3:,.1f} kB cost more to open than to read: make larger chunks"
        rows = int(rows * 1e6 / size)
    if text:
        yield Advice(text, f"lazyshard-producer run … --samples-per-chunk {max(1, rows)}")
    if told is not None and told.refused:
        text = f"{told.refused:,} of {told.read:,} source rows were refused: see why, and correct their sources"
        yield Advice(text, f"lazyshard-producer quarantine {shlex.quote(str(found.directory))}")


def unevenness(tokens: Lengths, training: Training) -> float:
    """Returns the work of the slowest rank over the mean, in steps drawn from the lengths with a fixed seed."""
    costs = Cost().of([tokens.quantile((index + 0.5) / 256) for index in range(256)])
    # With more ranks the result hardly changes.
    shape = 200, min(training.ranks, 1024), min(training.micro_batch_size, 64)
    steps = costs[np.random.default_rng(0).integers(0, 256, shape)].sum(axis=2)
    mean = float(steps.mean())
    return float(steps.max(axis=1).mean()) / mean if mean else 1.0


class History(NamedTuple):
    """The history of a stream."""

    found: Overview | None  # from the seals; None without `stream.json`, since the rows would have to be read
    trained: tuple[Cursor, ...] = ()  # of the consumers that are furthest behind, at most `MOST_TRAINED`
    refusals: RefusedRows | None = None  # None if there is no quarantine file
    refusals_size: int | None = None  # bytes of that file


def take_history(directory: Path, before: History | None = None) -> History:
    """Collects the history of a stream; `before` is the previous result. Raises as `overview` and `read_refusals`."""
    size, before = None, before or History(None)
    with contextlib.suppress(FileNotFoundError):
        size = size_of(directory / QUARANTINE)
    refusals = before.refusals if size == before.refusals_size else read_refusals(directory)
    if read_manifest(directory, None) is None:
        return History(None, refusals=refusals, refusals_size=size)
    stream = open_now(directory)
    published, found = stream.published(), before.found
    state = (published.chunks, published.ended, stream.retired())
    if found is None or state != (found.published.chunks, found.published.ended, found.retired):
        found = overview(directory, rows=False)
    consumers = tolerate(lambda: list_consumers(directory, published.chunks), []) or ()
    trained = [one.cursor for one in consumers if one.cursor is not None]
    trained.sort(key=lambda one: (one.consumed, one.consumer))
    return History(found, tuple(trained[:MOST_TRAINED]), refusals, size)


def rates(course: Sequence[At], most: int) -> list[At]:
    """Returns the mean rate per second in at most `most` equal intervals, each at the end of its interval."""
    if len(course) < 2 or course[-1].time <= course[0].time:
        return []
    edges = np.linspace(course[0].time, course[-1].time, min(most, len(course) - 1) + 1)
    found = np.diff(np.interp(edges, *np.transpose(course))) / np.diff(edges)
    return [At(*one) for one in zip(edges[1:].tolist(), found.tolist(), strict=True)]
