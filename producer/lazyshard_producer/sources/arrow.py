"""Arrow IPC as a source of rows: a file or stream on disk, or a directory of them in the order of their names.

Files are mapped, since pyarrow otherwise reads a record batch whole, and one batch may be all of the data. What was
read is let go of again, so that it does not count as this process's memory. Not guaranteed: that a file which somebody
truncates at the very moment of reading, or a network filesystem that fails, leads to an error; the system then ends the
process (SIGBUS), and the next start goes on as after any kill. A file that was truncated before is refused.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from typing import Any, Final

from lazyshard.memory import raise_if_short
from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.sources.arrow_library import load_pyarrow
from lazyshard_producer.sources.regular_file import open_regular
from lazyshard_producer.sources.source import Context
from lazyshard_producer.sources.table_files import list_table_files, refuse_changed, refuse_table
from lazyshard_producer.sources.tables import PIECE_BYTES, PIECE_ROWS, TableSource

SUFFIXES: Final = (".arrow",)

_MAGIC_FILE: Final = b"ARROW1"
_MAGIC_STREAM: Final = b"\xff\xff\xff\xff"

_LET_GO_BYTES: Final = 16 << 20
"""After so much was read the mapped pages are let go of; each time costs microseconds."""


def open_arrow(settings: SourceSettings, position: dict[str, Any] | None, context: Context) -> TableSource:
    """Opens an Arrow IPC file or stream, or a directory of them, as a source of rows.

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
    return TableSource("arrow", path, files, ArrowTable, position, context)


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
                raise refuse_table(path, "an Arrow IPC file or stream", "an empty file")
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
        return self._call(next, self._pieces, None)

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
            file = self._call(self._ipc.open_file, source)
            self.schema: Any = file.schema
            return self._of_file(file)
        if not start.startswith(_MAGIC_STREAM):
            actual = f"something else, which begins with {start!r}"
            raise refuse_table(self._path, "an Arrow IPC file or stream", actual)
        stream = self._call(self._ipc.open_stream, source)
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

    def _call(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (OSError, ValueError, NotImplementedError, EOFError) as cause:
            raise_if_short(cause)
            # pyarrow's own errors extend these.
            expected = "an Arrow IPC file or stream that can be read"
            raise refuse_table(self._path, expected, str(cause).splitlines()[0]) from cause
