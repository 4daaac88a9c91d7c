"""`lazyshard export`: writes an ended stream of token ids as Megatron's IndexedDataset, by megatron-core's builder.

Each row holds a list of tokens: one sequence, or several with their lengths. Both files are written under temporary
names and renamed once they are synced to the device, the data first, as readers look for both.
"""

from __future__ import annotations

import os
import re
import reprlib
import secrets
import time
import warnings
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from typer import Argument, Option

from lazyshard.cli import exits, output
from lazyshard.conversion.indexed import DATA_SUFFIX, DTYPES, INDEX_SUFFIX, bounds_of
from lazyshard.errors import ConfigInvalid, RowInvalid
from lazyshard.inspection.tracing import Report
from lazyshard.part import Array
from lazyshard.store import durable
from lazyshard.stream.listing import invalid, read_retired
from lazyshard.stream.reader import StreamReader
from lazyshard.stream.stream import open_now

AUTO: Final = "auto"
_SMALLEST: Final = "uint16"  # Up to token 65,498; above that int32 (`DType.optimal_dtype` of megatron-core)
_KEY: Final = "key:"


class ExportSettings(NamedTuple):
    """The options of the command."""

    field: str = "input_ids"
    dtype: str = AUTO
    boundaries: str = "row"
    lengths: str | None = None
    samples_per_chunk: int | None = None  # of a directory without `stream.json`; None: rows of its first chunk
    force: bool = False  # replace existing files


def command(
    stream: output.StreamArgument,
    prefix: Annotated[str, Argument(metavar="PREFIX", help="Path of the two files, without .bin and .idx.")],
    field: Annotated[str, Option(metavar="KEY", help="Key of the list of tokens.")] = "input_ids",
    dtype: Annotated[str, Option(metavar="TYPE", help=f"{', '.join(DTYPES)}; auto: as Megatron chooses.")] = AUTO,
    document_boundaries: Annotated[
        str, Option(metavar="row|stream|key:NAME", help="A document is a row, all rows, or rows with equal NAME.")
    ] = "row",
    lengths: Annotated[str | None, Option(metavar="KEY", help="Key of sequence lengths, if rows hold several.")] = None,
    force: Annotated[bool, Option("--force", help="Replace existing files.")] = False,
    as_json: output.JsonOption = False,
    samples_per_chunk: output.SamplesPerChunkOption = None,
) -> int:
    r"""Writes an ended stream of token ids as Megatron's IndexedDataset, PREFIX.bin and PREFIX.idx.

    Each row holds a list of integers under --field, which is a sequence and, by default, a document. Both files appear
    once everything is written, the index last. The stream is not changed. Requires megatron-core: pip install
    'lazyshard\[megatron]'.

    If the command is killed, it leaves hidden files in the same folder, .NAME.bin.* and .NAME.idx.*. Remove them and
    run the same command again; it starts from the beginning. If it is killed at the very end, PREFIX.bin exists without
    its index, and the next run needs --force.

    Examples:
        lazyshard export /shared/stream /data/corpus
        lazyshard export /shared/stream /data/corpus --dtype int32 --document-boundaries key:document

    Exit codes:
        0  written
        1  a package is missing: pip install 'lazyshard\[cli,megatron]'
        2  usage error; no such directory
        3  refused: PREFIX exists; STREAM has not ended, lacks its first chunks, or holds no token; a row has no list of
           tokens, or a token that the type cannot hold (the message gives file and row)
        5  STREAM is damaged or holds no stream
        7  the filesystem or store failed: disk full, read-only, no permission
        130  Ctrl-C; nothing was written
    """
    started, source = time.monotonic(), output.find_stream(stream)
    unplaced = not os.path.basename(prefix) or not os.path.isdir(os.path.dirname(prefix) or ".")
    output.refuse_if(unplaced, "PREFIX", f"{prefix!r} is not a name in an existing directory")
    suffixed = prefix.endswith((DATA_SUFFIX, INDEX_SUFFIX))
    output.refuse_if(suffixed, "PREFIX", f"give it without {prefix[-len(INDEX_SUFFIX) :]}, got {prefix!r}")
    known = (AUTO, *DTYPES)
    output.refuse_if(dtype not in known, "--dtype", f"expected one of {', '.join(known)}, got {dtype!r}")
    unknown = re.fullmatch(f"row|stream|{_KEY}.+", document_boundaries, re.DOTALL) is None
    needed = f"expected row, stream or {_KEY}NAME, got {document_boundaries!r}"
    output.refuse_if(unknown, "--document-boundaries", needed)
    settings = ExportSettings(field, dtype, document_boundaries, lengths, samples_per_chunk, force)
    with output.chunk_bar() as report:
        made = export(source, Path(prefix), settings, report)
    holds = ", ".join(output.count(made[f"{noun}s"], noun) for noun in ("document", "sequence", "token"))
    holds += f" of {made['dtype']}; {output.size(made['size'])} ({time.monotonic() - started:.1f} s)"
    output.show(made, [f"exported: {made['data']} and {INDEX_SUFFIX} hold {holds}"], as_json)
    return exits.DONE


