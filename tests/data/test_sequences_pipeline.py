"""Sequences of data sets and blends of any order: with cursors, of a YAML file, without what is skipped, and traced."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lazyshard
from lazyshard import BlendedDataset, EncodeCache, LazyShardedDataset, LazyShardedSequences, Order, Pack, Pad, Split
from lazyshard.errors import ConfigInvalid, StateMismatch
from lazyshard.inspection.auditing import Audit, audit
from lazyshard.inspection.tracing import facts_of
from lazyshard.inspection.tracing_sequences import SequenceTracing, traced
from lazyshard.inspection.tracing_states import read_state
from lazyshard.stream import read_retired
from lazyshard.stream.stream import open_now
from tests.cli.commands import lazyshard as cli
from tests.data.runs import LENGTHS, STAGE, all_written, expected, forms, free, open_rank, open_sequences, write_rows
from tests.data.test_sequences_blend import MORE, SECOND, blend, write_both
from tests.data.test_stream_state import stateful
from tests.stream.streams import cursor_of, raised, refusal_of

WEIGHTS = {"a": 2.0, "b": 1.0}


def ids_of(form: Any, sequence: Any) -> list[int]:
    if isinstance(form, Pack):
        return [row["id"] for row in sequence]
    kept = sequence["input_ids"][sequence.get("attention_mask", sequence["input_ids"] * 0 + 1) == 1]
    return [token // 100 for token in kept.tolist() if token >= 0]


@pytest.mark.parametrize("form", [Pack(9), Split(5), Pad(9)])
def test_cursors_of_a_blend_free_what_no_rank_needs_and_each_row_comes_once(tmp_path: Path, form: Any) -> None:
    lengths = {"a": [3, 5, 4] * 12, "b": [2, 6] * 9}
    write_both(tmp_path, lengths)
    state, consumed, met = None, 0, Counter[int]()
    freed = []
    for dp, steps in ((2, 4), (3, 2), (1, 4), (2, 99)):
        blends = [blend(tmp_path, WEIGHTS, "run") for _ in range(dp)]
        runs = [open_sequences(one, form, rank, dp, state, window=1) for rank, one in enumerate(blends)]
        drawn = [list(itertools.islice(run, steps)) for run in runs]
        met.update(one for sequences in drawn for sequence in sequences for one in ids_of(form, sequence))
        consumed += dp * len(drawn[0])
        state = runs[0].state_dict(consumed)
        assert [run.commit(consumed, last_epoch=True, take_over=True) for run in runs] == [True] + [False] * (dp - 1)
        for name in lengths:
            cursor = cursor_of(tmp_path / name)
            assert cursor.state is None and cursor.plan == {"dp_size": dp, "batch_size": 1}
            assert sum(share.weight for share in cursor.blend) == pytest.approx(1)
            free(tmp_path / name)
        freed.append((read_retired(tmp_path / "a"), read_retired(tmp_path / "b")))
    assert freed[-1] >= (9, 2) and freed == sorted(freed)
    each = {SECOND + n if name == "b" else n: size for name, own in lengths.items() for n, size in enumerate(own)}
    most = {row: 1 if isinstance(form, Pack) else size for row, size in each.items()}
    assert all(count <= most[row] for row, count in met.items())
    assert sum(met.values()) >= 54 - 9 if isinstance(form, Pack) else sum(met.values()) >= 200 - 20


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=4, max_size=25),
    forms,
    st.integers(1, 3),
    st.none() | st.just(5),
    st.lists(st.tuples(STAGE, st.integers(0, 20), st.integers(0, 6)), min_size=1, max_size=3),
)
def test_what_is_skipped_comes_no_more_and_all_else_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], form: Any, window: int, seed: int | None, parts: Any
) -> None:
    directory = write_rows(tmp_path_factory.mktemp("s"), lengths)
    met, out, state, consumed = Counter[int](), set[int](), None, 0
    for (dp, size, steps), first, count in [*parts, ((1, 1, 10**6), 0, 0)]:
        options = {"batch_size": size, "window": window, "seed": seed}
        runs = [open_sequences(directory, form, rank, dp, state, **options) for rank in range(dp)]
        for run in runs:
            if count:
                run.skip(samples=[(first, first + count)])
        out |= set(range(first, first + count))
        drawn = [list(itertools.islice(run, steps * size)) for run in runs]
        fresh = [one for sequences in drawn for sequence in sequences for one in ids_of(form, sequence)]
        assert not out & set(fresh), "skipped rows are in no sequence to come"
        met.update(fresh)
        consumed += dp * len(drawn[0])
        states = [run.state_dict(consumed) for run in runs]
        assert states == [states[0]] * dp
        state = json.loads(json.dumps(states[0]))
    for row, length in enumerate(lengths):
        whole = int(length > 0) if isinstance(form, Pack) else length
        if row not in out:
            assert met[row] >= whole and (met[row] == whole or getattr(form, "overlap", False))
        else:
            assert met[row] <= whole or getattr(form, "overlap", False)


def test_next_steps_are_passed_over(tmp_path: Path) -> None:
    stream, options = write_rows(tmp_path / "s", MORE), {"batch_size": 1, "micro_batches_per_step": 2}
    run = open_sequences(stream, Pack(9), 0, 1, **options)
    left = expected(MORE, Pack(9), 6)
    state = run.state_dict(2)
    for dp in (1, 2):
        again = open_sequences(stream, Pack(9), 0, dp, state, **options)
        again.skip(steps=[(2, 4)])
        assert again.consumed == 2 + 2 * 2 * dp
        assert all_written(again) == left[again.consumed :: dp][: len(left[again.consumed :]) // dp]
        refusal_of(RuntimeError, "already in use", again.skip, samples=[(0, 1)])
    again = open_sequences(stream, Pack(9), state=state, **options)
    refusal_of(ValueError, "from the next one on, 2", again.skip, steps=[(4, 5)])
    refusal_of(ValueError, "FIRST < STOP", again.skip, samples=[(3, 3)])


def test_samples_of_a_blend_are_skipped_on_its_data_sets(tmp_path: Path) -> None:
    write_both(tmp_path, {"a": LENGTHS, "b": LENGTHS})

    def run(*, skip: bool) -> LazyShardedSequences:
        blended = blend(tmp_path, WEIGHTS, stopping="all_exhausted")
        if skip:
            blended.datasets[1].skip(samples=[(2, 11)])
        return open_sequences(blended, Pack(9))

    found = {one for pack in all_written(run(skip=True)) for one in pack}
    assert found & set(range(SECOND, 99)) == {SECOND, SECOND + 1, SECOND + 11, SECOND + 12}
    refusal_of(ValueError, "skip them on the data sets", run(skip=False).skip, samples=[(0, 1)])
    refusal_of(StateMismatch, "with blend = ", run(skip=False).load_state_dict, run(skip=True).state_dict(1))


@pytest.mark.parametrize(
    "options", [{"num_samples": 30}, {"max_total_samples": 10}, {"order": Order(shuffle_window=2)}]
)
def test_a_data_set_gives_its_rows_in_its_own_order(tmp_path: Path, options: dict[str, Any]) -> None:
    stream = write_rows(tmp_path / "s", LENGTHS)
    plain, other, same = (open_rank(stream, **options) for _ in range(3))
    rows = [row["id"] for batch in plain.batches(collate_fn=list) for row in batch]
    assert len(rows) == options.get("num_samples", options.get("max_total_samples", 13))
    run = open_sequences(other, Pad(9), window=1)
    assert [one[0] // 100 for one in all_written(run)] == [row for row in rows if LENGTHS[row]]
    assert all_written(open_sequences(same, Pad(9), state=run.state_dict(7), window=1)) == all_written(run)[7:]
    raised(StateMismatch, open_sequences, stream, Pad(9), state=run.state_dict(7), window=1)


def test_a_data_set_in_its_plain_order_is_the_same_as_its_directory_and_its_cache_is_used(tmp_path: Path) -> None:
    write_rows(tmp_path / "s", LENGTHS)
    cache = EncodeCache(tmp_path / "cache", fingerprint={"version": 1})
    run = open_sequences(LazyShardedDataset(tmp_path / "s", dict, cache=cache), Pack(9))
    assert all_written(run)[3:] == all_written(open_sequences(tmp_path / "s", Pack(9), state=run.state_dict(3)))
    assert len(all_written(run)) == 7
    assert run.stats()[5:7] == (len(LENGTHS), len(LENGTHS))


SEQUENCES: dict[str, Any] = {"form": "pack", "size": 9, "window": 2}


def config(tmp_path: Path, names: str, **more: Any) -> dict[str, Any]:
    paths = [{"path": str(tmp_path / name), "weight": weight} for name, weight in zip(names, (2.0, 1.0), strict=False)]
    return {"version": 1, "datasets": paths, "sequences": SEQUENCES} | more


@pytest.mark.parametrize("names", ["a", "ab"])
def test_a_file_gives_the_same_sequences_as_python(tmp_path: Path, names: str) -> None:
    for name in names:
        write_rows(tmp_path / name, MORE)
    loaded = lazyshard.load(config(tmp_path, names, micro_batches_per_step=2, consumer="run"), dp_rank=0, dp_size=2)
    found = [all_written(batch) for batch in loaded.loader]
    source: Any = LazyShardedDataset(tmp_path / "a")
    if names == "ab":
        source = BlendedDataset([(source, 2.0), (LazyShardedDataset(tmp_path / "b"), 1.0)])
    run = open_sequences(source, Pack(9), 0, 2, micro_batches_per_step=2)
    assert [one for batch in found for one in batch] == all_written(run)
    state = loaded.state_dict(4)
    assert state["parts"][0]["draws_per_step"] == 2
    assert loaded.commit(4, last_epoch=True)
    again = lazyshard.load(config(tmp_path, names, micro_batches_per_step=2), dp_rank=0, dp_size=2)
    again.load_state_dict(state)
    assert again.consumed == 4 and [all_written(batch) for batch in again.loader] == found[2:]
    assert again.stats()[0].dropped == 0 and again.stream is not None


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"sequences": SEQUENCES | {"form": "packs"}}, "sequences.form"),
        ({"sequences": SEQUENCES | {"eos": 1}}, "sequences.eos"),
        ({"sequences": SEQUENCES | {"form": "split", "token": 1}}, "sequences.token"),
        ({"dataloader": {"form": "map"}}, "dataloader"),
        ({"dataloader": {"at_end": "loop"}}, "dataloader"),
    ],
)
def test_mistakes_of_a_file_are_named(tmp_path: Path, change: dict[str, Any], path: str) -> None:
    refusal_of(ConfigInvalid, rf"\n  {path}: ", lazyshard.load, config(tmp_path, "a", **change))


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    folder = folder / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "lazyshard.json").write_text(json.dumps({"state": state, "step": step}))
    return folder


def tracing_of(stream: Path, checkpoint: Path) -> SequenceTracing:
    found = traced(read_state(checkpoint, stream), facts_of(open_now(stream)), str(stream))
    assert isinstance(found, SequenceTracing)
    return found


def fates(stream: Path, checkpoint: Path, *rows: int) -> list[str]:
    """What became of each row, where that is one thing."""
    tracing = tracing_of(stream, checkpoint)
    return [fate.became for row in rows for (fate,) in [tracing.fates(row)]]


def audit_of(stream: Path, *checkpoints: Path) -> Audit:
    states = [read_state(checkpoint, stream) for checkpoint in checkpoints]
    return audit(open_now(stream), facts_of(open_now(stream)), states, states[-1])


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_trace_and_audit_tell_what_was_trained(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=3, max_size=25), label="lengths")
    form, seed = data.draw(forms, label="form"), data.draw(st.none() | st.just(5), label="seed")
    at_end, blended = data.draw(st.sampled_from(["drop", "complete"])), data.draw(st.booleans(), label="blended")
    one_or_two = st.integers(1, 2)
    part = st.tuples(st.integers(1, 3), one_or_two, one_or_two, st.integers(1, 3), st.booleans())
    parts = data.draw(st.lists(part, min_size=1, max_size=3), label="parts")
    directory = tmp_path_factory.mktemp("s")
    write_both(directory, {"a": lengths, "b": lengths})
    trained: dict[tuple[int, int], list[int]] = {}
    state, consumed, step, skipped = None, 0, 0, False
    for dp, size, per_step, steps, skips in parts:
        options = {"seed": seed, "at_end": at_end, "micro_batches_per_step": per_step, "batch_size": size}
        runs = []
        for rank in range(dp):
            source: Any = blend(directory, WEIGHTS, num_samples=2 * len(lengths)) if blended else directory / "a"
            run = open_sequences(source, form, rank, dp, state, **options)
            if skips and not blended:
                run.skip(samples=[(1, 3)])
                skipped = True
            runs.append(run)
        drawn = [list(itertools.islice(run, steps * size * per_step)) for run in runs]
        taken = len(drawn[0]) // (size * per_step)
        for rank, sequences in enumerate(drawn):
            for number, sequence in enumerate(sequences[: taken * size * per_step]):
                own = [row for row in ids_of(form, sequence) if row < SECOND]
                trained.setdefault((step + number // (size * per_step), rank), []).extend(own)
        consumed += taken * dp * size * per_step
        step += taken
        if taken or state is None:
            state = runs[0].state_dict(consumed)
        consumed = state["consumed"]
    assert state is not None
    stream, checkpoint = directory / "a", save(directory / "out", step, state)
    tracing = tracing_of(stream, checkpoint)
    assert tracing.steps.trained == step
    found: dict[tuple[int, Any], set[int]] = {key: set() for key in trained}
    for number in range(step):
        for fate in tracing.at_step(number):
            assert fate.became == "trained"
            found[number, fate.rank].add(fate.sample)
    assert found == {key: set(rows) for key, rows in trained.items()}
    for row in range(len(lengths)):
        told = {(fate.step, fate.rank) for fate in tracing.fates(row) if fate.became == "trained"}
        assert told == {key for key, rows in trained.items() if row in rows}
    result = audit_of(stream, checkpoint)
    assert result.proven, result
    assert skipped or not any(one.skipped.samples for one in result.epochs) or 0 in lengths


def test_an_audit_finds_what_is_wrong(tmp_path: Path) -> None:
    stream = write_rows(tmp_path / "s", MORE)
    run = open_sequences(stream, Pack(9), 0, 1, micro_batches_per_step=1)
    early, state = run.state_dict(4), run.state_dict(9)
    files = [save(tmp_path / "out", 4, early), save(tmp_path / "out", 9, state)]
    result = audit_of(stream, *files)
    assert result.proven and result.ok
    assert [one.relation for one in result.states] == ["on the course", "audited"]
    (epoch,) = result.epochs
    assert epoch.trained + epoch.to_come.samples == len(MORE)
    again = open_sequences(stream, Pack(9), 0, 2, early, micro_batches_per_step=1)
    result = audit_of(stream, *files, save(tmp_path / "out", 7, again.state_dict(10)))
    assert [one.relation for one in result.states] == ["on the course", "abandoned", "audited"]
    assert result.states[1].trained == 5 and result.states[1].again
    # What the lengths make says otherwise.
    broken = state | {"place": state["place"] | {"before": state["place"]["before"] - 1}}
    refusal_of(StateMismatch, "of other sequences", audit_of, stream, save(tmp_path / "other", 9, broken))


def test_chunks_that_are_deleted_are_told(tmp_path: Path) -> None:
    stream = write_rows(tmp_path / "s", MORE)
    run = open_sequences(stream, Pack(9), micro_batches_per_step=1, consumer="run")
    early, state = save(tmp_path / "out", 2, run.state_dict(2)), save(tmp_path / "out", 9, run.state_dict(9))
    run.commit(9, last_epoch=True)
    assert free(stream) == 4
    result = audit_of(stream, early, state)
    assert result.proven and [one.kind for one in result.remarks] == ["note", "note"]
    assert fates(stream, state, 0) == ["before"]
    with pytest.raises(StateMismatch, match="step 2 took sequences of rows whose chunks are deleted"):
        list(tracing_of(stream, state).at_step(1))
    # Nor does a later skip tell of such a row.
    run = open_sequences(stream, Pack(9), state=run.state_dict(9), micro_batches_per_step=1)
    run.skip(samples=[(0, 1), (20, 21)])
    assert fates(stream, save(tmp_path / "skipped", 9, run.state_dict(9)), 0, 20) == ["before", "skipped"]


def test_rows_of_a_stream_whose_first_window_is_not_published_are_to_come(tmp_path: Path) -> None:
    stream = write_rows(tmp_path / "s", [8, 6, 3], end=False)
    run = open_sequences(stream, Split(13), micro_batches_per_step=1, max_wait=0)
    checkpoint = save(tmp_path / "out", 0, run.state_dict(0))
    result = audit_of(stream, checkpoint)
    (epoch,) = result.epochs
    assert result.proven and epoch.to_come.ranges == ((0, 3),)
    assert fates(stream, checkpoint, 0) == ["to come"]


@pytest.mark.parametrize("seed", [None, 5])
def test_a_window_that_the_state_cuts_is_counted_before_the_next_one_is_published(tmp_path: Path, seed: Any) -> None:
    stream = write_rows(tmp_path / "s", [4] * 6, end=False)
    run = open_sequences(stream, Split(9), seed=seed, window=1, micro_batches_per_step=1, consumer="run", max_wait=0)
    assert len(all_written(itertools.islice(run, 2))) == 2
    checkpoint = save(tmp_path / "out", 2, run.state_dict(2))
    for deleted in (0, 1):
        (epoch,) = audit_of(stream, checkpoint).epochs
        assert epoch.proven and (epoch.trained, epoch.to_come.ranges) == (4, ((4, 6),)), deleted
        run.commit(2, last_epoch=True)
        assert free(stream) == 1


BEFORE, LAST, NONE = ("before", None), ("trained", 2), ("in no sequence", None)


@pytest.mark.parametrize(
    ("lengths", "form", "last", "told", "skipped"),
    [
        # Of the second window row 3 is cut, and row 5 whole, for a last sequence; row 4 has no token.
        ([6, 6, 6, 2, 0, 4], Split(9), [300, 301, 500, 501, 502, 503], [*[BEFORE] * 3, LAST, NONE, LAST], ((4, 5),)),
        # Row 4 begins in a window whose chunks are needed no more, and counts once.
        ([4, 5, 4, 4, 5, 3], Split(4, overlap=1), [403, 404, 500, 501, 502], [BEFORE] * 6, ()),
    ],
)
def test_rows_that_a_window_leaves_over_are_told_where_chunks_before_are_deleted(
    tmp_path: Path, lengths: list[int], form: Split, last: list[int], told: list[Any], skipped: Any
) -> None:
    stream = write_rows(tmp_path / "s", lengths)
    run = open_sequences(stream, form, window=1, micro_batches_per_step=1, consumer="run")
    drawn = all_written(run)
    assert drawn[-1] == last
    checkpoint = save(tmp_path / "out", len(drawn), run.state_dict(len(drawn)))
    run.commit(len(drawn), last_epoch=True)
    assert free(stream) == 1
    tracing, result = tracing_of(stream, checkpoint), audit_of(stream, checkpoint)
    assert [[(fate.became, fate.step) for fate in tracing.fates(row)] for row in range(6)] == [[one] for one in told]
    (epoch,) = result.epochs
    assert result.proven and not epoch.left_over.samples
    assert (epoch.trained, epoch.skipped.ranges) == (6 - len(skipped), skipped)


def test_of_packs_that_were_taken_apart_with_deleted_ones_no_rank_is_told(tmp_path: Path) -> None:
    stream, options = write_rows(tmp_path / "s", [5, 4, 9, 9]), {"at_end": "complete", "batch_size": 2, "window": 1}
    runs = [open_sequences(stream, Pack(9), rank, 2, **options, consumer="run") for rank in range(2)]
    assert [all_written(run) for run in runs] == [[[0], [1]], [[2], [3]]]
    checkpoint = save(tmp_path / "out", 1, runs[0].state_dict(4))
    assert [(fate.rank, fate.position) for fate in tracing_of(stream, checkpoint).fates(3)] == [(1, 1)]
    runs[0].commit(4, last_epoch=True)
    assert free(stream) == 1
    assert fates(stream, checkpoint, 3) == ["before"]
    assert audit_of(stream, checkpoint).epochs[0].trained == 4


@pytest.mark.parametrize("seed", [None, 5])
def test_rows_of_a_begun_window_are_told_in_the_order_of_cuts(tmp_path: Path, seed: int | None) -> None:
    stream = write_rows(tmp_path / "s", MORE, end=False)
    run = open_sequences(stream, Split(13), seed=seed, window=1, micro_batches_per_step=1, consumer="run", max_wait=0)
    places = range(0, 6, 2)
    drawn = [[token // 100 for token in one] for one in all_written(itertools.islice(run, 6))]
    files = [save(tmp_path / "out", place, run.state_dict(place)) for place in places[1:]]
    result = audit_of(stream, *files)
    (epoch,) = result.epochs
    assert result.proven and not epoch.left_over.samples
    assert epoch.trained + epoch.to_come.samples == len(MORE) // 3 * 3
    tracing = tracing_of(stream, files[-1])
    assert not any(fate.became == "in no sequence" for row in range(len(MORE)) for fate in tracing.fates(row))
    # Of chunks that are deleted the state alone says that they were trained.
    run.commit(4, last_epoch=True)
    assert free(stream)
    tracing = tracing_of(stream, files[-1])
    told = {row: {fate.became for fate in tracing.fates(row)} for row in range(len(MORE) // 3 * 3)}
    for row, became in told.items():
        over = {row in one for one in drawn[:4]} == {True, False} and row not in {*itertools.chain(*drawn[4:])}
        assert became & {"trained", "before"} or not over, (row, became)
        assert "in no sequence" not in became
    assert audit_of(stream, files[-1]).epochs[0].trained == epoch.trained


def test_what_a_data_set_skips_itself_and_rows_behind_the_end_are_told_so(tmp_path: Path) -> None:
    write_rows(tmp_path / "s", LENGTHS)
    dataset = LazyShardedDataset(tmp_path / "s", num_samples=8, dp_rank=0, dp_size=1)
    dataset.skip(samples=[(2, 4)])
    run = open_sequences(dataset, Pack(9), micro_batches_per_step=1)
    count = len(all_written(run))
    checkpoint = save(tmp_path / "out", count, run.state_dict(count))
    became = ["trained"] * 2 + ["skipped"] * 2 + ["trained"] * 6 + ["left over"] * 3
    assert fates(tmp_path / "s", checkpoint, *range(13)) == became
    result = audit_of(tmp_path / "s", checkpoint)
    (epoch,) = result.epochs
    assert result.proven and epoch.skipped.ranges == ((2, 4),) and epoch.left_over.ranges == ((10, 13),)


def test_a_data_set_gives_the_rows_of_one_run_alone(tmp_path: Path) -> None:
    write_rows(tmp_path / "s", LENGTHS)
    dataset = LazyShardedDataset(tmp_path / "s")
    open_sequences(dataset, Pack(9), 0, 2)
    raised(RuntimeError, open_sequences, dataset, Pack(9), 1, 2)
    begun = open_rank(tmp_path / "s", state=open_rank(tmp_path / "s").state_dict(4))
    begun.skip(samples=[(6, 7)])
    refusal_of(ValueError, "continues from a state", open_sequences, begun, Pack(9))


@pytest.mark.parametrize("out", [{"samples": [(5, 7)]}, {"steps": [(1, 2)]}])
def test_a_state_that_is_loaded_behind_a_skip_does_not_undo_it_unseen(tmp_path: Path, out: dict[str, Any]) -> None:
    stream, options = write_rows(tmp_path / "s", MORE), {"micro_batches_per_step": 1}
    state = open_sequences(stream, Pack(9), **options).state_dict(2)
    for workers in (0, 1):
        run = open_sequences(stream, Pack(9), **options)
        saved = stateful(open_sequences(stream, Pack(9)), workers, 1, collate_fn=list)
        next(iter(saved))
        run.skip(**out)
        loader = stateful(run, workers, 1, saved.state_dict(), collate_fn=list)
        refusal_of(RuntimeError, "does not include what `skip` excluded", list, loader)
    refusal_of(RuntimeError, "does not include what `skip` excluded", run.load_state_dict, state)
    again = open_sequences(stream, Pack(9), state=state, **options)
    again.skip(samples=[(5, 7)])
    again.load_state_dict(again.state_dict(2))


def test_the_commands_tell_of_sequences(tmp_path: Path) -> None:
    write_both(tmp_path, {"a": LENGTHS, "b": LENGTHS})
    run = open_sequences(blend(tmp_path, WEIGHTS), Pack(9), 0, 2, micro_batches_per_step=1)
    trace = ("trace", tmp_path / "a", "--state", save(tmp_path / "out", 2, run.state_dict(4)), "--sample", "0")
    shown = cli(*trace)
    assert shown.returncode == 0 and "trained at step" in shown.stdout, shown
    shown = cli("audit", tmp_path / "a", tmp_path / "out")
    assert shown.returncode == 0 and "4 sequences in 2 steps" in shown.stdout, shown
    # Of a state that other streams give rows to these must be there, too.
    (tmp_path / "b").rename(tmp_path / "c")
    shown = cli(*trace)
    assert shown.returncode == 5 and "its sequences cannot be made again" in shown.stderr, shown
    write_rows(tmp_path / "b", LENGTHS)
    shown = cli(*trace)
    assert shown.returncode == 5 and "holds stream" in shown.stderr, shown
