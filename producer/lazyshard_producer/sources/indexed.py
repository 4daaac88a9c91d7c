"""Megatron's IndexedDataset as a source of rows: a row for each document, or for each sequence.

The position is the number of rows, and a fingerprint of both files, so a restart is a few reads however far it was.
"""

from __future__ import annotations

from typing import Any, Final

from lazyshard.conversion.indexed_reader import IndexedReader, data_path
from lazyshard.errors import IndexedInvalid, RowInvalid
from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.position import plain_name, refuse_position
from lazyshard_producer.sources.indexed_rows import RowMaker
from lazyshard_producer.sources.source import Context, Place
from lazyshard_producer.sources.source_file import refuse_os_error
from lazyshard_producer.sources.table_files import Version, file_version, fingerprint, refuse_changed

KIND: Final = "megatron"


class IndexedRows:
    """Rows of one file, in order: see `lazyshard_producer.sources.source.Rows`."""

    __slots__ = ("_before", "_name", "lines")

    def __init__(self, name: str, before: int, lines: list[bytes | RowInvalid]) -> None:
        self.lines = lines
        self._name = name
        self._before = before

    def mark(self, index: int) -> int:
        """Returns where the source stands after the row of this index: how many rows are before."""
        return self._before + range(len(self.lines))[index] + 1

    def place(self, index: int) -> Place:
        """Returns the index file, and the number of the document or sequence in it from 1."""
        return Place(self._name, self.mark(index), None)


class IndexedSource:
    """A source of rows: see `lazyshard_producer.sources.source.Source`. Never live: what it reads is complete.

    Args:
        settings: of which the path of the `.idx` file counts, and what makes a row.
        position: where to go on, None at the start.
        context: what sources are told about the run.

    Raises:
        SourceRefused: one of the two files cannot be read, is damaged as far as a look at both ends of the index
            tells, or is not what it was.
    """

    live: Final = False
    blank: Final = 0

    def __init__(self, settings: SourceSettings, position: dict[str, Any] | None, context: Context) -> None:
        self.name: Final = plain_name(settings.path)
        self._path = settings.path
        self._of = settings.indexed_rows
        try:
            self._files: Final = (self._path, data_path(self._path))
        except IndexedInvalid as cause:
            raise _refuse(cause) from cause
        self.start: Final = 0 if position is None else self._decode(position)
        self._reader = self._open(position)
        self._maker = RowMaker(self._reader, self._of, context.max_row_bytes)
        if self.start > self._maker.total:
            raise refuse_position(self.name, f"at most {self._maker.total} rows", str(self.start))
        self._mark = self.start
        self._go_to()

    @property
    def reached(self) -> int:
        """How many rows it has given."""
        return self._mark

    @property
    def progress(self) -> tuple[int, int]:
        """(bytes read, bytes there are) of the data file; it goes by rows."""
        size = self._reader.data_size
        return size * self._mark // max(1, self._maker.total), size

    def read(self) -> IndexedRows | None:
        """Returns the next rows; None when all are read.

        Raises:
            SourceRefused: a file cannot be read, is damaged, or was changed.
        """
        if self._mark == self._maker.total:
            self._check_same()
            return None
        try:
            lines = self._maker.make(self._mark)
        except IndexedInvalid as cause:
            # A file that was replaced is not damaged: that it was is the better message.
            self._check_same()
            raise _refuse(cause) from cause
        except OSError as cause:
            raise refuse_os_error(self._path, cause) from cause
        rows = IndexedRows(self.name, self._mark, lines)
        self._mark += len(lines)
        return rows

    def wait(self, seconds: float) -> None:
        """Returns at once."""

    def waits_for(self) -> str:
        """Returns what it waits for: nothing."""
        return "nothing"

    def position(self, mark: int) -> dict[str, Any]:
        """Returns the position at a mark.

        Raises:
            SourceRefused: a file was changed since it was opened.
        """
        if mark:
            self._check_same()
        digests = self._digests if mark else []
        return {"kind": KIND, "path": self.name, "rows": self._of, "row": mark, "xxh3": digests}

    def end(self) -> None:
        """Does nothing: it ends by itself."""

    def close(self) -> None:
        """Closes both files."""
        self._reader.close()

    def _go_to(self) -> None:
        try:
            self._maker.go_to(self._mark)
        except IndexedInvalid as cause:
            raise _refuse(cause) from cause
        except OSError as cause:
            raise refuse_os_error(self._path, cause) from cause

    def _open(self, position: dict[str, Any] | None) -> IndexedReader:
        try:
            found = [fingerprint(path) for path in self._files]
            self._digests = [f"{digest:016x}" for digest, _ in found]
            self._versions: list[Version] = [version for _, version in found]
            for path, expected, digest in zip(self._files, self._expected(position), self._digests, strict=True):
                if expected not in (None, digest):
                    raise refuse_changed(path)
            reader = IndexedReader(self._path)
        except IndexedInvalid as cause:
            raise _refuse(cause) from cause
        except OSError as cause:
            raise refuse_os_error(getattr(cause, "file", None) or cause.filename or self._path, cause) from cause
        # What was opened is what the fingerprint is of.
        self._check_same()
        return reader

    def _check_same(self) -> None:
        for number, path in enumerate(self._files):
            version = file_version(path)
            if self._versions[number] == version:
                continue
            digest, version = fingerprint(path)
            if f"{digest:016x}" != self._digests[number]:
                raise refuse_changed(path)
            self._versions[number] = version

    def _expected(self, position: dict[str, Any] | None) -> list[str | None]:
        return [None, None] if position is None or not self.start else list(position["xxh3"])

    def _decode(self, position: dict[str, Any]) -> int:
        for field, expected in (("kind", KIND), ("path", self.name)):
            if position.get(field) != expected:
                raise refuse_position(self.name, f"{field} {expected!r}", repr(position.get(field))[:120])
        row, digests = position.get("row"), position.get("xxh3")
        if type(row) is not int or row < 0:
            raise refuse_position(self.name, "a number of rows", repr(row)[:120])
        texts = isinstance(digests, list) and all(isinstance(digest, str) for digest in digests)
        if not texts or not isinstance(digests, list) or len(digests) != (2 if row else 0):
            raise refuse_position(self.name, "fingerprints of both files", repr(digests)[:120])
        if row and position.get("rows") != self._of:
            expected = f"--indexed-rows {position.get('rows')}, by which rows were published"
            actual = f"--indexed-rows {self._of}"
            raise SourceRefused(
                f"{self.name}: expected {expected}, found {actual}; give that again, or choose another --out",
                file=self.name,
                expected=expected,
                actual=actual,
            )
        return row


def _refuse(cause: IndexedInvalid) -> SourceRefused:
    return SourceRefused(str(cause), file=cause.file, expected=cause.expected, actual=cause.actual)
