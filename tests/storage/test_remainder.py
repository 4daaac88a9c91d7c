"""What is left of a stream that has ended for a consumer that is through with it: decisions only."""

from __future__ import annotations

import pytest

from lazyshard.format import Cursor
from lazyshard.format.state import PartState, RunState
from lazyshard.storage.remainder import Remainder, remainder

ID = "0123456789abcdef0123456789abcdef"
SAMPLES, CHUNKS = 43, 11
"""Chunks of 4, the last of 3."""


def told(draws: int, done: int, draws_per_step: int = 0, limit: int | None = None) -> Cursor:
    """The cursor of 2 ranks with micro batches of 2, which says in its state where they are."""
    part = PartState(2, 2, draws, draws_per_step=draws_per_step)
    state = RunState(ID, 4, 4, 0, 0, limit, (part,), 2 * draws)
    plan = {"dp_size": 2, "batch_size": 2, "unit": 4, "window": 0, "seed": 0}
    return Cursor("sft", ID, 2 * draws, done, plan, 1.0, state)


def bare(consumed: int, done: int, **plan: int) -> Cursor:
    return Cursor("sft", ID, consumed, done, plan, 1.0)


@pytest.mark.parametrize(
    ("cursor", "expected"),
    [
        # 40 of 43 are trained, and the last chunks are needed by what is left over.
        (told(20, 10), Remainder(3, 10)),
        # The newest checkpoint needs no chunk below 10, an older one those from 6 on.
        (told(20, 6), Remainder(3, 10)),
        # A step of 2 micro batches: 7 samples are none.
        (told(18, 8, draws_per_step=4), Remainder(7, 8)),
        (told(18, 8), None),
        (told(0, 0), None),
        # It takes no more than 18 for all.
        (told(8, 4, limit=18), Remainder(2, 4, limited=True)),
        (told(9, 4, limit=18), Remainder(0, 11, limited=True)),
        (told(20, 10, limit=43), Remainder(3, 10)),
        # Without a state there is the micro batch of all ranks.
        (bare(40, 6, dp_size=2, batch_size=2), Remainder(3, 6)),
        (bare(39, 6, dp_size=2, batch_size=2), None),
        (bare(42, 6), None),
        # All of it, once or more often.
        (bare(43, 11), Remainder(0, 11)),
        (bare(43, 0), Remainder(0, 11)),
        (bare(100, 0), Remainder(0, 11)),
    ],
)
def test_remainder(cursor: Cursor, expected: Remainder | None) -> None:
    assert remainder(cursor, SAMPLES, CHUNKS, ended=True) == expected


@pytest.mark.parametrize(
    ("cursor", "expected"),
    [
        # All of the 40 that are published: what the newest checkpoint does not need an older one does.
        (told(20, 6), Remainder(0, 10)),
        (told(19, 6), Remainder(2, 8)),
        (told(18, 6), None),
        # It will take no more, however many there will be.
        (told(20, 10, limit=40), Remainder(0, 10, limited=True)),
        (told(9, 4, limit=18), Remainder(0, 10, limited=True)),
        (told(9, 4, limit=50), None),
        (bare(40, 6, dp_size=2, batch_size=2), Remainder(0, 6)),
    ],
)
def test_remainder_of_a_live_stream(cursor: Cursor, expected: Remainder | None) -> None:
    assert remainder(cursor, samples=40, chunks=10, ended=False) == expected
