"""Values of options as people write them, such as "20GB" and "64 chunks".

Units of bytes are those of the SI (kB = 1,000) and of the IEC (KiB = 1,024), in any case, with or without the B.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Literal

MAX_ROW_BYTES: Final = 64 << 20  # longest row by default: far above any text sample, and a few fit into any machine
MAX_AMOUNT: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """An amount of data, 0 or more."""

    number: int
    unit: Literal["chunks", "samples", "bytes"]

    def __str__(self) -> str:
        """Returns the amount for people."""
        if self.unit == "bytes":
            return show_bytes(self.number)
        return f"{self.number:,} {self.unit if self.number != 1 else self.unit[:-1]}"


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


def parse_retain(text: str) -> str | int:
    """Returns what a stream keeps: "all", "consumed", or the number of ``last N`` or ``N``; else raises ValueError."""
    if text in ("all", "consumed"):
        return text
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


def _split(text: str, expected: str) -> tuple[Fraction, str]:
    found = _QUANTITY.fullmatch(text.strip())
    if found is None:
        raise ValueError(expected)
    return Fraction(found[1].replace("_", "")), found[2].lower()


def read_whole(value: Any) -> Any:
    """Refuses 5.0 behind a flag, which is a whole number to pydantic."""
    if isinstance(value, str) and "." in value:
        raise ValueError("a whole number")
    return value


# Of flags that may be repeated all texts come as a tuple, from TOML a list or a table.


def _names(value: tuple[str, ...]) -> list[str]:
    return [name.strip() for text in value for name in text.split(",")]


def read_names(value: Any) -> tuple[Any, ...]:
    """Returns names."""
    if isinstance(value, tuple):
        return tuple(_names(value))
    return tuple(value) if isinstance(value, list) else (value,)


def read_columns(value: Any) -> tuple[Any, ...]:
    """Returns pairs of columns: new and old name."""
    if isinstance(value, tuple):
        parts = (name.partition("=") for name in _names(value))
        return tuple((new.strip(), old.strip() if equals else new) for new, equals, old in parts)
    if isinstance(value, list):
        return tuple((name, name) for name in value)
    if isinstance(value, dict):
        return tuple(value.items())
    raise ValueError("names of columns as NEW=OLD")


def read_pairs(value: Any) -> tuple[tuple[str, str], ...]:
    """Returns names and values."""
    if isinstance(value, tuple) and all("=" in text for text in value):
        return tuple((name.strip(), item) for name, _, item in (text.partition("=") for text in value))
    if not isinstance(value, dict) or not all(type(item) in (str, int, float, bool) for item in value.values()):
        raise ValueError("settings as NAME=VALUE")
    return tuple((name, str(item).lower() if type(item) is bool else str(item)) for name, item in value.items())
