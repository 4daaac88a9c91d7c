"""`shuffle_distance` and `shuffle_measured`: formulas against counting, and both against what the plan draws."""

from __future__ import annotations

from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lazyshard
from lazyshard.plan import Course, Deal, Part, Plan, Rules, window_for_distance, window_positions
from lazyshard.plan.shuffle_distance import (
    expected_in_turn,
    expected_neighbours,
    expected_same_chunk,
    largest_distance,
)
from lazyshard.plan.shuffle_measured import in_turn, measure, neighbours, same_chunk


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

    def in_turn(self) -> float:
        found = []
        for lane, p in product(range(self.deal.dp), range(self.length - 1)):
            pairs = [(a, b) for a, b in product(self.places(p), self.places(p + 1)) if a != b or not self.window]
            samples = [self.deal.sample(lane, a, self.total) - self.deal.sample(lane, b, self.total) for a, b in pairs]
            found.append(float(np.mean(np.abs(samples))))
        return float(np.mean(found))

    def same_chunk(self, samples_per_chunk: int, batch: int) -> float:
        found = []
        for lane, p in product(range(self.deal.dp), range(self.length)):
            mates = [q for q in range(p // batch * batch, p // batch * batch + batch) if q != p and q < self.length]
            shared = 1.0
            for q in mates:
                pairs = [(a, b) for a, b in product(self.places(p), self.places(q)) if a != b]
                numbers = [
                    [self.deal.sample(lane, one, self.total) // samples_per_chunk for one in two] for two in pairs
                ]
                shared += float(np.mean([a == b for a, b in numbers]))
            found.append(shared)
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
    if length > 1:
        assert expected_in_turn(ranks, unit, unit * units, length) == pytest.approx(counted.in_turn())


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 3), st.integers(1, 4), st.integers(1, 5))
def test_expected_share_of_a_chunk_is_the_mean_over_all_permutations(
    ranks: int, unit: int, units: int, batches: int, batch: int
) -> None:
    # Whole batches, and chunks of one unit: the drawing's case; chunks that are cut are counted in the next test.
    length = batches * batch
    counted = Counted(ranks, unit, unit * units, length)
    found = expected_same_chunk(Deal(ranks, unit), unit, unit * units, batch, ranks * length)
    assert found == pytest.approx(counted.same_chunk(unit, batch))


def test_endless_streams_have_the_distances_of_long_ones() -> None:
    for ranks, unit, window in ((1, 5, 0), (4, 5, 0), (1, 5, 20), (4, 5, 20), (3, 1, 12)):
        assert expected_neighbours(ranks, unit, window, None) == pytest.approx(
            expected_neighbours(ranks, unit, window, 60 * 10**6), rel=1e-6
        )
        assert expected_in_turn(ranks, unit, window, None) == pytest.approx(
            expected_in_turn(ranks, unit, window, 60 * 10**6), rel=1e-6
        )
        endless = expected_same_chunk(Deal(ranks, unit), 5, window, 3, None)
        assert endless == pytest.approx(expected_same_chunk(Deal(ranks, unit), 5, window, 3, ranks * 30_000), rel=1e-3)


def test_distances_of_well_known_orders() -> None:
    # In order one rank draws neighbours in turn; of chunks in windows of W, see the module.
    assert expected_neighbours(1, 100, 0, None) == expected_in_turn(1, 100, 0, None) == 1
    assert expected_in_turn(64, 1000, 0, None) == 64
    assert expected_neighbours(1, 100, 400, None) == pytest.approx(400 / 3 + 1 - 1 / 1200)
    assert expected_same_chunk(Deal(8, 100), 100, 400, 8, None) == pytest.approx(1 + 7 * 99 / 399)
    assert expected_same_chunk(Deal(8, 100), 100, 0, 10, None) == 10
    # Dealt sample by sample a lane has 100 / 4 of each chunk.
    assert expected_same_chunk(Deal(4, 1), 100, 400, 8, None) == pytest.approx(1 + 7 * 24 / 399)


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
    found = measure(course, 50, course.epoch_length(total), total)
    length = total // ranks
    assert found.samples == ranks * course.epoch_length(total)
    assert found.neighbours == pytest.approx(expected_neighbours(ranks, unit, window, length), rel=0.03)
    assert found.in_turn == pytest.approx(expected_in_turn(ranks, unit, window, length), rel=0.03)
    assert found.same_chunk == pytest.approx(expected_same_chunk(Deal(ranks, unit), 50, window, batch, total), rel=0.03)


@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.integers(1, 3), st.integers(0, 60), st.integers(1, 6)
)
def test_measured_distances_are_those_of_the_lists(
    ranks: int, unit: int, units: int, batch: int, total: int, size: int
) -> None:
    course = Course(Rules(unit, unit * units, 3), [Part(ranks, batch)])
    plan = Plan(Deal(ranks, unit), batch, unit * units, 3)
    length = plan.epoch_length(total)
    lanes = [[plan.draw(lane, position, total).sample for position in range(length)] for lane in range(ranks)]
    at = {sample: position for lane in lanes for position, sample in enumerate(lane)}
    beside = [abs(at[sample] - at[sample + 1]) for sample in at if sample + 1 in at]
    turns = [abs(a - b) for lane in lanes for a, b in pairwise(lane)]
    batches = [lane[start : start + batch] for lane in lanes for start in range(0, length, batch)]
    mates = [sum(one // size == other // size for other in group) for group in batches for one in group]
    found = measure(course, size, length, total)
    for value, expected in ((found.neighbours, beside), (found.in_turn, turns), (found.same_chunk, mates)):
        assert value == (pytest.approx(np.mean(expected)) if expected else None)
    assert found.samples == ranks * length


@pytest.mark.parametrize("batch", [3, 4])
@pytest.mark.parametrize("window", [0, 40])
def test_of_a_long_stream_some_windows_are_looked_at(window: int, batch: int) -> None:
    course = Course(Rules(10, window, 7), [Part(4, batch)])
    row, total = 4 * (window or 10), 100_000
    length = course.epoch_length(total)
    whole = measure(course, 10, length, total, total)
    assert whole.samples == 4 * length
    # 8 stretches of 7 windows, each with the one behind it; of 2 and 1 windows.
    for most, samples in ((64 * row, 56 * row), (4 * row, 2 * row), (1, 1 * row // 2)):
        found = measure(course, 10, length, total, most)
        assert found.samples == samples
        rel = 0.03 if most > 4 * row else 0.25
        for some, every in zip(found[:3], whole[:3], strict=True):
            assert some == pytest.approx(every, rel=rel)


def test_where_some_windows_are_looked_at_all_that_begins_in_them_is_counted() -> None:
    # In order nothing is left to chance: from one stripe to the next as often as in the whole.
    course = Course(Rules(10, 0, 7), [Part(4, 3)])
    found = measure(course, 10, 3 * 1000, 12_000, 4 * 40)
    assert found.neighbours == expected_neighbours(4, 10, 0, None) == (7 * 9 + 1) / 40
    assert found.in_turn == expected_in_turn(4, 10, 0, None) == 4


def test_of_windows_too_wide_for_all_lanes_some_lanes_are_looked_at() -> None:
    course = Course(Rules(10, 4000, 7), [Part(50, 4)])
    found = measure(course, 10, 8000, 50 * 8000, 12_000)
    assert found.samples == 3 * 4000
    assert found.neighbours == pytest.approx(4001 / 3, rel=0.05)
    # Two lanes in any case, or there would be no neighbours where units are of one sample.
    assert measure(Course(Rules(1, 4000, 7), [Part(50, 4)]), 10, 8000, 50 * 8000, 1).samples == 2 * 4000


def test_of_a_growing_stream_what_is_certain_is_looked_at() -> None:
    course = Course(Rules(10, 20, 7), [Part(2, 4)])
    assert course.drawable(100) == 40
    assert measure(course, 10, 40, None).samples == 80
    assert measure(course, 10, 0, None) == (None, None, None, 0)


def test_counts_of_small_arrays() -> None:
    assert neighbours(np.array([[2, 0, 1]]), np.array([5, 6, 9])) == (4 + 3) / 2
    assert neighbours(np.array([[0, 2], [4, 6]]), np.array([0, 1])) == 0
    assert in_turn(np.array([[7]])) == 0
    assert in_turn(np.array([[7, 1, 2]])) == 3.5
    assert same_chunk(np.array([[0, 1, 9, 2]]), 3, 4) == (9 + 1) / 4


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
