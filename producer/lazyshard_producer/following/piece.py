"""Lines that were read from a file of a followed directory in one go, and what such a file is to the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lazyshard.errors import RowInvalid
from lazyshard_producer.following.state import FileState
from lazyshard_producer.sources.source import Place


class Piece(Protocol):
    """Lines that follow each other in a file.

    Attributes:
        lines: the rows among them; there may be none.
    """

    lines: Sequence[bytes | RowInvalid]

    @property
    def begin(self) -> FileState:
        """How far the file was read before."""

    @property
    def end(self) -> FileState:
        """How far it is read with these."""

    def state(self, index: int) -> FileState:
        """Returns how far it is read with the row of this index, and with the blank lines behind the last one."""

    def place(self, index: int) -> Place:
        """Returns where the row of this index begins."""


class FollowedFile(Protocol):
    """A file that is being read.

    Attributes:
        state: how far it is read.
        finished: it was read to its end.
        at_end: at the last read there was nothing more to be had for now.
        diverged: at the last read it was found not to be what an earlier run has read here. What was read of it by this
            run is what it holds now.
    """

    state: FileState
    finished: bool
    at_end: bool
    diverged: bool

    @property
    def size(self) -> int:
        """Bytes of the file that are read, compressed ones if it is a compressed one."""

    def read(self, until: FileState | None = None) -> Piece | None:
        """Returns the next lines, of about 1 MiB; None where there is nothing new.

        Args:
            until: where to stop: a place that an earlier run came to.

        Raises:
            FileNotFoundError: it is gone.
            SourceRefused: it is not what it was, or cannot be read.
        """

    def close(self) -> None:
        """Lets go of what is open. May be called twice."""
