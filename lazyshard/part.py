"""Dataclasses whose fields are checked on construction, types of arrays, sizes, and parts of a run, for all rooms."""

from __future__ import annotations

import dataclasses
import math
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Final, NamedTuple, TypeAlias, get_type_hints

import numpy as np

from lazyshard.errors import StateInvalid

# As `numpy.typing.NDArray`, which takes 3 ms to import
Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
BoolArray: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
ByteArray: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
FloatArray: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Int64Array: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
UInt32Array: TypeAlias = np.ndarray[Any, np.dtype[np.uint32]]
UInt64Array: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
Numbers: TypeAlias = Array | Sequence[float] | float  # anything that numpy makes an array of

MAX_SAMPLES: Final = 2**62  # More than any real stream has; keeps all index arithmetic within 64 bits
MOST_SHARES: Final = 100_000  # the shares of all splits of a stream together: a table of a period is kept in memory
_SIZE: Final = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,6}))? *(?:([kmgtp])(i?))?(?:b|bytes?)?", re.IGNORECASE)
_SHOWN_MAX: Final = 80  # Characters of an invalid value in a message

# Shortens values of many megabytes, and values nested as deeply as orjson reads, beyond Python's own limit
_SHORTENED: Final = reprlib.Repr()
_SHORTENED.maxstring = _SHOWN_MAX


def as_it_is(value: Any) -> Any:
    """Returns the value."""
    return value


class Kind(NamedTuple):
    """The kind of a field: what is expected, in words, and a check; `read` converts a value from JSON or a pickle."""

    expected: str
    fits: Callable[[Any], bool]
    read: Callable[[Any], Any] = as_it_is

    def check(self, field: str, value: Any) -> Any:
        """Returns the value if it fits; raises StateInvalid otherwise."""
        if not self.fits(value):
            raise refused(field, self.expected, value)
        return value


