"""Sources of tables on disk: a Parquet or Arrow file, a directory of them, or a data set saved by `datasets`.

Files that sort after all others may be added later; any other change is refused. Arrow files are memory-mapped, because
pyarrow otherwise reads whole record batches. So truncating one at the moment of reading kills the process (SIGBUS).
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Generator, Iterator
from itertools import accumulate
from typing import Any, BinaryIO, Final, NamedTuple

from lazyshard.errors import RowInvalid
from lazyshard.format.records import pack, unpack
from lazyshard.memory import raise_if_short
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.position import plain_name, read_entry, refuse_position
from lazyshard_producer.sources import source
from lazyshard_producer.sources.arrow_rows import ArrowRowEncoder, load_pyarrow
from lazyshard_producer.sources.source import PIECE_BYTES, PIECE_ROWS, Context, KnownFile, Rows, Source, refuse_source

_PARQUET: Final = "a Parquet file"
_PARQUET_MAGIC: Final = b"PAR1"
_ARROW: Final = "an Arrow IPC file or stream"
_ARROW_MAGIC: Final = b"ARROW1"


class TablePosition(NamedTuple):
    """A position between two rows: number of files before it, and rows of the next file."""

    file: int
    row: int


class TableSource(Source):
    """Table files of one kind: for "parquet" or "arrow", a file or a directory of files in the order of their names.

    "huggingface": a directory of `Dataset.save_to_disk`; all columns are read, whatever format was set.
    """

    def __init__(self, kind: str, path: str, position: dict[str, Any] | None, context: Context) -> None:
        self.name: Final = plain_name(path)
        self._kind = kind
        self._files = [path]
        if os.path.isdir(path):
            self._files = find_data_files(path) if kind == "huggingface" else list_table_files(path, f".{kind}")
        self._max_row_bytes = context.max_row_bytes
        self._pa = load_pyarrow(path)
        self.start, self._fingerprints = TablePosition(0, 0), list[int]()
        if position is not None:
            self.start, self._fingerprints = self._decode(position)
            self._check_read()
        self._known, self.reached = dict[int, KnownFile](), self.start
        self._ends = [0, *accumulate(map(source.file_size, self._files))]
        self.progress = self._ends[min(self.start.file, len(self._files))], self._ends[-1]
        self._rows = self._read_files()
        # Open the first file now, so that an unreadable one is refused before anything is published.
        next(self._rows, None)

    def read(self) -> Rows | None:
        """Returns the next rows, None when all files are read."""
        return next(self._rows, None)

    def entry(self, position: TablePosition) -> dict[str, Any]:
        """Returns the entry of a position, which grows by 11 bytes with each begun file."""
        begun = position.file + (position.row > 0)
        if position.row:
            self._known[position.file].check()
        entry = {"kind": self._kind, "path": self.name, "files": position.file, "row": position.row}
        return entry | {"xxh3": pack(self._fingerprints[:begun], "<u8")}

    def close(self) -> None:
        """Closes the open file."""
        self._rows.close()

    def _read_files(self) -> Generator[Rows, None, None]:
        """Yields empty rows once the first file is open, and then all rows, about 1 MiB at a time."""
        for index in range(self.start.file, len(self._files)):
            path, start, end = self._files[index], *self._ends[index : index + 2]
            file = self._known[index] = KnownFile(path)
            if index < len(self._fingerprints) and self._fingerprints[index] != file.digest:
                raise source.refuse_changed(path)
            self._fingerprints[index:] = [file.digest]
            with contextlib.closing(_read(path, self.reached.row, self._kind)) as pieces:
                schema, _ = next(pieces)
                try:
                    encoder = ArrowRowEncoder(self._pa, schema, self._max_row_bytes)
                except ValueError as cause:
                    raise refuse_source(path, "a unique name for every column", str(cause)) from None
                # Make sure that the opened file is the one that was fingerprinted.
                file.check()
                if index == self.start.file:
                    yield Rows()
                for batch, fraction in pieces:
                    self.progress = int(start * (1 - fraction) + end * fraction), self._ends[-1]
                    yield self._give(encoder.encode(batch), self.reached, plain_name(path))
            file.check()
            self.progress, self.reached = (end, self._ends[-1]), TablePosition(index + 1, 0)

    def _give(self, lines: list[bytes | RowInvalid], at: TablePosition, name: str) -> Rows:
        self.reached = TablePosition(at.file, at.row + len(lines))
        return source.number_rows(lines, name, at.row, lambda index: TablePosition(at.file, at.row + index + 1))

    def _decode(self, entry: dict[str, Any]) -> tuple[TablePosition, list[int]]:
        file, row, _ = read_entry(entry, self.name, self._kind, files=int, row=int, xxh3=str)
        try:
            return TablePosition(file, row), unpack(entry, "xxh3", "<u8", file + (row > 0)).tolist()
        except ValueError as cause:
            raise refuse_position(self.name, "a fingerprint of each begun file", str(cause)) from None

    def _check_read(self) -> None:
        """Checks that the files that were read exist unchanged, with no new files before or between them."""
        paths, read = self._files, self._fingerprints
        for index, expected in enumerate(read):
            if index < len(paths) and KnownFile(paths[index]).digest == expected:
                continue
            there = [KnownFile(path).digest for path in paths[index:]]
            if expected in there:
                new = plain_name(os.path.basename(paths[index]))
                actual = f"{new}, which is new and sorts before files already read"
            elif not there or there[0] in read[index:]:
                actual = "that this file is missing"
            else:
                raise source.refuse_changed(paths[index])
            hint = "; restore the files (more may follow in the order of names), or choose another --out"
            raise refuse_source(self.name, f"as file {index + 1} the one whose rows were read", actual, hint)


def list_table_files(directory: str, suffix: str) -> list[str]:
    """Returns the paths of a directory's files with this suffix, sorted by name, except names with a leading . or _."""
    with source.refusing(directory), os.scandir(directory) as entries:
        found = [entry for entry in entries if not entry.name.startswith((".", "_"))]
        names = sorted(entry.name for entry in found if entry.name.endswith(suffix) and not entry.is_dir())
        folders = sorted(entry.name for entry in found if entry.is_dir())
    if names:
        return [os.path.join(directory, name) for name in names]
    actual = f"none; it has folders ({', '.join(folders[:3])}), give each as a source" if folders else "none"
    raise refuse_source(directory, f"files *{suffix}", actual)


