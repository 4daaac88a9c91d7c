"""Quantities as people write them: "20GB", "512MiB", "64 chunks", "last 100". Text to values and back, nothing else.

Units of bytes are those of the SI (kB = 1,000) and of the IEC (KiB = 1,024), in any case, with or without the B.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Literal

MAX_ROW_BYTES: Final = 64 << 20
"""Longest row by default, in bytes: far above any text sample, and a few of them fit into any machine."""

MAX_AMOUNT: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """An amount of data.

    Attributes:
        number: how much, 0 or more.
        unit: of what.
    """

    number: int
    unit: Literal["chunks", "samples", "bytes"]


_QUANTITY: Final = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?) *([a-z]*)", re.ASCII | re.IGNORECASE)

_PREFIXES: Final = "kmgtp"

_BYTE_UNITS: Final[dict[str, int]] = {
    "b": 1,
    "byte": 1,
    "bytes": 1,
    **{prefix + end: 1000**power for power, prefix in enumerate(_PREFIXES, 1) for end in ("", "b")},
    **{prefix + end: 1024**power for power, prefix in enumerate(_PREFIXES, 1) for end in ("i", "ib")},
}

_AMOUNT_UNITS: Final[dict[str, Literal["chunks", "samples"]]] = {
    "": "chunks",
    "chunk": "chunks",
    "chunks": "chunks",
    "sample": "samples",
    "samples": "samples",
}

_SHOWN_UNITS: Final = ("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)

SIZE: Final = "a size such as 20GB or 512MiB, or a number of bytes"
AMOUNT: Final = "an amount such as 64chunks, 1000000samples or 20GB"
RETAIN: Final = '"all", "consumed" or a number of chunks from 1'


def parse_bytes(text: str) -> int:
    """Returns a number of bytes, rounded down.

    >>> parse_bytes("512"), parse_bytes("1.5 kB"), parse_bytes("2MiB")
    (512, 1500, 2097152)

    Raises:
        ValueError: it is none.
    """
    number, unit = _split(text, SIZE)
    if (unit or "b") not in _BYTE_UNITS:
        raise ValueError(SIZE)
    return int(number * _BYTE_UNITS[unit or "b"])


def parse_amount(text: str) -> Amount:
    """Returns an amount of chunks (where no unit is given), samples or bytes.

    >>> parse_amount("64"), parse_amount("20GB").number
    (Amount(number=64, unit='chunks'), 20000000000)

    Raises:
        ValueError: it is none.
    """
    number, unit = _split(text, AMOUNT)
    if unit not in _AMOUNT_UNITS:
        number, unit = Fraction(parse_bytes(text)), "bytes"
    if number.denominator != 1 or number > MAX_AMOUNT:
        raise ValueError(AMOUNT)
    return Amount(number=int(number), unit=_AMOUNT_UNITS.get(unit, "bytes"))


def parse_retain(text: str) -> Literal["all", "consumed"] | int:
    """Returns what a stream keeps: "all", "consumed", or the number of ``last N`` or ``N``.

    Raises:
        ValueError: it is none of these.
    """
    if text == "all" or text == "consumed":
        return text  # type: ignore[return-value]  # mypy does not narrow a str by ==
    number = re.fullmatch(r"(?:last[ :]*)?([0-9]{1,19})", text.strip())
    if number is None or not 1 <= int(number[1]) <= MAX_AMOUNT:
        raise ValueError(RETAIN)
    return int(number[1])


def show_bytes(number: int) -> str:
    """Returns a number of bytes for people.

    >>> show_bytes(999), show_bytes(20_500_000_000)
    ('999 bytes', '20.5 GB')
    """
    for unit, size in _SHOWN_UNITS:
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
