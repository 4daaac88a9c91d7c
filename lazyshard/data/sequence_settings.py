"""What `LazyShardedSequences` is told of the sequences, checked before the stream is opened."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Final, Literal, get_args

from lazyshard.data.sequence_forms import Form, Pack, Pad, Split, facts_of
from lazyshard.data.sequence_planner import TooLong
from lazyshard.data.sequence_states import Facts

__all__ = ["AtEnd", "SequenceSettings", "at_least"]

AtEnd = Literal["drop", "complete"]
"""What becomes of the sequences left over: not drawn, or drawn in one more micro batch of every rank."""

_WINDOW_ROWS: Final = 10_000
"""Rows of a window, if not said otherwise: with so many, packs are 99.9 % full (docs/packing.md)."""


@dataclass(frozen=True, slots=True)
class SequenceSettings:
    """Which sequences are made, and what becomes of those left over. See `LazyShardedSequences` for the arguments.

    Attributes:
        form: what is made of the rows.
        batch_size: sequences of one rank in a micro batch.
        window: chunks that are looked at together; None for as many as have 10,000 rows.
        seed: of the order of the rows within a window; None keeps it.
        at_end: what becomes of the sequences left over.
        too_long: what becomes of a row with more tokens than a sequence, where rows stay whole.

    Raises:
        TypeError: the form is none, or a number no integer.
        ValueError: a number is too small, or a choice none.
    """

    form: Form
    batch_size: int
    window: int | None
    seed: int | None
    at_end: AtEnd
    too_long: TooLong

    def __post_init__(self) -> None:
        """Checks the fields."""
        if not isinstance(self.form, (Pack, Pad, Split)):
            raise TypeError(f"form is Pack(SIZE), Split(SIZE) or Pad(SIZE), got {self.form!r:.100}")
        for name, known in (("at_end", get_args(AtEnd)), ("too_long", get_args(TooLong))):
            given = getattr(self, name)
            if given not in known:
                raise ValueError(f"{name} is one of {', '.join(known)}, got {given!r}")
        for name, least in (("batch_size", 1), ("seed", 0), ("window", 1)):
            value = getattr(self, name)
            if value is not None or name == "batch_size":
                object.__setattr__(self, name, at_least(name, value, least))

    def chunks(self, samples_per_chunk: int) -> int:
        """Returns how many chunks of a stream a window has."""
        return -(-_WINDOW_ROWS // samples_per_chunk) if self.window is None else self.window

    def facts(self, chunks: int) -> Facts:
        """Returns what a state says of them: all that decides which sequences there are.

        Args:
            chunks: of a window.
        """
        return facts_of(self.form) | {"window": chunks, "seed": self.seed}


def at_least(name: str, value: int, least: int) -> int:
    """Returns a number as an `int`.

    Raises:
        ValueError: it is too small.
        TypeError: it is no integer.
    """
    found = operator.index(value)
    if found < least:
        raise ValueError(f"{name} is {least} or more, got {found}")
    return found