def _read(path: str, row: int, kind: str) -> Generator[tuple[Any, float], None, None]:
    """Yields a file's `pyarrow.Schema`, then its batches from row `row` on, each with the fraction of the file read."""
    with source.open_regular(path, 0) as file:
        try:
            yield from (_parquet if kind == "parquet" else _arrow)(path, file, row)
        except SourceRefused:
            raise
        except (OSError, ValueError, NotImplementedError, EOFError) as cause:
            raise_if_short(cause)
            what = _PARQUET if kind == "parquet" else _ARROW
            raise refuse_source(path, f"{what} that is readable", str(cause).splitlines()[0]) from cause


def _piece_rows(rows: int, size: int) -> int:
    return max(1, min(PIECE_ROWS, PIECE_BYTES * rows // max(1, size)))


def _parquet(path: str, handle: BinaryIO, row: int) -> Iterator[tuple[Any, float]]:
    """Skips whole row groups before a row; reads the start of the row's own group."""
    size = os.fstat(handle.fileno()).st_size
    ends = (max(0, offset) for offset in (0, size - len(_PARQUET_MAGIC)))
    head, tail = (source.read_at(handle.fileno(), path, len(_PARQUET_MAGIC), offset) for offset in ends)
    if b"PARE" in (head, tail):
        raise refuse_source(path, _PARQUET, "an encrypted one, which is not supported")
    if head != _PARQUET_MAGIC:
        raise refuse_source(path, _PARQUET, f"something else, which begins with {head!r}")
    if tail != _PARQUET_MAGIC or size <= 2 * len(_PARQUET_MAGIC):
        actual = f"one of {size} bytes without its end; is it still being written, or truncated?"
        raise refuse_source(path, "a complete Parquet file", actual)
    # No pre-buffering and no threads: both hold more of a row group than requested. Without a buffer pyarrow reads
    # whole columns of a row group.
    file = load_pyarrow(path, "pyarrow.parquet").parquet.ParquetFile(handle, pre_buffer=False, buffer_size=64 << 10)
    yield file.schema_arrow, 0.0
    metadata, read = file.metadata, row
    for number, group in enumerate(map(metadata.row_group, range(metadata.num_row_groups))):
        if row >= group.num_rows:
            row -= group.num_rows
            continue
        most = _piece_rows(group.num_rows, group.total_byte_size)
        for batch in file.iter_batches(batch_size=most, row_groups=[number], use_threads=False):
            if row < batch.num_rows:
                read += batch.num_rows - row
                yield batch.slice(row), read / metadata.num_rows
            row = max(0, row - batch.num_rows)


def _arrow(path: str, handle: BinaryIO, row: int) -> Iterator[tuple[Any, float]]:
    """Reads only the lengths of the batches before a row."""
    if not (size := os.fstat(handle.fileno()).st_size):
        raise refuse_source(path, _ARROW, "an empty file")
    data = mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ)
    start = data[: len(_ARROW_MAGIC)]
    if start != _ARROW_MAGIC and not start.startswith(b"\xff\xff\xff\xff"):
        raise refuse_source(path, _ARROW, f"something else, which begins with {start!r}")

    def check() -> None:
        if os.fstat(handle.fileno()).st_size < size:
            raise source.refuse_changed(path)

    pa = load_pyarrow(path, "pyarrow.ipc")
    buffer, count, touched = pa.BufferReader(pa.py_buffer(data)), 0, 0
    reader = batches = (pa.ipc.open_file if start == _ARROW_MAGIC else pa.ipc.open_stream)(buffer)
    yield reader.schema, 0.0
    check()
    if start == _ARROW_MAGIC:
        count = reader.num_record_batches
        batches = map(reader.get_batch, range(count))
    for number, batch in enumerate(batches):
        if row >= batch.num_rows:
            row -= batch.num_rows
            continue
        batch.validate()
        most = _piece_rows(batch.num_rows, batch.nbytes)
        while row < batch.num_rows:
            piece = batch.slice(row, most)
            _check_piece(pa, piece)
            row += piece.num_rows
            yield piece, (number + row / batch.num_rows) / count if count else buffer.tell() / size
            touched += piece.nbytes
            # Release mapped pages that were read, so that they do not count as this process's memory.
            if touched >= 16 << 20:
                touched = 0
                data.madvise(mmap.MADV_DONTNEED)
            check()
        row = 0


def _check_piece(pa: Any, piece: Any) -> None:
    # Offsets out of their buffers would make pyarrow read foreign memory. Nested columns are not checked, because
    # pyarrow checks the whole column for each piece.
    for column in piece.columns:
        try:
            column.validate(full=not pa.types.is_nested(column.type))
        except ValueError as cause:
            if "UTF8" not in str(cause):  # invalid UTF-8 refuses only its row
                raise


STATE: Final = "state.json"
INFO: Final = "dataset_info.json"
SPLITS: Final = "dataset_dict.json"

_HINT: Final = "; save it with `Dataset.save_to_disk`"


def is_hugging_face(path: str) -> bool:
    """Returns whether `datasets` wrote a directory: a data set, a DatasetDict, or a folder of its cache."""
    return any(os.path.isfile(os.path.join(path, name)) for name in (STATE, INFO, SPLITS))


def find_data_files(directory: str) -> list[str]:
    """Returns the paths of a data set's Arrow files, in order."""
    if os.path.isfile(os.path.join(directory, SPLITS)):
        splits = [os.path.join(directory, str(name)) for name in _load(directory, SPLITS).get("splits", [])]
        raise refuse_source(directory, "one data set", f"a DatasetDict; give one of its splits: {', '.join(splits)}")
    if not os.path.isfile(os.path.join(directory, STATE)):
        raise refuse_source(directory, "a saved data set", f"no {STATE}: a folder of the cache of `datasets`?", _HINT)
    state = _load(directory, STATE)
    if state.get("_indices_files"):
        hint = "; load it, call `flatten_indices()`, and save it again"
        raise refuse_source(directory, "a data set with its rows in order", "a selection of rows by indices", hint)
    listed = entries if isinstance(entries := state.get("_data_files"), list) else []
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in listed]
    if not names or not all(isinstance(name, str) and name and name == os.path.basename(name) for name in names):
        raise refuse_source(os.path.join(directory, STATE), "the names of its data files", repr(entries)[:120], _HINT)
    return [os.path.join(directory, name) for name in names if name]


def _load(directory: str, name: str) -> dict[str, Any]:
    path = os.path.join(directory, name)
    with source.refusing(path), open(path, "rb") as file:
        data = file.read()
    try:
        found: Any = json.loads(data)
        if not isinstance(found, dict):
            raise ValueError(type(found).__name__)
    except ValueError as cause:
        raise refuse_source(path, "a JSON object", str(cause), _HINT) from cause
    return found
