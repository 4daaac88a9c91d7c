"""Rows dealt by cost: each once, in the same places every time, and steps as even as they can be."""

from __future__ import annotations

from collections.abc import Callable

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
    stripes = costs.reshape(2, balance.stripe)
    after = np.concatenate([rows[balance.order(rows, at * balance.stripe)] for at, rows in enumerate(stripes)])
    for ranks, most in ((64, 1.01), (32, 1.01), (48, 1.02), (72, 1.02), (128, 1.02)):
        even = evenness(step_costs(after, ranks, balance.samples_per_chunk, size))
        assert even is not None
        assert even.overall < most
        assert even.mean < most


def test_no_rank_has_the_costliest_micro_batch_of_every_step_and_no_length_a_place() -> None:
    balance = Balance(8, 500)
    # No two alike, so that there is always one rank that has most.
    costs = np.random.default_rng(0).lognormal(0.0, 1.0, balance.stripe)
    steps = step_costs(costs[balance.order(costs, 0)], 8, 500)
    worst = np.bincount(steps.argmax(axis=1), minlength=8)
    assert worst.min() > 40
    assert abs(np.corrcoef(np.arange(500), steps.mean(axis=1))[0, 1]) < 0.1


def test_rows_behind_those_that_others_have_put_in_place_stay_in_order() -> None:
    assert Balance(2, 4).order([3.0, 1.0, 2.0], 5).tolist() == [0, 1, 2]


def test_the_rows_left_over_at_the_end_are_not_the_cheapest_of_all() -> None:
    left = [set(Balance(4, 10, seed=seed).order(np.arange(18.0), 0)[16:].tolist()) for seed in range(20)]
    assert len(set().union(*left)) > 9


@pytest.mark.parametrize(
    ("per_token", "squared", "found"), [(1.0, 0.0, [2.0, 10.0]), (0.0, 1.0, [4.0, 100.0]), (2.0, 0.5, [6.0, 70.0])]
)
def test_a_cost_is_that_of_tokens_and_of_their_square(per_token: float, squared: float, found: list[float]) -> None:
    assert Cost(per_token, squared).of([2, 10]).tolist() == found


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Cost(-1.0, 1.0), "per_token"),
        (lambda: Cost(1.0, float("nan")), "per_token_squared"),
        (lambda: Cost(float("inf"), 0.0), "per_token"),
        (lambda: Cost(0.0, 0.0), "per_token"),
        (lambda: Balance(2, 4).order([1.0] * 4, 5), "there is room for 3 rows"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}"):
        make()
