"""The error for a file of a chunk that is not what was published."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from lazyshard.errors import ChunkCorrupt

SEALED: Final = "sealed"
MARKED: Final = "marked complete"
"""How a chunk was published: by a seal, or by an empty marker."""


def damaged(
    path: Path, chunk: int, row: int | None, byte: int | None, expected: str, actual: str, *, published: str = SEALED
) -> ChunkCorrupt:
    """Returns the error for a file that was changed or damaged after it was published.

    Args:
        path: the file.
        chunk: the chunk's number.
        row: the row that is bad; None if it is the file.
        byte: at which it starts; None without a row.
        expected: what should be there.
        actual: what is there.
        published: `SEALED` or `MARKED`.
    """
    where = "" if row is None else f" row {row} (byte {byte}):"
    return ChunkCorrupt(
        f"{path}:{where} expected {expected}, found {actual}; the file was changed or damaged after it was "
        f"{published}. Restore it from a copy",
        file=str(path),
        chunk=chunk,
        row=row,
        byte=byte,
        expected=expected,
        actual=actual,
    )
