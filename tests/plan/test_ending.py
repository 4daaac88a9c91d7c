"""The end of an epoch: what is left over and the batch that completes it are those of lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.part import Part
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Rules
from lazyshard.plan.steps import AtEnd, Ending
from tests.plan import oracle
from tests.plan.cases import PROPERTY
from tests.plan.test_course import Chain, chains


def batches(ending: Ending, at_end: AtEnd) -> list[list[int]]:
    return [list(ending.batch(lane, at_end)) for lane in range(len(ending.left))]


def in_turn(lanes: list[list[int]]) -> list[int]:
    """What lanes draw, position by position."""
    return [
        lane[position] for position in range(max(map(len, lanes), default=0)) for lane in lanes if position < len(lane)
    ]


def test_golden_of_the_documented_example() -> None:
    ending = Ending.of(Course(Rules(3), [Part(2, 4)]), 0, 17)
    assert (ending.left, ending.leftover, ending.missing) == (((16,), ()), 1, 7)
    assert batches(ending, "pad") == [[16, 8, 12, 14], [10, 11, 13, 15]]
    assert batches(ending, "loop") == [[16, 3, 4, 5], [0, 1, 2, 6]]
    assert batches(ending, "drop") == [[], []]


@pytest.mark.parametrize(
    ("at_end", "expected"), [("pad", [[0, 2, 2, 1], [1, 1, 0, 2]]), ("loop", [[0, 2, 1, 0], [1, 0, 2, 1]])]
)
def test_epoch_shorter_than_a_batch_of_all_lanes_is_repeated(at_end: Any, expected: list[list[int]]) -> None:
    assert batches(Ending.of(Course(Rules(3), [Part(2, 4)]), 0, 3), at_end) == expected


@pytest.mark.parametrize("total", [0, 8, 16])
@pytest.mark.parametrize("at_end", ["drop", "pad", "loop"])
def test_where_nothing_is_left_over_there_is_no_batch_more(total: int, at_end: Any) -> None:
    ending = Ending.of(Course(Rules(3), [Part(2, 4)]), 0, total)
    assert (ending.left, ending.missing, batches(ending, at_end)) == (((), ()), 0, [[], []])


@PROPERTY
@given(
    dp=st.integers(1, 5),
    batch=st.integers(1, 4),
    unit=st.integers(1, 4),
    windows=st.integers(0, 2),
    total=st.integers(0, 60),
    epoch=st.integers(0, 3),
)
def test_batch_is_that_of_lists(dp: int, batch: int, unit: int, windows: int, total: int, epoch: int) -> None:
    window = unit * windows
    lanes = oracle.dealt(dp, unit, 0, total)
    lanes = [oracle.shuffled(lane, window, 0, epoch, number) for number, lane in enumerate(lanes)]
    course = Course(Rules(unit, window), [Part(dp, batch)])
    length = course.full_epoch_length(total)
    at_ends: list[AtEnd] = ["drop", "pad", "loop"]
    # At an epoch's beginning; and within a run over several, where its first position is drawn.
    for begun, drawn in ((course.in_epoch(epoch), 0), (course, epoch * length + 1)):
        if drawn and not length:
            continue
        ending = Ending.of(begun, drawn, total)
        assert [list(each) for each in ending.left] == [lane[length:] for lane in lanes]
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
    out = {sample for part in chain.parts for start, end in part.skip for sample in range(start, end)}
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
