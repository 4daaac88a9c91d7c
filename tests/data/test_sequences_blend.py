"""`LazyShardedSequences` of a blend: its rows in its order, packed, cut or padded as those of one stream."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshard import (
    BlendedDataset,
    ChunkWriter,
    Filter,
    LazyShardedDataset,
    LazyShardedSequences,
    Map,
    Order,
    Pack,
    Pad,
    Split,
)
from lazyshard.errors import BadSample, CursorTaken, LengthUnknown, StateMismatch, WaitTimeout
from lazyshard.format.records import chunk_name
from lazyshard.stream import list_consumers, read_reading, read_retired
from lazyshard.stream.listing import retire
from tests.data import runs
from tests.data.runs import LENGTHS, all_written, chunks_before, expected, open_sequences, tokens_of_row, write_rows
from tests.data.test_stream_state import stateful
from tests.data.workers import DEADLINE_S
from tests.stream.streams import cursor_of, fork, produce, raised, reap, refusal_of, wait_until

Lists = dict[str, list[int]]

SECOND = 50  # What is added to the ids of rows of the second stream, so that no two are equal


def write_both(directory: Path, lists: Lists, *, end: bool = True) -> None:
    for name, lengths in lists.items():
        write_rows(directory / name, lengths, end=end)


def number(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"] + SECOND, "input_ids": [token + 100 * SECOND for token in row["input_ids"]]}


def blend(directory: Path, weights: dict[str, float], consumer: str | None = None, **options: Any) -> BlendedDataset:
    members = []
    for place, (name, weight) in enumerate(weights.items()):
        given: dict[str, Any] = {"order": Order(shuffle_window=place, seed=3), "steps": [Map(number)] if place else []}
        dataset = LazyShardedDataset(directory / name, consumer=consumer, max_wait=DEADLINE_S, **given)
        members.append((dataset, weight))
    return BlendedDataset(members, **options)


def rows_of(directory: Path, weights: dict[str, float], epoch: int = 0, **options: Any) -> list[int]:
    """The ids of the rows in the order in which one rank of the blend itself draws them."""
    drawn = blend(directory, weights, **options)
    drawn.set_epoch(epoch)
    return [row["id"] for batch in drawn.batches(epochs=epoch + 1, collate_fn=list) for row in batch]


def made_of(ids: list[int], lengths: list[int], form: Any, rows: int = 6, *order: Any) -> list[Any]:
    """What is made of rows that come in this order, by brute force: of those of a stream in which they stand so."""
    found = expected(lengths, form, rows, *order)
    if isinstance(form, Pack):
        return [[ids[place] for place in pack] for pack in found]
    # Its tokens tell place and offset, but for those that were put in.
    return [
        [token if token < 0 else tokens_of_row(ids[token // 100], 99)[token % 100] for token in one] for one in found
    ]


ENDS: list[dict[str, Any]] = [{"num_samples": 30}, {"stopping": "first_exhausted"}, {"stopping": "all_exhausted"}]
STAGES = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 3)), max_size=4)


@pytest.mark.parametrize("blended", [False, True])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rows_are_made_sequences_in_turn_and_any_ranks_go_on_with_the_next_one(
    tmp_path_factory: pytest.TempPathFactory, blended: bool, data: st.DataObject
) -> None:
    lists = st.lists(st.integers(0, 9), min_size=3 * blended, max_size=25)
    first, second, form = data.draw(lists, label="a"), data.draw(lists, label="b"), data.draw(runs.forms, label="form")
    shares = {"a": data.draw(st.sampled_from([1.0, 3.0])), "b": data.draw(st.sampled_from([1.0, 2.0]))}
    options = data.draw(st.sampled_from(ENDS), label="end") if blended else {}
    stages, window = data.draw(STAGES, label="stages"), data.draw(st.integers(1, 4), label="window")
    seed = data.draw(st.none() | st.integers(0, 3), label="seed")
    # With num_samples one run is one epoch, however many of a stream that takes.
    epoch = 0 if "num_samples" in options else data.draw(st.integers(0, 1), label="epoch")
    directory = tmp_path_factory.mktemp("s")
    write_both(directory, {"a": first, "b": second})
    ids = rows_of(directory, shares, epoch, **options) if blended else [*range(len(first))]
    lengths = [first[one] if one < SECOND else second[one - SECOND] for one in ids]

    def opened(*given: Any, batch_size: int) -> LazyShardedSequences:
        source: Any = blend(directory, shares, **options) if blended else directory / "a"
        run = open_sequences(source, form, *given, window=window, batch_size=batch_size, seed=seed)
        run.set_epoch(epoch)
        return run

    runs.check_any_ranks_go_on(opened, made_of(ids, lengths, form, 3 * window, seed, epoch), stages)


WEIGHTS = {"a": 3.0, "b": 1.0}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("form", [Pack(9), Split(5), Pad(9)])
def test_pass_of_workers_over_a_live_blend_ends_where_it_does(tmp_path: Path, form: Any, workers: int) -> None:
    write_both(tmp_path, {"a": LENGTHS[:9], "b": LENGTHS[:9]}, end=False)
    run = open_sequences(blend(tmp_path, WEIGHTS), form)
    loader = iter(runs.loader_of(run, workers))
    found = list(next(loader))
    write_both(tmp_path, {"a": LENGTHS, "b": LENGTHS})
    found += [one for batch in loader for one in batch]
    ids = rows_of(tmp_path, WEIGHTS)
    assert found == made_of(ids, [LENGTHS[one % SECOND] for one in ids], form)
    assert run.stats().dropped == 0


def test_a_state_goes_on_with_the_same_blend_alone(tmp_path: Path) -> None:
    write_both(tmp_path, {"a": LENGTHS, "b": LENGTHS, "c": LENGTHS})
    run = open_sequences(blend(tmp_path, WEIGHTS), Pack(9))
    state = run.state_dict(2)
    for weights, num_samples, what in (
        ({"a": 1.0, "b": 1.0}, None, "blend"),
        (WEIGHTS, 20, "blend"),
        ({"a": 3.0, "c": 1.0}, None, "stream"),
    ):
        other = blend(tmp_path, weights, num_samples=num_samples)
        assert raised(StateMismatch, open_sequences, other, Pack(9), state=state).field == what
    alone = open_sequences(tmp_path / "a", Pack(9))
    raised(StateMismatch, alone.load_state_dict, state)
    raised(StateMismatch, run.load_state_dict, alone.state_dict(1))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    write_both(tmp_path, {"a": LENGTHS, "b": LENGTHS})
    produce(tmp_path / "unmeasured", 9, 3)

    def of(batch_size: int = 1, **options: Any) -> BlendedDataset:
        return BlendedDataset([(LazyShardedDataset(tmp_path / "a", **options), 1)], batch_size=batch_size)

    alone = {"dp_rank": 0, "dp_size": 1}
    refused: list[tuple[BlendedDataset, dict[str, Any], str]] = [
        (of(2), {}, "batch_size=1"),
        (of(dp_rank=1, dp_size=2), {}, "without dp_rank and dp_size"),
        (of(), {"encode_fn": number}, "settings of the data sets"),
        (of(), {"consumer": "run"}, "settings of the data sets"),
        (runs.continued(of(**alone), of(**alone).state_dict(3)), {}, "it continues from a state"),
    ]
    for drawn, options, what in refused:
        refusal_of(ValueError, what, open_sequences, drawn, Pack(9), **options)
    used = of()
    assert len(used) == 13
    raised(RuntimeError, open_sequences, used, Pack(9))
    raised(LengthUnknown, open_sequences, blend(tmp_path, {"a": 1, "unmeasured": 1}), Pack(9))


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
    for dp, steps in ((2, 3), (3, 1), (1, 2), (2, 99)):
        ranks = [open_sequences(stream, form, rank, dp, state, window=WINDOW, consumer="run") for rank in range(dp)]
        steps = min(steps, (len(left) - consumed) // dp)
        for micro_batch in zip(*(all_written(itertools.islice(run, steps)) for run in ranks), strict=True):
            found += micro_batch
        consumed += steps * dp
        state = ranks[0].state_dict(consumed)
        assert [run.commit(consumed, last_epoch=True, take_over=True) for run in ranks] == [True] + [False] * (dp - 1)
        done.append(runs.free(stream))
    assert found == left[:consumed] and len(left) - consumed < 2
    # The last window begins with what a split leaves over of the one before.
    assert done == ([4, 4, 6, 6] if isinstance(form, Pack) else [0, 0, 0, 4])
    assert read_retired(stream) == done[-1]


def test_the_cursor_says_rows_and_keeps_what_older_states_and_other_epochs_need(tmp_path: Path) -> None:
    stream = write_rows(tmp_path / "s", MORE)
    sequences = open_sequences(stream, Pack(9), window=WINDOW, batch_size=2, consumer="run")
    early = sequences.state_dict(2)
    assert sequences.commit(8, last_epoch=True)
    cursor = cursor_of(stream)
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
    wrong = open_sequences(stream, Pack(8), window=WINDOW)
    keep = [wrong.state_dict(2)]
    refusal_of(StateMismatch, "size = 8, here it is 9", sequences.commit, 8, last_epoch=True, keep=keep)
    refusal_of(ValueError, "in steps of dp_size", sequences.commit, 7, last_epoch=True)
    refusal_of(ValueError, "consumer=NAME", wrong.commit, 1, last_epoch=True)
    other = open_sequences(stream, Pack(9), window=WINDOW, consumer="run")
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
    assert raised(WaitTimeout, lambda: list(first)).chunk == 5
    mark = read_reading(stream, "run")
    assert mark is not None and mark.needs_chunks == 6, "what it waited for"


def hold_back(directory: Path, total: int) -> None:
    """Publishes not one chunk further than the consumer needs, and deletes what is done with."""
    with ChunkWriter(directory, 4) as writer:

        def needed() -> bool:
            consumers = list_consumers(directory, writer.published_chunks)
            needs = max((one.reading.needs_chunks for one in consumers if one.reading), default=0)
            retire(directory, min((one.chunks_before for one in consumers), default=0), writer.published_chunks)
            return needs > writer.published_chunks

        for number in range(total):
            if writer.published_samples == number:
                wait_until(needed, "a consumer that needs more")
            length = 1 + number % 5
            writer.write({"id": number, "input_ids": [number] * length}, tokens=length)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_producer_that_deletes_and_a_run_that_commits_get_through(tmp_path: Path, workers: int) -> None:
    stream, total = tmp_path / "s", 96
    producer = fork(hold_back, stream, total)
    try:
        sequences = open_sequences(stream, Pack(9), batch_size=2, consumer="run")
        rows, consumed = [], 0
        for batch in runs.loader_of(sequences, workers, batch_size=2):
            rows += [row for pack in batch for row in pack]
            consumed += 2
            if consumed % 6 == 0:
                sequences.commit(consumed, last_epoch=True)
    finally:
        assert reap(producer) == 0
    assert len(rows) == len(set(rows)) and set(range(total)) - set(rows) <= set(range(total - 8, total)), "left over"
    assert 6 <= read_retired(stream) <= 22


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_go_through_steps_and_dropped_ones_are_left_out_of_their_pack(tmp_path: Path, workers: int) -> None:
    stream = write_rows(tmp_path / "s", LENGTHS)
    steps = [Filter(drop_every_third, with_indices=True), Map(negate)]
    sequences = open_sequences(stream, Pack(30), steps=steps)
    found = [pack for batch in runs.loader_of(sequences, workers) for pack in batch]
    assert found == [[-row for row in pack if row % 3 != 2] for pack in expected(LENGTHS, Pack(30), 6)]
    assert sequences.stats().dropped == len(LENGTHS) // 3


def test_a_split_takes_steps_that_keep_lengths_and_no_filter(tmp_path: Path) -> None:
    stream = write_rows(tmp_path / "s", LENGTHS)
    shifted = Map(lambda row: {"input_ids": [token + 1 for token in row["input_ids"]]})
    plain = [token for sequence in all_written(open_sequences(stream, Split(5))) for token in sequence]
    assert [t - 1 for one in all_written(open_sequences(stream, Split(5), steps=shifted)) for t in one] == plain
    for step, says in (
        (Filter(drop_every_third, with_indices=True), r"sample 2\): SkipSample: steps\[0\], filter_fn .* drops it"),
        (Map(lambda row: {"n": 1 // (row["id"] != 4)}), r"steps\[0\], map .*ZeroDivisionError"),
    ):
        refusal_of(BadSample, says, list, open_sequences(stream, Split(5), steps=step))


def test_a_commit_after_the_state_of_a_later_checkpoint_or_another_rank_reads_no_deleted_chunk(tmp_path: Path) -> None:
    stream = write_rows(tmp_path / "s", [4] * 60)
    run, other = (open_sequences(stream, Pack(4), rank, 2, window=1, consumer="run") for rank in range(2))
    assert run.commit(30, last_epoch=True)
    assert runs.free(stream) == 10 and not (stream / chunk_name(9)).exists()
    assert not other.commit(30, last_epoch=True)
    states = [run.state_dict(consumed) for consumed in (36, 54)]
    assert run.commit(36, last_epoch=True)
    assert runs.free(tmp_path / "s") == 12
    assert run.state_dict(54) == states[1]


def test_what_a_worker_needs_to_go_on_is_not_freed(tmp_path: Path) -> None:
    """Its state stands in the micro batch that it has handed out last, before those of the other workers."""
    run = open_sequences(write_rows(tmp_path / "s", [4] * 60), Pack(4), window=1, consumer="run")
    loader = stateful(run, 2, 1, collate_fn=all_written)
    batches = iter(loader)
    assert len(list(itertools.islice(batches, 6))) == 6
    state = loader.state_dict()
    assert run.commit(6, last_epoch=True)
    assert runs.free(tmp_path / "s") == 1
    again = open_sequences(tmp_path / "s", Pack(4), window=1)
    assert list(stateful(again, 2, 1, state, collate_fn=all_written)) == list(batches)
