"""What the data set tells the producer of its needs: enough, in time, again if it was lost, and in nobody's way."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lazyshard import LazyShardedDataset, StreamReader
from lazyshard.data import commits as reading_hints
from lazyshard.data.commits import ReadingHints, is_due
from lazyshard.format.state import ReadingHint
from lazyshard.part import Part
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Rules
from lazyshard.stream import read_reading, write_reading
from tests.data import runs
from tests.data.workers import DEADLINE_S, PICKLED, loader
from tests.stream.streams import foreign, names, produce, wait_until


@pytest.fixture(autouse=True)
def told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_hints, "PAUSE_S", 0.0)


def open_rank(directory: Path, rank: int = 0, dp: int = 1, **options: Any) -> LazyShardedDataset:
    return runs.open_rank(directory, rank, dp, **{"max_wait": 0, "consumer": "sft", **options})


def told(directory: Path) -> tuple[int, int] | None:
    """Number of the window, and chunks needed."""
    mark = read_reading(directory, "sft")
    return None if mark is None else (mark.window, mark.needs_chunks)


def tell(directory: Path, needs: int, at: float = 0.0) -> None:
    write_reading(directory, ReadingHint("sft", None, 1, 0, needs, at))


MARK = ReadingHint("sft", "f" * 32, 2, 3, 8, 100.0)


def test_mark_is_replaced_only_by_who_needs_more() -> None:
    # Of a run before, which was further; of another stream.
    other: list[dict[str, Any]] = [{"updated_at": 49.0}, {"updated_at": 49.0, "needs_chunks": 99}]
    other += [{"stream_id": "e" * 32}, {"stream_id": None, "needs_chunks": 99}, {"needs_chunks": 7}]
    assert is_due(None, MARK, since=50.0)
    assert all(is_due(replace(MARK, **one), MARK, since=50.0) for one in other)
    assert not any(is_due(replace(MARK, needs_chunks=needs), MARK, since=50.0) for needs in (8, 9))


@pytest.mark.parametrize(
    ("per_chunk", "dp", "positions", "options", "expected"),
    [
        # Of dp * unit = 4 samples, 2 chunks.
        (2, 2, 5, {}, [(0, 2), (1, 4), (2, 6)]),
        (2, 2, 5, {"shuffle_window": 2}, [(0, 4), (1, 8)]),
        # A micro batch of 3 on two ranks reaches into the third chunk; the third stripe needs no more than the second
        # batch, for which it was told.
        (2, 2, 5, {"batch_size": 3}, [(0, 3), (1, 4), (1, 6)]),
        # Positions 5, 10 and 15 are the first whose stripe of two samples is in the next chunk.
        (10, 2, 20, {"unit": "sample"}, [(0, 1), (5, 2), (10, 3), (15, 4)]),
        (2, 1, 40, {"shuffle_window": 4}, [(0, 4), (1, 8), (2, 12), (3, 16), (4, 20)]),
    ],
)
def test_mark_tells_once_a_chunk_or_window_what_that_needs_of_all_lanes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    per_chunk: int, dp: int, positions: int, options: dict[str, Any], expected: list[tuple[int, int]],
) -> None:  # fmt: skip
    written: list[tuple[int, int]] = []

    def noted(directory: Path, mark: ReadingHint) -> bool:
        written.append((mark.window, mark.needs_chunks))
        return write_reading(directory, mark)

    monkeypatch.setattr(reading_hints, "write_reading", noted)
    produce(tmp_path, 40, per_chunk, end=positions > 5)
    dataset = open_rank(tmp_path, 0, dp, max_total_samples=100, layout="strided", **options)
    for index in [*range(0, positions * dp, dp)] * 2:
        dataset[index]
    assert written == expected
    found = read_reading(tmp_path, "sft")
    assert found is not None
    assert (found.dp_size, found.stream_id) == (dp, dataset.stream_id)


@pytest.mark.parametrize(("options", "total"), [({"max_total_samples": 11}, 6), ({}, 20)])
def test_mark_never_asks_for_more_than_will_be_drawn(tmp_path: Path, options: dict[str, Any], total: int) -> None:
    produce(tmp_path, 40)
    dataset = open_rank(tmp_path, 0, 1, shuffle_window=7, num_samples=200, **options)
    seen = set()
    for index in range(0, 200, 2):
        dataset[index]
        seen.add(told(tmp_path))
    # Rounds up the last window, and another epoch needs nothing more.
    assert {mark[1] for mark in seen if mark is not None} == ({6} if total == 6 else {7, 14, 20})


def test_windows_that_pass_quickly_are_told_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_hints, "PAUSE_S", 0.2)
    now = 1000.0
    reader = StreamReader(produce(tmp_path, 20, end=False))
    marks = ReadingHints("sft", Course(Rules(2), [Part(1)]), reader, timer=lambda: now)
    found = []
    for position, later, limit in ((0, 0.0, None), (2, 0.1, None), (4, 0.05, None), (6, 0.06, None), (8, 0.1, None)):
        now += later
        marks.enter(position, limit, 20)
        found.append(told(tmp_path))
    assert found == [(0, 1), (0, 1), (0, 1), (3, 4), (3, 4)]
    # Not published yet; and the last of all, which is told for good.
    marks.enter(20, None, 20)
    assert told(tmp_path) == (10, 11)
    marks.enter(22, 24, 24)
    assert (told(tmp_path), marks.stop > 10**9) == ((11, 12), True)


def test_only_rank_0_tells_and_nobody_without_a_name(tmp_path: Path) -> None:
    produce(tmp_path, 8)
    for options in ({"rank": 1, "dp": 2}, {"consumer": None}):
        open_rank(tmp_path, **options)[0]
    assert "cursors" not in names(tmp_path)
    # A directory of another program is told too.
    directory = foreign(tmp_path / "f", b'{"id":0}\n{"id":1}\n', b'{"id":2}\n{"id":3}\n', end=True)
    open_rank(directory, samples_per_chunk=2)[3]
    assert told(directory) == (1, 2)


def test_run_that_starts_again_further_back_says_so(tmp_path: Path) -> None:
    produce(tmp_path, 20)
    tell(tmp_path, 9)
    dataset = open_rank(tmp_path)
    dataset[2]
    assert told(tmp_path) == (1, 2)
    # But what another process of the same run has told stays.
    tell(tmp_path, 8, at=9e9)
    found = read_reading(tmp_path, "sft")
    assert found is not None
    write_reading(tmp_path, replace(found, stream_id=dataset.stream_id))
    dataset[4]
    assert told(tmp_path) == (0, 8)
    # Nor does a later epoch take it back.
    dataset.set_epoch(1)
    dataset[4]
    assert told(tmp_path) == (0, 8)
    dataset[16]
    assert told(tmp_path) == (8, 9)


def test_workers_tell_what_they_read(tmp_path: Path) -> None:
    produce(tmp_path, 24)
    dataset = open_rank(tmp_path, shuffle_window=2)
    batches = loader(dataset, dataset.rank_indices, 2, batch_size=2, multiprocessing_context=PICKLED)
    read = [i for batch in batches for i in batch]
    assert sorted(read) == list(range(24))
    assert told(tmp_path) == (5, 12)
    assert names(tmp_path / "cursors") == ["sft.reading.json"]


def test_what_is_waited_for_was_told_before_and_is_told_again_if_it_got_lost(tmp_path: Path) -> None:
    produce(tmp_path, 4, end=False)
    dataset = open_rank(tmp_path, max_total_samples=100, shuffle_window=2, max_wait=DEADLINE_S)
    read: list[int] = []
    waiting = threading.Thread(target=lambda: read.append(dataset[4]["id"]), daemon=True)
    waiting.start()
    wait_until(lambda: told(tmp_path) == (1, 4), "the mark of the window that is waited for")
    path = tmp_path / "cursors" / "sft.reading.json"
    ways: list[Callable[[], object]] = [lambda: tell(tmp_path, 1, at=9e9), lambda: path.write_bytes(b"{"), path.unlink]
    for lose in ways:
        lose()
        wait_until(lambda: told(tmp_path) == (1, 4), "the mark again")
    assert read == []
    produce(tmp_path, 8)
    waiting.join(DEADLINE_S)
    assert read and read[0] in (4, 5, 6, 7)
