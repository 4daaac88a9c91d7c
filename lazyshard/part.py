"""Values whose fields are checked once, as they are made; and a part of a run, which `plan` and `format` share."""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Final, NamedTuple, get_type_hints

from lazyshard.errors import StateInvalid

MAX_SAMPLES: Final = 2**62  # No real stream has as many, so that all index arithmetic stays within 64 bits
_SHOWN_MAX: Final = 80  # Characters of a wrong value that a message shows

# Neither a value of many megabytes nor one nested as deep as orjson reads (past Python's own limit) is shown whole
_SHORTENED: Final = reprlib.Repr()
_SHORTENED.maxstring = _SHOWN_MAX


class Kind(NamedTuple):
    """What a field may be, in words and by a test; `read` makes it of what JSON or a pickle holds."""

    expected: str
    fits: Callable[[Any], bool]
    read: Callable[[Any], Any] = lambda value: value

    def check(self, field: str, value: Any) -> Any:
        """Returns a value that fits. Raises StateInvalid."""
        if not self.fits(value):
            raise refused(field, self.expected, value)
        return value


def integer(low: int, high: int) -> Kind:
    """Returns the kind of an integer of the closed range [low, high]."""
    return Kind(f"an integer from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


def or_null(kind: Kind) -> Kind:
    """Returns the kind of what is of another kind, or None."""
    return Kind(
        f"{kind.expected} or null",
        lambda value: value is None or kind.fits(value),
        lambda value: None if value is None else kind.read(value),
    )


BOOLEAN: Final = Kind("true or false", lambda value: type(value) is bool)
TEXT: Final = Kind("a string", lambda value: isinstance(value, str) and value != "")
NUMBER: Final = Kind(
    "a number",
    lambda value: type(value) in (int, float) and math.isfinite(value),
    lambda value: float(value) if type(value) is int else value,
)
Samples = Annotated[int, integer(0, MAX_SAMPLES)]


def tuples(value: Any, depth: int = 3) -> Any:
    """Returns lists of lists as tuples of tuples, and anything else as it is, for the check to refuse."""
    return tuple(tuples(one, depth - 1) for one in value) if depth and isinstance(value, (list, tuple)) else value


class Checked:
    """A frozen dataclass whose fields are checked as it is made, each by the `Kind` in its annotation."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, kind in kinds_of(type(self)).items():  # type: ignore[arg-type]
            kind.check(name, getattr(self, name))

    def to_dict(self) -> dict[str, Any]:
        """Returns it as plain JSON values: dicts, lists, strings, numbers, true, false and None."""
        return {one.name: _plain(getattr(self, one.name)) for one in dataclasses.fields(self)}  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    if isinstance(value, Checked):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return dict(value) if isinstance(value, Mapping) else value


@cache
def kinds_of(cls: type) -> dict[str, Kind]:
    """Returns the kinds of a class's fields that have one."""
    hints = get_type_hints(cls, include_extras=True).items()
    found = ((name, kind) for name, hint in hints for kind in getattr(hint, "__metadata__", ()))
    return {name: kind for name, kind in found if isinstance(kind, Kind)}


_RANGES: Final = Kind("a list of ranges", lambda value: isinstance(value, tuple), tuples)


@dataclasses.dataclass(frozen=True, slots=True)
class Part(Checked):
    """A stretch of a run under one number of ranks and one micro batch."""

    dp: Annotated[int, integer(1, 2**31)]  # its data-parallel ranks, each of which draws one lane
    batch_size: Annotated[int, integer(1, MAX_SAMPLES)] = 1  # samples of a rank in a micro batch
    # the positions of the half-open range [0, draws) of each of its lanes were drawn; of the current part: so far, as
    # the trainer counts
    draws: Samples = 0
    # the epoch that it begins anew; None where it continues where the part before stands (the first: epoch 0)
    epoch: Annotated[int | None, or_null(integer(0, MAX_SAMPLES))] = None
    trained: Annotated[bool, BOOLEAN] = True  # whether its draws were trained; False where they were skipped
    # half-open ranges of sample numbers that are not drawn from here on, besides those of earlier parts; sorted and
    # disjoint
    skip: Annotated[tuple[tuple[int, int], ...], _RANGES] = ()
    first_step: Samples = 0  # steps that were trained before it
    draws_per_step: Samples = 0  # positions of a lane in a step; 0 where it is not known

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        stop_before = 0
        for number, one in enumerate(self.skip):
            if not isinstance(one, tuple) or len(one) != 2:
                raise refused(f"skip[{number}]", "a range: its first sample and the one behind its last", one)
            integer(stop_before, MAX_SAMPLES).check(f"skip[{number}][0]", one[0])
            stop_before = integer(one[0] + 1, MAX_SAMPLES).check(f"skip[{number}][1]", one[1])


def refused(field: str, expected: str, value: Any, found: str | None = None) -> StateInvalid:
    """Returns the error for a value that is not as expected; `found` is what to say instead of the value."""
    actual = shown(value) if found is None else found
    text = f"{f'field {field!r}: ' if field else ''}expected {expected}, found {actual}"
    return StateInvalid(text, field=field or None, expected=expected, actual=actual)


def shown(value: Any) -> str:
    """Returns a wrong value as a message shows it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value[: _SHOWN_MAX + 1]) if isinstance(value, bytes) else _SHORTENED.repr(value)
    return text if len(text) <= _SHOWN_MAX else text[: _SHOWN_MAX - 3] + "..."
