"""Parquet and Arrow files as sources of rows: alone, by the directory, or as `datasets` of Hugging Face saves them.

Rows come as the file has them. Of Parquet files pages are read as they are needed, so a row group may be of any size:
the memory is that of one page and one piece of rows for each column.

Arrow files are mapped, since pyarrow otherwise reads a record batch whole, and one batch may be all of the data. What
was read is let go of again, so that it does not count as this process's memory. Not guaranteed: that a file which
somebody truncates at the very moment of reading, or a network filesystem that fails, leads to an error; the system then
ends the process (SIGBUS), and the next start goes on as after any kill. A file that was truncated before is refused.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any, Final

from lazyshard.memory import raise_if_short
from lazyshard_producer.sources.arrow_rows import load_pyarrow
from lazyshard_producer.sources.files import open_regular, read_at, refuse_changed, refuse_os_error, refuse_source
from lazyshard_producer.sources.source import PIECE_BYTES, PIECE_ROWS, Context
from lazyshard_producer.sources.tables import TableSource, list_table_files

_PARQUET: Final = "a Parquet file"
_ARROW: Final = "an Arrow IPC file or stream"

_MAGIC: Final = b"PAR1"
_MAGIC_ENCRYPTED: Final = b"PARE"

_BUFFER_BYTES: Final = 64 << 10
"""How much of each column is read ahead; without it pyarrow reads a row group's columns whole."""


def open_tables(kind: str, path: str, position: dict[str, Any] | None, context: Context) -> TableSource:
    """Opens files of one kind as a source of rows.

    Args:
        kind: "parquet" or "arrow": a file, or a directory of them in the order of their names. "huggingface": a
            directory of `Dataset.save_to_disk`, whose `state.json` names the Arrow files in their order; every column
            is given, whatever format was set, as formats are views.
        path: as the user gave it.
        position: where to go on, None at the start.
        context: what sources are told about the run.

    Raises:
        SourceRefused: it cannot be read, what was read of it is not as it was, or it is a dictionary of data sets or a
            selection of rows.
        ExtraMissing: pyarrow is not installed.
    """
    if kind == "huggingface":
        files = find_data_files(path)
    else:
        files = list_table_files(path, f".{kind}") if os.path.isdir(path) else [path]
    return TableSource(kind, path, files, ParquetTable if kind == "parquet" else ArrowTable, position, context)


