"""Commits: what the cursor says, which chunks it lets go, who may write it; and what the producer is told of needs."""

import errno
import pickle
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lazyshard import BlendedDataset, ChunkWriter, LazyShardedDataset, StreamReader
from lazyshard.data import commits as reading_hints
from lazyshard.data.commits import ReadingHints
from lazyshard.errors import ChunkRetired, CursorTaken, StateMismatch, WaitTimeout, WriterFailed
from lazyshard.format.state import ReadingHint, RunState
from lazyshard.part import Part
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Rules
from lazyshard.stream import read_cursor, read_reading, write_reading
from lazyshard.stream.listing import retire
from tests.data.runs import State, chunks_before, open_rank, open_ranks
from tests.data.workers import DEADLINE_S, PICKLED, first_error, loader
from tests.stream.streams import add, cursor_of, foreign, names, produce, raised, raising, refusal_of, wait_until


@pytest.fixture(autouse=True)
def told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_hints, "PAUSE_S", 0.0)


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    return produce(tmp_path / "s", 40, 4)


def open_run(stream: Path, dp: int = 2, state: State | None = None, **options: Any) -> list[LazyShardedDataset]:
    return open_ranks(stream, dp, state, **{"consumer": "run", **options})


def test_cursor_holds_the_state_and_the_numbers_of_the_plan(stream: Path) -> None:
    dataset = open_run(stream, batch_size=2, shuffle_window=1, seed=3)[0]
    assert dataset.commit(20, last_epoch=True) is True
    cursor = cursor_of(stream)
    assert (cursor.stream_id, cursor.consumed, cursor.chunks_before) == (dataset.stream_id, 20, 4)
    assert cursor.plan == {"dp_size": 2, "batch_size": 2, "unit": 4, "window": 4, "seed": 3}
    assert cursor.state == RunState.from_dict(dataset.state_dict(20), "here")
    assert cursor.owner


def test_chunks_of_older_checkpoints_and_of_epochs_to_come_stay(stream: Path) -> None:
    dataset = open_run(stream)[0]
    older = [dataset.state_dict(consumed) for consumed in (24, 9 * 2, 30, 40)]
    for keep, before in ((older[:3], 4), (older[:1], 6), ([], 8)):
        dataset.commit(32, last_epoch=True, keep=keep)
        assert chunks_before(stream) == before
    dataset.commit(40, last_epoch=False)
    assert chunks_before(stream) == 0
    dataset.set_epoch(1)
    # The end of the epoch before, which has another one before it, keeps everything.
    for keep, before in (([], 8), (older[3:], 0)):
        dataset.commit(32, last_epoch=True, keep=keep)
        assert chunks_before(stream) == before
    steps = open_run(stream, num_samples=80, consumer="steps")[0]
    for consumed, before in ((38, 0), (56, 4)):
        steps.commit(72, last_epoch=True, keep=[steps.state_dict(consumed)])
        assert chunks_before(stream, "steps") == before


def test_checkpoint_of_other_ranks_can_be_named(stream: Path) -> None:
    before = open_run(stream)[0].state_dict(12)
    dataset = open_run(stream, 3, before)[0]
    for consumed, expected in ((12, 2), (15, 2), (24, 4), (36, 7), (39, 7)):
        dataset.commit(consumed, last_epoch=True)
        # One is left over in the end, which other ranks could still draw.
        assert chunks_before(stream) == expected, consumed
    dataset.commit(39, last_epoch=True, keep=[before])
    assert chunks_before(stream) == 2


def test_one_rank_writes_and_what_cannot_be_is_refused_on_every_rank(stream: Path) -> None:
    refusal_of(ValueError, "consumer=NAME", open_ranks(stream, 1)[0].commit, 4, last_epoch=True)
    ranks = open_run(stream)
    for dataset in ranks:
        raised(ValueError, dataset.commit, 15, last_epoch=True)
    other = open_ranks(stream, 2, seed=1)[0].state_dict(8)
    raised(StateMismatch, ranks[0].commit, 16, last_epoch=True, keep=[other])
    assert read_cursor(stream, "run") is None
    assert [dataset.commit(16, last_epoch=True) for dataset in reversed(ranks)] == [False, True]
    assert chunks_before(stream) == 4


