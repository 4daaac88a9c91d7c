"""`LazyShardedSequences` of a blend: its rows in its order, packed, cut or padded as those of one stream."""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader

from lazyshard import BlendedDataset, Filter, LazyShardedDataset, LazyShardedSequences, Map, Order, Pack, Pad, Split
from lazyshard.errors import BadSample, CursorTaken, LengthUnknown, StateMismatch
from lazyshard.format.records import chunk_name
from lazyshard.stream import read_cursor, read_reading, read_retired
from lazyshard.stream.listing import retire
from tests.data.runs import (
    LENGTHS,
    all_written,
    chunks_before,
    dealt,
    expected,
    forms,
    loader_of,
    open_sequences,
    tokens_of_row,
    write_rows,
)
from tests.data.streams import HOLDING_BACK
from tests.data.workers import DEADLINE_S
from tests.stream.streams import HERE, produce, raised, refusal_of

# Which torchdata still calls, and torch has given up.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

Lists = dict[str, list[int]]

SECOND = 50  # What is added to the ids of rows of the second stream, so that no two are equal


def write_both(directory: Path, lists: Lists, *, end: bool = True) -> None:
    for name, lengths in lists.items():
        write_rows(directory / name, lengths, end=end)


def number(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"] + SECOND, "input_ids": [token + 100 * SECOND for token in row["input_ids"]]}


def blend(directory: Path, weights: dict[str, float], **options: Any) -> BlendedDataset:
    members = []
    for place, (name, weight) in enumerate(weights.items()):
        order = Order(shuffle_window=place, seed=3)
        steps = [Map(number)] if place else []
        members.append((LazyShardedDataset(directory / name, order=order, steps=steps, max_wait=DEADLINE_S), weight))
    return BlendedDataset(members, **options)


def open_all(
    directory: Path, weights: dict[str, float], form: Any, dp: int, state: Any = None, **options: Any
) -> list[LazyShardedSequences]:
    own = {name: options.pop(name) for name in ("num_samples", "stopping") if name in options}
    options = {"window": 2, **options}
    found = []
    for rank in range(dp):
        run = LazyShardedSequences(blend(directory, weights, **own), form=form, dp_rank=rank, dp_size=dp, **options)
        if state is not None:
            run.load_state_dict(json.loads(json.dumps(state)))
        found.append(run)
    return found


def rows_of(directory: Path, weights: dict[str, float], epoch: int = 0, **options: Any) -> list[int]:
    """The ids of the rows in the order in which one rank of the blend itself draws them."""
    drawn = blend(directory, weights, **options)
    drawn.set_epoch(epoch)
    return [row["id"] for batch in drawn.batches(epochs=epoch + 1, collate_fn=list) for row in batch]


def made_of(ids: list[int], lengths: list[int], form: Any, seed: int | None = None, epoch: int = 0) -> list[Any]:
    """What is made of rows that come in this order, by brute force: of those of a stream in which they stand so."""
    found = expected(lengths, form, 6, seed, epoch)
    if isinstance(form, Pack):
        return [[ids[place] for place in pack] for pack in found]
    # Its tokens tell place and offset, but for those that were put in.
    return [
        [token if token < 0 else tokens_of_row(ids[token // 100], 99)[token % 100] for token in one] for one in found
    ]


@settings(max_examples=30, deadline=None)
@given(
    first=st.lists(st.integers(0, 9), min_size=3, max_size=20),
    second=st.lists(st.integers(0, 9), min_size=3, max_size=20),
    form=forms,
    weights=st.sampled_from([(1.0, 1.0), (3.0, 1.0), (1.0, 2.0)]),
    options=st.sampled_from([{"num_samples": 30}, {"stopping": "first_exhausted"}, {"stopping": "all_exhausted"}]),
    ranks=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(0, 3)), min_size=2, max_size=3),
    seed=st.one_of(st.none(), st.just(5)),
    epoch=st.integers(0, 1),
)
def test_rows_of_a_blend_are_made_sequences_and_any_ranks_go_on_with_the_next_one(
    tmp_path_factory: pytest.TempPathFactory,
    first: list[int],
    second: list[int],
    form: Any,
    weights: tuple[float, float],
    options: dict[str, Any],
    ranks: list[tuple[int, int, int]],
    seed: int | None,
    epoch: int,
) -> None:
    directory, shares = tmp_path_factory.mktemp("s"), dict(zip("ab", weights, strict=True))
    write_both(directory, {"a": first, "b": second})
    # With num_samples one run is one epoch, however many of a stream that takes.
    epoch = 0 if "num_samples" in options else epoch
    ids = rows_of(directory, shares, epoch, **options)
    lengths = [first[one] if one < SECOND else second[one - SECOND] for one in ids]
    left = made_of(ids, lengths, form, seed, epoch)
    state, consumed = None, 0
    for dp, size, steps in ranks:
        runs = open_all(directory, shares, form, dp, state, batch_size=size, seed=seed, **options)
        steps = min(steps, len(left) // (dp * size))
        for run, micro_batches in zip(runs, dealt(left, dp, size), strict=True):
            run.set_epoch(epoch)
            found = all_written(itertools.islice(run, steps * size))
            assert found == list(itertools.chain(*micro_batches[:steps]))
        consumed += steps * dp * size
        left = left[steps * dp * size :]
        state = runs[-1].state_dict(consumed)
    (run,) = open_all(directory, shares, form, 1, state, seed=seed, **options)
    assert all_written(run) == left


WEIGHTS = {"a": 3.0, "b": 1.0}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("form", [Pack(9), Split(5), Pad(9)])
def test_pass_of_workers_over_a_live_blend_ends_where_it_does(tmp_path: Path, form: Any, workers: int) -> None:
    write_both(tmp_path, {"a": LENGTHS[:9], "b": LENGTHS[:9]}, end=False)
    (run,) = open_all(tmp_path, WEIGHTS, form, 1, max_wait=DEADLINE_S)
    loader = iter(loader_of(run, workers))
    found = list(next(loader))
    write_both(tmp_path, {"a": LENGTHS, "b": LENGTHS})
    found += [one for batch in loader for one in batch]
    ids = rows_of(tmp_path, WEIGHTS)
    assert found == made_of(ids, [LENGTHS[one % SECOND] for one in ids], form)
    assert run.stats().dropped == 0


def test_each_data_set_has_its_own_steps(tmp_path: Path) -> None:
    write_both(tmp_path, {"a": LENGTHS, "b": LENGTHS})
    odd = LazyShardedDataset(tmp_path / "a", steps=[Filter(lambda row: row["id"] % 2)])
    plain = LazyShardedDataset(tmp_path / "b", steps=[Map(number)])
    sequences = LazyShardedSequences(BlendedDataset([(odd, 1), (plain, 1)]), form=Pack(30), dp_rank=0, dp_size=1)
    ids = [one for pack in all_written(sequences) for one in pack]
    assert sorted(ids) == [*range(1, 13, 2), *range(SECOND, SECOND + 13)]
    assert sequences.stats().dropped == 7


def test_a_state_goes_on_with_the_same_blend_alone(tmp_path: Path) -> None:
    write_both(tmp_path, {"a": LENGTHS, "b": LENGTHS, "c": LENGTHS})
    (run,) = open_all(tmp_path, WEIGHTS, Pack(9), 1)
    state = run.state_dict(2)
    for weights, options, what in (
        ({"a": 1.0, "b": 1.0}, {}, "blend"),
        (WEIGHTS, {"num_samples": 20}, "blend"),
        ({"a": 3.0, "c": 1.0}, {}, "stream"),
    ):
        no = refusal_of(StateMismatch, f"with {what} = ", open_all, tmp_path, weights, Pack(9), 1, state, **options)
        assert no.field == what
    alone = LazyShardedSequences(tmp_path / "a", form=Pack(9), dp_rank=0, dp_size=1)
    raised(StateMismatch, alone.load_state_dict, state)
    raised(StateMismatch, run.load_state_dict, alone.state_dict(1))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    write_both(tmp_path, {"a": LENGTHS, "b": LENGTHS})
    produce(tmp_path / "unmeasured", 9, 3)

    def of(dataset: LazyShardedDataset, **options: Any) -> BlendedDataset:
        return BlendedDataset([(dataset, 1)], **options)

    def member(**options: Any) -> LazyShardedDataset:
        return LazyShardedDataset(tmp_path / "a", **options)

    def sequences(drawn: Any, *encode: Any, **options: Any) -> LazyShardedSequences:
        return LazyShardedSequences(drawn, *encode, form=Pack(9), dp_rank=0, dp_size=1, **options)

    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: sequences(of(member(), batch_size=2)), "batch_size=1"),
        (lambda: sequences(of(member(dp_rank=1, dp_size=2))), "without dp_rank and dp_size"),
        (lambda: sequences(of(member()), number), "settings of the data sets"),
        (lambda: sequences(of(member()), consumer="run"), "settings of the data sets"),
    ]
    for make, what in refused:
        refusal_of(ValueError, what, make)
    begun = of(member(dp_rank=0, dp_size=1))
    begun.load_state_dict(of(member(dp_rank=0, dp_size=1)).state_dict(3))
    refusal_of(ValueError, "it continues from a state", sequences, begun)
    used = of(member())
    assert len(used) == 13
    raised(RuntimeError, sequences, used)
    raised(LengthUnknown, sequences, blend(tmp_path, {"a": 1, "unmeasured": 1}))


# Which torchdata still calls, and torch has given up.

WINDOW = 2  # Chunks, of three rows: there are four windows, of six rows but for the last one

MORE = [*LENGTHS, *LENGTHS[:10]]


def drop_every_third(row: dict[str, Any], index: int) -> bool:
    assert row["id"] == index
    return index % 3 != 2


def negate(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": -row["id"], "seen": True}


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
def test_a_producer_that_deletes_and_a_run_that_commits_get_through(tmp_path: Path, workers: int) -> None:
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
