"""Permutations, pinned for ever, and how far apart they move neighbours; rows dealt by cost, as evenly as can be."""

from itertools import combinations, product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.plan import shuffle
from lazyshard.plan.balance import Balance, Cost
from lazyshard.plan.deal import Deal, window_positions
from lazyshard.plan.shuffle import expected_neighbours, permutation, window_for_distance
from tests.plan import oracle
from tests.plan.cases import PROPERTY
from tests.plan.evenness import evenness, step_costs
from tests.stream.streams import refusal_of

words = st.integers(0, 2**64 - 1)


def test_mix64_golden_and_what_cannot_be_is_refused() -> None:
    # The first output of SplitMix64 seeded with 0, as published test vectors give it.
    mixed = {(): 0, (0,): 0xE220A8397B1DCDAF, (0, 0): 0xA706DD2F4D197E6F, (1, 2, 3, 4): 0xD55CCD4AEB3CCAFB}
    mixed[(2**64 - 1,)] = 0xE4D971771B652C20
    for key, word in mixed.items():
        assert shuffle.mix64(*key) == word
        assert shuffle.mix64(*(np.uint64(one) for one in key)) == word  # type: ignore[arg-type]
    for word in (-1, 2**64):
        refusal_of(ValueError, f"got {word}", shuffle.mix64, 0, word)
        refusal_of(ValueError, f"got {word}", permutation, 3, word)
    refusal_of(ValueError, "got -1", permutation, -1, 0)
    distances: list[Any] = [(0, 1), (-1, 1), (1.5, 1), (True, 1), (1, 0), ("9", 1)]
    for one in distances:
        refusal_of(ValueError, "must be an int >= 1", window_for_distance, *one)


def test_permutation_golden() -> None:
    orders = {(8, 0, 0, 0, 0): [5, 2, 3, 6, 0, 1, 4, 7], (5, 1, 2, 3, 4): [0, 2, 1, 3, 4], (1, 1): [0], (0, 1): []}
    for (size, *key), order in orders.items():
        found = permutation(size, *key)
        assert found.dtype == np.int64
        assert found.tolist() == order
        assert permutation(size, *key) is found
        with pytest.raises(ValueError, match="read-only"):
            found[:] = 1
    # Large enough that many words share their highest 16 bits.
    for size in (4000, 100_000):
        assert permutation(size, 7, 0, 3, 5).tolist() == oracle.permutation(size, (7, 0, 3, 5))


@PROPERTY
@given(st.integers(0, 300), st.lists(words, max_size=5))
def test_permutation_equals_its_definition_in_plain_integers(size: int, key: list[int]) -> None:
    assert permutation(size, *key).tolist() == oracle.permutation(size, key)


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
    found = expected_neighbours(ranks, unit, unit * units, length)
    assert found == (pytest.approx(counted(ranks, unit, unit * units, length)) if ranks * length > 1 else 0)
    endless = expected_neighbours(ranks, unit, unit * units, None)
    assert endless == pytest.approx(expected_neighbours(ranks, unit, unit * units, 60 * 10**6), rel=1e-6)


def test_largest_distance_is_the_mean_of_a_whole_shuffle() -> None:
    for positions in range(2, 30):
        pairs = [abs(a - b) for a, b in combinations(range(positions), 2)]
        assert shuffle.largest_distance(positions) == int(np.mean(pairs) + 1e-9)
    assert (shuffle.largest_distance(0), shuffle.largest_distance(1)) == (0, 0)


@given(st.integers(1, 10**6), st.integers(1, 10**5))
def test_window_for_a_distance_is_the_smallest_that_reaches_it(distance: int, size: int) -> None:
    chunks = window_for_distance(distance, size)
    assert (chunks * size + 1) / 3 >= distance
    assert chunks == 1 or ((chunks - 1) * size + 1) / 3 < distance


@given(st.integers(1, 1000), st.integers(1, 50), st.integers(1, 64), st.sampled_from(["chunk", "sample"]))
def test_neighbours_of_the_window_are_as_far_apart_as_asked(distance: int, size: int, ranks: int, unit: Any) -> None:
    dealt = size if unit == "chunk" else 1
    window = window_positions(window_for_distance(distance, size), size, dealt)
    found = expected_neighbours(ranks, dealt, window, None)
    assert abs(found - (window + 1) / 3) < 1
    assert found > distance - 1


