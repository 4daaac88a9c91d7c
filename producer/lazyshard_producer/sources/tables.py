"""Tables on disk as a source: Parquet and Arrow files, alone, by the directory, or as `datasets` saves them.

Files that sort after those read may come later; all else that changes is refused. Arrow files are mapped, since pyarrow
otherwise reads a record batch whole: one that is truncated at the very moment of reading ends the process (SIGBUS).
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
    """Where the source stands between two rows: files before it, and rows of the next one."""

    file: int
    row: int


class TableSource(Source):
    """Files of rows of one kind: "parquet" or "arrow", a file or a directory of them in the order of their names.

    "huggingface": a directory of `Dataset.save_to_disk`; every column is given, whatever format was set.
    """

    def __init__(self, kind: str, path: str, position: dict[str, Any] | None, context: Context) -> None:
        self.name: Final = plain_name(path)
        self._kind = kind
        self._files = [path]
        if os.path.isdir(path):
            self._files = find_data_files(path) if kind == "huggingface" else list_table_files(path, f".{kind}")
        self._max_row_bytes = context.max_row_bytes
        self._pa = load_pyarrow(path)
        load_pyarrow(path, "pyarrow.compute")
        self.start, self._fingerprints = TablePosition(0, 0), list[int]()
        if position is not None:
            self.start, self._fingerprints = self._decode(position)
            self._check_read()
        self._known, self.reached = dict[int, KnownFile](), self.start
        self._ends = [0, *accumulate(map(source.file_size, self._files))]
        self.progress = self._ends[min(self.start.file, len(self._files))], self._ends[-1]
        self._rows = self._read_files()
        # At once, so that what cannot be read is refused before anything is published.
        next(self._rows, None)

    def read(self) -> Rows | None:
        """Returns the next rows; None when all files are read."""
        return next(self._rows, None)

    def entry(self, position: TablePosition) -> dict[str, Any]:
        """Returns the entry of a position. It grows by 11 bytes with each file that was begun."""
        begun = position.file + (position.row > 0)
        if position.row:
            self._known[position.file].check()
        entry = {"kind": self._kind, "path": self.name, "files": position.file, "row": position.row}
        return entry | {"xxh3": pack(self._fingerprints[:begun], "<u8")}

    def close(self) -> None:
        """Closes the file that is open."""
        self._rows.close()

    def _read_files(self) -> Generator[Rows, None, None]:
        """Yields no rows once the first file is open, and then all of them, about 1 MiB at a time."""
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
                    raise refuse_source(path, "every column under a name of its own", str(cause)) from None
                # What was opened is what the fingerprint is of.
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
            raise refuse_position(self.name, "a fingerprint of each file that was begun", str(cause)) from None

    def _check_read(self) -> None:
        """Checks that the files which were read are still there, as they were, with no other before or between them."""
        paths, read = self._files, self._fingerprints
        for index, expected in enumerate(read):
            if index < len(paths) and KnownFile(paths[index]).digest == expected:
                continue
            there = [KnownFile(path).digest for path in paths[index:]]
            if expected in there:
                new = plain_name(os.path.basename(paths[index]))
                actual = f"{new}, which is new and comes before files already read"
            elif not there or there[0] in read[index:]:
                actual = "that one gone"
            else:
                raise source.refuse_changed(paths[index])
            hint = "; put them back as they were (others may follow, by the order of names), or choose another --out"
            raise refuse_source(self.name, f"as file {index + 1} the one whose rows were read", actual, hint)


def list_table_files(directory: str, suffix: str) -> list[str]:
    """Returns the paths of a directory's files with this ending, sorted by name; none that begin with a dot or "_"."""
    with source.refusing(directory), os.scandir(directory) as entries:
        found = [entry for entry in entries if not entry.name.startswith((".", "_"))]
        names = sorted(entry.name for entry in found if entry.name.endswith(suffix) and not entry.is_dir())
        folders = sorted(entry.name for entry in found if entry.is_dir())
    if names:
        return [os.path.join(directory, name) for name in names]
    actual = f"none; it has folders ({', '.join(folders[:3])}), give each as a source" if folders else "none"
    raise refuse_source(directory, f"files *{suffix}", actual)


