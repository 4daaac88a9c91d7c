"""A part of a run: the value that the arithmetic of `plan` and the states of `format` share, checked once."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Any, Final

from lazyshard.errors import StateInvalid

MAX_SAMPLES: Final = 2**62  # No real stream has as many, so that all index arithmetic stays within 64 bits
_MAX_RANKS: Final = 2**31  # No job has as many


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a run under one number of ranks and one micro batch."""

    dp: int  # its data-parallel ranks, each of which draws one lane
    batch_size: int = 1  # samples of a rank in a micro batch
    # the positions of the half-open range [0, draws) of each of its lanes were drawn; of the current part: so far, as
    # the trainer counts
    draws: int = 0
    # the epoch that it begins anew; None where it goes on where the part before stands (the first: epoch 0)
    epoch: int | None = None
    trained: bool = True  # whether its draws were trained; False where they were skipped
    # half-open ranges of sample numbers that are not drawn from here on, besides those of earlier parts; sorted and
    # disjoint
    skip: tuple[tuple[int, int], ...] = ()
    first_step: int = 0  # steps that were trained before it
    draws_per_step: int = 0  # positions of a lane in a step; 0 where it is not known

    def __post_init__(self) -> None:
        check_integer("dp", self.dp, 1, _MAX_RANKS)
        check_integer("batch_size", self.batch_size, 1, MAX_SAMPLES)
        check_integer("draws", self.draws, 0, MAX_SAMPLES)
        if self.epoch is not None:
            check_integer("epoch", self.epoch, 0, MAX_SAMPLES, " or null")
        if type(self.trained) is not bool:
            raise refused("trained", "true or false", self.trained)
        _check_ranges(self.skip)
        check_integer("first_step", self.first_step, 0, MAX_SAMPLES)
        check_integer("draws_per_step", self.draws_per_step, 0, MAX_SAMPLES)


def check_integer(field: str, value: Any, low: int, high: int, otherwise: str = "") -> None:
    """Refuses what is no integer of the closed range [low, high]; `otherwise` tells what else there may be."""
    if type(value) is not int or not low <= value <= high:
        raise refused(field, f"an integer from {low} to {high}{otherwise}", value)


def _check_ranges(ranges: Any) -> None:
    """Refuses what is no tuple of half-open ranges, none of them empty, sorted and disjoint."""
    if not isinstance(ranges, tuple):
        raise refused("skip", "a list of ranges", ranges)
    stop_before = 0
    for number, one in enumerate(ranges):
        if not isinstance(one, tuple) or len(one) != 2:
            raise refused(f"skip[{number}]", "a range: its first sample and the one behind its last", one)
        start, stop = one
        check_integer(f"skip[{number}][0]", start, stop_before, MAX_SAMPLES)
        check_integer(f"skip[{number}][1]", stop, start + 1, MAX_SAMPLES)
        stop_before = stop


def refused(field: str, expected: str, value: Any, found: str | None = None) -> StateInvalid:
    """Returns the error for a value that is not as expected; `found` is what to say instead of the value."""
    actual = reprlib.repr(value) if found is None else found
    text = f"{f'field {field!r}: ' if field else ''}expected {expected}, found {actual}"
    return StateInvalid(text, field=field or None, expected=expected, actual=actual)
