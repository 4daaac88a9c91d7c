"""Tables on disk as a source: files of typed columns, one after another, row by row.

The position is the number of files read whole, how many rows of the next one, and the fingerprints of all files that
were begun. So a restart opens each of them for a moment, goes to the row group or batch that it needs, and reads on
from there. Files that sort after those read may come later; everything else that changes is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import pybase64

from lazyshard.errors import RowInvalid
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.position import check_entry, plain_name, read_count, refuse_position
from lazyshard_producer.sources.arrow_rows import ArrowRowEncoder, load_pyarrow
from lazyshard_producer.sources.files import KnownFile, file_size, refuse_changed, refuse_os_error, refuse_source
from lazyshard_producer.sources.source import Context, RowOrigin, Rows, Source


def list_table_files(directory: str, suffix: str) -> list[str]:
    """Returns the paths of a directory's files with this ending, sorted by name.

    Names that begin with a dot or an underscore are passed over, as other programs do: they are not data.

    Raises:
        SourceRefused: there are none, or the directory cannot be listed.
    """
    try:
        with os.scandir(directory) as entries:
            found = [entry for entry in entries if not entry.name.startswith((".", "_"))]
            names = sorted(entry.name for entry in found if entry.name.endswith(suffix) and not entry.is_dir())
            folders = sorted(entry.name for entry in found if entry.is_dir())
    except OSError as cause:
        raise refuse_os_error(directory, cause) from cause
    if names:
        return [os.path.join(directory, name) for name in names]
    actual = f"none; it has folders ({', '.join(folders[:3])}), give each as a source" if folders else "none"
    raise refuse_source(directory, f"files *{suffix}", actual)


def check_read_files(name: str, paths: Sequence[str], read: Sequence[int]) -> None:
    """Checks that the files which were read are still there, as they were, with no other before or between them.

    Args:
        name: the source, for messages.
        paths: the files that are there, in order.
        read: fingerprints of those that were read (the last one perhaps in part), in order.

    Raises:
        SourceRefused: with what is wrong with the first that is not so.
    """
    for index, expected in enumerate(read):
        if index < len(paths) and KnownFile(paths[index]).digest == expected:
            continue
        raise _difference(name, paths, read, index)


def _difference(name: str, paths: Sequence[str], read: Sequence[int], index: int) -> SourceRefused:
    there = [KnownFile(path).digest for path in paths[index:]]
    hint = "; put them back as they were (others may follow, by the order of names), or choose another --out"
    if there and read[index] in there:
        actual = f"{plain_name(os.path.basename(paths[index]))}, which is new and comes before files already read"
    elif not there or there[0] in read[index:]:
        actual = "that one gone"
    else:
        raise refuse_changed(paths[index])
    return refuse_source(name, f"as file {index + 1} the one whose rows were read", actual, hint)


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


class TablePosition(NamedTuple):
    """Where the source stands between two rows.

    Attributes:
        file: files before it, in order.
        row: rows of the next one before it.
    """

    file: int
    row: int


class TableSource(Source):
    """Files of rows. Never live: what it reads is complete.

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
        self.start = TablePosition(0, 0)
        self._fingerprints: list[int] = []
        if position is not None:
            self.start, self._fingerprints = self._decode(position)
            check_read_files(self.name, files, self._fingerprints)
        self._known: dict[int, KnownFile] = {}
        self._position: TablePosition = self.start
        self._table: Table | None = None
        self._encoder: ArrowRowEncoder | None = None
        self._sizes = [file_size(file) for file in files]
        self._bytes_before = sum(self._sizes[: self._position.file])
        # At once, so that what cannot be read is refused before anything is published.
        if self._position.file < len(files):
            self._open()

    @property
    def reached(self) -> TablePosition:
        """Where it stands after all that was read."""
        return self._position

    @property
    def progress(self) -> tuple[int, int]:
        """(bytes read, bytes there are); within a file it goes by rows."""
        part = self._table.fraction if self._table is not None else 0.0
        size = self._sizes[self._position.file] if self._position.file < len(self._files) else 0
        return self._bytes_before + int(part * size), sum(self._sizes)

    def read(self) -> Rows | None:
        """Returns the next rows; None when all files are read.

        Raises:
            SourceRefused: a file cannot be read, is none of this kind, or was changed.
        """
        while self._position.file < len(self._files):
            if self._table is None:
                self._open()
            assert self._table is not None and self._encoder is not None
            batch = self._table.read()
            if batch is not None:
                return self._rows(self._encoder.encode(batch))
            self._known[self._position.file].check()
            self.close()
            self._bytes_before += self._sizes[self._position.file]
            self._position = TablePosition(self._position.file + 1, 0)
        return None

    def _rows(self, lines: Sequence[bytes | RowInvalid]) -> Rows:
        (file, before), numbers = self._position, range(1, len(lines) + 1)
        name = plain_name(self._files[file])
        self._position = TablePosition(file, before + len(lines))
        return Rows(
            lines,
            lambda index: TablePosition(file, before + numbers[index]),
            lambda index: RowOrigin(name, before + numbers[index], None),
        )

    def entry(self, position: TablePosition) -> dict[str, Any]:
        """Returns the entry of a position. It grows by 11 bytes with each file that was begun.

        Raises:
            SourceRefused: the file was changed since it was opened.
        """
        begun = position.file + (1 if position.row else 0)
        if position.row:
            self._known[position.file].check()
        digests = np.asarray(self._fingerprints[:begun], dtype="<u8").tobytes()
        return {
            "kind": self._kind,
            "path": self.name,
            "files": position.file,
            "row": position.row,
            "xxh3": pybase64.b64encode(digests).decode("ascii"),
        }

    def close(self) -> None:
        """Closes the file that is open."""
        table, self._table, self._encoder = self._table, None, None
        if table is not None:
            table.close()

    def _open(self) -> None:
        index = self._position.file
        path = self._files[index]
        file = self._known[index] = KnownFile(path)
        if index < len(self._fingerprints) and self._fingerprints[index] != file.digest:
            raise refuse_changed(path)
        self._fingerprints[index:] = [file.digest]
        self._table = self._open_table(path, self._position.row)
        try:
            self._encoder = self._choose_encoder(path, self._table.schema)
            # What was opened is what the fingerprint is of.
            file.check()
        except BaseException:
            self.close()
            raise

    def _choose_encoder(self, path: str, schema: Any) -> ArrowRowEncoder:
        try:
            return ArrowRowEncoder(self._pa, schema, self._context.max_row_bytes)
        except ValueError as cause:
            raise refuse_source(path, "every column under a name of its own", str(cause)) from None

    def _decode(self, entry: dict[str, Any]) -> tuple[TablePosition, list[int]]:
        check_entry(entry, self.name, self._kind)
        position = TablePosition(*(read_count(entry, field, self.name) for field in ("files", "row")))
        try:
            digests = pybase64.b64decode(entry.get("xxh3", ""), validate=True)
            fingerprints: list[int] = np.frombuffer(digests, dtype="<u8").tolist()
        except (TypeError, ValueError):
            raise refuse_position(self.name, "fingerprints in base64", repr(entry.get("xxh3"))[:120]) from None
        if len(fingerprints) != position.file + (1 if position.row else 0):
            raise refuse_position(self.name, "a fingerprint of each file that was begun", f"{len(fingerprints)}")
        return position, fingerprints
