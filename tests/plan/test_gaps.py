"""Gaps: the numbering of what is kept equals a list's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.plan.deal import Gaps
from tests.plan.cases import PROPERTY

RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)).map(lambda pair: (pair[0], sum(pair))), max_size=5)


def test_numbers_of_the_documented_example() -> None:
    gaps = Gaps([(6, 7), (2, 4)])
    assert gaps.ranges == ((2, 4), (6, 7))
    assert [sample for sample in range(9) if sample not in gaps] == [0, 1, 4, 5, 7, 8]
    assert [gaps.nth(1, number) for number in range(5)] == [1, 4, 5, 7, 8]
    assert (gaps.kept(1, 7), gaps.kept(7, 1), gaps.kept(2, 4)) == (3, 0, 0)


def test_ranges_that_touch_become_one() -> None:
    assert Gaps([(5, 7), (1, 3), (3, 4), (6, 9)]).ranges == ((1, 4), (5, 9))
    assert Gaps([(1, 9)]).joined([(2, 3)]).ranges == ((1, 9),)


@PROPERTY
@given(RANGES, st.integers(0, 40), st.integers(0, 40))
def test_numbering_equals_a_list(ranges: list[tuple[int, int]], start: int, stop: int) -> None:
    gaps = Gaps(ranges)
    out = {sample for low, high in ranges for sample in range(low, high)}
    kept = [sample for sample in range(start, 100) if sample not in out]
    assert gaps.kept(start, stop) == len([sample for sample in kept if sample < stop])
    numbers = np.arange(20)
    assert [gaps.nth(start, number) for number in range(20)] == kept[:20]
    assert gaps.nth_all(start, numbers).tolist() == kept[:20]
    assert gaps.contains_all(np.arange(50)).tolist() == [sample in out for sample in range(50)]
    assert [sample in gaps for sample in range(50)] == [sample in out for sample in range(50)]
    assert bool(gaps) == bool(out)


@pytest.mark.parametrize(("ranges", "expected"), [([(3, 3)], "stop of a range"), ([(-1, 3)], "start of a range")])
def test_a_range_that_is_none_is_refused(ranges: list[tuple[int, int]], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Gaps(ranges)
