"""The deal and layouts: lanes as the oracle deals them, both ways; what is left out; bijections."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.part import SplitOf
from lazyshard.plan.deal import Deal, Gaps, Layout, auto_unit, named_unit, split_table, window_positions
from tests.plan import oracle
from tests.plan.cases import PROPERTY, Case, cases
from tests.stream.streams import refusal_of


def lane_of(deal: Deal, lane: int, total: int) -> list[int]:
    return [deal.sample(lane, q, total) for q in range(deal.lane_length(lane, total))]


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
    st.none() | st.sampled_from([SplitOf((3, 2, 1), 1), SplitOf((5, 1), 0), SplitOf((5, 1), 1)]),
)
def test_numbering_equals_a_list(ranges: list[tuple[int, int]], start: int, stop: int, split: SplitOf | None) -> None:
    gaps = Gaps(ranges, split)
    out = {sample for low, high in ranges for sample in range(low, high)}
    if split is not None:
        owners = oracle.split_owners(split.shares, 300)
        out |= {sample for sample, owner in enumerate(owners) if owner != split.number}
    kept = [sample for sample in range(start, 300) if sample not in out]
    for sample in kept[:20]:
        low, high = gaps.around(sample)
        assert low <= sample < high
        assert out.isdisjoint(range(low, min(high, 300)))
    assert gaps.kept(start, stop) == len([sample for sample in kept if sample < stop])
    assert [gaps.nth(start, number) for number in range(20)] == kept[:20]
    assert gaps.nth(start, np.arange(20)).tolist() == kept[:20]
    assert [sample in gaps for sample in range(50)] == [sample in out for sample in range(50)]
    assert bool(gaps) == bool(out)


def test_samples_of_a_split_are_spread_evenly_and_each_belongs_to_one() -> None:
    assert oracle.split_owners((3, 2, 1), 9) == [0, 1, 0, 1, 0, 2, 0, 1, 0]
    tables = [split_table(SplitOf((969, 30, 1), number)) for number in range(3)]
    assert [sum(sample in table for table in tables) for sample in range(3000)] == [1] * 3000
    assert [table.count(10**15) for table in tables] == [969 * 10**12, 30 * 10**12, 10**12]
    assert [table.sample(10**12) for table in tables] == [1031991744066, 33333333333354, 1000000000000999]
    assert [tables[1].owner(sample) for sample in (0, 31, 32, 999)] == ["train", "train", "validation", "test"]
    # In no 100 consecutive samples is a split more than one sample away from its share.
    assert {tables[1].count(sample + 100) - tables[1].count(sample) for sample in range(2000)} <= {2, 3, 4}


def test_names_and_shares_of_splits() -> None:
    assert SplitOf.named(None, None) is None
    assert SplitOf.named("train", [90, 10]) == SplitOf((9, 1), 0)
    assert SplitOf.named("test", (98, 1, 1)) == SplitOf((98, 1, 1), 2)
    for name, shares in (
        ("train", None), (None, (9, 1)), ("dev", (9, 1)), ("test", (9, 1)), ("train", (0, 1)), ("train", (0, 0)),
        ("train", (1,)), ("train", (1, 1, 1, 1)), ("train", (0.9, 0.1)), ("train", (True, 1)), ("train", (-1, 2)),
        ("train", (99_999, 2)), ("train", 9), ("train", "91"),
    ):  # fmt: skip
        refusal_of(ValueError, "^splits? must be", SplitOf.named, name, shares)


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


@PROPERTY
@given(st.booleans(), st.integers(1, 6), st.integers(0, 8))
def test_layout_is_a_bijection_and_negative_indices_count_from_the_end(strided: bool, dp: int, block: int) -> None:
    layout = Layout(dp, block, strided)
    places = [layout.locate(i) for i in range(layout.size)]
    assert sorted(places) == [(lane, p) for lane in range(dp) for p in range(block)]
    assert [layout.locate(i) for i in range(-layout.size, 0)] == places
    for lane in range(dp):
        assert [layout.locate(i) for i in layout.lane_indices(lane)] == [(lane, p) for p in range(block)]
