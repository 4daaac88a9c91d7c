"""What of a stream's rows is exported as an IndexedDataset: tokens, lengths and modes of sequences, and documents."""

from __future__ import annotations

import re
import reprlib
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshard.format.indexed import DTYPES, MAX_LENGTH

AUTO: Final = "auto"

ROW: Final = "row"
STREAM: Final = "stream"
KEY: Final = "key:"
_BOUNDARIES: Final = re.compile(rf"{ROW}|{STREAM}|{KEY}.+", re.DOTALL)

_MODES: Final = range(-128, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSettings:
    """What of the rows is exported, and how.

    Attributes:
        field: key of the list of tokens.
        dtype: type of the tokens on disk, one of `lazyshard.format.indexed.DTYPES`; "auto" for what megatron-core would
            choose for a vocabulary that ends with the largest token: uint16 below 65,500 tokens, else int32.
        boundaries: what is a document: "row", each row; "stream", all of it; "key:NAME", rows that follow each other
            with the same value under NAME.
        lengths: key of the tokens of each sequence, for rows of several; a row without it is one sequence.
        mode: key of the mode, an integer, or a list of one for each sequence; None to write no modes.

    Raises:
        ValueError: there is no such type, or the boundaries are none of these.
    """

    field: str = "input_ids"
    dtype: str = AUTO
    boundaries: str = ROW
    lengths: str | None = None
    mode: str | None = None

    def __post_init__(self) -> None:
        """Checks the values."""
        if self.dtype != AUTO and self.dtype not in DTYPES:
            raise ValueError(f"one of {', '.join((AUTO, *DTYPES))} is needed, got {self.dtype!r}")
        if not _BOUNDARIES.fullmatch(self.boundaries):
            raise ValueError(f"{ROW}, {STREAM} or {KEY}NAME is needed, got {self.boundaries!r}")


class ExportedRow(NamedTuple):
    """What of a row is exported.

    Attributes:
        tokens: of all its sequences, shape (n,): int64, or float64 where floats are exported.
        lengths: tokens of each sequence; their sum is n.
        modes: mode of each sequence; None where none are exported.
        key: what rows of one document have in common; None where that is not asked for.
    """

    tokens: npt.NDArray[Any]
    lengths: list[int]
    modes: list[int] | None
    key: Any


class Unfit(Exception):
    """Why a row cannot be exported; told with its place by whoever knows that."""


def read_row(row: dict[str, Any], settings: ExportSettings, integral: bool) -> ExportedRow:
    """Returns what of a row is exported.

    Args:
        row: as it was parsed.
        settings: what of it.
        integral: whether tokens are integers; else they are numbers of any kind, rounded to what a float holds.

    Raises:
        Unfit: something is missing, or not what it has to be.
    """
    tokens = _numbers(_take(row, settings.field), settings.field, integral)
    lengths = [len(tokens)]
    if settings.lengths is not None and settings.lengths in row:
        lengths = _integers(row[settings.lengths], settings.lengths)
        if min(lengths, default=0) < 0 or sum(lengths) != len(tokens):
            raise Unfit(f"{settings.lengths!r} adds up to {sum(lengths)}, and there are {len(tokens)} tokens")
    if max(lengths, default=0) > MAX_LENGTH:
        raise Unfit(f"a sequence of {max(lengths)} tokens; the index holds lengths up to {MAX_LENGTH}")
    modes = None if settings.mode is None else _modes(_take(row, settings.mode), settings.mode, len(lengths))
    key = None
    if settings.boundaries.startswith(KEY):
        key = _take(row, settings.boundaries[len(KEY) :])
    return ExportedRow(tokens, lengths, modes, key)


def _take(row: dict[str, Any], name: str) -> Any:
    try:
        return row[name]
    except KeyError:
        there = ", ".join(map(repr, list(row)[:8])) or "nothing"
        raise Unfit(f"{name!r} is missing; it holds {reprlib.repr(there) if len(there) > 200 else there}") from None


def _numbers(values: Any, name: str, integral: bool) -> npt.NDArray[Any]:
    kinds = {int} if integral else {int, float}
    if type(values) is not list:
        raise Unfit(f"{name!r} is {_kind(values)}, expected a list of {'integers' if integral else 'numbers'}")
    if set(map(type, values)) - kinds:
        at = next(index for index, value in enumerate(values) if type(value) not in kinds)
        what = "an integer" if integral else "a number"
        raise Unfit(f"{name!r}[{at}] is {_kind(values[at])}, expected {what}")
    try:
        return np.array(values, np.int64 if integral else np.float64)
    except OverflowError:
        raise Unfit(f"{name!r} holds {max(values, key=abs)}, which no type of tokens can hold") from None


def _integers(values: Any, name: str) -> list[int]:
    found: list[int] = _numbers(values, name, integral=True).tolist()
    return found


def _modes(values: Any, name: str, sequences: int) -> list[int]:
    modes = [values] * sequences if type(values) is int else _integers(values, name)
    if len(modes) != sequences:
        raise Unfit(f"{name!r} holds {len(modes)} modes for {sequences} sequences")
    for mode in modes:
        if mode not in _MODES:
            raise Unfit(f"{name!r} holds {mode}, expected modes from {_MODES[0]} to {_MODES[-1]}")
    return modes


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {reprlib.repr(value)}"
