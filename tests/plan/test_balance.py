"""Rows dealt by cost: each once, in the same places every time, and steps as even as they can be."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.plan.balance import Balance, Cost
from tests.plan.evenness import evenness, step_costs


def lengths(count: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """Lognormal lengths with a mean of 700 tokens, 8,192 at the most."""
    drawn = np.random.default_rng(seed).lognormal(np.log(700) - 0.5, 1.0, count)
    return np.minimum(drawn.astype(np.int64) + 1, 8192)


def dealt(balance: Balance, costs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The costs of a whole stream in the order in which it is published."""
    found = []
    for first in range(0, len(costs), balance.stripe):
        rows = costs[first : first + balance.stripe]
        found.append(rows[balance.order(rows, first)])
    return np.concatenate(found)


def test_long_rows_meet_short_ones_and_equal_micro_batches_meet_in_a_step() -> None:
    # Two ranks, chunks of four, micro batches of two. In costs the rounds make 9 + 1, 8 + 2, 7 + 3 and 6 + 4.
    costs = [1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 30.0]
    order = Balance(2, 4, 2, seed=5).order(costs, 0)
    steps = step_costs(np.array(costs)[order], 2, 4, 2)
    assert sorted(map(sorted, steps.tolist())) == [[10.0, 10.0], [10.0, 31.0]]


def test_the_order_is_pinned() -> None:
    """Streams go on in the order in which they were begun, whatever the release."""
    costs = Cost().of([(7 * i * i + i) % 97 for i in range(24)])
    expected = [
        "16 4 9 0 15 13 6 22 18 14 5 17 23 10 8 20 7 19 11 21 3 1 12 2",
        "15 11 21 13 3 22 4 18 12 5 17 2 6 1 19 7 23 9 0 10 8 20 14 16",
        "5 8 12 0 4 10 3 11 7 14 1 2 6 9 13",
    ]
    stripe, single, rest = Balance(3, 8, 2, 7), Balance(3, 8, 1, 7), costs[:15]
    found = [stripe.order(costs, 0), single.order(costs, 24), stripe.order(rest, 48)]
    assert [" ".join(map(str, order.tolist())) for order in found] == expected


@given(
    ranks=st.integers(1, 5),
    steps=st.integers(1, 6),
    size=st.integers(1, 4),
    count=st.integers(0, 130),
    seed=st.integers(0, 2**63 - 1),
    stripe=st.integers(0, 3),
    data=st.data(),
)
def test_every_row_comes_once_and_its_rank_and_step_are_those_of_the_deal(
    ranks: int, steps: int, size: int, count: int, seed: int, stripe: int, data: st.DataObject
) -> None:
    balance = Balance(ranks, steps * size, size, seed)
    count = min(count, balance.stripe)
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
    assert before is not None
    assert before.overall > 2.5
    after = dealt(balance, costs)
    for ranks, most in ((64, 1.01), (32, 1.01), (48, 1.02), (72, 1.02), (128, 1.02)):
        even = evenness(step_costs(after, ranks, balance.samples_per_chunk, size))
        assert even is not None
        assert even.overall < most
        assert even.mean < most


def test_no_rank_has_the_costliest_micro_batch_of_every_step_and_no_length_a_place() -> None:
    balance = Balance(8, 500)
    # No two alike, so that there is always one rank that has most.
    costs = np.random.default_rng(0).lognormal(0.0, 1.0, balance.stripe)
    steps = step_costs(dealt(balance, costs), 8, 500)
    worst = np.bincount(steps.argmax(axis=1), minlength=8)
    assert worst.min() > 40
    assert abs(np.corrcoef(np.arange(500), steps.mean(axis=1))[0, 1]) < 0.1


def test_rows_behind_those_that_others_have_put_in_place_stay_in_order() -> None:
    assert Balance(2, 4).order([3.0, 1.0, 2.0], 5).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="room for 3 rows from sample 5 on, got 4"):
        Balance(2, 4).order([1.0, 1.0, 1.0, 1.0], 5)


def test_the_rows_left_over_at_the_end_are_not_the_cheapest_of_all() -> None:
    left = [set(Balance(4, 10, seed=seed).order(np.arange(18.0), 0)[16:].tolist()) for seed in range(20)]
    assert len(set().union(*left)) > 9


def test_what_each_rank_does_in_each_step_is_told() -> None:
    costs = np.arange(14.0)
    # Chunks of three for two ranks; what fills no stripe is not dealt as long as more may come.
    assert step_costs(costs, 2, 3).tolist() == [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8, 11]]
    assert step_costs(costs, 2, 3, 2, ended=True).tolist() == [[1, 7], [8, 14], [15, 21]]
    assert step_costs(costs, 2, 3, ended=True).tolist()[6:] == [[12, 13]]
    assert step_costs(costs[:3], 4, 3, ended=True).tolist() == []


def test_evenness_is_the_largest_cost_over_the_mean() -> None:
    even = evenness(np.array([[1.0, 3.0], [2.0, 2.0], [0.0, 0.0]]))
    assert even is not None
    assert (even.steps, even.overall, even.worst, even.between) == (3, 5 / 4, 1.5, 1.5)
    assert even.mean == pytest.approx(3.5 / 3)
    assert even.p99 == pytest.approx(1.49)
    assert evenness(np.zeros((2, 2))) is None
    assert evenness(np.empty((0, 4))) is None


@pytest.mark.parametrize(
    ("per_token", "squared", "found"), [(1.0, 0.0, [2.0, 10.0]), (0.0, 1.0, [4.0, 100.0]), (2.0, 0.5, [6.0, 70.0])]
)
def test_a_cost_is_that_of_tokens_and_of_their_square(per_token: float, squared: float, found: list[float]) -> None:
    assert Cost(per_token, squared).of([2, 10]).tolist() == found


@pytest.mark.parametrize("costs", [(-1.0, 1.0), (1.0, float("nan")), (float("inf"), 0.0), (0.0, 0.0)])
def test_a_cost_that_is_none_is_refused(costs: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="per_token"):
        Cost(*costs)


@pytest.mark.parametrize("fields", [(0, 4, 1), (2, 4, 0), (2, 4, 3), (2, 0, 1), (2, 4, 1, -1), (True, 4, 1)])
def test_a_balance_that_cannot_be_is_refused(fields: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Balance(*fields)
