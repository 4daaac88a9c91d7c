"""Tables on disk as a source: files of typed columns, one after another, row by row.

The position is the number of files read whole, how many rows of the next one, and the fingerprints of all files that
were begun. So a restart opens each of them for a moment, goes to the row group or batch that it needs, and reads on
from there. Files that sort after those read may come later; everything else that changes is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import pybase64

from lazyshard.errors import RowInvalid
from lazyshard_producer.position import plain_name, refuse_position
from lazyshard_producer.sources.arrow_library import load_pyarrow
from lazyshard_producer.sources.arrow_rows import RowEncoder
from lazyshard_producer.sources.source import Context, Place
from lazyshard_producer.sources.source_file import file_size
from lazyshard_producer.sources.table_files import (
    Version,
    check_read_files,
    file_version,
    fingerprint,
    refuse_changed,
    refuse_table,
)

PIECE_BYTES: Final = 1 << 20
"""How much is read at a time: enough for what a piece costs by itself, little beside all else in memory."""

PIECE_ROWS: Final = 512
"""As many rows at the most: in Python small rows take many times their size, and more gains nothing."""


class Table(Protocol):
    """A file of rows, opened at one of them."""

    @property
    def schema(self) -> Any:
        """Its columns: a `pyarrow.Schema`."""

    @property
    def fraction(self) -> float:
        """How much of it was read, about: from 0 to 1."""

    def read(self) -> Any:
        """Returns the next rows, a `pyarrow.RecordBatch` of about 1 MiB and at least one row; None at the end.

        Raises:
            SourceRefused: it cannot be read.
        """

    def close(self) -> None:
        """Lets go of the file."""


OpenTable = Callable[[str, int], Table]
"""Opens the file of a path, as far as its row of this number, from 0. Raises SourceRefused."""


class TableMark(NamedTuple):
    """Where the source stands between two rows.

    Attributes:
        file: files before it, in order.
        row: rows of the next one before it.
    """

    file: int
    row: int


class TableRows:
    """Rows of one file, in order: see `lazyshard_producer.sources.source.Rows`."""

    __slots__ = ("_before", "_name", "lines")

    def __init__(self, name: str, before: TableMark, lines: Sequence[bytes | RowInvalid]) -> None:
        self.lines = lines
        self._name = name
        self._before = before

    def mark(self, index: int) -> TableMark:
        """Returns where the source stands after the row of this index."""
        return TableMark(self._before.file, self._before.row + range(len(self.lines))[index] + 1)

    def place(self, index: int) -> Place:
        """Returns the file, and the row's number in it from 1."""
        return Place(self._name, self.mark(index).row, None)