def _read(path: str, row: int, kind: str) -> Generator[tuple[Any, float], None, None]:
    """Yields a file's columns, a `pyarrow.Schema`, then its rows from one on, and how much of it is read with each."""
    with source.open_regular(path, 0) as file:
        try:
            yield from (_parquet if kind == "parquet" else _arrow)(path, file, row)
        except SourceRefused:
            raise
        except (OSError, ValueError, NotImplementedError, EOFError) as cause:
            raise_if_short(cause)
            what = _PARQUET if kind == "parquet" else _ARROW
            raise refuse_source(path, f"{what} that can be read", str(cause).splitlines()[0]) from cause


def _piece_rows(rows: int, size: int) -> int:
    return max(1, min(PIECE_ROWS, PIECE_BYTES * rows // max(1, size)))


def _parquet(path: str, handle: BinaryIO, row: int) -> Iterator[tuple[Any, float]]:
    """Passes over whole row groups before a row; in its own what is before."""
    size = os.fstat(handle.fileno()).st_size
    ends = (max(0, offset) for offset in (0, size - len(_PARQUET_MAGIC)))
    head, tail = (source.read_at(handle.fileno(), path, len(_PARQUET_MAGIC), offset) for offset in ends)
    if b"PARE" in (head, tail):
        raise refuse_source(path, _PARQUET, "an encrypted one, which is not read")
    if head != _PARQUET_MAGIC:
        raise refuse_source(path, _PARQUET, f"something else, which begins with {head!r}")
    if tail != _PARQUET_MAGIC or size <= 2 * len(_PARQUET_MAGIC):
        actual = f"one of {size} bytes without its end; is it still being written, or was it cut?"
        raise refuse_source(path, "a complete Parquet file", actual)
    # No pre-buffering and no threads: both hold more of a row group than is asked for. Without a buffer pyarrow reads a
    # row group's columns whole.
    file = load_pyarrow(path, "pyarrow.parquet").ParquetFile(handle, pre_buffer=False, buffer_size=64 << 10)
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
    """Looks at no more than the lengths of batches before a row."""
    if not (size := os.fstat(handle.fileno()).st_size):
        raise refuse_source(path, _ARROW, "an empty file")
    data = mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ)
    start = data[: len(_ARROW_MAGIC)]
    if start != _ARROW_MAGIC and not start.startswith(b"\xff\xff\xff\xff"):
        raise refuse_source(path, _ARROW, f"something else, which begins with {start!r}")

    def check() -> None:
        if os.fstat(handle.fileno()).st_size < size:
            raise source.refuse_changed(path)

    pa, ipc = load_pyarrow(path), load_pyarrow(path, "pyarrow.ipc")
    buffer, count, touched = pa.BufferReader(pa.py_buffer(data)), 0, 0
    reader = batches = (ipc.open_file if start == _ARROW_MAGIC else ipc.open_stream)(buffer)
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
            # So that the mapped pages that were read do not count as this process's memory.
            if touched >= 16 << 20:
                touched = 0
                data.madvise(mmap.MADV_DONTNEED)
            check()
        row = 0


def _check_piece(pa: Any, piece: Any) -> None:
    # Offsets that point out of their buffers would have Python read whatever lies there. Nested columns are taken
    # on trust: pyarrow checks all of them, however small the piece.
    for column in piece.columns:
        try:
            column.validate(full=not pa.types.is_nested(column.type))
        except ValueError as cause:
            if "UTF8" not in str(cause):  # that is one row's affair
                raise


STATE: Final = "state.json"
INFO: Final = "dataset_info.json"
SPLITS: Final = "dataset_dict.json"

_HINT: Final = "; save it with `Dataset.save_to_disk`"


def is_hugging_face(path: str) -> bool:
    """Whether a directory holds what `datasets` writes: a data set, a dictionary of them, or a folder of its cache."""
    return any(os.path.isfile(os.path.join(path, name)) for name in (STATE, INFO, SPLITS))


def find_data_files(directory: str) -> list[str]:
    """Returns the paths of a data set's Arrow files, in its order."""
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
