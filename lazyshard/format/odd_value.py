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

_BYTES: Final = "write the path of a file that holds it, or base64 text: base64.b64encode(it).decode()"

_LIST: Final = "convert it, with list()"

_ADVICE: Final = {
    **dict.fromkeys(("bytes", "bytearray", "memoryview", "bytes_"), _BYTES),
    **dict.fromkeys(("Image", "PngImageFile", "JpegImageFile", "WebPImageFile"), _BYTES.partition(":")[0]),
    **dict.fromkeys(("set", "frozenset"), "convert it, with sorted(), as it has no order of its own"),
    **dict.fromkeys(("range", "generator", "deque", "map", "filter", "zip", "dict_keys", "dict_values"), _LIST),
    **dict.fromkeys(("Decimal", "Fraction"), "convert it, with float(), or str() to keep every digit"),
    **dict.fromkeys(("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"), "convert it, with str()"),
    **dict.fromkeys(("datetime64", "timedelta64"), "convert it, with str()"),
    "timedelta": "convert it, with .total_seconds()",
    "complex": "write it as two numbers, [it.real, it.imag]",
    "Tensor": "convert it, with .tolist()",
}
"""What to do with a value of a type of this name."""

_WITH_ARRAYS: Final = {
    **dict.fromkeys(("bytes", "bytearray", "memoryview"), "; or an array: np.frombuffer(it, np.uint8)"),
    "Tensor": "; or an array: .numpy()",
}
"""What to do besides where a row may hold arrays."""


def advise(row: Any, reason: str, arrays: bool) -> str:
    """Returns what to put behind the reason that orjson gives; nothing where it is about no type.

    Args:
        row: that could not be written.
        reason: orjson's.
        arrays: whether it may hold numpy arrays.

    >>> advise({"a": {"b": [1, range(2)]}}, "Type is not JSON serializable: range", True)
    " under 'a.b[1]'; a row holds what JSON has, and numpy arrays: convert it, with list()"
    """
    if not reason.startswith(_TYPE):
        return ""
    name = reason[len(_TYPE) :].rpartition(".")[2]
    if name == "ndarray":
        return "; a stream that is made by ChunkWriter(..., arrays=True) holds arrays"
    place = _find(row, name)
    where = f" under {place[:_SHOWN]!r}" if place else ""
    holds = "what JSON has, and numpy arrays" if arrays else "what JSON has"
    advice = _ADVICE.get(name)
    if advice is None:
        numpy = reason.startswith(f"{_TYPE}numpy.")
        advice = "convert it, with .item()" if numpy else "make it of dicts, lists, text, numbers, True, False and None"
    return f"{where}; a row holds {holds}: {advice}{_WITH_ARRAYS.get(name, '') if arrays else ''}"


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
