"""Parquet as a source of rows: a file, or a directory of files in the order of their names.

Rows come as the file has them, row group after row group. Pages are read as they are needed, so a row group may be of
any size: the memory is that of one page and one piece of rows for each column.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final

from lazyshard.memory import raise_if_short
from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.sources.arrow_library import load_pyarrow
from lazyshard_producer.sources.regular_file import open_regular
from lazyshard_producer.sources.source import Context
from lazyshard_producer.sources.source_file import read_at
from lazyshard_producer.sources.table_files import list_table_files, refuse_table
from lazyshard_producer.sources.tables import PIECE_BYTES, PIECE_ROWS, TableSource

SUFFIXES: Final = (".parquet",)

_MAGIC: Final = b"PAR1"
_MAGIC_ENCRYPTED: Final = b"PARE"

_BUFFER_BYTES: Final = 64 << 10
"""How much of each column is read ahead; without it pyarrow reads a row group's columns whole."""


def open_parquet(settings: SourceSettings, position: dict[str, Any] | None, context: Context) -> TableSource:
    """Opens a Parquet file, or a directory of them, as a source of rows.

    Args:
        settings: of which only the path counts.
        position: where to go on, None at the start.
        context: what sources are told about the run.

    Raises:
        SourceRefused: it cannot be read, or what was read of it is not as it was.
        ExtraMissing: pyarrow is not installed.
    """
    path = settings.path
    files = list_table_files(path, SUFFIXES) if os.path.isdir(path) else [path]
    return TableSource("parquet", path, files, ParquetTable, position, context)


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
            self._file = self._call(
                self._parquet.ParquetFile, self._handle, pre_buffer=False, buffer_size=_BUFFER_BYTES
            )
            self._rows: int = self._file.metadata.num_rows
            self._read = row
            self.schema: Any = self._call(lambda: self._file.schema_arrow)
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
        batch = self._call(next, self._batches, None)
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
            raise refuse_table(self._path, "a Parquet file", "an encrypted one, which is not read")
        if head == _MAGIC:
            actual = f"one of {size} bytes without its end; is it still being written, or was it cut?"
            raise refuse_table(self._path, "a complete Parquet file", actual)
        raise refuse_table(self._path, "a Parquet file", f"something else, which begins with {head!r}")

    def _call(self, function: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except (OSError, ValueError, NotImplementedError, EOFError) as cause:
            raise_if_short(cause)
            # pyarrow's own errors extend these.
            raise refuse_table(self._path, "a Parquet file that can be read", str(cause).splitlines()[0]) from cause
