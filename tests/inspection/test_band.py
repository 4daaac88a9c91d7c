"""A stream as a band, and which chunks are read now, and by which rank."""

import contextlib
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.format.records import Manifest
from lazyshard.format.state import Cursor, ReadingHint, RunState
from lazyshard.inspection.outlook import CLOSE_UP, Band, Cell, make_band, open_window
from lazyshard.inspection.survey import Census
from lazyshard.part import Part
from lazyshard.stream.cursor import Consumer
from lazyshard.stream.listing import names_of
from lazyshard.stream.run_parts import course_of
from tests.cli.commands import ID, consumer, told

SLOW, FAST = told("slow", done=4, needs=8), told("fast", consumed=90, done=9, needs=14)
ALL_STATES = [(0, 3, "deleted"), (3, 4, "done"), (4, 6, "taken"), (6, 8, "reading"), (8, 12, "ready")]
PER_CHUNK = 4


def census(chunks: int, *, retired: int = 0, ended: bool = False) -> Census:
    return Census(True, None, None, chunks, chunks * 10, ended, retired, names_of)


def stretches(band: Band) -> list[tuple[int, int, str]]:
    return [(one.first, one.stop, one.state) for one in band.stretches]


@pytest.mark.parametrize(
    ("published", "consumers", "expected"),
    [
        (census(12, retired=3), [SLOW, FAST], [*ALL_STATES, (12, 14, "awaited")]),
        (census(5), [], [(0, 5, "ready")]),
        (census(0), [], []),
        (census(0), [told(needs=2)], [(0, 2, "awaited")]),
        (census(5, ended=True), [told(needs=6)], [(0, 4, "taken"), (4, 5, "reading")]),  # Nothing is awaited
        (census(10), [consumer(needs=2**40)], [(0, 10, "ready"), (10, 2**40, "awaited")]),  # What no run can need
    ],
)
def test_stretches(published: Census, consumers: list[Consumer], expected: list[tuple[int, int, str]]) -> None:
    assert stretches(make_band(published, consumers)) == expected


def test_readers_of_chunks_and_the_close_up_of_a_million() -> None:
    band = make_band(census(7), [told(needs=8)])  # Published chunks of a window that is waited for are not read
    assert band.cells[6:] == (Cell(6, "ready", (("sft", 0),)), Cell(7, "awaited", (("sft", 1),)))
    band = make_band(census(8), [told("b", needs=4), told("a", needs=4, ranks=4)])
    assert band.cells[3].readers == (("a", 3), ("b", 1))
    band = make_band(census(1_000_000), [told(consumed=6_000_000, done=600_000, needs=700_000)])
    assert (len(band.cells), band.cells[0].chunk) == (CLOSE_UP, 699_998 - 16)
    newest = make_band(census(1_000_000), [])
    assert (len(newest.cells), newest.cells[-1].chunk) == (CLOSE_UP, 999_999)


@st.composite
def consumers(draw: st.DrawFn) -> list[Consumer]:
    found: list[Consumer] = []
    for number in range(draw(st.integers(0, 4))):
        ranks, window = draw(st.integers(1, 3)), draw(st.integers(0, 2))
        spans = draw(st.integers(1, 20))
        needs = spans * ranks * (window or 1)
        done = draw(st.integers(0, needs))
        made = told(f"c{number}", consumed=done * ranks, done=done, needs=needs, ranks=ranks, window=window)
        kind = draw(st.sampled_from(["both", "mark", "cursor"]))
        if kind == "mark":
            made = Consumer(made.name, None, ReadingHint(made.name, ID, 1, 0, needs, 1.0), None)
        found.append(made if kind != "cursor" else Consumer(made.name, made.cursor, None, None))
    return found


@given(consumers(), st.integers(0, 120), st.integers(0, 130), st.booleans(), st.integers(1, 40))
def test_chunks_are_covered_once(found: list[Consumer], chunks: int, retired: int, ended: bool, close_up: int) -> None:
    band = make_band(census(chunks, retired=min(retired, chunks), ended=ended), found, close_up)
    assert [one.first for one in band.stretches] == [0, *(one.stop for one in band.stretches)][: len(band.stretches)]
    assert (band.stretches[-1].stop if band.stretches else 0) == band.stop >= chunks
    assert all(one.first < one.stop for one in band.stretches)
    assert all(one.state != other.state for one, other in pairwise(band.stretches))
    states = {chunk: one.state for one in band.stretches for chunk in range(one.first, one.stop)}
    assert [cell.state for cell in band.cells] == [states[cell.chunk] for cell in band.cells]
    assert len(band.cells) == min(close_up, band.stop)
    for cell in band.cells:
        assert [consumer for consumer, _ in cell.readers] == sorted(
            name for name, window in band.windows.items() if window.first <= cell.chunk < window.stop
        )
        assert cell.state != "reading" or cell.readers


