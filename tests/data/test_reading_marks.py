"""What the data set tells the producer of its needs: enough, in time, again if it was lost, and in nobody's way."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lazyshard import LazyShardedDataset, Order, StreamReader
from lazyshard.data import commits as reading_marks
from lazyshard.data.commits import ReadingMarks, is_due
from lazyshard.format.cursor import ReadingMark
from lazyshard.inspection.outlook import Looks
from lazyshard.inspection.survey import take_survey
from lazyshard.part import Part
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Rules
from lazyshard.stream import read_reading, write_reading
from tests.data.options import grouped
from tests.data.workers import DEADLINE_S, PICKLED, loader
from tests.stream.streams import foreign, names, produce, wait_until


@pytest.fixture(autouse=True)
def told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_marks, "PAUSE_S", 0.0)


def open_rank(directory: Path, rank: int = 0, dp: int = 1, **options: Any) -> LazyShardedDataset:
    common: dict[str, Any] = {"dp_rank": rank, "dp_size": dp, "max_wait": 0, "consumer": "sft"}
    return LazyShardedDataset(directory, **grouped({**common, **options}))


def told(directory: Path) -> tuple[int, int] | None:
    """Number of the window, and chunks needed."""
    mark = read_reading(directory, "sft")
    return None if mark is None else (mark.window, mark.needs_chunks)


def tell(directory: Path, needs: int, at: float = 0.0) -> None:
    write_reading(directory, ReadingMark("sft", None, 1, 0, needs, at))


MARK = ReadingMark("sft", "f" * 32, 2, 3, 8, 100.0)


@pytest.mark.parametrize(
    ("found", "due"),
    [
        (None, True),
        (MARK, False),
        (replace(MARK, needs_chunks=9), False),
        (replace(MARK, needs_chunks=7), True),
        (replace(MARK, updated_at=49.0), True),
        # Of a run before, which was further.
        (replace(MARK, updated_at=49.0, needs_chunks=99), True),
        (replace(MARK, stream_id="e" * 32), True),
        (replace(MARK, stream_id=None, needs_chunks=99), True),
    ],
)
def test_mark_is_replaced_only_by_who_needs_more(found: ReadingMark | None, due: bool) -> None:
    assert is_due(found, MARK, since=50.0) is due


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Of dp * unit = 4 samples, 2 chunks.
        ({}, [(0, 2), (0, 2), (1, 4), (1, 4), (2, 6)]),
        ({"shuffle_window": 2}, [(0, 4), (0, 4), (0, 4), (0, 4), (1, 8)]),
        # A micro batch of 3 on two ranks reaches into the third chunk.
        # The third stripe needs no more than the second batch, for which it was told.
        ({"batch_size": 3}, [(0, 3), (0, 3), (1, 4), (1, 6), (1, 6)]),
    ],
)
def test_mark_tells_what_the_window_needs_of_all_lanes(
    tmp_path: Path, options: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    produce(tmp_path, 40, end=False)
    dataset = open_rank(tmp_path, 0, 2, max_total_samples=100, layout="strided", **options)
    assert told(tmp_path) is None
    for position, mark in enumerate(expected):
        dataset[2 * position]
        assert told(tmp_path) == mark, position
    found = read_reading(tmp_path, "sft")
    assert found is not None
    assert (found.dp_size, found.stream_id) == (2, dataset.stream_id)


def test_stripes_smaller_than_a_chunk_are_told_chunk_by_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[int, int]] = []
    monkeypatch.setattr(
        reading_marks, "write_reading", lambda _, mark: written.append((mark.window, mark.needs_chunks))
    )
    monkeypatch.setattr(reading_marks, "read_reading", lambda *_: None)
    produce(tmp_path, 40, 10)
    dataset = open_rank(tmp_path, 0, 2, unit="sample")
    for index in dataset.rank_indices:
        dataset[index]
    # Positions 5, 10 and 15 are the first whose stripe of two samples is in the next chunk.
    assert written == [(0, 1), (5, 2), (10, 3), (15, 4)]


@pytest.mark.parametrize(("options", "total"), [({"max_total_samples": 11}, 6), ({}, 20)])
def test_mark_never_asks_for_more_than_will_be_drawn(tmp_path: Path, options: dict[str, Any], total: int) -> None:
    produce(tmp_path, 40)
    dataset = open_rank(tmp_path, 0, 1, shuffle_window=7, num_samples=200, **options)
    seen = set()
    for index in range(0, 200, 2):
        dataset[index]
        mark = told(tmp_path)
        assert mark is not None
        seen.add(mark[1])
    # Rounds up the last window, and another epoch needs nothing more.
    assert seen == ({6} if total == 6 else {7, 14, 20})


def test_windows_that_pass_quickly_are_told_now_and_then_and_what_is_waited_for_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_marks, "PAUSE_S", 0.2)
    now = 1000.0
    reader = StreamReader(produce(tmp_path, 20, end=False))
    marks = ReadingMarks("sft", Course(Rules(2), [Part(1)]), reader, timer=lambda: now)
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


def test_mark_is_written_once_a_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    def noted(directory: Path, mark: ReadingMark) -> bool:
        written.append(mark.needs_chunks)
        return write_reading(directory, mark)

    monkeypatch.setattr(reading_marks, "write_reading", noted)
    produce(tmp_path, 40)
    dataset = open_rank(tmp_path, 0, 1, shuffle_window=4)
    for _ in range(2):
        for index in range(len(dataset)):
            dataset[index]
    assert written == [4, 8, 12, 16, 20]


def test_only_rank_0_tells_and_nobody_without_a_name(tmp_path: Path) -> None:
    produce(tmp_path, 8)
    for options in ({"rank": 1, "dp": 2}, {"consumer": None}):
        dataset = open_rank(tmp_path, **options)
        dataset[0]
    assert "cursors" not in names(tmp_path)


def test_foreign_directory_is_told_too(tmp_path: Path) -> None:
    directory = foreign(tmp_path / "f", b'{"id":0}\n{"id":1}\n', b'{"id":2}\n{"id":3}\n', end=True)
    dataset = open_rank(directory, samples_per_chunk=2)
    dataset[3]
    assert told(directory) == (1, 2)


@pytest.mark.parametrize("consumer", ["", "a/b", ".x", "x.reading", 5])
def test_name_that_no_consumer_can_have_is_refused(tmp_path: Path, consumer: Any) -> None:
    with pytest.raises(ValueError, match="the name of a consumer is"):
        open_rank(produce(tmp_path, 2), consumer=consumer)


def test_stream_that_cannot_be_written_to_is_read_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    produce(tmp_path, 8)
    (tmp_path / "cursors").write_bytes(b"a file")
    dataset = open_rank(tmp_path)
    assert [dataset[index]["id"] for index in range(8)] == list(range(8))
    assert [record.getMessage() for record in caplog.records if "cannot be written" in record.getMessage()] != []


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
    dataset[16]
    assert told(tmp_path) == (8, 9)


@pytest.mark.parametrize("start", ["fork", PICKLED])
def test_workers_tell_what_they_read(tmp_path: Path, start: str) -> None:
    produce(tmp_path, 24)
    dataset = open_rank(tmp_path, shuffle_window=2)
    options = {"multiprocessing_context": start}
    read = [i for batch in loader(dataset, dataset.rank_indices, 2, batch_size=2, **options) for i in batch]
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
    for lost in ("lower", "torn", "gone"):
        path = tmp_path / "cursors" / "sft.reading.json"
        if lost == "lower":
            tell(tmp_path, 1, at=9e9)
        elif lost == "torn":
            path.write_bytes(b"{")
        else:
            path.unlink()
        wait_until(lambda: told(tmp_path) == (1, 4), f"the mark again after it was {lost}")
    assert read == []
    produce(tmp_path, 8)
    waiting.join(DEADLINE_S)
    assert read and read[0] in (4, 5, 6, 7)


def test_data_set_that_was_forked_tells_for_itself(tmp_path: Path) -> None:
    produce(tmp_path, 4, end=False)
    dataset = open_rank(tmp_path, max_total_samples=100, shuffle_window=2, max_wait=DEADLINE_S)
    dataset[0]
    pid = os.fork()
    if pid == 0:
        try:
            dataset[4]
        finally:
            os._exit(0)
    try:
        wait_until(lambda: told(tmp_path) == (1, 4), "the child's mark")
        (tmp_path / "cursors" / "sft.reading.json").unlink()
        wait_until(lambda: told(tmp_path) == (1, 4), "the child's mark again")
        produce(tmp_path, 8)
    finally:
        assert os.waitpid(pid, 0)[1] == 0


def test_window_of_the_order_is_the_courses() -> None:
    assert Order(shuffle_window=2).rules(3, 3) == Rules(3, window=6)


def test_later_epoch_does_not_take_back_what_another_process_has_told_meanwhile(tmp_path: Path) -> None:
    produce(tmp_path, 20)
    dataset = open_rank(tmp_path)
    dataset[2]
    # Of a worker, say, that has gone ahead.
    found = read_reading(tmp_path, "sft")
    assert found is not None
    write_reading(tmp_path, replace(found, needs_chunks=8))
    dataset.set_epoch(1)
    dataset[2]
    assert told(tmp_path) == (1, 8)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [(0, 2, [0, 1]), (2, 4, [0, 1]), (4, 6, [0, 1])]),
        ({"shuffle_window": 2}, [(0, 4, [0, 1, 0, 1]), (0, 4, [0, 1, 0, 1]), (4, 8, [0, 1, 0, 1])]),
        ({"unit": "sample"}, [(0, 1, [None]), (2, 3, [None]), (4, 5, [None])]),
    ],
)
def test_mark_and_commit_tell_which_rank_reads_which_chunk(
    tmp_path: Path, options: dict[str, Any], expected: list[tuple[int, int, list[int | None]]]
) -> None:
    produce(tmp_path, 40, end=False)
    dataset = open_rank(tmp_path, 0, 2, max_total_samples=100, layout="strided", **options)
    dataset.commit(0, last_epoch=True)
    found = []
    for position in (0, 2, 4):
        dataset[position * 2]
        outlook = Looks().add(take_survey(tmp_path, time.time()))
        window = outlook.band.windows["sft"]
        found.append((window.first, window.stop, [window.rank(chunk) for chunk in range(window.first, window.stop)]))
    assert found == expected
