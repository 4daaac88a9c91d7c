"""A stream as a band: a few stretches however long it is, and a close-up of what is read."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lazyshard.format import ReadingMark
from lazyshard.storage.band import CLOSE_UP, Band, Cell, Reader, Stretch, make_band
from lazyshard.storage.census import Census
from lazyshard.storage.consumers import Consumer
from lazyshard.storage.disk_use import canonical_names
from tests.cli.looks import ID, consumer, told


def census(chunks: int, *, retired: int = 0, ended: bool = False) -> Census:
    return Census(True, None, None, chunks, chunks * 10, ended, retired, canonical_names)


def stretches(band: Band) -> list[tuple[int, int, str]]:
    return [(one.first, one.stop, one.state) for one in band.stretches]


def test_all_states_of_a_chunk() -> None:
    slow, fast = told("slow", done=4, needs=8), told("fast", consumed=90, done=9, needs=14)
    assert stretches(make_band(census(12, retired=3), [slow, fast])) == [
        (0, 3, "deleted"),
        (3, 4, "done"),
        (4, 6, "taken"),
        (6, 8, "reading"),
        (8, 12, "ready"),
        (12, 14, "awaited"),
    ]


def test_published_chunks_of_a_window_that_is_waited_for_are_not_read() -> None:
    band = make_band(census(7), [told(needs=8)])
    assert stretches(band) == [(0, 6, "taken"), (6, 7, "ready"), (7, 8, "awaited")]
    assert band.cells[6:] == (Cell(6, "ready", (Reader("sft", 0),)), Cell(7, "awaited", (Reader("sft", 1),)))


def test_two_windows_far_apart() -> None:
    band = make_band(census(40), [told("a", done=4, needs=8), told("b", consumed=90, done=9, needs=20, ranks=1)])
    assert stretches(band) == [
        (0, 4, "done"),
        (4, 6, "taken"),
        (6, 8, "reading"),
        (8, 19, "ready"),
        (19, 20, "reading"),
        (20, 40, "ready"),
    ]
    assert band.cells[6:8] == (Cell(6, "reading", (Reader("a", 0),)), Cell(7, "reading", (Reader("a", 1),)))
    assert band.cells[19] == Cell(19, "reading", (Reader("b", 0),))


def test_chunk_that_two_consumers_read_names_both() -> None:
    band = make_band(census(8), [told("b", needs=4), told("a", needs=4, ranks=4)])
    assert band.cells[3].readers == (Reader("a", 3), Reader("b", 1))


def test_without_consumers_everything_is_ready() -> None:
    assert stretches(make_band(census(5), [])) == [(0, 5, "ready")]


def test_empty_stream_is_an_empty_band() -> None:
    assert make_band(census(0), []) == Band(0, (), (), {})


def test_reader_that_waits_for_the_first_chunks() -> None:
    assert make_band(census(0), [told(needs=2)]).stretches == (Stretch(0, 2, "awaited"),)


def test_nothing_is_awaited_of_a_stream_that_has_ended() -> None:
    band = make_band(census(5, ended=True), [told(needs=6)])
    assert (band.stop, band.stretches[-1]) == (5, Stretch(4, 5, "reading"))


def test_a_million_chunks_are_as_few_stretches_and_cells() -> None:
    reads = told(consumed=6_000_000, done=600_000, needs=700_000)
    band = make_band(census(1_000_000, retired=500_000), [reads])
    assert stretches(band) == [
        (0, 500_000, "deleted"),
        (500_000, 600_000, "done"),
        (600_000, 699_998, "taken"),
        (699_998, 700_000, "reading"),
        (700_000, 1_000_000, "ready"),
    ]
    assert (len(band.cells), band.cells[0].chunk) == (CLOSE_UP, 699_998 - 16)
    newest = make_band(census(1_000_000), [])
    assert (len(newest.cells), newest.cells[-1].chunk) == (CLOSE_UP, 999_999)


def test_a_mark_that_claims_what_no_run_can_need_costs_nothing() -> None:
    band = make_band(census(10), [consumer(needs=2**40)])
    assert stretches(band) == [(0, 10, "ready"), (10, 2**40, "awaited")]
    assert (len(band.cells), band.cells[0].chunk) == (CLOSE_UP, 0)


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
            made = Consumer(made.name, None, ReadingMark(made.name, ID, 1, 0, needs, 1.0), None)
        found.append(made if kind != "cursor" else Consumer(made.name, made.cursor, None, None))
    return found


@given(
    found=consumers(),
    chunks=st.integers(0, 120),
    retired=st.integers(0, 130),
    ended=st.booleans(),
    close_up=st.integers(1, 40),
)
def test_stretches_cover_every_chunk_once_and_the_close_up_agrees(
    found: list[Consumer], chunks: int, retired: int, ended: bool, close_up: int
) -> None:
    band = make_band(census(chunks, retired=min(retired, chunks), ended=ended), found, close_up)
    assert [one.first for one in band.stretches] == [0, *(one.stop for one in band.stretches)][: len(band.stretches)]
    assert (band.stretches[-1].stop if band.stretches else 0) == band.stop >= chunks
    assert all(one.first < one.stop for one in band.stretches)
    assert all(one.state != other.state for one, other in pairwise(band.stretches))
    states = {chunk: one.state for one in band.stretches for chunk in range(one.first, one.stop)}
    assert [cell.state for cell in band.cells] == [states[cell.chunk] for cell in band.cells]
    assert len(band.cells) == min(close_up, band.stop)
    for cell in band.cells:
        assert [reader.consumer for reader in cell.readers] == sorted(
            name for name, window in band.windows.items() if window.first <= cell.chunk < window.stop
        )
        assert cell.state != "reading" or cell.readers
