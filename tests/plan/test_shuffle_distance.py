"""`shuffle_distance`: the formula against counting, and against what the plan draws."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lazyshard
from lazyshard.part import Part
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Deal, Rules, window_positions
from lazyshard.plan.shuffle import expected_neighbours, largest_distance, window_for_distance
from tests.plan.distances import neighbours


class Counted:
    """The means over all permutations, by going through all that can happen. Lanes of the same length."""

    def __init__(self, ranks: int, unit: int, window: int, length: int) -> None:
        self.deal, self.total = Deal(ranks, unit), ranks * length
        self.window, self.length = window, length

    def places(self, position: int) -> range:
        """Where the sample at an unshuffled position of a lane may be drawn, each as likely."""
        if not self.window:
            return range(position, position + 1)
        start = position // self.window * self.window
        return range(start, min(start + self.window, self.length))

    def neighbours(self) -> float:
        found = []
        for sample in range(self.total - 1):
            (lane, p), (other, q) = self.deal.place(sample, self.total), self.deal.place(sample + 1, self.total)
            pairs = list(product(self.places(p), self.places(q)))
            if lane == other and self.places(p) == self.places(q) and self.window:
                pairs = [(a, b) for a, b in pairs if a != b]
            found.append(float(np.mean([abs(a - b) for a, b in pairs])))
        return float(np.mean(found))


ORDERS = st.tuples(
    st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.integers(1, 14)
)  # lanes, unit, units in a window, positions of a lane


@given(ORDERS)
def test_expected_distances_are_the_means_over_all_permutations(order: tuple[int, int, int, int]) -> None:
    ranks, unit, units, length = order
    counted = Counted(ranks, unit, unit * units, length)
    if ranks * length > 1:
        assert expected_neighbours(ranks, unit, unit * units, length) == pytest.approx(counted.neighbours())


def test_endless_streams_have_the_distances_of_long_ones() -> None:
    for ranks, unit, window in ((1, 5, 0), (4, 5, 0), (1, 5, 20), (4, 5, 20), (3, 1, 12)):
        assert expected_neighbours(ranks, unit, window, None) == pytest.approx(
            expected_neighbours(ranks, unit, window, 60 * 10**6), rel=1e-6
        )


def test_distances_of_well_known_orders() -> None:
    assert expected_neighbours(1, 100, 0, None) == 1
    assert expected_neighbours(4, 10, 0, None) == (7 * 9 + 1) / 40
    assert expected_neighbours(1, 100, 400, None) == pytest.approx(400 / 3 + 1 - 1 / 1200)


@pytest.mark.parametrize(
    ("ranks", "unit", "window", "batch", "total"),
    [
        (1, 50, 400, 8, 40_000),
        (4, 50, 400, 8, 40_000),
        (4, 50, 400, 7, 41_003),
        (4, 1, 400, 8, 40_000),
        (3, 8, 400, 8, 40_001),
        (64, 50, 100, 4, 70_000),
        # As wide as the rank: all its chunks together.
        (4, 50, 10_000, 8, 40_000),
        (4, 50, 0, 8, 40_100),
    ],
)
def test_what_is_drawn_is_as_far_apart_as_expected(ranks: int, unit: int, window: int, batch: int, total: int) -> None:
    course = Course(Rules(unit, window, 7), [Part(ranks, batch)])
    positions = np.arange(course.epoch_length(total))
    samples = course.draws(np.arange(ranks)[:, None], positions[None, :], total)[1]
    expected = expected_neighbours(ranks, unit, window, total // ranks)
    assert neighbours(samples, positions) == pytest.approx(expected, rel=0.03)


def test_neighbours_of_small_arrays() -> None:
    assert neighbours(np.array([[2, 0, 1]]), np.array([5, 6, 9])) == (4 + 3) / 2
    assert neighbours(np.array([[0, 2], [4, 6]]), np.array([0, 1])) == 0


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


@pytest.mark.parametrize(("distance", "size"), [(0, 1), (-1, 1), (1.5, 1), (True, 1), (1, 0), ("9", 1)])
def test_window_for_what_is_no_distance_is_refused(distance: Any, size: Any) -> None:
    with pytest.raises(ValueError, match="must be an int >= 1"):
        window_for_distance(distance, size)


def test_largest_distance_is_that_of_one_window() -> None:
    for positions in range(2, 30):
        pairs = [abs(a - b) for a, b in combinations(range(positions), 2)]
        assert largest_distance(positions) == int(np.mean(pairs) + 1e-9)
    assert (largest_distance(0), largest_distance(1)) == (0, 0)
