"""Which chunks are read now, and by which rank: against what the course of the run draws, sample by sample."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.format import Cursor, Manifest, PartState, ReadingMark, RunState
from lazyshard.storage.census import Census
from lazyshard.storage.consumers import Consumer
from lazyshard.storage.disk_use import canonical_names
from lazyshard.storage.open_window import OpenWindow, open_window
from lazyshard.storage.run_state import course_of

ID = "0" * 32
SIZE = 4


def census(chunks: int, *, ended: bool = False, short: int = 0) -> Census:
    return Census(True, Manifest(ID, SIZE, 0.0), None, chunks, chunks * SIZE - short, ended, 0, canonical_names)


def state(*parts: PartState, unit: int = SIZE, window: int = 0, limit: int | None = None) -> RunState:
    return RunState(ID, SIZE, unit, window, 7, limit, parts, sum(part.dp * part.draws for part in parts))


def marked(run: RunState, window: int, needs: int, *, done: int = 0, dp: int | None = None) -> Consumer:
    ranks = run.parts[-1].dp if dp is None else dp
    return Consumer(
        "sft",
        Cursor("sft", ID, run.consumed, done, {}, 1.0, run),
        ReadingMark("sft", ID, ranks, window, needs, 2.0),
        None,
    )


def test_chunk_k_is_read_by_rank_k_modulo_their_number() -> None:
    run = state(PartState(3))
    found = open_window(marked(run, 2, 9), census(20))
    assert found is not None
    assert (found.first, found.stop, [found.rank(chunk) for chunk in range(6, 9)]) == (6, 9, [0, 1, 2])


def test_shuffled_window_of_two_chunks_a_rank() -> None:
    found = open_window(marked(state(PartState(2), window=2 * SIZE), 3, 16), census(20))
    assert found == OpenWindow(12, 16, 2, 1, 0, None)
    assert [found.rank(chunk) for chunk in range(12, 16)] == [0, 1, 0, 1]


def test_smaller_units_are_shared() -> None:
    found = open_window(marked(state(PartState(2), unit=1), 3, 2), census(20))
    assert found is not None
    assert found.rank(found.first) is None


def test_rows_behind_the_last_whole_stripe_are_shared() -> None:
    found = open_window(marked(state(PartState(2)), 2, 5), census(5, ended=True, short=1))
    assert found is not None
    assert (found.first, found.stop, found.rank(4)) == (4, 5, None)


@pytest.mark.parametrize(
    "consumer",
    [
        marked(state(PartState(2)), 2, 6, dp=3),
        marked(state(PartState(2)), 2, 60),
        marked(state(PartState(2)), 9, 6),
        marked(state(PartState(2)), 2, 6, done=6),
        marked(state(PartState(2, skip=((1, 3),))), 2, 6),
        marked(state(PartState(2**30)), 2, 3 * 2**30),
        marked(state(*[PartState(2)] * 300), 2, 6),
        marked(state(PartState(2)), 2**62, 6),
        replace(marked(state(PartState(2)), 2, 6), reading=None),
        replace(marked(state(PartState(2)), 2, 6), cursor=None),
        replace(marked(state(PartState(2)), 2, 6), cursor=Cursor("sft", ID, 0, 0, {}, 1.0)),
    ],
    ids=["ranks", "mark ahead", "mark behind", "done", "gaps", "many ranks", "many parts", "far", "0", "1", "2"],
)
def test_where_cursor_and_mark_contradict_or_do_not_tell_nothing_is_claimed(consumer: Consumer) -> None:
    assert open_window(consumer, census(20)) is None


def test_past_the_first_epoch_nothing_is_claimed() -> None:
    run = state(PartState(2, draws=8))
    assert open_window(marked(run, 1, 4), census(4, ended=True)) is None
    assert open_window(marked(run, 1, 4), census(8)) is not None


@given(
    data=st.data(),
    history=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6)), min_size=0, max_size=2),
    dp=st.integers(1, 4),
    unit=st.sampled_from([1, SIZE, 2 * SIZE]),
    windows=st.integers(0, 2),
    position=st.integers(0, 30),
)
def test_what_is_drawn_from_a_mark_on_is_in_the_window_and_of_the_rank_named(
    data: st.DataObject, history: list[tuple[int, int]], dp: int, unit: int, windows: int, position: int
) -> None:
    parts = [PartState(ranks, draws=draws) for ranks, draws in history]
    run = state(*parts, PartState(dp), unit=unit, window=windows * unit)
    course = course_of(run)
    # As `lazyshard.data.reading_marks` tells it.
    needs = -(-course.needed(position) // SIZE)
    drawable = course.drawable(needs * SIZE)
    published, short, ended = needs + data.draw(st.integers(0, 3)), 0, data.draw(st.booleans())
    total = None
    if ended:
        published = data.draw(st.integers(max(1, needs - 2), needs + 3))
        short = data.draw(st.integers(0, SIZE - 1))
        total = published * SIZE - short
        try:
            length = course.begin(total).length
        except ValueError:
            return  # Less than was drawn.
        drawable = min(drawable, length)
        if position >= drawable:
            return
    window = position // course.rules.span
    found = open_window(marked(run, window, needs), census(published, ended=ended, short=short))
    assert found is not None
    lanes, positions = np.meshgrid(np.arange(dp), np.arange(position, drawable), indexing="ij")
    _, samples = course.draws(lanes, positions, total)
    for lane, sample in zip(lanes.ravel().tolist(), samples.ravel().tolist(), strict=True):
        assert found.first <= sample // SIZE < found.stop
        assert found.rank(sample // SIZE) in (None, lane)
    whole = unit % SIZE == 0 and not history and total is None
    assert not whole or None not in {found.rank(chunk) for chunk in range(found.first, found.stop)}
