"""Audit: the counts are the oracle's, lineages are told apart, and what is not in order is found."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.format.state import RunState
from lazyshard.inspection import auditing_counts as counting
from lazyshard.inspection.auditing_counts import AuditedState, Counts, Ranges, count_epochs, ranges_where, shared_draws
from lazyshard.inspection.tracing import Stretch
from lazyshard.inspection.tracing_states import SavedState
from lazyshard.part import Part
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Rules
from tests.inspection.test_tracing import facts, lists, run_state, states, traced
from tests.plan.cases import PROPERTY


@PROPERTY
@given(states())
def test_counts_are_what_the_oracle_draws(case: tuple[RunState, int]) -> None:
    state, total = case
    tracing = traced(state, facts(total))
    drawn: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for part, lanes in zip(state.parts, lists(state, total), strict=True):
        drawn[part.trained] += [draw for lane in lanes for draw in lane]
    audits = count_epochs(tracing)
    assert [one.epoch for one in audits] == list(tracing.epochs)
    for one in audits:
        assert one.proven
        trained = [sample for epoch, sample in drawn[True] if epoch == one.epoch]
        assert one.trained == len(trained)
        named = {kind: samples_of(getattr(one, kind)) for kind in ("to_come", "left_over", "skipped")}
        assert sorted(sum(named.values(), trained)) == list(range(total))
        assert {sample for epoch, sample in drawn[False] if epoch == one.epoch} <= set(named["skipped"])
        assert not named["to_come"] or one.epoch == tracing.epochs[-1]
        for kind, samples in named.items():  # The same as of a single sample: the first and the last of each kind
            for sample in samples[:1] + samples[-1:]:
                (became,) = [fate.became for fate in tracing.fates(sample) if fate.epoch == one.epoch]
                assert became == kind.replace("_", " ")


@PROPERTY
@given(states(), st.integers(0, 30))
def test_what_is_counted_live_is_what_is_counted_after_the_end(case: tuple[RunState, int], more: int) -> None:
    state, total = case
    ended = traced(state, facts(total))
    if ended.epochs != range(1):
        return
    course = ended.course
    needed = max([course.until(n).needed(one.draws - 1) for n, one in enumerate(state.parts) if one.draws], default=0)
    [live] = count_epochs(traced(state, facts(needed + more, ended=False)))
    [whole] = count_epochs(ended)
    assert live.proven
    assert live.trained == whole.trained
    assert live.left_over == Ranges()


def samples_of(found: Ranges) -> list[int]:
    samples = [sample for start, stop in found.ranges for sample in range(start, stop)]
    assert len(samples) == found.samples
    return samples


def test_an_epoch_that_was_begun_twice_is_trained_twice_and_one_that_was_cut_short_passes_samples_over() -> None:
    begun = Part(2, 1, 3, draws_per_step=1)
    [one] = count_epochs(traced(run_state(begun, Part(2, 1, 2, 0, first_step=3, draws_per_step=1)), facts(12)))
    assert (one.proven, one.twice) == (False, Ranges(4, ((0, 2), (3, 5))))
    state = run_state(begun, Part(2, 1, 2, 1, first_step=3, draws_per_step=1))
    first, second = count_epochs(traced(state, facts(12)))
    assert (first.proven, first.missing) == (False, Ranges(6, ((6, 12),)))
    assert (second.proven, second.to_come) == (True, Ranges(8, ((2, 3), (5, 12))))


def mark(counts: Counts, course: Course, start: int, stop: int, kind: int) -> Counts:
    for samples, epochs in Stretch(0, course, start, stop, "trained").blocks(counts.total):
        counts.mark(samples, epochs, kind)
    return counts


def test_counting_does_not_trust_the_arithmetic() -> None:
    often = Counts(1, 0)
    for _ in range(256):
        mark(often, Course(Rules(1), [Part(1)]), 0, 1, counting.TRAINED)
    assert not often.is_whole(), "more than 255 times passes for none"
    course = Course(Rules(2), [Part(2, draws=3)])
    counts = mark(Counts(8, 0), course, 0, 3, counting.TRAINED)
    mark(counts, course, 2, 3, counting.TRAINED)
    mark(counts, course, 2, 3, counting.TO_COME)
    assert ranges_where(8, lambda first, last: counts.trained[first:last] > 1) == Ranges(2, ((4, 5), (6, 7)))
    assert counts.is_whole()
    assert not mark(counts, course, 2, 3, counting.SKIPPED).is_whole()
    left = Counts(6, 0)  # What is left out is only what nothing else is known of
    left.trained[1], left.kinds[2] = 1, counting.TO_COME
    left.leave_out(1, 9)
    assert left.kinds.tolist() == [0, 0, counting.TO_COME, counting.LEFT_OUT, counting.LEFT_OUT, counting.LEFT_OUT]
    other_epoch = mark(Counts(8, 1), course, 0, 3, counting.TRAINED)
    assert (other_epoch.impossible, other_epoch.is_whole()) == (6, False)


def test_ranges_go_on_over_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyshard.inspection.auditing_counts._LOOKED_AT", 3)
    picked = np.array([0, 1, 1, 1, 1, 0, 0, 1], dtype=np.bool_)
    assert ranges_where(8, lambda first, last: picked[first:last]) == Ranges(5, ((1, 5), (7, 8)))


A = run_state(Part(4, 1, 10, draws_per_step=1), Part(2, 1, 3, first_step=10, draws_per_step=1))


@pytest.mark.parametrize(
    ("other", "shared"),
    [
        (A, (10, 3)),
        (run_state(Part(4, 1, 7, draws_per_step=1)), (7, 0)),
        (run_state(Part(4, 1, 12, draws_per_step=1)), (10, 0)),
        (run_state(Part(4, 1, 10), Part(3, 1, 5)), (10, 0)),
        (run_state(Part(4, 1, 10), Part(2, 1, 5, skip=((1, 2),))), (10, 0)),
        (run_state(Part(4, 2, 10)), (0, 0)),
        (run_state(Part(4, 1, 10), Part(3)), (10, 0)),  # Nothing is drawn in its last part yet, so it decides nothing
        (run_state(Part(4)), (0, 0)),
    ],
)
def test_what_two_states_share(other: RunState, shared: tuple[int, ...]) -> None:
    assert shared_draws(A, other) == shared
    assert sum(shared_draws(other, A)) == sum(shared)


@PROPERTY
@given(states(), states())
def test_two_states_share_as_much_of_one_as_of_the_other(a: tuple[RunState, int], b: tuple[RunState, int]) -> None:
    one, other = a[0], replace(b[0], unit=a[0].unit, window=a[0].window, seed=a[0].seed)
    pairs = ((one, shared_draws(one, other)), (other, shared_draws(other, one)))
    trained = [[part.dp * some for part, some in zip(run.parts, shared, strict=True) if some] for run, shared in pairs]
    assert trained[0] == trained[1]
    assert all(draws <= part.draws for run, shared in pairs for part, draws in zip(run.parts, shared, strict=True))


@pytest.mark.parametrize(
    ("other", "audited", "epoch", "relation"),
    [
        (A, A, 0, "on the course"),
        (run_state(Part(4, 1, 7)), A, 0, "on the course"),
        (A, run_state(Part(4, 1, 7)), 0, "beyond"),
        (run_state(Part(4, 1, 12, draws_per_step=1)), A, 0, "abandoned"),
        (replace(A, seed=3), A, 0, "other settings"),
        (replace(A, stream_id="1" * 32), A, 0, "other stream"),
        (run_state(Part(4, 1, 2, 1)), A, 1, "another epoch"),
    ],
)
def test_relations(other: RunState, audited: RunState, epoch: int, relation: str) -> None:
    assert counting.relate(other, audited, range(epoch, epoch + 1), range(1)) == relation


def test_what_a_branch_trained_is_compared_with_the_course() -> None:
    """The branch: lanes 0 1 2 | 6 7 and 3 4 5 | 9 10. The course continues after 3 draws with one rank: 6 7 8."""
    head = run_state(Part(2, 1, 3), Part(1, 1, 2))
    branch = run_state(Part(2, 1, 5))
    saved, left = SavedState(branch, Path("state")), traced(branch, facts(12))
    one = AuditedState(saved, left, "abandoned", shared_draws(branch, head))
    count_epochs(traced(head, facts(12)), [one])
    assert one.trained == 4
    assert one.again == {0: Ranges(2, ((6, 8),))}