def export(source: Path, prefix: Path, settings: ExportSettings, report: Report = lambda *_: None) -> dict[str, Any]:
    """Writes `PREFIX.bin` and `PREFIX.idx` with all rows of a stream, in order; returns what the command prints.

    `report` is called with a phase, the chunks done and the number of chunks. Raises ConfigInvalid, StreamMissing,
    StreamInvalid (the stream has not ended, its first rows are deleted, or it holds no token), RowInvalid, another
    LazyShardError for a damaged stream, ImportError without megatron-core, OSError.
    """
    files = [prefix.with_name(f"{prefix.name}{suffix}") for suffix in (DATA_SUFFIX, INDEX_SUFFIX)]
    parts = [path.with_name(f".{path.name}.{secrets.token_hex(8)}") for path in files]
    if not settings.force:
        _check_free(files)
    reader = StreamReader(source, open_now(source, settings.samples_per_chunk).samples_per_chunk, max_wait=0.0)
    _check_source(source, reader)
    new_builder = _find_builder()
    try:
        for dtype in (_SMALLEST, "int32") if settings.dtype == AUTO else (settings.dtype,):
            builder = new_builder(str(parts[0]), getattr(np, dtype))
            try:
                # False if a token does not fit the smallest type: start again with the next one.
                if _add_rows(reader, builder, dtype, settings, report):
                    break
            finally:
                builder.data_file.close()
        tokens = sum(builder.sequence_lengths)
        if not tokens:
            raise invalid(source, f"its rows hold no token, and megatron-core opens no empty {DATA_SUFFIX} file")
        builder.finalize(str(parts[1]))
        size = sum(path.stat().st_size for path in parts)
        _publish(parts, files, settings.force)
    finally:
        for path in parts:
            durable.remove(path)
    made = {"data": str(files[0]), "index": str(files[1]), "dtype": dtype, "samples": reader.seen.samples}
    made |= {"documents": len(builder.document_indices) - 1, "sequences": len(builder.sequence_lengths)}
    return made | {"tokens": tokens, "size": size}


def _find_builder() -> Any:
    try:
        with warnings.catch_warnings():
            # Transformer Engine, which is not needed here, warns.
            warnings.simplefilter("ignore")
            from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    except ImportError as cause:
        raise ImportError(f"export needs megatron-core: pip install 'lazyshard[megatron]' ({cause})") from cause
    return IndexedDatasetBuilder


def _check_free(files: list[Path]) -> None:
    for path in files:
        if os.path.lexists(path):
            raise ConfigInvalid(f"{path}: already exists; choose another name, or give --force", file=str(path))


def _publish(parts: list[Path], files: list[Path], force: bool) -> None:
    for path in parts:
        durable.sync_file(path)
    if not force:
        _check_free(files)
    elif os.path.lexists(files[1]):
        # Readers look for both files, and must not find the older index with the new data.
        durable.remove(files[1])
        durable.sync_directory(files[1].parent)
    for path, target in zip(parts, files, strict=True):
        durable.rename(path, target)
        durable.sync_directory(target.parent)


def _check_source(source: Path, reader: StreamReader) -> None:
    seen = reader.seen
    if not seen.ended:
        gap = "" if seen.gap is None else f": chunk {seen.gap} lacks its data or its marker"
        raise invalid(source, f"has not ended{gap}; an export holds a whole stream, so wait for its end", seen.gap)
    if reader.stream_id is not None and (retired := read_retired(source, reader.stream_id)):
        raise invalid(source, f"its chunks below {retired} are deleted; produce it again with --retain all", 0)


