"""The deal and layouts: lanes as the oracle deals them, both ways; what is left out; bijections; shards."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.data.iterable_shard import Sharding
from lazyshard.part import SplitOf
from lazyshard.plan.deal import Deal, Gaps, Layout, auto_unit, named_unit, split_table, window_positions
from tests.plan import oracle
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
    for lane, row in enumerate(lanes):
        assert [deal.place(sample, total) for sample in row] == [(lane, q) for q in range(len(row))]


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
def test_numbering_of_what_is_kept_equals_a_list(
    ranges: list[tuple[int, int]], start: int, stop: int, split: SplitOf | None
) -> None:
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
        last = rules.last(left, rules.batch if full else left)
        mine += [at if begun else full * rules.batch + at for begun, at in last]
        assert rules.count(total) == len(mine)
        found.append(mine)
    return found


def test_elements_of_shards() -> None:
    """Of the rules that accelerate has too, tests/data/test_streaming_shard.py asks accelerate."""
    assert dealt(9, 2, 2, strided=True) == [[0, 2, 4, 6, 8, 1], [1, 3, 5, 7, 0, 2]]
    assert dealt(9, 2, 2, even_batches=False) == [[0, 1, 4, 5, 8], [2, 3, 6, 7]]
    assert dealt(3, 2, 4) == [[0, 1, 2, 0], [1, 2, 0, 1]]


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
