"""The plan: what every lane draws equals the oracle, before and after the end is known, alone and in arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.plan.deal import Deal
from lazyshard.plan.lane import Draw, Plan, Run
from tests.plan.cases import PROPERTY, Case, cases, filled_cases, plans


def drawn(plan: Plan, lane: int, total: int, turn: int = 0) -> list[int]:
    length = plan.epoch_length(total)
    return [plan.draw(lane, turn * length + p, total).sample for p in range(length)]


def test_draws_golden_of_two_epochs() -> None:
    plan = Plan(Deal(dp=2, unit=4), window=8)
    assert drawn(plan, 0, 27) == [9, 2, 3, 10, 0, 1, 8, 11, 16, 17, 18, 19, 24]
    assert drawn(plan, 1, 27) == [13, 15, 12, 4, 5, 14, 6, 7, 21, 20, 22, 23, 25]
    assert drawn(plan, 0, 27, turn=1) == [2, 10, 8, 9, 1, 3, 11, 0, 26, 18, 19, 17, 24]
    assert drawn(plan, 1, 27, turn=1) == [14, 7, 12, 4, 6, 5, 13, 15, 25, 20, 23, 22, 21]
    assert plan.leftover(27) == 1


def test_draws_golden_in_order_cut_to_whole_batches() -> None:
    plan = Plan(Deal(dp=2, unit=3), batch_size=2)
    assert drawn(plan, 0, 19) == [0, 1, 2, 6, 7, 8, 12, 13]
    assert drawn(plan, 1, 19) == [3, 4, 5, 9, 10, 11, 15, 16]
    assert plan.leftover(19) == 3


@PROPERTY
@given(filled_cases(), st.integers(0, 3))
def test_draws_equal_the_oracle_in_any_epoch(case: Case, turn: int) -> None:
    lanes = [drawn(case.plan, lane, case.total, turn) for lane in range(case.plan.deal.dp)]
    assert lanes == case.drawn(turn)


@PROPERTY
@given(filled_cases(), st.integers(0, 3))
def test_no_sample_is_drawn_twice_in_an_epoch_and_only_the_leftover_never(case: Case, turn: int) -> None:
    plan = case.plan
    samples = [sample for lane in range(plan.deal.dp) for sample in drawn(plan, lane, case.total, turn)]
    stream = range(plan.deal.start, case.total)
    assert len(set(samples)) == len(samples)
    assert set(samples) <= set(stream)
    assert len(stream) - len(samples) == plan.leftover(case.total) < plan.deal.dp * plan.batch_size


@PROPERTY
@given(plans(), st.integers(0, 30), st.integers(0, 40))
def test_what_is_drawn_live_is_what_is_drawn_after_the_end(plan: Plan, position: int, more: int) -> None:
    total = plan.needed(position) + more
    for lane in range(plan.deal.dp):
        assert plan.draw(lane, position, None) == plan.draw(lane, position, total)


@PROPERTY
@given(plans(), st.integers(0, 30))
def test_needed_holds_the_sample_itself_and_never_falls(plan: Plan, position: int) -> None:
    needed = plan.needed(position)
    assert needed <= plan.needed(position + 1)
    assert all(plan.draw(lane, position, None).sample < needed for lane in range(plan.deal.dp))


@PROPERTY
@given(plans(), st.integers(0, 30))
def test_needed_is_no_more_than_window_and_batch_ask_for(plan: Plan, position: int) -> None:
    one_less = plan.needed(position) - 1
    window = plan.window or plan.deal.unit
    window_is_whole = plan.deal.whole_positions(one_less) >= (position // window + 1) * window
    assert not (window_is_whole and plan.epoch_length(one_less) > position)


@pytest.mark.parametrize(
    ("plan", "needed"),
    [
        (Plan(Deal(2, 3)), [6, 6, 6, 12, 12, 12, 18]),
        (Plan(Deal(2, 3, start=10)), [16, 16, 16, 22, 22, 22, 28]),
        (Plan(Deal(2, 3), batch_size=4), [8, 8, 8, 12, 16, 16, 18]),
        (Plan(Deal(2, 3), window=6), [12, 12, 12, 12, 12, 12, 24]),
        (Plan(Deal(2, 3), window=6, batch_size=4), [12, 12, 12, 12, 16, 16, 24]),
    ],
)
def test_needed_golden(plan: Plan, needed: list[int]) -> None:
    assert [plan.needed(p) for p in range(7)] == needed


@PROPERTY
@given(filled_cases(), st.integers(0, 2), st.randoms(use_true_random=False))
def test_vectorised_equals_scalar_in_any_order(case: Case, epoch: int, random: object) -> None:
    plan, total = case.plan, case.total
    places = [(lane, p) for lane in range(plan.deal.dp) for p in range(2 * plan.epoch_length(total) + 1)]
    random.shuffle(places)  # type: ignore[attr-defined]
    epochs, samples = plan.draws([lane for lane, _ in places], [p for _, p in places], total, epoch)
    expected = [plan.draw(lane, p, total, epoch) for lane, p in places]
    assert [Draw(*pair) for pair in zip(epochs.tolist(), samples.tolist(), strict=True)] == expected


@PROPERTY
@given(plans(), st.integers(1, 40), st.integers(0, 2))
def test_vectorised_equals_scalar_while_live(plan: Plan, count: int, epoch: int) -> None:
    epochs, samples = plan.draws(np.arange(plan.deal.dp)[:, None], np.arange(count), None, epoch)
    assert epochs.shape == samples.shape == (plan.deal.dp, count)
    for lane in range(plan.deal.dp):
        expected = [plan.draw(lane, p, None, epoch) for p in range(count)]
        assert [Draw(*pair) for pair in zip(epochs[lane].tolist(), samples[lane].tolist(), strict=True)] == expected


@pytest.mark.parametrize("window", [0, 8])
def test_vectorised_of_two_integers_has_no_dimension(window: int) -> None:
    plan = Plan(Deal(2, 4), window=window)
    epochs, samples = plan.draws(1, 14, 27)
    assert epochs.shape == samples.shape == ()
    assert Draw(epochs.item(), samples.item()) == plan.draw(1, 14, 27)


@pytest.mark.parametrize("window", [0, 8])
def test_vectorised_of_nothing_is_empty(window: int) -> None:
    epochs, samples = Plan(Deal(2, 4), window=window).draws([], [], 27)
    assert epochs.dtype == samples.dtype == np.int64
    assert epochs.shape == samples.shape == (0,)


@PROPERTY
@given(filled_cases())
def test_run_equals_single_draws_around_the_position(case: Case) -> None:
    plan, total = case.plan, case.total
    for lane in range(plan.deal.dp):
        for p in range(2 * plan.epoch_length(total)):
            run = plan.run(lane, p, total)
            assert run.first <= p < run.stop
            singles = [plan.draw(lane, q, total) for q in range(run.first, run.stop)]
            assert singles == [Draw(run.epoch, run.sample + i) for i in range(run.stop - run.first)]


@PROPERTY
@given(plans(), st.integers(0, 40), st.integers(0, 2))
def test_run_while_live_grants_no_position_before_it_is_ready(plan: Plan, position: int, epoch: int) -> None:
    run = plan.run(0, position, None, epoch)
    assert run.first <= position < run.stop
    for i, q in enumerate(range(run.first, run.stop)):
        assert plan.needed(q) <= plan.needed(position)
        assert plan.draw(0, q, None, epoch) == Draw(run.epoch, run.sample + i)


@pytest.mark.parametrize(
    ("plan", "position", "total", "run"),
    [
        (Plan(Deal(2, 4)), 5, None, Run(4, 8, 12, 0)),
        (Plan(Deal(2, 4)), 5, 27, Run(4, 8, 12, 0)),
        (Plan(Deal(2, 4)), 12, 27, Run(12, 13, 25, 0)),
        (Plan(Deal(2, 4)), 14, 27, Run(13, 17, 4, 1)),
        (Plan(Deal(2, 4), batch_size=3), 5, None, Run(4, 6, 12, 0)),
        (Plan(Deal(2, 4), batch_size=3), 6, None, Run(4, 8, 12, 0)),
        (Plan(Deal(2, 4), batch_size=7), 5, 16, Run(4, 7, 12, 0)),
        (Plan(Deal(2, 4), window=4), 5, 27, Run(5, 6, 12, 0)),
        (Plan(Deal(1, 4)), 5, 27, Run(4, 8, 4, 0)),
    ],
)
def test_run_golden(plan: Plan, position: int, total: int | None, run: Run) -> None:
    assert plan.run(plan.deal.dp - 1, position, total) == run


@PROPERTY
@given(cases())
def test_epoch_length_is_the_whole_batches_of_the_shortest_lane(case: Case) -> None:
    shortest = min(map(len, case.lanes()))
    assert case.plan.epoch_length(case.total) == shortest - shortest % case.plan.batch_size


@pytest.mark.parametrize("window", [0, 3])
def test_epoch_in_which_position_0_lies_counts_on(window: int) -> None:
    plan = Plan(Deal(2, 3), window=window)
    assert [plan.draw(1, 6 * turn + 2, 12, epoch=4) for turn in range(2)] == [
        plan.draw(1, 6 * (turn + 4) + 2, 12) for turn in range(2)
    ]


def test_window_order_differs_by_lane_window_epoch_and_seed() -> None:
    def order(lane: int, window: int, epoch: int, seed: int) -> tuple[int, ...]:
        plan = Plan(Deal(2, 32), window=32, seed=seed)
        return tuple(plan.draw(lane, window * 32 + p, None, epoch).sample % 32 for p in range(32))

    keys = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]
    assert len({order(*key) for key in keys}) == len(keys)


def test_window_order_key_is_seed_epoch_lane_window() -> None:
    # oracle.permutation(4, (9, 5, 1, 2)) is [1, 0, 2, 3]; samples of window 2 of lane 1 are 20 to 23.
    plan = Plan(Deal(2, 4), window=4, seed=9)
    assert [plan.draw(1, 8 + p, None, epoch=5).sample for p in range(4)] == [21, 20, 22, 23]
