"""Which chunks come next is guessed from those that were opened."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.storage.mirror_ahead import guess_next


@pytest.mark.parametrize(
    ("opened", "count", "expected"),
    [
        ([], 2, []),
        ([5], 2, []),
        ([5, 5], 2, []),
        ([0, 1], 2, [2, 3]),
        ([1, 5, 9], 2, [13, 17]),
        ([4, 0, 6, 2], 1, [8]),
        ([0, 1], 0, []),
    ],
)
def test_what_is_guessed(opened: list[int], count: int, expected: list[int]) -> None:
    assert guess_next(opened, count) == expected


@given(
    st.integers(1, 64), st.integers(0, 63), st.integers(1, 8), st.integers(0, 100), st.randoms(use_true_random=False)
)
def test_a_rank_is_never_given_anothers_chunks(
    ranks: int, rank: int, window: int, start: int, order: random.Random
) -> None:
    chunks = [ranks * number + rank for number in range(start, start + 2 * window)]
    opened: list[int] = []
    for first in (0, window):
        part = chunks[first : first + window]
        order.shuffle(part)
        for chunk in part:
            opened.append(chunk)
            guessed = guess_next(opened, 2)
            assert all((ahead - rank) % ranks == 0 and ahead > max(opened) for ahead in guessed)
    assert guess_next(opened, 2) == [chunks[-1] + ranks, chunks[-1] + 2 * ranks]
