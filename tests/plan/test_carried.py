"""The numbering of what one segment takes over from the one before."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.plan.segment import Carried, Slices, Stretch
from tests.plan.cases import PROPERTY


def test_lanes_follow_one_another_and_the_first_may_be_longer() -> None:
    carried = Carried(Slices(5, 2), draws=10)
    lanes, positions = carried.places(np.arange(5))
    assert (lanes.tolist(), positions.tolist()) == ([0, 0, 0, 1, 1], [10, 11, 12, 10, 11])
    assert list(carried.stretches(1, 5)) == [Stretch(1, 0, 11, 2), Stretch(3, 1, 10, 2)]


def test_what_is_left_out_has_no_number_and_cuts_a_stretch() -> None:
    carried = Carried(Slices(5, 2), draws=10, removed=np.array([1, 3]))
    assert carried.size == 3
    lanes, positions = carried.places(np.arange(3))
    assert (lanes.tolist(), positions.tolist()) == ([0, 0, 1], [10, 12, 11])
    assert list(carried.stretches(0, 3)) == [Stretch(0, 0, 10, 1), Stretch(1, 0, 12, 1), Stretch(2, 1, 11, 1)]
    places = [(0, 10), (0, 11), (0, 12), (0, 13), (1, 10), (1, 11), (1, 12)]
    assert [carried.number(*place) for place in places] == [0, -1, 1, None, -1, 2, None]


@PROPERTY
@given(size=st.integers(0, 40), lanes=st.integers(1, 9), draws=st.integers(0, 5), data=st.data())
def test_places_stretches_and_numbers_are_one_and_the_same(
    size: int, lanes: int, draws: int, data: st.DataObject
) -> None:
    every = [(lane, position) for lane in range(lanes) for position in range(Slices(size, lanes).length(lane))]
    removed = data.draw(st.lists(st.integers(0, size - 1), unique=True).map(sorted) if size else st.just([]))
    carried = Carried(Slices(size, lanes), draws, np.array(removed, dtype=np.int64))
    kept = [(lane, draws + position) for at, (lane, position) in enumerate(every) if at not in removed]
    assert carried.size == len(kept)
    found = carried.places(np.arange(carried.size))
    assert list(zip(*(one.tolist() for one in found), strict=True)) == kept
    start = data.draw(st.integers(0, carried.size))
    stop = data.draw(st.integers(start, carried.size))
    stretches = list(carried.stretches(start, stop))
    assert [(one.lane, one.position + more) for one in stretches for more in range(one.length)] == kept[start:stop]
    assert [one.number + more for one in stretches for more in range(one.length)] == list(range(start, stop))
    assert [carried.number(*place) for place in kept] == list(range(carried.size))
