"""How the fields of a run's state are checked, and refused by their path in it: `parts[1].skip[0]`.

Unlike the fields of a stream's own files (`fields`) they are values already, from JSON or from a pickle.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lazyshard.errors import StateInvalid, VersionUnsupported
from lazyshard.format.fields import MAX_SAMPLES


def check_integer(field: str, value: Any, low: int, high: int, otherwise: str = "") -> None:
    """Refuses what is no integer of the closed range [low, high]; `otherwise` tells what else there may be."""
    if type(value) is not int or not low <= value <= high:
        raise refused(field, f"an integer from {low} to {high}{otherwise}", value)


def check_ranges(field: str, ranges: Any) -> None:
    """Refuses what is no tuple of half-open ranges of sample numbers, none of them empty, sorted and disjoint."""
    if not isinstance(ranges, tuple):
        raise refused(field, "a list of ranges", ranges)
    stop_before = 0
    for number, one in enumerate(ranges):
        if not isinstance(one, tuple) or len(one) != 2:
            raise refused(f"{field}[{number}]", "a range: its first sample and the one behind its last", one)
        start, stop = one
        check_integer(f"{field}[{number}][0]", start, stop_before, MAX_SAMPLES)
        check_integer(f"{field}[{number}][1]", stop, start + 1, MAX_SAMPLES)
        stop_before = stop


def check_version(value: Any, known: int, what: str) -> None:
    """Refuses what is of a later format; to be called first, as nothing else of that may be as it is known here.

    Args:
        value: an object with a field `format`.
        known: the format that is read here, and all before it.
        what: it is.
    """
    version = members(value, ("format",))["format"]
    check_integer("format", version, 1, 2**31)
    if version > known:
        raise VersionUnsupported(
            f"{what} in format {version}, this release of lazyshard reads format {known}; install a newer lazyshard",
            field="format",
            expected=str(known),
            actual=str(version),
        )


def members(value: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Returns the fields of an object, all of which must be there: one that is lost must not become its default."""
    if not isinstance(value, dict):
        raise refused("", "an object", value)
    for name in names:
        if name not in value:
            raise _wrong(name, "a value", "no such field")
    return {name: value[name] for name in names}


def tuples(value: Any) -> Any:
    """Returns a list of lists as a tuple of tuples, and anything else as it is, for the check to refuse."""
    if not isinstance(value, (list, tuple)):
        return value
    return tuple(tuple(one) if isinstance(one, list) else one for one in value)


def refused(field: str, expected: str, value: Any) -> StateInvalid:
    """Returns the error for a value that is not as expected."""
    return _wrong(field, expected, reprlib.repr(value))


def _wrong(field: str, expected: str, actual: str) -> StateInvalid:
    where = f"field {field!r}: " if field else ""
    return StateInvalid(
        f"{where}expected {expected}, found {actual}", field=field or None, expected=expected, actual=actual
    )


@contextmanager
def inside(name: str) -> Iterator[None]:
    """Puts the name of the field that holds an object before those of its own fields that are refused in here."""
    try:
        yield
    except StateInvalid as error:
        field = ".".join(part for part in (name, error.field) if part)
        raise _wrong(field, str(error.expected), str(error.actual)) from None
    except VersionUnsupported as error:
        error.field = ".".join(part for part in (name, error.field) if part)
        raise
