"""Layouts: bijections between the index space and the lanes. Shards: which elements of a sequence are one's own."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.plan.deal import Layout, Sharding
from tests.plan.cases import PROPERTY
from tests.stream.streams import refusal_of


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
    for index in (6, -7):
        refusal_of(IndexError, rf"\[-6, 6\), got {index}", layout.locate, index)
        with pytest.raises(IndexError, match=rf"\[0, 0\), got {index}"):
            Layout(2, 0, strided).locate(index)
    for outside in (-1, 2):
        refusal_of(IndexError, rf"\[0, 2\), got {outside}", layout.lane_indices, outside)
    # An index of numpy gives plain ints, and a float is refused.
    place = layout.locate(np.int32(4))  # type: ignore[arg-type]
    assert (place, [type(one) for one in place]) == (places[4], [int, int])
    with pytest.raises(TypeError):
        layout.locate(1.0)  # type: ignore[arg-type]


@PROPERTY
@given(st.booleans(), st.integers(1, 6), st.integers(0, 8))
def test_layout_is_a_bijection_and_negative_indices_count_from_the_end(strided: bool, dp: int, block: int) -> None:
    layout = Layout(dp, block, strided)
    places = [layout.locate(i) for i in range(layout.size)]
    assert sorted(places) == [(lane, p) for lane in range(dp) for p in range(block)]
    assert [layout.locate(i) for i in range(-layout.size, 0)] == places
    for lane in range(dp):
        assert [layout.locate(i) for i in layout.lane_indices(lane)] == [(lane, p) for p in range(block)]


def dealt(total: int, shards: int, batch_size: int, **options: Any) -> list[list[int]]:
    """What each shard gets of 0, 1, ...: by the pure rule alone."""
    found = []
    for index in range(shards):
        rules = Sharding(shards, index, batch_size, **options)
        full, left = divmod(total, rules.batch)
        mine = [batch * rules.batch + place for batch in range(full) for place in rules.own]
        mine += [at if begun else full * rules.batch + at for begun, at in rules.last(left, full > 0)]
        assert rules.count(total) == len(mine)
        found.append(mine)
    return found


@pytest.mark.parametrize(
    ("total", "shards", "size", "options", "expected"),
    [
        (9, 2, 2, {}, [[0, 1, 4, 5, 8, 0], [2, 3, 6, 7, 1, 2]]),
        (9, 2, 2, {"strided": True}, [[0, 2, 4, 6, 8, 1], [1, 3, 5, 7, 0, 2]]),
        (9, 2, 2, {"even_batches": False}, [[0, 1, 4, 5, 8], [2, 3, 6, 7]]),
        (9, 2, 2, {"split_batches": True}, [[0, 2, 4, 6, 8], [1, 3, 5, 7, 0]]),
        # Fewer than a batch are repeated.
        (3, 2, 4, {}, [[0, 1, 2, 0], [1, 2, 0, 1]]),
        (0, 3, 1, {}, [[], [], []]),
    ],
)
def test_elements_of_shards(total: int, shards: int, size: int, options: Any, expected: list[list[int]]) -> None:
    assert dealt(total, shards, size, **options) == expected


@given(st.integers(0, 60), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.booleans())
def test_every_element_is_one_shards(total: int, shards: int, size: int, strided: bool, drop_last: bool) -> None:
    found = dealt(total, shards, size, strided=strided, drop_last=drop_last, even_batches=False)
    kept = total - total % (shards * size) if drop_last else total
    assert sorted(itertools.chain.from_iterable(found)) == list(range(kept))
    found = dealt(total, shards, size, strided=strided)
    assert len(set(map(len, found))) == 1
    assert set(itertools.chain.from_iterable(found)) == set(range(total))


def test_impossible_numbers_are_refused() -> None:
    wrong: dict[tuple[Any, ...], str] = {(0, 0): "num_shards", (2, 2): "index", (2, -1): "index"}
    wrong |= {(2, 0, 0): "batch_size", (2, 0, 3, True): "with split_batches, batch_size"}
    for numbers, field in wrong.items():
        refusal_of(ValueError, f"^{field} ", Sharding, *numbers)
