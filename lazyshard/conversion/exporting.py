"""Exports an ended stream of token ids as Megatron's IndexedDataset.

Each row holds a list of tokens, which is a sequence, or several with their lengths. An export that was killed leaves
nothing under its final names, and the next one begins anew. Memory: a piece of the stream, however long that is.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshard.conversion.indexed import DATA_SUFFIX, DTYPES, INDEX_SUFFIX, MAX_LENGTH, bounds_of, smallest_dtype
from lazyshard.conversion.indexed_writer import IndexedWriter
from lazyshard.errors import RowInvalid, StreamInvalid
from lazyshard.format.names import chunk_name
from lazyshard.stream.reader import StreamReader
from lazyshard.stream.retention import read_retired
from lazyshard.stream.stream import open_now, rows_of_first_chunk

_ROWS_AT_ONCE: Final = 1024  # What a chunk has of them is read together; large rows come in smaller pieces
AUTO: Final = "auto"
_KEY: Final = "key:"
_BOUNDARIES: Final = re.compile(rf"row|stream|{_KEY}.+", re.DOTALL)

_MODES: Final = range(-128, 128)

_SMALLEST: Final = smallest_dtype(0, 0)

# Called with what is done, how many chunks of the stream are exported, and how many it has
_Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSettings:
    """What of the rows is exported, and how. Raises ValueError for a type or boundaries that there are not."""

    field: str = "input_ids"  # key of the list of tokens
    # type of the tokens on disk, one of `DTYPES` in `indexed`; "auto" for what megatron-core would choose for a
    # vocabulary that ends with the largest token: uint16 below 65,500 tokens, else int32
    dtype: str = AUTO
    # what is a document: "row", each row; "stream", all of it; "key:NAME", rows that follow each other with the same
    # value under NAME
    boundaries: str = "row"
    # key of the tokens of each sequence, for rows of several; a row without it is one sequence
    lengths: str | None = None
    mode: str | None = None  # key of the mode, an integer, or a list of one for each sequence; None to write no modes

    def __post_init__(self) -> None:
        if self.dtype != AUTO and self.dtype not in DTYPES:
            raise ValueError(f"one of {', '.join((AUTO, *DTYPES))} is needed, got {self.dtype!r}")
        if not _BOUNDARIES.fullmatch(self.boundaries):
            raise ValueError(f"row, stream or {_KEY}NAME is needed, got {self.boundaries!r}")


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: the paths of both files, their type of tokens, what they hold, and their bytes."""

    data: str
    index: str
    dtype: str
    samples: int
    documents: int
    sequences: int
    tokens: int
    size: int


def export(
    source: Path,
    prefix: Path,
    settings: ExportSettings | None = None,
    *,
    source_samples_per_chunk: int | None = None,
    force: bool = False,
    report: _Report = lambda phase, done, total: None,
) -> Exported:
    """Writes `PREFIX.bin` and `PREFIX.idx` with all rows of a stream, in order; the directory of the prefix is there.

    Of a foreign directory `source_samples_per_chunk` are the rows in every chunk but the last; None for those of its
    first. With `force` files of these names are replaced.

    Raises:
        ConfigInvalid: there is such a file already, and `force` is False.
        ProducerFenced: another process of this machine exports to this prefix.
        StreamMissing: there is no stream.
        StreamInvalid: it has not ended, its first rows are deleted, or it holds no token.
        RowInvalid: a row is none of tokens that the type can hold; the message names it.
        LazyShardError: the stream is damaged.
        OSError: the filesystem refused.
    """
    settings = settings or ExportSettings()
    if source_samples_per_chunk is None:
        source_samples_per_chunk = rows_of_first_chunk(source)
    open_now(source, source_samples_per_chunk)
    reader = StreamReader(source, source_samples_per_chunk, max_wait=0.0)
    _check_source(reader)
    dtype = _SMALLEST if settings.dtype == AUTO else settings.dtype
    with IndexedWriter(prefix, dtype, has_modes=settings.mode is not None, replace=force) as writer:
        _copy(reader, writer, settings, report)
        if not writer.tokens:
            rows = reader.seen.samples
            empty = f"its {rows} rows hold no token, and megatron-core opens no empty {DATA_SUFFIX} file"
            raise _unfit_stream(reader, empty)
        header = writer.finish()
    return Exported(
        data=f"{prefix}{DATA_SUFFIX}",
        index=f"{prefix}{INDEX_SUFFIX}",
        dtype=header.dtype,
        samples=reader.seen.samples,
        documents=header.documents,
        sequences=header.sequences,
        tokens=writer.tokens,
        size=header.size + writer.tokens * header.token.itemsize,
    )


def _unfit_stream(reader: StreamReader, why: str, chunk: int | None = None) -> StreamInvalid:
    return StreamInvalid(f"{reader.directory}: {why}", directory=str(reader.directory), chunk=chunk)


def _check_source(reader: StreamReader) -> None:
    seen = reader.seen
    if not seen.ended:
        gap = "" if seen.gap is None else f": chunk {seen.gap} lacks its data or its marker"
        raise _unfit_stream(
            reader, f"has not ended{gap}; an export holds all of a stream, so wait for its end", seen.gap
        )
    retired = 0 if reader.stream_id is None else read_retired(reader.directory, reader.stream_id)
    if retired:
        advice = "take a stream that was produced with --retain all"
        raise _unfit_stream(
            reader, f"its chunks below {retired} are deleted, and an export would lack them; {advice}", 0
        )


