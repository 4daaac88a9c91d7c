"""`LazyShardedSequences` whose rows go through steps, and whose producer deletes what is trained and holds back."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from lazyshard import Filter, LazyShardedSequences, Map, Pack, Split
from lazyshard.errors import BadSample, CursorTaken, StateMismatch
from lazyshard.format.records import chunk_name
from lazyshard.stream import read_cursor, read_reading, read_retired
from lazyshard.stream.listing import retire
from tests.data.sequence_runs import LENGTHS, all_written, expected, loader_of, open_sequences, write_rows
from tests.data.streams import HOLDING_BACK
from tests.data.workers import DEADLINE_S
from tests.stream.streams import HERE, raised, refusal_of

# Which torchdata still calls, and torch has given up.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

WINDOW = 2  # Chunks, of three rows: there are four windows, of six rows but for the last one

MORE = [*LENGTHS, *LENGTHS[:10]]


def drop_every_third(row: dict[str, Any], index: int) -> bool:
    assert row["id"] == index
    return index % 3 != 2


def negate(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": -row["id"], "seen": True}


def chunks_before(stream: Path, consumer: str = "run") -> int:
    cursor = read_cursor(stream, consumer)
    assert cursor is not None
    return cursor.chunks_before


@pytest.mark.parametrize("form", [Pack(9), Split(5, eos=-2)])
def test_chunks_of_whole_windows_are_done_with_and_other_ranks_go_on_without_them(tmp_path: Path, form: Any) -> None:
    stream = write_rows(tmp_path / "s", MORE)
    left = expected(MORE, form, 3 * WINDOW)
    found: list[list[int]] = []
    done: list[int] = []
    consumed, state = 0, None
    # Each with its own ranks; after each all chunks go that the cursor frees.
    for dp, steps in ((2, 3), (3, 1), (1, 2), (2, 99)):
        runs = [open_sequences(stream, form, rank, dp, window=WINDOW, consumer="run") for rank in range(dp)]
        for run in runs:
            if state is not None:
                run.load_state_dict(state)
        steps = min(steps, (len(left) - consumed) // dp)
        for micro_batch in zip(*(all_written(itertools.islice(run, steps)) for run in runs), strict=True):
            found += micro_batch
        consumed += steps * dp
        state = runs[0].state_dict(consumed)
        assert [run.commit(consumed, last_epoch=True, take_over=True) for run in runs] == [True] + [False] * (dp - 1)
        done.append(chunks_before(stream))
        retire(stream, done[-1], 8)
    assert found == left[:consumed] and len(left) - consumed < 2
    # The last window begins with what a split leaves over of the one before.
    assert done == ([4, 4, 6, 6] if isinstance(form, Pack) else [0, 0, 0, 4])
    assert read_retired(stream) == done[-1]


def test_the_cursor_says_rows_and_keeps_what_older_states_and_other_epochs_need(tmp_path: Path) -> None:
    stream = write_rows(tmp_path / "s", MORE)
    sequences = open_sequences(stream, Pack(9), window=WINDOW, batch_size=2, consumer="run")
    early = sequences.state_dict(2)
    assert sequences.commit(8, last_epoch=True)
    cursor = read_cursor(stream, "run")
    assert cursor is not None
    assert (cursor.stream_id, cursor.consumed, cursor.plan) == (early["stream"], 12, {"dp_size": 1, "batch_size": 2})
    assert cursor.chunks_before == 4 and cursor.state is None and cursor.owner
    sequences.commit(8, last_epoch=True, keep=[early])
    assert chunks_before(stream) == 0
    sequences.commit(8, last_epoch=False)
    assert chunks_before(stream) == 0
    sequences.set_epoch(1)
    sequences.commit(8, last_epoch=True, keep=[early])
    assert chunks_before(stream) == 0, "the older state has another epoch before it"
    sequences.commit(8, last_epoch=True)
    assert chunks_before(stream) == 4
    other = open_sequences(stream, Pack(8), window=WINDOW).state_dict(2)
    refusal_of(StateMismatch, "size = 8, here it is 9", sequences.commit, 8, last_epoch=True, keep=[other])
    refusal_of(ValueError, "in steps of dp_size", sequences.commit, 7, last_epoch=True)


def test_who_may_commit(tmp_path: Path) -> None:
    stream = write_rows(tmp_path / "s", LENGTHS)
    refusal_of(ValueError, "consumer=NAME", open_sequences(stream, Pack(9)).commit, 1, last_epoch=True)
    one, other = (open_sequences(stream, Pack(9), consumer="run") for _ in range(2))
    one.commit(1, last_epoch=True)
    refusal_of(CursorTaken, "take_over=True", other.commit, 1, last_epoch=True)
    assert other.commit(1, last_epoch=True, take_over=True)


def test_rank_0_tells_which_window_it_needs(tmp_path: Path) -> None:
    stream = write_rows(tmp_path / "s", MORE[:12], end=False)
    options: dict[str, Any] = {"window": WINDOW, "consumer": "run", "max_wait": 0.1}
    other = iter(open_sequences(stream, Pack(9), 1, 2, **options))
    assert read_reading(stream, "run") is None
    next(other)
    assert read_reading(stream, "run") is None, "rank 0 speaks for all"
    first = iter(open_sequences(stream, Pack(9), 0, 2, **options))
    next(first)
    mark = read_reading(stream, "run")
    assert mark is not None and (mark.dp_size, mark.needs_chunks) == (2, 2)
    raised(TimeoutError, lambda: list(first))
    mark = read_reading(stream, "run")
    assert mark is not None and mark.needs_chunks == 6, "what it waited for"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_producer_that_holds_back_and_deletes_and_a_run_that_commits_get_through(
    tmp_path: Path, workers: int
) -> None:
    stream, total = tmp_path / "s", 96
    command = [sys.executable, "-c", HOLDING_BACK, *map(str, (stream, total, DEADLINE_S))]
    with subprocess.Popen(command, cwd=HERE, stdout=subprocess.DEVNULL) as producer:
        try:
            sequences = LazyShardedSequences(
                stream, form=Pack(9), batch_size=2, window=2, dp_rank=0, dp_size=1, max_wait=DEADLINE_S, consumer="run"
            )
            rows, consumed = [], 0
            for batch in loader_of(sequences, workers, batch_size=2):
                rows += [row for pack in batch for row in pack]
                consumed += 2
                # As after a checkpoint at every third step.
                if consumed % 6 == 0:
                    sequences.commit(consumed, last_epoch=True)
            assert producer.wait(DEADLINE_S) == 0
        finally:
            producer.kill()
    assert len(rows) == len(set(rows)) and set(range(total)) - set(rows) <= set(range(total - 8, total)), "left over"
    assert 6 <= read_retired(stream) <= 22


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_go_through_steps_and_dropped_ones_are_left_out_of_their_pack(tmp_path: Path, workers: int) -> None:
    stream = write_rows(tmp_path / "s", LENGTHS)
    steps = [Filter(drop_every_third, with_indices=True), Map(negate)]
    sequences = open_sequences(stream, Pack(30), steps=steps)
    found = [pack for batch in loader_of(sequences, workers) for pack in batch]
    packs = [[-row for row in pack if row % 3 != 2] for pack in expected(LENGTHS, Pack(30), 6)]
    assert found == packs
    assert sequences.stats().dropped == len(LENGTHS) // 3


def test_a_split_takes_steps_that_keep_lengths_and_no_filter(tmp_path: Path) -> None:
    stream = write_rows(tmp_path / "s", LENGTHS)
    shifted = Map(lambda row: {"input_ids": [token + 1 for token in row["input_ids"]]})
    plain = [token for sequence in all_written(open_sequences(stream, Split(5))) for token in sequence]
    assert [t - 1 for one in all_written(open_sequences(stream, Split(5), steps=shifted)) for t in one] == plain
    dropping = Filter(drop_every_third, with_indices=True)
    with pytest.raises(BadSample, match=r"sample 2\): SkipSample: steps\[0\], filter_fn .* drops it"):
        all_written(open_sequences(stream, Split(5), steps=dropping))
    failing = Map(lambda row: {"n": 1 // (row["id"] != 4)})
    with pytest.raises(BadSample, match=r"steps\[0\], map .*ZeroDivisionError"):
        all_written(open_sequences(stream, Split(5), steps=failing))


def free(stream: Path) -> int:
    """Deletes all chunks that the cursor frees, as a producer does; returns how many are gone."""
    done = chunks_before(stream)
    retire(stream, done, 20)
    assert not (stream / chunk_name(done - 1)).exists()
    return done


def test_a_commit_after_the_state_of_a_later_checkpoint_reads_no_chunk_that_is_gone(tmp_path: Path) -> None:
    run = open_sequences(write_rows(tmp_path / "s", [4] * 60), Pack(4), window=1, consumer="run")
    assert run.commit(30, last_epoch=True)
    assert free(tmp_path / "s") == 10
    # One checkpoint is still being written while the next one begins.
    states = [run.state_dict(consumed) for consumed in (36, 54)]
    assert run.commit(36, last_epoch=True)
    assert free(tmp_path / "s") == 12
    assert run.state_dict(54) == states[1]


def test_other_ranks_commit_nothing_and_read_nothing_for_it(tmp_path: Path) -> None:
    stream = write_rows(tmp_path / "s", [4] * 60)
    first, other = (open_sequences(stream, Pack(4), rank, 2, window=1, consumer="run") for rank in range(2))
    assert first.commit(30, last_epoch=True)
    assert free(stream) == 10
    assert not other.commit(30, last_epoch=True)


def test_what_a_worker_needs_to_go_on_is_not_freed(tmp_path: Path) -> None:
    """Its state stands in the micro batch that it has handed out last, before those of the other workers."""
    run = open_sequences(write_rows(tmp_path / "s", [4] * 60), Pack(4), window=1, consumer="run")
    loader = StatefulDataLoader(run, batch_size=1, num_workers=2, collate_fn=all_written)
    batches = iter(loader)
    for _ in range(6):
        next(batches)
    state = loader.state_dict()
    assert run.commit(6, last_epoch=True)
    assert free(tmp_path / "s") == 1
    sequences = open_sequences(tmp_path / "s", Pack(4), window=1)
    again = StatefulDataLoader(sequences, batch_size=1, num_workers=2, collate_fn=all_written)
    again.load_state_dict(state)
    assert list(again) == list(batches)
