"""The deal: the lanes of the oracle, both ways; what is left out; which unit a name stands for, for all ranks alike."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.plan.deal import Deal, Gaps, auto_unit, named_unit, window_positions
from tests.plan.cases import PROPERTY, Case, cases
from tests.stream.streams import refusal_of


def lane_of(deal: Deal, lane: int, total: int) -> list[int]:
    return [deal.sample(lane, q, total) for q in range(deal.lane_length(lane, total))]


@pytest.mark.parametrize(
    ("deal", "total", "lanes"),
    [
        (Deal(2, 3), 16, [[0, 1, 2, 6, 7, 8, 12, 14], [3, 4, 5, 9, 10, 11, 13, 15]]),
        # Fewer chunks than lanes are all tail, and a turn moves the tail alone.
        (Deal(4, 100), 6, [[0, 4], [1, 5], [2], [3]]),
        (Deal(3, 2, turn=2), 11, [[0, 1, 7, 10], [2, 3, 8], [4, 5, 6, 9]]),
    ],
)
def test_deal_golden(deal: Deal, total: int, lanes: list[list[int]]) -> None:
    assert [lane_of(deal, lane, total) for lane in range(deal.dp)] == lanes
    places = {sample: (lane, q) for lane, row in enumerate(lanes) for q, sample in enumerate(row)}
    assert [deal.place(sample, total) for sample in range(total)] == [places[sample] for sample in range(total)]
    length = min(map(len, lanes))
    own, places_of = np.indices((deal.dp, length), np.int64)
    table = deal.samples(own, places_of, total)
    assert table.dtype == np.int64
    assert table.tolist() == [lane[:length] for lane in lanes]


@PROPERTY
@given(cases())
def test_lanes_are_the_oracles_in_arrays_too_and_back(case: Case) -> None:
    deal, total = case.deal, case.total
    for lane, expected in enumerate(case.lanes()):
        positions = np.arange(len(expected))
        own = np.full(len(expected), lane)
        assert lane_of(deal, lane, total) == deal.samples(own, positions, total).tolist() == expected
        assert [deal.place(sample, total) for sample in expected] == [(lane, q) for q in range(len(expected))]
        live = [deal.sample(lane, q) for q in range(len(expected))]
        assert deal.samples(own, positions).tolist() == live
        assert [deal.sample(*deal.place(sample)) for sample in expected] == expected


@PROPERTY
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)).map(lambda one: (one[0], sum(one))), max_size=5),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_numbering_of_what_is_kept_equals_a_list(ranges: list[tuple[int, int]], start: int, stop: int) -> None:
    gaps = Gaps(ranges)
    out = {sample for low, high in ranges for sample in range(low, high)}
    kept = [sample for sample in range(start, 100) if sample not in out]
    assert gaps.kept(start, stop) == len([sample for sample in kept if sample < stop])
    assert [gaps.nth(start, number) for number in range(20)] == kept[:20]
    assert gaps.nth(start, np.arange(20)).tolist() == kept[:20]
    assert [sample in gaps for sample in range(50)] == [sample in out for sample in range(50)]
    assert bool(gaps) == bool(out)


def test_what_a_unit_stands_for_and_a_window_has_whole_units() -> None:
    units: list[str | int] = ["chunk", "sample", "batch", 1, 250, "auto"]
    assert [named_unit(unit, 100, 8) for unit in units] == [100, 1, 8, 1, 250, None]
    others: list[Any] = ["row", "", "8", 0, -1, True, 1.0, None, ["chunk"]]
    for unit in others:
        refusal_of(ValueError, "unit must be one of chunk, sample, batch, auto", named_unit, unit, 100, 8)
    assert [window_positions(2, 100, unit) for unit in (100, 1, 8, 7, 1000)] == [200, 200, 200, 203, 1000]
    assert window_positions(0, 100, 7) == 0
    assert Gaps([(5, 7), (1, 3), (3, 4), (6, 9)]).ranges == ((1, 4), (5, 9))
    assert Gaps([(1, 9)]).joined([(2, 3)]).ranges == ((1, 9),)
    for wrong, field in (((3, 3), "stop"), ((-1, 3), "start")):
        refusal_of(ValueError, f"^{field} .*(must be|a range)", Gaps, [wrong])


@PROPERTY
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.integers(0, 60), st.none() | st.integers(1, 60))
def test_chunks_where_each_rank_has_a_full_one(dp: int, size: int, batch: int, total: int, limit: int | None) -> None:
    known = total if limit is None else min(total, limit)
    at_the_end = auto_unit(dp, size, batch, total, True, limit)
    assert at_the_end == (size if known >= dp * size else batch)
    looks = [auto_unit(dp, size, batch, published, False, limit) for published in range(total + 1)]
    assert set(looks) <= {None, at_the_end}
    # Nobody waits longer than a rank which draws chunks would for its first sample; nor at all where the limit says it.
    assert looks[dp * size :] == [at_the_end] * len(looks[dp * size :])
    if limit is not None and limit < dp * size:
        assert set(looks) == {batch}
    if limit is None and at_the_end == batch != size:
        whole = Deal(dp, batch).whole_positions(total)
        assert whole == total // (dp * batch) * batch, "what is drawn and nothing else, so no row by itself"