def test_a_copy_owns_no_cursor_and_a_full_disk_is_told(stream: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_run(stream)[0]
    full = raising(OSError(errno.ENOSPC, "No space left on device"))
    with monkeypatch.context() as patched:
        patched.setattr("lazyshard.store.durable.write_all", full)
        for _ in range(2):
            told = refusal_of(WriterFailed, r"'run'.*No space left", dataset.commit, 16, last_epoch=True)
            assert told.errno == errno.ENOSPC
    dataset.commit(16, last_epoch=True)
    raised(CursorTaken, pickle.loads(pickle.dumps(dataset)).commit, 24, last_epoch=True)
    dataset.commit(24, last_epoch=True)
    assert chunks_before(stream) == 6


def test_workers_commit_nothing(stream: Path) -> None:
    dataset = open_run(stream, 1)[0]

    def commit(rows: list[Any]) -> None:
        raised(RuntimeError, dataset.commit, len(rows), last_epoch=True)

    assert len(list(loader(dataset, dataset.rank_indices[:4], 1, batch_size=4, collate_fn=commit))) == 1
    assert read_cursor(stream, "run") is None


@pytest.mark.parametrize(("shuffle_window", "start"), [(0, None), (2, None), (0, PICKLED)])
def test_sample_of_a_retired_chunk_is_an_error_at_once(tmp_path: Path, shuffle_window: int, start: str | None) -> None:
    produce(tmp_path, 12)
    retire(tmp_path, 2, 6)
    dataset = open_rank(tmp_path, shuffle_window=shuffle_window)
    options: dict[str, Any] = {"batch_size": 1} | ({"multiprocessing_context": start} if start else {})
    for index in range(1 if start else 4):
        error = first_error(loader(dataset, [index], int(start is not None), **options))
        assert type(error) is ChunkRetired
        assert error.chunk in (0, 1) and error.chunks_before == 2
        assert error.file == str(tmp_path / f"chunk_{error.chunk:05}.jsonl.completed")
    assert sorted(dataset[index]["id"] for index in range(4, 12)) == list(range(4, 12))
    assert dataset.stats().bad_samples == 0


def test_chunk_that_goes_while_a_substitute_is_looked_for_is_no_bad_sample(tmp_path: Path) -> None:
    produce(tmp_path, 12)

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == 1:
            retire(tmp_path, 2, 6)
            dataset.reader._chunks.clear()
            raise ValueError("bad")
        return row

    dataset = open_rank(tmp_path, encode_fn=encode)
    assert dataset[0] == {"id": 0}
    raised(ChunkRetired, lambda: dataset[1])
    assert dataset.stats().bad_samples == 0
    assert dataset[4] == {"id": 4}


@pytest.mark.parametrize(("by", "shuffle_window"), [("index", 0), ("set_epoch", 2), ("worker", 2)])
def test_second_pass_over_what_is_gone_says_how_to_keep_it(tmp_path: Path, by: str, shuffle_window: int) -> None:
    produce(tmp_path, 12)
    retire(tmp_path, 4, 6)
    dataset = open_rank(tmp_path, num_samples=24, shuffle_window=shuffle_window)
    assert sorted(dataset[index]["id"] for index in range(8, 12)) == [8, 9, 10, 11]
    if by == "set_epoch":
        dataset.set_epoch(1)
    error = first_error(loader(dataset, [0 if by == "set_epoch" else 12], int(by == "worker"), batch_size=1))
    assert type(error) is ChunkRetired
    assert (error.chunk in range(2), error.chunks_before) == (True, 4)
    assert "epoch 1" in str(error) and "--retain all" in str(error)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_over_a_blend_that_asks_where_the_epoch_ends_comes_to_its_end_though_the_beginning_is_deleted(
    tmp_path: Path, workers: int, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A loop with a sampler, which asks about each batch of 2 when it has it; nothing is told of the next epoch."""
    live = produce(tmp_path / "a", 130, end=False)
    members = [open_rank(live), open_rank(produce(tmp_path / "b", 400))]
    blend = BlendedDataset([(member, 0.5) for member in members], batch_size=2, num_samples=600)
    indices = blend.rank_indices
    trained: list[int] = []
    for step, batch in enumerate(loader(blend, indices, workers, batch_size=2)):
        if not blend.in_epoch(indices[step * 2]):
            break
        trained += batch
        if step == 50:
            produce(live, 138)
            retire(live, 40, 69)
    assert sorted(trained) == sorted([*range(138)] * 2)
    assert "next epoch" not in capfd.readouterr().err + caplog.text


def test_a_reader_closes_what_was_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyshard.stream.reader._LET_GO_S", 0.0)
    with ChunkWriter(tmp_path, 1) as writer:
        add(writer, 0, 4)
        writer.heartbeat()
        reader = StreamReader(tmp_path, max_wait=0.05)

        def deleted_and_open() -> int:
            links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
            return sum(str(link).startswith(str(tmp_path)) and str(link).endswith("(deleted)") for link in links)

        reader.read(0)
        reader.read(1)
        retire(tmp_path, 1, 4)
        assert deleted_and_open() == 1
        reader.read(2)
        assert deleted_and_open() == 0
        retire(tmp_path, 3, 4)
        assert deleted_and_open() == 2
        raised(WaitTimeout, reader.read, 4)
        assert deleted_and_open() == 0


def open_told(directory: Path, rank: int = 0, dp: int = 1, **options: Any) -> LazyShardedDataset:
    return open_rank(directory, rank, dp, **{"max_wait": 0, "consumer": "sft", **options})


def told(directory: Path) -> tuple[int, int] | None:
    mark = read_reading(directory, "sft")
    return None if mark is None else (mark.window, mark.needs_chunks)


def tell(directory: Path, needs: int, at: float = 0.0) -> None:
    write_reading(directory, ReadingHint("sft", None, 1, 0, needs, at))


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
    writing = mock.Mock(wraps=write_reading)
    monkeypatch.setattr(reading_hints, "write_reading", writing)
    produce(tmp_path, 40, per_chunk, end=positions > 5)
    dataset = open_told(tmp_path, 0, dp, max_total_samples=100, layout="strided", **options)
    for index in [*range(0, positions * dp, dp)] * 2:
        dataset[index]
    marks = [call.args[1] for call in writing.mock_calls]
    assert [(mark.window, mark.needs_chunks) for mark in marks] == expected
    found = read_reading(tmp_path, "sft")
    assert found is not None
    assert (found.dp_size, found.stream_id) == (dp, dataset.stream_id)


@pytest.mark.parametrize(("options", "total"), [({"max_total_samples": 11}, 6), ({}, 20)])
def test_mark_never_asks_for_more_than_will_be_drawn(tmp_path: Path, options: dict[str, Any], total: int) -> None:
    produce(tmp_path, 40)
    dataset = open_told(tmp_path, 0, 1, shuffle_window=7, num_samples=200, **options)
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
        open_told(tmp_path, **options)[0]
    assert "cursors" not in names(tmp_path)
    directory = foreign(tmp_path / "f", b'{"id":0}\n{"id":1}\n', b'{"id":2}\n{"id":3}\n', end=True)
    open_told(directory, samples_per_chunk=2)[3]
    assert told(directory) == (1, 2)


def test_run_that_starts_again_further_back_says_so(tmp_path: Path) -> None:
    produce(tmp_path, 20)
    tell(tmp_path, 9)
    dataset = open_told(tmp_path)
    dataset[2]
    assert told(tmp_path) == (1, 2)
    tell(tmp_path, 8, at=9e9)
    found = read_reading(tmp_path, "sft")
    assert found is not None
    write_reading(tmp_path, replace(found, stream_id=dataset.stream_id))
    dataset[4]
    assert told(tmp_path) == (0, 8)
    dataset.set_epoch(1)
    dataset[4]
    assert told(tmp_path) == (0, 8)
    dataset[16]
    assert told(tmp_path) == (8, 9)


def test_workers_tell_what_they_read(tmp_path: Path) -> None:
    produce(tmp_path, 24)
    dataset = open_told(tmp_path, shuffle_window=2)
    batches = loader(dataset, dataset.rank_indices, 2, batch_size=2, multiprocessing_context=PICKLED)
    assert sorted(i for batch in batches for i in batch) == list(range(24))
    assert told(tmp_path) == (5, 12)
    assert names(tmp_path / "cursors") == ["sft.reading.json"]


def test_what_is_waited_for_was_told_before_and_is_told_again_if_it_got_lost(tmp_path: Path) -> None:
    produce(tmp_path, 4, end=False)
    dataset = open_told(tmp_path, max_total_samples=100, shuffle_window=2, max_wait=DEADLINE_S)
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
