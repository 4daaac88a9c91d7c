"""Layouts: bijections between the index space and the lanes, from both ends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.plan.layout import BlockLayout, StridedLayout, make_layout
from tests.plan.cases import PROPERTY

names = st.sampled_from(["block", "strided"])


def test_block_layout_golden() -> None:
    layout = BlockLayout(dp=2, block=3)
    assert [layout.locate(i) for i in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert layout.lane_indices(1) == range(3, 6)


def test_strided_layout_golden() -> None:
    layout = StridedLayout(dp=2, block=3)
    assert [layout.locate(i) for i in range(6)] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert layout.lane_indices(1) == range(1, 6, 2)


@PROPERTY
@given(names, st.integers(1, 6), st.integers(0, 8))
def test_layout_is_a_bijection(name: str, dp: int, block: int) -> None:
    layout = make_layout(name, dp, block)
    places = [layout.locate(i) for i in range(layout.size)]
    assert sorted(places) == [(lane, p) for lane in range(dp) for p in range(block)]
    assert [layout.index(*place) for place in places] == list(range(layout.size))
    lanes = [[layout.index(lane, p) for p in range(block)] for lane in range(dp)]
    assert [list(layout.lane_indices(lane)) for lane in range(dp)] == lanes


@PROPERTY
@given(names, st.integers(1, 6), st.integers(0, 8))
def test_negative_indices_count_from_the_end(name: str, dp: int, block: int) -> None:
    layout = make_layout(name, dp, block)
    assert [layout.locate(i) for i in range(-layout.size, 0)] == [layout.locate(i) for i in range(layout.size)]


@pytest.mark.parametrize("name", ["block", "strided"])
@pytest.mark.parametrize("index", [6, -7])
def test_index_out_of_range_is_refused(name: str, index: int) -> None:
    layout = make_layout(name, 2, 3)
    with pytest.raises(IndexError, match=rf"index must be in \[-6, 6\), got {index}"):
        layout.locate(index)


@pytest.mark.parametrize("name", ["block", "strided"])
def test_every_index_of_an_empty_layout_is_refused(name: str) -> None:
    with pytest.raises(IndexError, match=r"index must be in \[0, 0\), got 0"):
        make_layout(name, 2, 0).locate(0)


@pytest.mark.parametrize("name", ["block", "strided"])
def test_place_out_of_range_is_refused(name: str) -> None:
    layout = make_layout(name, 2, 3)
    with pytest.raises(IndexError, match=r"lane must be in \[0, 2\), got 2"):
        layout.index(2, 0)
    with pytest.raises(IndexError, match=r"position must be in \[0, 3\), got 3"):
        layout.index(0, 3)
    with pytest.raises(IndexError, match=r"lane must be in \[0, 2\), got -1"):
        layout.lane_indices(-1)


def test_index_of_a_numpy_integer_gives_plain_ints() -> None:
    lane, position = BlockLayout(2, 3).locate(np.int32(4))  # type: ignore[arg-type]
    assert (type(lane), type(position)) == (int, int)
    assert (lane, position) == (1, 1)


def test_index_that_is_no_integer_is_refused() -> None:
    with pytest.raises(TypeError):
        BlockLayout(2, 3).locate(1.0)  # type: ignore[arg-type]


def test_unknown_layout_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="layout must be 'block' or 'strided', got 'random'"):
        make_layout("random", 2, 3)


@pytest.mark.parametrize("name", ["block", "strided"])
def test_field_out_of_range_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="dp must be an int >= 1, got 0"):
        make_layout(name, 0, 3)
    with pytest.raises(ValueError, match="block must be an int >= 0, got -1"):
        make_layout(name, 2, -1)
