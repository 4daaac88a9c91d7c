"""The cursor of the run that this process writes: one owner a process, from the start of the run to its end.

The lock that keeps a second run of the same name out is held as long as the process lives, and ends with it.
"""

from __future__ import annotations

from lazyshard.format import Cursor
from lazyshard.storage import CursorOwner

_held: dict[tuple[str, str], CursorOwner] = {}


def put(directory: str, cursor: Cursor, *, take_over: bool = False) -> None:
    """Writes a cursor durably; the first time for this process, the run begins to own it.

    Args:
        directory: the stream's directory.
        cursor: what to write.
        take_over: go on although another run on this machine has the cursor.

    Raises:
        CursorTaken: another run has it, or has taken it over. Nothing was written.
        VersionUnsupported: the cursor that is there is of a later format.
        OSError: the filesystem refused; may be called again.
    """
    key = (directory, cursor.consumer)
    owner = _held.get(key)
    if owner is None:
        owner = _held[key] = CursorOwner(directory, cursor.consumer, take_over=take_over)
    owner.put(cursor)


def let_go() -> None:
    """Lets other runs in."""
    while _held:
        _held.popitem()[1].close()