def integer(low: int, high: int) -> Kind:
    """Returns the kind of an integer in the closed range [low, high]."""
    return Kind(f"an integer from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


def or_null(kind: Kind) -> Kind:
    """Returns the kind of a value of the given kind or None."""
    return Kind(
        f"{kind.expected} or null",
        lambda value: value is None or kind.fits(value),
        as_it_is if kind.read is as_it_is else lambda value: None if value is None else kind.read(value),
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
    """Converts lists of lists to tuples of tuples; returns any other value unchanged, for the check to reject."""
    return tuple(tuples(one, depth - 1) for one in value) if depth and isinstance(value, (list, tuple)) else value


def parse_size(text: str | int, least: int = 1) -> int:
    """Returns a number of bytes in SI units (kB) or IEC units (KiB). Raises ValueError: invalid, or below `least`.

    >>> parse_size("20GB"), parse_size("1.5 MiB"), parse_size("512")
    (20000000000, 1572864, 512)
    """
    size = -1
    if (found := _SIZE.fullmatch(str(text).strip())) is not None:
        whole, decimals, prefix, binary = found.groups("")
        unit = (1024 if binary else 1000) ** ("kmgtp".index(prefix.lower()) + 1) if prefix else 1
        size = int(whole + decimals) * unit // 10 ** len(decimals)
    if size < least:
        raise ValueError(f"expected a number of bytes such as 20GB or 512MiB, got {text!r}")
    return size


class Checked:
    """Base of frozen dataclasses whose fields are checked on construction, each by the `Kind` in its annotation.

    It compares, hashes and shows them: `dataclass` would compile these methods for each class, which slows the import.
    """

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __post_init__(self) -> None:
        for name, kind in kinds_of(type(self)).items():  # type: ignore[arg-type]
            if not kind.fits(value := getattr(self, name)):
                raise refused(name, kind.expected, value)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return self._values() == other._values() if isinstance(other, type(self)) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._values(hashed=True))

    def __repr__(self) -> str:
        shown = (f"{one.name}={getattr(self, one.name)!r}" for one in dataclasses.fields(self))
        return f"{type(self).__name__}({', '.join(shown)})"

    def _values(self, *, hashed: bool = False) -> tuple[Any, ...]:
        """Returns the values of the fields that are compared, or hashed."""
        return tuple([getattr(self, name) for name in _names_of(type(self), compared=True, hashed=hashed)])  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values: dicts, lists, strings, numbers, true, false and None."""
        return {name: _plain(getattr(self, name)) for name in _names_of(type(self))}  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    if isinstance(value, Checked):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return dict(value) if isinstance(value, Mapping) else value


@cache
def _names_of(cls: type, *, compared: bool = False, hashed: bool = False) -> tuple[str, ...]:
    fields = dataclasses.fields(cls)
    return tuple(one.name for one in fields if (one.compare or not compared) and not (hashed and one.hash is False))


@cache
def kinds_of(cls: type) -> dict[str, Kind]:
    """Returns the kind of each field of a class that has one."""
    hints = get_type_hints(cls, include_extras=True).items()
    found = ((name, kind) for name, hint in hints for kind in getattr(hint, "__metadata__", ()))
    return {name: kind for name, kind in found if isinstance(kind, Kind)}


SPLITS: Final = ("train", "validation", "test")


def _are_shares(values: tuple[Any, ...]) -> bool:
    return 2 <= len(values) <= len(SPLITS) and all(type(one) is int and one >= 0 for one in values)


class SplitOf(NamedTuple):
    """One split of a stream: which samples belong to it follows from their numbers alone.

    `shares` of every sum(shares) consecutive samples go to each split, spread evenly: the first split takes
    sample n if ceil((n + 1) * share / sum) > ceil(n * share / sum), the next one of the rest by the same rule::

        shares (3, 2, 1)     sample            0  1  2  3  4  5 |  6  7  8 ...
                             split             0  1  0  1  0  2 |  0  1  0
    """

    shares: tuple[int, ...]
    number: int

    @classmethod
    def named(cls, name: object, shares: object) -> SplitOf | None:
        """Returns a split by its name, and the shares; None if both are None. Raises ValueError: there is none."""
        if name is None and shares is None:
            return None
        given = tuple(shares) if isinstance(shares, (list, tuple)) else ()
        if not _are_shares(given) or not 0 < sum(given) // (common := math.gcd(*given) or 1) <= MOST_SHARES:
            expected = f"the shares of {', '.join(SPLITS)}, such as (969, 30, 1): 2 or 3 whole numbers"
            raise ValueError(f"splits must be {expected}, together at most {MOST_SHARES}, got {shares!r:.100}")
        names = [one for one, share in zip(SPLITS, given, strict=False) if share]
        if name not in names:
            raise ValueError(f"split must be one of {', '.join(names)} for splits={given}, got {name!r:.100}")
        return cls(tuple(share // common for share in given), SPLITS.index(str(name)))

    def __str__(self) -> str:
        return f"{SPLITS[self.number]} of {':'.join(map(str, self.shares))}"


def _is_split(value: Any) -> bool:
    if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], tuple) and type(value[1]) is int):
        return False
    shares, number = value
    sound = _are_shares(shares) and sum(shares) <= MOST_SHARES
    return sound and 0 <= number < len(shares) and shares[number] > 0


SPLIT: Final = Kind("the shares of two or three splits, and the number of one of them", _is_split, tuples)
_RANGES: Final = Kind("a list of ranges", lambda value: isinstance(value, tuple), tuples)


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class Part(Checked):
    """A part of a run with one number of ranks and one micro batch size."""

    dp: Annotated[int, integer(1, 2**31)]  # number of data-parallel ranks, each of which draws one lane
    batch_size: Annotated[int, integer(1, MAX_SAMPLES)] = 1  # samples per rank in a micro batch
    # positions drawn in each lane: the half-open range [0, draws); in the current part: so far, as the trainer counts
    draws: Samples = 0
    # the epoch that this part starts from its beginning; None if it continues where the previous part ended (the first
    # part: epoch 0)
    epoch: Annotated[int | None, or_null(integer(0, MAX_SAMPLES))] = None
    trained: Annotated[bool, BOOLEAN] = True  # whether its draws were trained; False if they were skipped
    # half-open ranges of sample numbers that are not drawn from here on, in addition to those of earlier parts; sorted
    # and disjoint
    skip: Annotated[tuple[tuple[int, int], ...], _RANGES] = ()
    first_step: Samples = 0  # steps trained before this part
    draws_per_step: Samples = 0  # positions of a lane per step; 0 if unknown

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        stop_before = 0
        for number, one in enumerate(self.skip):
            if not isinstance(one, tuple) or len(one) != 2:
                raise refused(f"skip[{number}]", "a half-open range: its first sample and the one after its last", one)
            integer(stop_before, MAX_SAMPLES).check(f"skip[{number}][0]", one[0])
            stop_before = integer(one[0] + 1, MAX_SAMPLES).check(f"skip[{number}][1]", one[1])


def refused(field: str, expected: str, value: Any, found: str | None = None) -> StateInvalid:
    """Returns the error for an invalid value; the message shows `found` instead of the value if it is given."""
    actual = shown(value) if found is None else found
    text = f"{f'field {field!r}: ' if field else ''}expected {expected}, found {actual}"
    return StateInvalid(text, field=field or None, expected=expected, actual=actual)


def shown(value: Any) -> str:
    """Returns an invalid value as messages show it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value[: _SHOWN_MAX + 1]) if isinstance(value, bytes) else _SHORTENED.repr(value)
    return text if len(text) <= _SHOWN_MAX else text[: _SHOWN_MAX - 3] + "..."
