"""Permutations: pinned for ever, equal to their definition. And how far apart they move neighbours of a stream."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lazyshard
from lazyshard.plan.deal import Deal, window_positions
from lazyshard.plan.shuffle import expected_neighbours, largest_distance, mix64, permutation, window_for_distance
from tests.plan import oracle
from tests.plan.cases import PROPERTY

words = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize(
    ("key", "mixed"),
    [
        ((), 0),
        # The first output of SplitMix64 seeded with 0, as published test vectors give it.
        ((0,), 0xE220A8397B1DCDAF),
        ((0, 0), 0xA706DD2F4D197E6F),
        ((1, 2, 3, 4), 0xD55CCD4AEB3CCAFB),
        ((2**64 - 1,), 0xE4D971771B652C20),
    ],
)
def test_mix64_golden(key: tuple[int, ...], mixed: int) -> None:
    assert mix64(*key) == mixed
    assert mix64(*(np.uint64(one) for one in key)) == mixed  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "key", "order"),
    [
        (8, (0, 0, 0, 0), [5, 2, 3, 6, 0, 1, 4, 7]),
        (5, (1, 2, 3, 4), [0, 2, 1, 3, 4]),
        (1, (1,), [0]),
        (0, (1,), []),
    ],
)
def test_permutation_golden(size: int, key: tuple[int, ...], order: list[int]) -> None:
    found = permutation(size, *key)
    assert found.dtype == np.int64
    assert found.tolist() == order
    assert permutation(size, *key) is found
    with pytest.raises(ValueError, match="read-only"):
        found[:] = 1


@PROPERTY
@given(st.integers(0, 300), st.lists(words, max_size=5))
def test_permutation_equals_its_definition_in_plain_integers(size: int, key: list[int]) -> None:
    assert permutation(size, *key).tolist() == oracle.permutation(size, key)


@pytest.mark.parametrize("size", [4000, 100_000])
def test_permutation_of_thousands_equals_its_definition(size: int) -> None:
    # Large enough that many words share their highest 16 bits.
    assert permutation(size, 7, 0, 3, 5).tolist() == oracle.permutation(size, (7, 0, 3, 5))


def test_what_cannot_be_is_refused() -> None:
    for word in (-1, 2**64):
        with pytest.raises(ValueError, match=f"got {word}"):
            mix64(0, word)
        with pytest.raises(ValueError, match=f"got {word}"):
            permutation(3, word)
    with pytest.raises(ValueError, match="got -1"):
        permutation(-1, 0)
    distances: list[Any] = [(0, 1), (-1, 1), (1.5, 1), (True, 1), (1, 0), ("9", 1)]
    for one in distances:
        with pytest.raises(ValueError, match="must be an int >= 1"):
            window_for_distance(*one)


def counted(ranks: int, unit: int, window: int, length: int) -> float:
    """The mean distance over all permutations, by going through all that can happen. Lanes of the same length."""
    deal, total = Deal(ranks, unit), ranks * length

    def places(position: int) -> range:
        """Where the sample at an unshuffled position of a lane may be drawn, each as likely."""
        if not window:
            return range(position, position + 1)
        start = position // window * window
        return range(start, min(start + window, length))

    found = []
    for sample in range(total - 1):
        (lane, p), (other, q) = deal.place(sample, total), deal.place(sample + 1, total)
        pairs = list(product(places(p), places(q)))
        if lane == other and places(p) == places(q) and window:
            pairs = [(a, b) for a, b in pairs if a != b]
        found.append(float(np.mean([abs(a - b) for a, b in pairs])))
    return float(np.mean(found))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.integers(1, 14))
def test_expected_distances_are_the_means_over_all_permutations(ranks: int, unit: int, units: int, length: int) -> None:
    if ranks * length > 1:
        found = expected_neighbours(ranks, unit, unit * units, length)
        assert found == pytest.approx(counted(ranks, unit, unit * units, length))
    endless = expected_neighbours(ranks, unit, unit * units, None)
    assert endless == pytest.approx(expected_neighbours(ranks, unit, unit * units, 60 * 10**6), rel=1e-6)


def test_distances_of_well_known_orders() -> None:
    assert expected_neighbours(1, 1, 0, 1) == 0
    assert expected_neighbours(1, 100, 0, None) == 1
    assert expected_neighbours(4, 10, 0, None) == (7 * 9 + 1) / 40
    assert expected_neighbours(1, 100, 400, None) == pytest.approx(400 / 3 + 1 - 1 / 1200)
    for positions in range(2, 30):
        pairs = [abs(a - b) for a, b in combinations(range(positions), 2)]
        assert largest_distance(positions) == int(np.mean(pairs) + 1e-9)
    assert (largest_distance(0), largest_distance(1)) == (0, 0)


@given(st.integers(1, 10**6), st.integers(1, 10**5))
def test_window_for_a_distance_is_the_smallest_that_reaches_it(distance: int, size: int) -> None:
    chunks = window_for_distance(distance, size)
    assert (chunks * size + 1) / 3 >= distance
    assert chunks == 1 or ((chunks - 1) * size + 1) / 3 < distance


@given(st.integers(1, 1000), st.integers(1, 50), st.integers(1, 64), st.sampled_from(["chunk", "sample"]))
def test_neighbours_of_the_window_are_as_far_apart_as_asked_for_to_within_one(
    distance: int, size: int, ranks: int, unit: Any
) -> None:
    dealt = size if unit == "chunk" else 1
    window = window_positions(window_for_distance(distance, size), size, dealt)
    found = expected_neighbours(ranks, dealt, window, None)
    assert abs(found - (window + 1) / 3) < 1
    assert found > distance - 1


def test_windows_of_distances_stay_what_they_are() -> None:
    # A run that is resumed by a later release, with the same distance, must have the same window.
    asked = [(1, 1), (1, 2), (1, 1000), (667, 1000), (668, 1000), (10_000, 1000), (10_000, 4096)]
    assert [window_for_distance(*one) for one in asked] == [2, 1, 1, 2, 3, 30, 8]
    assert lazyshard.window_for_distance is window_for_distance
