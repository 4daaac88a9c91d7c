"""Steps: which positions a step takes, whichever way the trainer counts, and back again; the end of an epoch."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.inspection.tracing_states import PartSteps, StepPlace, Steps
from lazyshard.plan.course import AtEnd, Ending
from tests.plan import oracle
from tests.plan.cases import PROPERTY, Case, cases
from tests.plan.test_course import Chain, chains
from tests.stream.streams import refusal_of


def test_steps_of_the_documented_example_and_of_four_parts_one_of_them_skipped() -> None:
    even, cut = PartSteps(0, 24, 4), PartSteps(0, 20, 4, cut=(10, 10))
    assert [even.positions(step) for step in range(6)] == [(0, 4), (4, 8), (8, 12), (12, 16), (16, 20), (20, 24)]
    assert [cut.positions(step) for step in range(6)] == [(0, 4), (4, 8), (8, 10), (10, 14), (14, 18), (18, 20)]
    assert even.stop_step == cut.stop_step == 6
    steps = Steps([PartSteps(0, 6, 2), PartSteps(3, 4, 2, trained=False), PartSteps(3, 3, 1), PartSteps(6, 4, 4)])
    places = [(0, 0, 2), (0, 2, 4), (0, 4, 6), (2, 0, 1), (2, 1, 2), (2, 2, 3), (3, 0, 4)]
    assert [steps.place(step) for step in range(7)] == [StepPlace(*one) for one in places]
    assert steps.place(7) == StepPlace(3, 4, 8)
    assert (steps.trained, steps.breaks(), steps.unknown) == (7, [], None)
    assert [steps.step_of(1, 0), steps.step_of(3, 3), steps.step_of(3, 4)] == [None, 6, 7]


def test_parts_that_do_not_know_their_steps_and_breaks_between_steps_are_named() -> None:
    steps = Steps([PartSteps(0, 6, 0), PartSteps(3, 4, 2)])
    assert [steps.place(step) for step in (0, 2, 3, 4)] == [None, None, StepPlace(1, 0, 2), StepPlace(1, 2, 4)]
    assert steps.unknown == 0
    assert steps.step_of(0, 5) is None
    assert steps.breaks() == []
    assert Steps([PartSteps(0, 6, 0)]).place(0) is None
    assert Steps([PartSteps(2, 6, 2), PartSteps(5, 4, 2), PartSteps(8, 0, 2)]).breaks() == [(0, 0, 2), (2, 7, 8)]
    assert Steps([PartSteps(0, 10, 2), PartSteps(7, 0, 2)]).place(5) is None
    assert Steps([PartSteps(0, 6, 4), PartSteps(2, 8, 4), PartSteps(4, 3, 4)]).ragged() == [0, 2]
    # Where steps end with epochs, the last one of an epoch is whole however short it is.
    assert Steps([PartSteps(0, 6, 4, cut=(6, 6)), PartSteps(2, 8, 4, trained=False), PartSteps(2, 0, 4)]).ragged() == []


@PROPERTY
@given(st.integers(1, 5), st.integers(0, 12), st.integers(1, 12), st.integers(0, 3), st.booleans())
def test_every_position_is_taken_by_one_step(each: int, length: int, full: int, first: int, cut: bool) -> None:
    part = PartSteps(first, length + 2 * full, each, cut=(length, full) if cut else (1 << 62, 0))
    taken: list[int] = []
    step = first
    while len(taken) < part.draws:
        start, stop = part.positions(step)
        assert start == len(taken) < stop <= start + each
        assert {part.step_of(position) for position in range(start, stop)} == {step}
        if cut:
            assert not any(start < end < stop for end in (length, length + full, length + 2 * full))
        taken += range(start, stop)
        step += 1
    assert part.stop_step == step


def batches(ending: Ending, at_end: AtEnd) -> list[list[int]]:
    return [list(ending.batch(lane, at_end)) for lane in range(len(ending.left))]


def in_turn(lanes: list[list[int]]) -> list[int]:
    return [lane[at] for at in range(max(map(len, lanes), default=0)) for lane in lanes if at < len(lane)]


@PROPERTY
@given(cases(), st.integers(0, 3))
def test_batch_is_that_of_lists(case: Case, epoch: int) -> None:
    total, course, dp, batch = case.total, case.course(), case.part.dp, case.part.batch_size
    lanes = case.shuffled(epoch)
    length = course.begin(total).full
    at_ends: list[AtEnd] = ["drop", "pad", "loop"]
    # At an epoch's beginning; and within a run over several, where its first position is drawn.
    for begun, drawn in ((course.in_epoch(epoch), 0), (course, epoch * length + 1)):
        if drawn and not length:
            continue
        ending = Ending.of(begun, drawn, total)
        assert [list(each) for each in ending.left] == [lane[length:] for lane in lanes]
        assert (ending.leftover, ending.missing) == (total % (dp * batch), -total % (dp * batch))
        for at_end in at_ends:
            found = batches(ending, at_end)
            assert found == [lane[length:] for lane in oracle.ended(lanes, batch, at_end)]
            if total >= dp * batch:
                assert len(set(in_turn(found))) == len(in_turn(found)) == (dp * batch if found[0] else 0)


@PROPERTY
@given(chain=chains())
def test_every_sample_is_drawn_by_the_end_of_the_epoch_whatever_ranks_drew_before(chain: Chain) -> None:
    course, total = chain.course, chain.total
    drawn = course.current.draws
    try:
        stop = course.epoch_stop(drawn, total)
    except ValueError:
        return  # more was drawn than there is
    ending = Ending.of(course, drawn, total)
    assert drawn <= stop and ending.leftover < course.dp * course.batch_size
    epoch = course.draw(0, drawn - 1, total).epoch if drawn else course.epoch(total)
    history: list[int] = []
    for number in range(len(chain.parts)):
        at = course.until(number)
        length = at.current.draws if number + 1 < len(chain.parts) else stop
        epochs, samples = at.draws(np.arange(at.dp)[:, None], np.arange(length), total)
        history += samples[epochs == epoch].tolist()
    left = in_turn([list(each) for each in ending.left])
    out = chain.left_out
    assert len(set(history)) == len(history)
    assert not set(left) & set(history)
    assert set(range(total)) - out <= set(history) | set(left) <= set(range(total))
    at_ends: list[AtEnd] = ["pad", "loop"]
    for at_end in at_ends:
        found = batches(ending, at_end)
        if not left:
            assert found == [[]] * course.dp
            continue
        assert [len(each) for each in found] == [course.batch_size] * course.dp
        assert set(left) <= set(in_turn(found)) <= set(range(total)) - out


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: PartSteps(3, 4, 2).positions(2), "step 2 "),
        (lambda: PartSteps(3, 4, 0).positions(3), "step 3 "),
        (lambda: PartSteps(0, 4, 2, cut=(4, 0)).positions(2), "step 2 .* end"),
        (lambda: PartSteps(0, 4, 2, cut=(4, 0)).step_of(4), "position 4 .* end"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], what: str) -> None:
    refusal_of(ValueError, what, make)