def _copy(reader: StreamReader, writer: IndexedWriter, settings: ExportSettings, report: _Report) -> None:
    published = reader.seen
    sample, key = 0, None
    integral = DTYPES[writer.dtype].kind in "iu"
    while sample < published.samples:
        report("exporting", sample // reader.samples_per_chunk, published.chunks)
        for row in reader.read_published(sample, published.samples, _ROWS_AT_ONCE):
            try:
                found = read_row(row, settings, integral)
                _make_room(writer, found.tokens, settings)
            except Unfit as cause:
                chunk, at = divmod(sample, reader.samples_per_chunk)
                path = str(reader.directory / chunk_name(chunk))
                message = f"{path}:{at + 1}: sample {sample}: {cause}"
                raise RowInvalid(message, reason=str(cause), file=path, line=at + 1) from None
            if settings.boundaries.startswith(_KEY) and sample and found.key != key:
                writer.end_document()
            key, begin = found.key, 0
            for number, length in enumerate(found.lengths):
                mode = None if found.modes is None else found.modes[number]
                writer.add_sequence(found.tokens[begin : begin + length], mode)
                begin += length
            if settings.boundaries == "row":
                writer.end_document()
            sample += 1
    if settings.boundaries != "row" and sample:
        writer.end_document()
    report("exporting", published.chunks, published.chunks)


def _make_room(writer: IndexedWriter, tokens: npt.NDArray[Any], settings: ExportSettings) -> None:
    """Sees to it that the tokens fit into the type on disk; raises Unfit if they do not."""
    if not len(tokens):
        return
    low, high = tokens.min().item(), tokens.max().item()
    if settings.dtype == AUTO and writer.dtype == _SMALLEST != (wider := smallest_dtype(low, high)):
        writer.widen(wider)
    least, most = bounds_of(writer.dtype)
    if low < least or high > most:
        token = low if low < least else high
        hint = "--dtype int64" if settings.dtype == AUTO else "a wider --dtype, or auto"
        raise Unfit(f"token {token} does not fit into {writer.dtype}, which holds {least} to {most}; give {hint}")


class ExportedRow(NamedTuple):
    """What of a row is exported."""

    tokens: npt.NDArray[Any]  # of all its sequences, shape (n,): int64, or float64 where floats are exported
    lengths: list[int]  # tokens of each sequence; their sum is n
    modes: list[int] | None  # mode of each sequence; None where none are exported
    key: Any  # what rows of one document have in common; None where that is not asked for


class Unfit(Exception):
    """Why a row cannot be exported; told with its place by whoever knows that."""


def read_row(row: dict[str, Any], settings: ExportSettings, integral: bool) -> ExportedRow:
    """Returns what of a parsed row is exported; raises Unfit where something is missing, or not what it has to be.

    If `integral`, tokens are integers; else they are numbers of any kind, rounded to what a float holds.
    """
    tokens = _numbers(_take(row, settings.field), settings.field, integral)
    lengths = [len(tokens)]
    if settings.lengths is not None and settings.lengths in row:
        lengths = _numbers(row[settings.lengths], settings.lengths).tolist()
        if min(lengths, default=0) < 0 or sum(lengths) != len(tokens):
            raise Unfit(f"{settings.lengths!r} adds up to {sum(lengths)}, and there are {len(tokens)} tokens")
    if max(lengths, default=0) > MAX_LENGTH:
        raise Unfit(f"a sequence of {max(lengths)} tokens; the index holds lengths up to {MAX_LENGTH}")
    modes = None if settings.mode is None else _modes(_take(row, settings.mode), settings.mode, len(lengths))
    by_key = settings.boundaries.startswith(_KEY)
    return ExportedRow(tokens, lengths, modes, _take(row, settings.boundaries[len(_KEY) :]) if by_key else None)


def _take(row: dict[str, Any], name: str) -> Any:
    try:
        return row[name]
    except KeyError:
        there = ", ".join(map(repr, list(row)[:8])) or "nothing"
        raise Unfit(f"{name!r} is missing; it holds {reprlib.repr(there) if len(there) > 200 else there}") from None


def _numbers(values: Any, name: str, integral: bool = True) -> npt.NDArray[Any]:
    kinds = {int} if integral else {int, float}
    if type(values) is not list:
        raise Unfit(f"{name!r} is {_kind(values)}, expected a list of {'integers' if integral else 'numbers'}")
    if set(map(type, values)) - kinds:
        at = next(index for index, value in enumerate(values) if type(value) not in kinds)
        what = "an integer" if integral else "a number"
        raise Unfit(f"{name!r}[{at}] is {_kind(values[at])}, expected {what}")
    try:
        return np.array(values, np.int64 if integral else np.float64)
    except OverflowError:
        raise Unfit(f"{name!r} holds {max(values, key=abs)}, which no type of tokens can hold") from None


def _modes(values: Any, name: str, sequences: int) -> list[int]:
    modes: list[int] = [values] * sequences if type(values) is int else _numbers(values, name).tolist()
    if len(modes) != sequences:
        raise Unfit(f"{name!r} holds {len(modes)} modes for {sequences} sequences")
    for mode in modes:
        if mode not in _MODES:
            raise Unfit(f"{name!r} holds {mode}, expected modes from {_MODES[0]} to {_MODES[-1]}")
    return modes


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {reprlib.repr(value)}"
