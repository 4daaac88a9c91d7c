"""Exports an ended stream of token ids as Megatron's IndexedDataset.

Each row holds a list of tokens, which is a sequence, or several with their lengths. An export that was killed leaves
nothing under its final names, and the next one begins anew. Memory: a piece of the stream, however long that is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lazyshard.conversion.exporting_rows import AUTO, KEY, ROW, ExportedRow, ExportSettings, Unfit, read_row
from lazyshard.conversion.indexed_writer import IndexedWriter
from lazyshard.errors import RowInvalid, StreamInvalid
from lazyshard.format.indexed import DATA_SUFFIX, DTYPES, INDEX_SUFFIX, bounds_of, smallest_dtype
from lazyshard.format.names import chunk_name
from lazyshard.stream.opening import open_now, rows_of_first_chunk
from lazyshard.stream.reader import StreamReader
from lazyshard.stream.retire import read_retired

_ROWS_AT_ONCE: Final = 1024
"""What a chunk has of them is read together; large rows come in smaller pieces."""

Report = Callable[[str, int, int], None]
"""Called with what is done, how many chunks of the stream are exported, and how many it has."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written.

    Attributes:
        data: path of the `.bin` file.
        index: path of the `.idx` file.
        dtype: type of the tokens.
        samples: rows of the stream.
        documents: documents.
        sequences: sequences.
        tokens: tokens.
        size: bytes of both files.
    """

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
    report: Report = lambda phase, done, total: None,
) -> Exported:
    """Writes `PREFIX.bin` and `PREFIX.idx` with all rows of a stream, in order.

    Args:
        source: the stream's directory or URL, one of ours or a foreign one.
        prefix: path of the two files without `.bin` and `.idx`; its directory is there.
        settings: what of the rows, and how; None for the defaults.
        source_samples_per_chunk: of a foreign directory, rows in every chunk but the last; None for those of its first.
        force: whether files of these names are replaced.
        report: is told how far it is.

    Raises:
        ExportExists: there is such a file already, and `force` is False.
        ProducerLocked: another process of this machine exports to this prefix.
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
    dtype = smallest_dtype(0, 0) if settings.dtype == AUTO else settings.dtype
    with IndexedWriter(prefix, dtype, has_modes=settings.mode is not None, replace=force) as writer:
        _copy(reader, writer, settings, report)
        if not writer.tokens:
            raise StreamInvalid(
                f"{reader.directory}: its {reader.seen.samples} rows hold no token, and megatron-core opens no empty "
                f"{DATA_SUFFIX} file",
                directory=str(reader.directory),
            )
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


def _check_source(reader: StreamReader) -> None:
    seen, directory = reader.seen, reader.directory
    if not seen.ended:
        gap = "" if seen.gap is None else f": chunk {seen.gap} lacks its data or its marker"
        raise StreamInvalid(
            f"{directory}: has not ended{gap}; an export holds all of a stream, so wait for its end",
            directory=str(directory),
            chunk=seen.gap,
        )
    retired = 0 if reader.stream_id is None else read_retired(directory, reader.stream_id)
    if retired:
        raise StreamInvalid(
            f"{directory}: its chunks below {retired} are deleted, and an export would lack them; take a stream that "
            f"was produced with --retain all",
            directory=str(directory),
            chunk=0,
        )


def _copy(reader: StreamReader, writer: IndexedWriter, settings: ExportSettings, report: Report) -> None:
    published = reader.seen
    sample, key = 0, None
    integral = DTYPES[writer.dtype].kind in "iu"
    while sample < published.samples:
        report("exporting", sample // reader.samples_per_chunk, published.chunks)
        for row in reader.read_published(sample, published.samples, _ROWS_AT_ONCE):
            try:
                found = read_row(row, settings, integral)
                _make_room(writer, found, settings)
            except Unfit as cause:
                raise _bad_row(reader, sample, str(cause)) from None
            if settings.boundaries.startswith(KEY) and sample and found.key != key:
                writer.end_document()
            key = found.key
            _add(writer, found)
            if settings.boundaries == ROW:
                writer.end_document()
            sample += 1
    if settings.boundaries != ROW and sample:
        writer.end_document()
    report("exporting", published.chunks, published.chunks)


def _make_room(writer: IndexedWriter, row: ExportedRow, settings: ExportSettings) -> None:
    """Sees to it that the tokens fit into the type on disk.

    Raises:
        Unfit: they do not.
    """
    if not len(row.tokens):
        return
    low, high = row.tokens.min().item(), row.tokens.max().item()
    if settings.dtype == AUTO and writer.dtype == smallest_dtype(0, 0) != (wider := smallest_dtype(low, high)):
        writer.widen(wider)
    least, most = bounds_of(writer.dtype)
    if low < least or high > most:
        token = low if low < least else high
        hint = "--dtype int64" if settings.dtype == AUTO else "a wider --dtype, or auto"
        raise Unfit(f"token {token} does not fit into {writer.dtype}, which holds {least} to {most}; give {hint}")


def _add(writer: IndexedWriter, row: ExportedRow) -> None:
    begin = 0
    for number, length in enumerate(row.lengths):
        mode = None if row.modes is None else row.modes[number]
        writer.add_sequence(row.tokens[begin : begin + length], mode)
        begin += length


def _bad_row(reader: StreamReader, sample: int, reason: str) -> RowInvalid:
    chunk, row = divmod(sample, reader.samples_per_chunk)
    path = str(reader.directory / chunk_name(chunk))
    return RowInvalid(f"{path}:{row + 1}: sample {sample}: {reason}", reason=reason, file=path, line=row + 1)