def census_of(chunks: int, *, ended: bool = False, short: int = 0) -> Census:
    return Census(True, Manifest(ID, PER_CHUNK, 0.0), None, chunks, chunks * PER_CHUNK - short, ended, 0, names_of)


def run_of(*parts: Part, unit: int = PER_CHUNK, window: int = 0, limit: int | None = None) -> RunState:
    return RunState(ID, PER_CHUNK, unit, window, 7, limit, parts, sum(part.dp * part.draws for part in parts))


def marked(run: RunState, window: int, needs: int, *, done: int = 0, dp: int | None = None) -> Consumer:
    cursor = Cursor("sft", ID, run.consumed, done, {}, 1.0, run)
    reading = ReadingHint("sft", ID, run.parts[-1].dp if dp is None else dp, window, needs, 2.0)
    return Consumer("sft", cursor, reading, None)


@pytest.mark.parametrize(
    "consumer",
    [
        marked(run_of(Part(2)), 2, 6, dp=3),
        marked(run_of(Part(2)), 2, 60),
        marked(run_of(Part(2)), 9, 6),
        marked(run_of(Part(2)), 2, 6, done=6),
        marked(run_of(Part(2, skip=((1, 3),))), 2, 6),
        marked(run_of(Part(2**30)), 2, 3 * 2**30),
        marked(run_of(*[Part(2)] * 300), 2, 6),
        marked(run_of(Part(2)), 2**62, 6),
        replace(marked(run_of(Part(2)), 2, 6), reading=None),
        replace(marked(run_of(Part(2)), 2, 6), cursor=None),
        replace(marked(run_of(Part(2)), 2, 6), cursor=Cursor("sft", ID, 0, 0, {}, 1.0)),
    ],
    ids=["ranks", "mark ahead", "mark behind", "done", "gaps", "many ranks", "many parts", "far", "0", "1", "2"],
)
def test_where_cursor_and_mark_contradict_or_do_not_tell_nothing_is_claimed(consumer: Consumer) -> None:
    assert open_window(consumer, census_of(20)) is None
    run = marked(run_of(Part(2, draws=8)), 1, 4)  # Nor past the first epoch
    assert open_window(run, census_of(4, ended=True)) is None
    assert open_window(run, census_of(8)) is not None


@given(
    data=st.data(),
    history=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6)), min_size=0, max_size=2),
    dp=st.integers(1, 4),
    unit=st.sampled_from([1, PER_CHUNK, 2 * PER_CHUNK]),
    windows=st.integers(0, 2),
    position=st.integers(0, 30),
)
def test_what_is_drawn_from_a_mark_on_is_in_the_window(
    data: st.DataObject, history: list[tuple[int, int]], dp: int, unit: int, windows: int, position: int
) -> None:
    parts = [Part(ranks, draws=draws) for ranks, draws in history]
    run = run_of(*parts, Part(dp), unit=unit, window=windows * unit)
    course = course_of(run)
    needs = -(-course.needed(position) // PER_CHUNK)  # As `lazyshard.data.commits` tells it
    drawable = course.drawable(needs * PER_CHUNK)
    published, short, ended = needs + data.draw(st.integers(0, 3)), 0, data.draw(st.booleans())
    total = None
    if ended:
        published = data.draw(st.integers(max(1, needs - 2), needs + 3))
        short = data.draw(st.integers(0, PER_CHUNK - 1))
        total = published * PER_CHUNK - short
        length = 0
        with contextlib.suppress(ValueError):  # Less than was drawn.
            length = course.begin(total).length
        drawable = min(drawable, length)
        if position >= drawable:
            return
    window = position // course.rules.span
    found = open_window(marked(run, window, needs), census_of(published, ended=ended, short=short))
    assert found is not None
    lanes, positions = np.meshgrid(np.arange(dp), np.arange(position, drawable), indexing="ij")
    _, samples = course.draws(lanes, positions, total)
    for lane, sample in zip(lanes.ravel().tolist(), samples.ravel().tolist(), strict=True):
        assert found.first <= sample // PER_CHUNK < found.stop
        assert found.rank(sample // PER_CHUNK) in (None, lane)
    whole = unit % PER_CHUNK == 0 and not history and total is None
    assert not whole or None not in {found.rank(chunk) for chunk in range(found.first, found.stop)}
