"""Layouts: bijections between the index space and the lanes, from both ends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.plan.layout import Layout
from tests.plan.cases import PROPERTY

both = pytest.mark.parametrize("strided", [False, True])


@pytest.mark.parametrize(
    ("strided", "places", "lane"),
    [
        (False, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)], range(3, 6)),
        (True, [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)], range(1, 6, 2)),
    ],
)
def test_layout_golden(strided: bool, places: list[tuple[int, int]], lane: range) -> None:
    layout = Layout(2, 3, strided)
    assert [layout.locate(i) for i in range(6)] == places
    assert layout.lane_indices(1) == lane


@PROPERTY
@given(st.booleans(), st.integers(1, 6), st.integers(0, 8))
def test_layout_is_a_bijection_and_negative_indices_count_from_the_end(strided: bool, dp: int, block: int) -> None:
    layout = Layout(dp, block, strided)
    places = [layout.locate(i) for i in range(layout.size)]
    assert sorted(places) == [(lane, p) for lane in range(dp) for p in range(block)]
    assert [layout.locate(i) for i in range(-layout.size, 0)] == places
    for lane in range(dp):
        assert [layout.locate(i) for i in layout.lane_indices(lane)] == [(lane, p) for p in range(block)]


@both
@pytest.mark.parametrize("index", [6, -7])
def test_index_out_of_range_is_refused(strided: bool, index: int) -> None:
    with pytest.raises(IndexError, match=rf"index must be in \[-6, 6\), got {index}"):
        Layout(2, 3, strided).locate(index)
    with pytest.raises(IndexError, match=rf"index must be in \[0, 0\), got {index}"):
        Layout(2, 0, strided).locate(index)


@both
def test_lane_out_of_range_is_refused(strided: bool) -> None:
    with pytest.raises(IndexError, match=r"lane must be in \[0, 2\), got -1"):
        Layout(2, 3, strided).lane_indices(-1)


def test_index_of_a_numpy_integer_gives_plain_ints_and_of_a_float_is_refused() -> None:
    lane, position = Layout(2, 3).locate(np.int32(4))  # type: ignore[arg-type]
    assert (type(lane), type(position)) == (int, int)
    assert (lane, position) == (1, 1)
    with pytest.raises(TypeError):
        Layout(2, 3).locate(1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("dp", "block", "message"), [(0, 3, "dp must be"), (2, -1, "block must be")])
def test_field_out_of_range_is_refused(dp: int, block: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(dp, block)
