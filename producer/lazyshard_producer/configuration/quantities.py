"""Values of options as people write them, such as "20GB" and "64 chunks", and the types by which pydantic reads them.

pydantic itself is imported where a value is read, not for the help.
Units of bytes are those of the SI (kB = 1,000) and of the IEC (KiB = 1,024), in any case, with or without the B.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Final, Literal

from annotated_types import Ge, Gt, Interval

MAX_ROW_BYTES: Final = 64 << 20  # longest row by default: far above any text sample, and a few fit into any machine
MAX_AMOUNT: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """An amount of data, 0 or more."""

    number: int
    unit: Literal["chunks", "samples", "bytes"]


_QUANTITY: Final = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?) *([a-z]*)", re.ASCII | re.IGNORECASE)

_BYTE_UNITS: Final[dict[str, int]] = {
    **dict.fromkeys(("", "b", "byte", "bytes"), 1),
    **{prefix + end: 1000**power for power, prefix in enumerate("kmgtp", 1) for end in ("", "b")},
    **{prefix + end: 1024**power for power, prefix in enumerate("kmgtp", 1) for end in ("i", "ib")},
}

_AMOUNT_UNITS: Final[dict[str, Literal["chunks", "samples"]]] = {
    **dict.fromkeys(("", "chunk", "chunks"), "chunks"),
    **dict.fromkeys(("sample", "samples"), "samples"),
}

_SIZE: Final = "a size such as 20GB or 512MiB, or a number of bytes"
_AMOUNT: Final = "an amount such as 64chunks, 1000000samples or 20GB"


def parse_bytes(text: str) -> int:
    """Returns a number of bytes, rounded down; raises ValueError if it is none."""
    number, unit = _split(text, _SIZE)
    if unit not in _BYTE_UNITS:
        raise ValueError(_SIZE)
    return int(number * _BYTE_UNITS[unit])


def parse_amount(text: str) -> Amount:
    """Returns an amount of chunks (where no unit is given), samples or bytes; raises ValueError if it is none."""
    number, unit = _split(text, _AMOUNT)
    if unit not in _AMOUNT_UNITS:
        number, unit = Fraction(parse_bytes(text)), "bytes"
    if number.denominator != 1 or number > MAX_AMOUNT:
        raise ValueError(_AMOUNT)
    return Amount(number=int(number), unit=_AMOUNT_UNITS.get(unit, "bytes"))


def parse_retain(text: str) -> Literal["all", "consumed"] | int:
    """Returns what a stream keeps: "all", "consumed", or the number of ``last N`` or ``N``; else raises ValueError."""
    if text == "all" or text == "consumed":
        return text  # type: ignore[return-value]  # mypy does not narrow a str by ==
    number = re.fullmatch(r"(?:last[ :]*)?([0-9]{1,19})", text.strip())
    if number is None or not 1 <= int(number[1]) <= MAX_AMOUNT:
        raise ValueError('"all", "consumed" or a number of chunks from 1')
    return int(number[1])


def show_bytes(number: int) -> str:
    """Returns a number of bytes for people: 999 bytes, 20.5 GB."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return "1 byte" if number == 1 else f"{number} bytes"


def show_amount(amount: Amount) -> str:
    """Returns an amount for people."""
    if amount.unit == "bytes":
        return show_bytes(amount.number)
    return f"{amount.number:,} {amount.unit if amount.number != 1 else amount.unit[:-1]}"


def _split(text: str, expected: str) -> tuple[Fraction, str]:
    found = _QUANTITY.fullmatch(text.strip())
    if found is None:
        raise ValueError(expected)
    return Fraction(found[1].replace("_", "")), found[2].lower()


class Written:
    """Metadata of a field whose value is written otherwise than pydantic knows: `read` makes it of what was given.

    That is a TOML value, the text behind a flag, or the tuple of those of one that may be repeated.
    """

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Returns pydantic's schema of the type, with `read` before it."""
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(self._read, handler(source))


def _quantity(parse: Callable[[str], Any]) -> Written:
    return Written(lambda value: parse(str(value) if type(value) in (str, int) else ""))


def _read_whole(value: Any) -> Any:
    # To pydantic the text 5.0 is a whole number.
    if isinstance(value, str) and "." in value:
        raise ValueError("a whole number")
    return value


def _split_names(value: tuple[str, ...]) -> list[str]:
    return [name.strip() for text in value for name in text.split(",")]


def _read_names(value: Any) -> tuple[Any, ...]:
    if isinstance(value, tuple):
        return tuple(_split_names(value))
    return tuple(value) if isinstance(value, list) else (value,)


def _read_columns(value: Any) -> Any:
    if isinstance(value, tuple):
        parts = (name.partition("=") for name in _split_names(value))
        return tuple((new.strip(), old.strip() if equals else new) for new, equals, old in parts)
    if isinstance(value, list):
        return tuple((name, name) for name in value)
    if not isinstance(value, dict):
        raise ValueError("names of columns as NEW=OLD")
    return tuple(value.items())


def _read_pairs(value: Any) -> Any:
    if isinstance(value, tuple) and all("=" in text for text in value):
        pairs = (text.partition("=") for text in value)
        return tuple((name.strip(), item) for name, _, item in pairs)
    if not isinstance(value, dict) or not all(type(item) in (str, int, float, bool) for item in value.values()):
        raise ValueError("settings as NAME=VALUE")
    return tuple((name, str(item).lower() if type(item) is bool else str(item)) for name, item in value.items())


OR_NONE: Final = Written(lambda value: None if value == "none" else value)
"""Of a value that may be "none": no limit, also where a configuration file sets one."""

Whole = Annotated[int, Written(_read_whole)]
FromZero = Annotated[Whole, Interval(ge=0, le=MAX_AMOUNT)]
FromOne = Annotated[Whole, Interval(ge=1, le=MAX_AMOUNT)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Bytes = Annotated[int, Interval(ge=1, le=MAX_AMOUNT), _quantity(parse_bytes)]
BytesFromZero = Annotated[int, Interval(ge=0, le=MAX_AMOUNT), _quantity(parse_bytes)]
AheadAmount = Annotated[Amount, _quantity(parse_amount)]
Retain = Annotated[Literal["all", "consumed"] | int, _quantity(parse_retain)]
Names = Annotated[tuple[str, ...], Written(_read_names)]
Columns = Annotated[tuple[tuple[str, str], ...], Written(_read_columns)]
Pairs = Annotated[tuple[tuple[str, str], ...], Written(_read_pairs)]
