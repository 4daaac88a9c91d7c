"""What to say of a value in a row that JSON does not have: where it is, and what to make of it."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

__all__ = ["advise"]

_TYPE: Final = "Type is not JSON serializable: "
"""How orjson begins, before the name of the type."""

_MAX_LOOKED_AT: Final = 100_000
"""Values: a row may hold itself, and bad rows are to cost little."""

_SHOWN: Final = 80
"""Characters of a place."""


def advise(row: Any, reason: str, arrays: bool) -> str:
    """Returns what to put behind the reason that orjson gives; nothing where it is about no type.

    Args:
        row: that could not be written.
        reason: orjson's.
        arrays: whether it may hold numpy arrays.

    >>> advise({"a": {"b": [1, 1j]}}, "Type is not JSON serializable: complex", True)
    " under 'a.b[1]'; a row holds what JSON has, and numpy arrays: convert it, with int(), float() or .tolist()"
    """
    if not reason.startswith(_TYPE):
        return ""
    name = reason[len(_TYPE) :].rpartition(".")[2]
    if name == "ndarray":
        return "; a stream that is made by ChunkWriter(..., arrays=True) holds arrays"
    place = _find(row, name)
    where = f" under {place[:_SHOWN]!r}" if place else ""
    holds = "what JSON has, and numpy arrays" if arrays else "what JSON has"
    return f"{where}; a row holds {holds}: convert it, with int(), float() or .tolist()"


def _find(row: Any, name: str) -> str:
    """Returns the place of the first value of a type of this name, the shallowest one; empty where none was found."""
    pending: deque[tuple[str, Any]] = deque([("", row)])
    left = _MAX_LOOKED_AT
    while pending:
        place, container = pending.popleft()
        named = isinstance(container, dict)
        for key, value in container.items() if named else enumerate(container):
            if type(value).__name__ == name:
                return _inner(place, key, named)
            if isinstance(value, dict | list | tuple):
                pending.append((_inner(place, key, named), value))
            left -= 1
            if not left:
                return ""
    return ""


def _inner(place: str, key: Any, named: bool) -> str:
    if not named:
        return f"{place}[{key}]"
    return f"{place}.{key}" if place else str(key)