def _add_rows(reader: StreamReader, builder: Any, dtype: str, settings: ExportSettings, report: Report) -> bool:
    """Adds all rows; returns False at a token that needs a wider type, if the type is chosen automatically."""
    published, sample = reader.seen, 0
    key: Any = object()
    (least, most), integral = bounds_of(dtype), DTYPES[dtype].kind in "iu"
    widens = settings.dtype == AUTO and dtype == _SMALLEST
    while sample < published.samples:
        report("exporting", sample // reader.samples_per_chunk, published.chunks)
        # Rows of one chunk are read together, up to this number; large rows are returned in smaller batches.
        for row in reader.read_published(sample, published.samples, 1024):
            try:
                tokens, lengths, shared = read_row(row, settings, integral)
                low, high = tokens.min(initial=0).item(), tokens.max(initial=0).item()
                if widens and (low < 0 or high > 65498):
                    return False
                if low < least or high > most:
                    hint = "--dtype int64" if settings.dtype == AUTO else "a wider --dtype, or auto"
                    token = low if low < least else high
                    held = f"which holds {least} to {most}; give {hint}"
                    raise RowRefused(f"token {token} does not fit into {dtype}, {held}")
            except RowRefused as cause:
                chunk, at = reader.locate(sample)
                path = str(chunk.path)
                message = f"{path}:{at + 1}: sample {sample}: {cause}"
                raise RowInvalid(message, reason=str(cause), file=path, line=at + 1) from None
            if shared == key:
                # The document of the previous row continues.
                builder.document_indices.pop()
            builder.add_document(tokens, lengths)
            sample, key = sample + 1, shared
    report("exporting", published.chunks, published.chunks)
    return True


class RowRefused(Exception):
    """The reason why a row cannot be exported; `_add_rows` adds file and row."""


def read_row(row: dict[str, Any], settings: ExportSettings, integral: bool) -> tuple[Array, list[int], Any]:
    """Returns a parsed row's tokens, the lengths of its sequences, and the key of its document.

    If `integral`, tokens must be integers, otherwise any numbers. Raises RowRefused for a row that cannot be exported.
    """
    tokens = _numbers(_take(row, settings.field), settings.field, integral)
    lengths = [len(tokens)]
    if settings.lengths is not None and settings.lengths in row:
        lengths = _numbers(row[settings.lengths], settings.lengths).tolist()
        if min(lengths, default=0) < 0 or sum(lengths) != len(tokens):
            raise RowRefused(f"{settings.lengths!r} adds up to {sum(lengths)}, but the row has {len(tokens)} tokens")
    # Lengths are written as int32.
    if max(lengths, default=0) >= 1 << 31:
        raise RowRefused(f"a sequence has {max(lengths)} tokens; the index holds lengths up to {(1 << 31) - 1}")
    if settings.boundaries.startswith(_KEY):
        return tokens, lengths, _take(row, settings.boundaries.removeprefix(_KEY))
    # No two objects are equal: each row is a document.
    return tokens, lengths, object() if settings.boundaries == "row" else None


def _take(row: dict[str, Any], name: str) -> Any:
    if name not in row:
        raise RowRefused(f"key {name!r} is missing; the row has {reprlib.repr(list(row))}")
    return row[name]


def _numbers(values: Any, name: str, integral: bool = True) -> Array:
    kinds, one = ({int}, "an integer") if integral else ({int, float}, "a number")
    if type(values) is not list:
        raise RowRefused(f"{name!r} is {_kind(values)}, expected a list, each item {one}")
    if set(map(type, values)) - kinds:
        at = next(index for index, value in enumerate(values) if type(value) not in kinds)
        raise RowRefused(f"{name!r}[{at}] is {_kind(values[at])}, expected {one}")
    try:
        return np.array(values, np.int64 if integral else np.float64)
    except OverflowError:
        raise RowRefused(f"{name!r} holds {max(values, key=abs)}, which no type of tokens can hold") from None


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {reprlib.repr(value)}"