class TableSource:
    """A source of rows: see `lazyshard_producer.sources.source.Source`. Never live: what it reads is complete.

    Args:
        kind: how positions call it.
        path: as the user gave it.
        files: paths of the files, in order; at least one.
        open_table: opens one of them.
        position: where to go on, None at the start.
        context: what sources are told about the run.

    Raises:
        SourceRefused: the position is none of such a source, or what was read is not as it was.
        ExtraMissing: pyarrow is not installed.
    """

    live: Final = False
    blank: Final = 0

    def __init__(
        self,
        kind: str,
        path: str,
        files: Sequence[str],
        open_table: OpenTable,
        position: dict[str, Any] | None,
        context: Context,
    ) -> None:
        self.name: Final = plain_name(path)
        self._kind = kind
        self._files = files
        self._open_table = open_table
        self._context = context
        self._pa = load_pyarrow(path)
        load_pyarrow(path, "pyarrow.compute")
        self.start = TableMark(0, 0)
        self._fingerprints: list[int] = []
        if position is not None:
            self.start, self._fingerprints = self._decode(position)
            check_read_files(self.name, files, self._fingerprints)
        self._versions: dict[int, Version] = {}
        self._mark = self.start
        self._table: Table | None = None
        self._encoder: RowEncoder | None = None
        self._sizes = [file_size(file) for file in files]
        self._bytes_before = sum(self._sizes[: self._mark.file])
        # At once, so that what cannot be read is refused before anything is published.
        if self._mark.file < len(files):
            self._open()

    @property
    def reached(self) -> TableMark:
        """Where it stands after all that was read."""
        return self._mark

    @property
    def progress(self) -> tuple[int, int]:
        """(bytes read, bytes there are); within a file it goes by rows."""
        part = self._table.fraction if self._table is not None else 0.0
        size = self._sizes[self._mark.file] if self._mark.file < len(self._files) else 0
        return self._bytes_before + int(part * size), sum(self._sizes)

    def read(self) -> TableRows | None:
        """Returns the next rows; None when all files are read.

        Raises:
            SourceRefused: a file cannot be read, is none of this kind, or was changed.
        """
        while self._mark.file < len(self._files):
            if self._table is None:
                self._open()
            assert self._table is not None and self._encoder is not None
            batch = self._table.read()
            if batch is not None:
                lines = self._encoder.encode(batch)
                rows = TableRows(plain_name(self._files[self._mark.file]), self._mark, lines)
                self._mark = TableMark(self._mark.file, self._mark.row + batch.num_rows)
                return rows
            self._check_same(self._mark.file)
            self.close()
            self._bytes_before += self._sizes[self._mark.file]
            self._mark = TableMark(self._mark.file + 1, 0)
        return None

    def wait(self, seconds: float) -> None:
        """Returns at once."""

    def waits_for(self) -> str:
        """Returns what it waits for: nothing."""
        return "nothing"

    def position(self, mark: TableMark) -> dict[str, Any]:
        """Returns the position at a mark. It grows by 11 bytes with each file that was begun.

        Raises:
            SourceRefused: the file was changed since it was opened.
        """
        begun = mark.file + (1 if mark.row else 0)
        if mark.row:
            self._check_same(mark.file)
        digests = np.asarray(self._fingerprints[:begun], dtype="<u8").tobytes()
        return {
            "kind": self._kind,
            "path": self.name,
            "files": mark.file,
            "row": mark.row,
            "xxh3": pybase64.b64encode(digests).decode("ascii"),
        }

    def end(self) -> None:
        """Does nothing: it ends by itself."""

    def close(self) -> None:
        """Closes the file that is open."""
        table, self._table, self._encoder = self._table, None, None
        if table is not None:
            table.close()

    def _open(self) -> None:
        index = self._mark.file
        path = self._files[index]
        digest, version = fingerprint(path)
        if index < len(self._fingerprints) and self._fingerprints[index] != digest:
            raise refuse_changed(path)
        self._fingerprints[index:] = [digest]
        self._versions[index] = version
        self._table = self._open_table(path, self._mark.row)
        try:
            self._encoder = self._choose_encoder(path, self._table.schema)
            # What was opened is what the fingerprint is of.
            self._check_same(index)
        except BaseException:
            self.close()
            raise

    def _choose_encoder(self, path: str, schema: Any) -> RowEncoder:
        try:
            return RowEncoder(self._pa, schema, self._context.max_row_bytes)
        except ValueError as cause:
            raise refuse_table(path, "every column under a name of its own", str(cause)) from None

    def _check_same(self, index: int) -> None:
        path = self._files[index]
        version = file_version(path)
        if self._versions.get(index) == version:
            return
        digest, version = fingerprint(path)
        if digest != self._fingerprints[index]:
            raise refuse_changed(path)
        self._versions[index] = version

    def _decode(self, position: dict[str, Any]) -> tuple[TableMark, list[int]]:
        for field, expected in (("kind", self._kind), ("path", self.name)):
            if position.get(field) != expected:
                raise refuse_position(self.name, f"{field} {expected!r}", repr(position.get(field))[:120])
        file, row = position.get("files"), position.get("row")
        if type(file) is not int or type(row) is not int or file < 0 or row < 0:
            raise refuse_position(self.name, "numbers of files and rows", repr((file, row))[:120])
        mark = TableMark(file, row)
        try:
            digests = pybase64.b64decode(position.get("xxh3", ""), validate=True)
            fingerprints: list[int] = np.frombuffer(digests, dtype="<u8").tolist()
        except (TypeError, ValueError):
            raise refuse_position(self.name, "fingerprints in base64", repr(position.get("xxh3"))[:120]) from None
        if len(fingerprints) != mark.file + (1 if mark.row else 0):
            raise refuse_position(self.name, "a fingerprint of each file that was begun", f"{len(fingerprints)}")
        return mark, fingerprints
