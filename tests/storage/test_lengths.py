"""Lengths counted in buckets, against the sorted list of them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.storage.lengths import MAX_BINS, Bin, Lengths

values = st.lists(st.one_of(st.integers(0, 3000), st.integers(0, 2**50)), min_size=1, max_size=60)


def counted(*groups: list[int]) -> Lengths:
    lengths = Lengths()
    for group in groups:
        lengths.add(np.array(group, np.uint64))
    return lengths


@given(numbers=values, share=st.floats(0, 1))
def test_quantiles(numbers: list[int], share: float) -> None:
    lengths = counted(numbers)
    wanted = sorted(numbers)[max(1, math.ceil(share * len(numbers))) - 1]
    found = lengths.quantile(share)
    assert found == wanted if wanted < 2048 else wanted * (1 - 1 / 1024) <= found <= wanted
    assert (lengths.smallest, lengths.largest, lengths.count) == (min(numbers), max(numbers), len(numbers))
    assert lengths.mean == sum(numbers) / len(numbers)


@given(numbers=values)
def test_histogram(numbers: list[int]) -> None:
    bins = counted(numbers).histogram()
    assert 1 <= len(bins) <= max(MAX_BINS, math.ceil(math.log10(max(numbers) + 1)) + 1)
    assert [one.high for one in bins[:-1]] == [one.low for one in bins[1:]]
    assert bins[0].low <= min(numbers) < bins[0].high
    assert bins[-1].low <= max(numbers) < bins[-1].high
    assert sum(one.count for one in bins) == len(numbers)
    for one in bins:
        # Past 4,096 an edge may lie within a bucket.
        if one.high <= 4096:
            assert one.count == sum(one.low <= number < one.high for number in numbers)


@given(first=values, second=values)
def test_counts_of_two_are_those_of_one(first: list[int], second: list[int]) -> None:
    merged = counted(first)
    merged.merge(counted(second))
    merged.merge(Lengths())
    both = counted(first, second)
    assert merged.histogram() == both.histogram()
    assert (merged.smallest, merged.largest, merged.total) == (both.smallest, both.largest, both.total)
    other = Lengths()
    other.merge(both)
    assert other.histogram() == both.histogram()


@pytest.mark.parametrize(
    ("numbers", "bins"),
    [
        ([0], [Bin(0, 1, 1)]),
        ([9, 9, 11], [Bin(7, 10, 2), Bin(10, 15, 1)]),
        ([100, 299], [Bin(100, 150, 1), Bin(150, 200, 0), Bin(200, 300, 1)]),
        (
            [10, 999],
            [
                Bin(10, 15, 1),
                Bin(15, 20, 0),
                Bin(20, 30, 0),
                Bin(30, 50, 0),
                Bin(50, 70, 0),
                Bin(70, 100, 0),
                Bin(100, 150, 0),
                Bin(150, 200, 0),
                Bin(200, 300, 0),
                Bin(300, 500, 0),
                Bin(500, 700, 0),
                Bin(700, 1000, 1),
            ],
        ),
        (
            [9, 999],
            [
                Bin(5, 10, 1),
                Bin(10, 20, 0),
                Bin(20, 50, 0),
                Bin(50, 100, 0),
                Bin(100, 200, 0),
                Bin(200, 500, 0),
                Bin(500, 1000, 1),
            ],
        ),
        (
            [5, 70_000],
            [Bin(1, 10, 1), Bin(10, 100, 0), Bin(100, 1000, 0), Bin(1000, 10_000, 0), Bin(10_000, 100_000, 1)],
        ),
    ],
)
def test_bins_are_as_fine_as_there_is_room_for(numbers: list[int], bins: list[Bin]) -> None:
    assert counted(numbers).histogram() == bins


def test_nothing_counted() -> None:
    lengths = Lengths()
    lengths.add(np.array([], np.uint32))
    assert (lengths.count, lengths.mean, lengths.histogram()) == (0, 0.0, [])


def test_memory_does_not_grow_with_the_lengths() -> None:
    lengths = counted([2**50 - 1, 2**60])
    assert lengths.largest == 2**60
    assert lengths._buckets.nbytes < 400_000


@given(st.lists(st.integers(0, 2_000), min_size=1, max_size=50), st.integers(1, 100))
def test_spread_counts_each_length_in_a_bin_of_one_width(values: list[int], most: int) -> None:
    lengths = Lengths()
    lengths.add(np.array(values))
    bins = lengths.spread(most)
    assert 1 <= len(bins) <= most
    assert len({one.high - one.low for one in bins}) == 1
    assert [one.count for one in bins] == [sum(one.low <= value < one.high for value in values) for one in bins]
    assert sum(one.count for one in bins) == len(values)


def test_spread_of_long_lengths_loses_none() -> None:
    lengths = Lengths()
    lengths.add(np.array([2_047, 5_001, 123_457, 10**9]))
    assert sum(one.count for one in lengths.spread(80)) == 4
    assert Lengths().spread(80) == []
