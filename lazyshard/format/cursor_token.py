"""The owner of a cursor: which of the runs that go by one name may write it.

Each run that begins takes a turn one above that of the run before, and puts its token in the cursor; before each write
it looks whether the token there is still its own. File locks do not hold across the mounts of every network filesystem,
this does: a run that was stopped and has woken up finds a later one, and gives up.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from lazyshard.format.cursor import NOT_IN_OWNERS

_MAX_TURN: Final = 2**62
_TEXT: Final = re.compile(r"([1-9][0-9]{0,18})/([0-9a-f]{16}) process ([0-9]{1,10}) on (.{1,200})")


@dataclass(frozen=True, slots=True)
class CursorToken:
    """A run and its turn.

    Attributes:
        turn: counts the runs of this name, from 1. Two that begin at the same time on different machines may have the
            same.
        token: 16 hexadecimal digits chosen at random at this start, so that no two runs are ever equal.
        pid: its process.
        host: that process's machine.
    """

    turn: int
    token: str
    pid: int
    host: str

    def __str__(self) -> str:
        """Names the holder for a message."""
        return f"process {self.pid} on {self.host}"

    @property
    def text(self) -> str:
        """What stands in the cursor as its `owner`: `3/9c41d7e2b06f83a5 process 14106 on node1`."""
        host = NOT_IN_OWNERS.sub("?", self.host)[:200] or "unknown"
        return f"{self.turn}/{self.token} process {self.pid} on {host}"

    @classmethod
    def parse(cls, text: str) -> CursorToken | None:
        """Returns the token that a text is, None for anything else, which is a stranger's."""
        found = _TEXT.fullmatch(text)
        if found is None or int(found[1]) > _MAX_TURN:
            return None
        return cls(int(found[1]), found[2], int(found[3]), found[4])