def lengths(count: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """Lognormal lengths with a mean of 700 tokens, 8,192 at the most."""
    drawn = np.random.default_rng(seed).lognormal(np.log(700) - 0.5, 1.0, count)
    return np.minimum(drawn.astype(np.int64) + 1, 8192)


def test_the_order_is_pinned() -> None:
    """Streams continue in the order in which they were begun, whatever the release."""
    costs = Cost().of([(7 * i * i + i) % 97 for i in range(24)])
    expected = [
        "16 4 9 0 15 13 6 22 18 14 5 17 23 10 8 20 7 19 11 21 3 1 12 2",
        "15 11 21 13 3 22 4 18 12 5 17 2 6 1 19 7 23 9 0 10 8 20 14 16",
        "5 8 12 0 4 10 3 11 7 14 1 2 6 9 13",
    ]
    stripe, single, rest = Balance(3, 8, 2, 7), Balance(3, 8, 1, 7), costs[:15]
    found = [stripe.order(costs, 0), single.order(costs, 24), stripe.order(rest, 48)]
    assert [" ".join(map(str, order.tolist())) for order in found] == expected
    # Rows behind those that others have put in place stay in order.
    assert Balance(2, 4).order([3.0, 1.0, 2.0], 5).tolist() == [0, 1, 2]
    costs_of = [Cost(*one).of([2, 10]).tolist() for one in ((1.0, 0.0), (0.0, 1.0), (2.0, 0.5))]
    assert costs_of == [[2.0, 10.0], [4.0, 100.0], [6.0, 70.0]]


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**63 - 1), st.integers(0, 3), st.data())
def test_every_row_comes_once_and_its_rank_and_step_are_those_of_the_deal(
    ranks: int, steps: int, size: int, seed: int, stripe: int, data: st.DataObject
) -> None:
    balance = Balance(ranks, steps * size, size, seed)
    count = data.draw(st.integers(0, balance.stripe))
    costs = data.draw(st.lists(st.integers(0, 9).map(float), min_size=count, max_size=count))
    order = balance.order(costs, stripe * balance.stripe)
    assert sorted(order.tolist()) == list(range(count))
    found = step_costs(np.array(costs)[order], ranks, steps * size, size, ended=True)
    assert found.shape == (count // (ranks * size), ranks)
    if size == 1 and count == balance.stripe:
        # With one row each nothing is more even than the sorted order: the sum of the largest is the least there is.
        least = np.sort(costs).reshape(-1, ranks).max(axis=1).sum()
        assert found.max(axis=1).sum() == pytest.approx(least)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_steps_of_64_ranks_are_even_within_2_percent(size: int) -> None:
    balance = Balance(64, 1000 - 1000 % size, size)
    costs = Cost().of(lengths(2 * balance.stripe))
    before = evenness(step_costs(costs, 64, balance.samples_per_chunk, size))
    assert before is not None and before.overall > 2.5
    stripes = costs.reshape(2, balance.stripe)
    after = np.concatenate([rows[balance.order(rows, at * balance.stripe)] for at, rows in enumerate(stripes)])
    for ranks, most in {64: 1.01, 32: 1.01, 48: 1.02, 72: 1.02, 128: 1.02}.items():
        even = evenness(step_costs(after, ranks, balance.samples_per_chunk, size))
        assert even is not None and even.overall < most and even.mean < most


def test_no_rank_has_the_costliest_micro_batch_of_every_step_and_no_length_a_place() -> None:
    balance = Balance(8, 500)
    # No two alike, so that there is always one rank that has most.
    costs = np.random.default_rng(0).lognormal(0.0, 1.0, balance.stripe)
    steps = step_costs(costs[balance.order(costs, 0)], 8, 500)
    assert np.bincount(steps.argmax(axis=1), minlength=8).min() > 40
    assert abs(np.corrcoef(np.arange(500), steps.mean(axis=1))[0, 1]) < 0.1
    # Nor are the rows left over at the end the cheapest of all.
    left = [set(Balance(4, 10, seed=seed).order(np.arange(18.0), 0)[16:].tolist()) for seed in range(20)]
    assert len(set().union(*left)) > 9


def test_what_cannot_be_is_refused() -> None:
    for costs in ((-1.0, 1.0), (float("inf"), 0.0), (0.0, 0.0)):
        refusal_of(ValueError, "^per_token[ ,]", Cost, *costs)
    refusal_of(ValueError, "^per_token_squared", Cost, 1.0, float("nan"))
    refusal_of(ValueError, "^there is room for 3 rows", Balance(2, 4).order, [1.0] * 4, 5)
