"""What a source of rows is to the rest of the command."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from lazyshard_producer.position import FilePosition


class Place(NamedTuple):
    """Where a row comes from.

    Attributes:
        file: path as the user gave it.
        line: number of its line, from 1.
        byte: offset of its line in the file, from 0.
    """

    file: str
    line: int
    byte: int


class Source(Protocol):
    """Gives rows one by one, and can say at any moment where it stands."""

    @property
    def offset(self) -> int:
        """Bytes read, for the progress."""

    @property
    def blank(self) -> int:
        """Blank lines skipped."""

    @property
    def duplicate(self) -> int:
        """Rows that name a key twice, as counted by `count_duplicate`."""

    @property
    def place(self) -> Place:
        """Where the row comes from that was read last."""

    def read(self) -> bytes | None:
        """Returns the next row's line, with its line end; None when the source is finished.

        Raises:
            RowInvalid: a line that cannot be a row, with its place.
            SourceRefused: the source cannot be read on.
        """

    def position(self) -> FilePosition:
        """Returns the position after the row that was read last. May do I/O: call it once a chunk, not once a row.

        Raises:
            SourceRefused: what was read is no longer there.
        """

    def count_duplicate(self) -> int:
        """Counts the row read last among those that name a key twice, and returns how many these are now."""

    def close(self) -> None:
        """Lets go of what is open."""