def _calling(path: str, what: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Returns what a function of pyarrow returns; has what it raises say that the file is refused."""
    try:
        return function(*arguments, **options)
    except (OSError, ValueError, NotImplementedError, EOFError) as cause:
        raise_if_short(cause)
        # pyarrow's own errors extend these.
        raise refuse_source(path, f"{what} that can be read", str(cause).splitlines()[0]) from cause


class ParquetTable:
    """One file, opened at a row: see `lazyshard_producer.sources.tables.Table`.

    Raises:
        SourceRefused: it is no Parquet file, or damaged.
    """

    def __init__(self, path: str, row: int) -> None:
        self._path = path
        self._parquet: Any = load_pyarrow(path, "pyarrow.parquet")
        self._handle = open_regular(path, 0)
        try:
            self._check_magic()
            # No pre-buffering and no threads: both hold more of a row group than is asked for.
            self._file = _calling(
                path, _PARQUET, self._parquet.ParquetFile, self._handle, pre_buffer=False, buffer_size=_BUFFER_BYTES
            )
            self._rows: int = self._file.metadata.num_rows
            self._read = row
            self.schema: Any = _calling(path, _PARQUET, lambda: self._file.schema_arrow)
        except BaseException:
            self._handle.close()
            raise
        self._batches = self._from(row)

    @property
    def fraction(self) -> float:
        """Rows read of all."""
        return self._read / max(1, self._rows)

    def read(self) -> Any:
        """Returns the next rows; None at the end. Raises SourceRefused where the file is damaged."""
        batch = _calling(self._path, _PARQUET, next, self._batches, None)
        if batch is not None:
            self._read += batch.num_rows
        return batch

    def close(self) -> None:
        """Closes the file."""
        self._handle.close()

    def _from(self, row: int) -> Iterator[Any]:
        """Yields batches from a row on: whole row groups before it are passed over, and in its own what is before."""
        metadata = self._file.metadata
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            if row >= group.num_rows:
                row -= group.num_rows
                continue
            most = max(1, min(PIECE_ROWS, PIECE_BYTES * group.num_rows // max(1, group.total_byte_size)))
            for batch in self._file.iter_batches(batch_size=most, row_groups=[number], use_threads=False):
                if row < batch.num_rows:
                    yield batch.slice(row)
                row = max(0, row - batch.num_rows)

    def _check_magic(self) -> None:
        size = os.fstat(self._handle.fileno()).st_size
        head = read_at(self._handle, self._path, len(_MAGIC), 0)
        tail = read_at(self._handle, self._path, len(_MAGIC), max(0, size - len(_MAGIC)))
        if head == _MAGIC and tail == _MAGIC and size > 2 * len(_MAGIC):
            return
        if head == _MAGIC_ENCRYPTED or tail == _MAGIC_ENCRYPTED:
            raise refuse_source(self._path, _PARQUET, "an encrypted one, which is not read")
        if head == _MAGIC:
            actual = f"one of {size} bytes without its end; is it still being written, or was it cut?"
            raise refuse_source(self._path, "a complete Parquet file", actual)
        raise refuse_source(self._path, _PARQUET, f"something else, which begins with {head!r}")


_MAGIC_FILE: Final = b"ARROW1"
_MAGIC_STREAM: Final = b"\xff\xff\xff\xff"

_LET_GO_BYTES: Final = 16 << 20
"""After so much was read the mapped pages are let go of; each time costs microseconds."""


class ArrowTable:
    """One file, opened at a row: see `lazyshard_producer.sources.tables.Table`.

    Raises:
        SourceRefused: it is no Arrow file or stream, or damaged.
    """

    def __init__(self, path: str, row: int) -> None:
        self._path = path
        self._pa: Any = load_pyarrow(path)
        self._ipc: Any = load_pyarrow(path, "pyarrow.ipc")
        self._handle = open_regular(path, 0)
        try:
            self._size = os.fstat(self._handle.fileno()).st_size
            if self._size == 0:
                raise refuse_source(path, _ARROW, "an empty file")
            self._map = mmap.mmap(self._handle.fileno(), 0, prot=mmap.PROT_READ)
        except BaseException:
            self._handle.close()
            raise
        self._touched = 0
        self._fraction = 0.0
        try:
            self._batches = self._open()
        except BaseException:
            self.close()
            raise
        self._pieces = self._from(row)

    @property
    def fraction(self) -> float:
        """Bytes passed of all."""
        return self._fraction

    def read(self) -> Any:
        """Returns the next rows; None at the end. Raises SourceRefused where the file is damaged or was truncated."""
        if os.fstat(self._handle.fileno()).st_size < self._size:
            raise refuse_changed(self._path)
        return _calling(self._path, _ARROW, next, self._pieces, None)

    def close(self) -> None:
        """Closes the file."""
        self._pieces = self._batches = iter(())
        self._handle.close()
        # Refused while a batch that was given is still in use; it is unmapped with the last of them.
        with contextlib.suppress(BufferError):
            self._map.close()

    def _open(self) -> Iterator[tuple[Any, float, float]]:
        start = self._map[: len(_MAGIC_FILE)]
        source = self._pa.BufferReader(self._pa.py_buffer(self._map))
        if start == _MAGIC_FILE:
            file = _calling(self._path, _ARROW, self._ipc.open_file, source)
            self.schema: Any = file.schema
            return self._of_file(file)
        if not start.startswith(_MAGIC_STREAM):
            actual = f"something else, which begins with {start!r}"
            raise refuse_source(self._path, _ARROW, actual)
        stream = _calling(self._path, _ARROW, self._ipc.open_stream, source)
        self.schema = stream.schema
        return self._of_stream(stream, source)

    def _of_file(self, file: Any) -> Iterator[tuple[Any, float, float]]:
        count = file.num_record_batches
        for number in range(count):
            yield file.get_batch(number), number / count, (number + 1) / count

    def _of_stream(self, stream: Any, source: Any) -> Iterator[tuple[Any, float, float]]:
        before = source.tell()
        while (batch := next(stream, None)) is not None:
            after = source.tell()
            yield batch, before / self._size, after / self._size
            before = after

    def _from(self, row: int) -> Iterator[Any]:
        """Yields pieces of batches from a row on; of batches before it only the lengths are looked at."""
        for batch, before, after in self._batches:
            if row >= batch.num_rows:
                row -= batch.num_rows
                continue
            batch.validate()
            most = max(1, min(PIECE_ROWS, PIECE_BYTES * batch.num_rows // max(1, batch.nbytes)))
            while row < batch.num_rows:
                piece = batch.slice(row, most)
                self._check(piece)
                row += piece.num_rows
                self._fraction = before + (after - before) * row / batch.num_rows
                yield piece
                self._let_go(piece.nbytes)
            row = 0

    def _check(self, piece: Any) -> None:
        # Offsets that point out of their buffers would have Python read whatever lies there. Nested columns are taken
        # on trust: pyarrow checks all of them, however small the piece.
        for column in piece.columns:
            if self._pa.types.is_nested(column.type):
                continue
            try:
                column.validate(full=True)
            except ValueError as cause:
                if "UTF8" not in str(cause):  # that is one row's affair
                    raise

    def _let_go(self, count: int) -> None:
        self._touched += count
        if self._touched >= _LET_GO_BYTES:
            self._touched = 0
            self._map.madvise(mmap.MADV_DONTNEED)


STATE: Final = "state.json"
INFO: Final = "dataset_info.json"
SPLITS: Final = "dataset_dict.json"

_HINT: Final = "; save it with `Dataset.save_to_disk`"


def is_hugging_face(path: str) -> bool:
    """Whether a directory holds what `datasets` writes: a data set, a dictionary of them, or a folder of its cache."""
    return any(os.path.isfile(os.path.join(path, name)) for name in (STATE, INFO, SPLITS))


def find_data_files(directory: str) -> list[str]:
    """Returns the paths of a data set's Arrow files, in its order.

    Raises:
        SourceRefused: the directory holds no single data set, or one that is a selection of other rows.
    """
    if os.path.isfile(os.path.join(directory, SPLITS)):
        splits = [os.path.join(directory, str(name)) for name in _load(directory, SPLITS).get("splits", [])]
        raise refuse_source(directory, "one data set", f"a DatasetDict; give one of its splits: {', '.join(splits)}")
    if not os.path.isfile(os.path.join(directory, STATE)):
        actual = f"no {STATE}: a folder of the cache of `datasets`?"
        raise refuse_source(directory, "a saved data set", actual, _HINT)
    state = _load(directory, STATE)
    if state.get("_indices_files"):
        hint = "; load it, call `flatten_indices()`, and save it again"
        raise refuse_source(directory, "a data set with its rows in order", "a selection of rows by indices", hint)
    entries = state.get("_data_files")
    names = [_file_name(entry) for entry in entries] if isinstance(entries, list) else []
    if not names or None in names:
        raise refuse_source(os.path.join(directory, STATE), "the names of its data files", repr(entries)[:120], _HINT)
    return [os.path.join(directory, name) for name in names if name is not None]


def _file_name(entry: Any) -> str | None:
    name = entry.get("filename") if isinstance(entry, dict) else None
    return name if isinstance(name, str) and name and name == os.path.basename(name) else None


def _load(directory: str, name: str) -> dict[str, Any]:
    path = os.path.join(directory, name)
    try:
        with open(path, "rb") as file:
            found = json.load(file)
    except OSError as cause:
        raise refuse_os_error(path, cause) from cause
    except ValueError as cause:
        raise refuse_source(path, "JSON", str(cause), _HINT) from cause
    if not isinstance(found, dict):
        raise refuse_source(path, "a JSON object", repr(found)[:120], _HINT)
    return found
