"""States of `LazyShardedSequences`: exact at every sequence, and with other ranks and workers."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader

from lazyshard import Pack, Pad, Split
from lazyshard.errors import StateInvalid, StateMismatch, VersionUnsupported
from tests.data.sequence_runs import all_written, dealt, expected, loader_of, open_sequences, write_rows, written
from tests.data.test_sequences import LENGTHS, forms
from tests.data.workers import DEADLINE_S
from tests.stream.lengths import put_lengths

# Which torchdata still calls, and torch has given up.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), max_size=25),
    form=forms,
    window=st.integers(1, 3),
    ranks=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 3)), min_size=2, max_size=4),
    seed=st.one_of(st.none(), st.just(5)),
)
def test_other_ranks_go_on_with_the_next_sequence(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    form: Any,
    window: int,
    ranks: list[tuple[int, int, int]],
    seed: int | None,
) -> None:
    directory = write_rows(tmp_path_factory.mktemp("s"), lengths)
    left = expected(lengths, form, 3 * window, seed)
    state, consumed = None, 0
    for dp, size, steps in ranks:
        runs = [open_sequences(directory, form, r, dp, batch_size=size, window=window, seed=seed) for r in range(dp)]
        for run in runs:
            if state is not None:
                run.load_state_dict(json.loads(json.dumps(state)))
            assert run.consumed == consumed
        steps = min(steps, len(left) // (dp * size))
        for run, micro_batches in zip(runs, dealt(left, dp, size), strict=True):
            found = list(map(written, itertools.islice(run, steps * size)))
            assert found == list(itertools.chain(*micro_batches[:steps]))
        consumed += steps * dp * size
        left = left[steps * dp * size :]
        states = [run.state_dict(consumed) for run in runs]
        assert states == [states[0]] * dp
        if steps:
            # What this process has counted by itself.
            assert [run.state_dict() for run in runs] == states
        state = states[0]


@pytest.mark.parametrize("at_end", ["drop", "complete"])
@pytest.mark.parametrize("form", [Pack(10), Split(size=10, eos=-1)])
def test_any_sequence_of_a_rank_can_be_the_next(tmp_path: Path, form: Any, at_end: str) -> None:
    directory = write_rows(tmp_path / "s", LENGTHS)
    options: dict[str, Any] = {"batch_size": 2, "at_end": at_end}
    whole = list(map(written, open_sequences(directory, form, 1, 2, **options)))
    run, states = open_sequences(directory, form, 1, 2, **options), []
    states.append(run.state_dict())
    for _ in run:
        states.append(json.loads(json.dumps(run.state_dict())))
    assert len(states) == len(whole) + 1
    assert run.state_dict() == states[-1]
    for count, state in enumerate(states):
        again = open_sequences(directory, form, 1, 2, **options)
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert list(map(written, again)) == whole[count:]


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_loader_goes_on_at_every_batch(tmp_path: Path, workers: int) -> None:
    directory = write_rows(tmp_path / "s", LENGTHS)
    waiting: dict[str, Any] = {"timeout": DEADLINE_S, "multiprocessing_context": "fork"} if workers else {}

    def stateful() -> Any:
        sequences = open_sequences(directory, Pack(10), 0, 1, batch_size=2, at_end="complete", seed=1)
        return StatefulDataLoader(sequences, batch_size=2, num_workers=workers, collate_fn=all_written, **waiting)

    batches = stateful()
    whole, states = [], []
    for batch in batches:
        whole.append(batch)
        torch.save(batches.state_dict(), tmp_path / "loader.pt")
        states.append(torch.load(tmp_path / "loader.pt", weights_only=True))
    # The last micro batch has one pack of one row, twice.
    assert sorted(itertools.chain(*itertools.chain(*whole))) == [*range(len(LENGTHS)), 12]
    for count, state in enumerate(states[:-1], 1):
        again = stateful()
        again.load_state_dict(state)
        assert list(again) == whole[count:]


def test_other_workers_go_on_from_the_state_of_the_run(tmp_path: Path) -> None:
    directory = write_rows(tmp_path / "s", LENGTHS)
    whole = dealt(expected(LENGTHS, Pack(10), 6), 1, 1)[0]
    first = open_sequences(directory, Pack(10))
    found = list(itertools.islice(loader_of(first, 2), 3))
    with pytest.raises(RuntimeError, match="workers hand the sequences out"):
        first.state_dict()
    again = open_sequences(directory, Pack(10))
    again.load_state_dict(first.state_dict(3))
    assert found + list(loader_of(again, 3)) == whole


def test_a_state_sets_its_epoch_and_the_next_one_begins_anew(tmp_path: Path) -> None:
    directory = write_rows(tmp_path / "s", LENGTHS)
    run = open_sequences(directory, Pack(10), seed=2)
    run.set_epoch(3)
    state = run.state_dict(5)
    again = open_sequences(directory, Pack(10), seed=2)
    again.load_state_dict(state)
    assert (again.epoch, again.consumed) == (3, 5)
    assert list(map(written, again)) == expected(LENGTHS, Pack(10), 6, 2, 3)[5:]
    again.set_epoch(4)
    assert again.consumed == 0
    assert list(map(written, again)) == expected(LENGTHS, Pack(10), 6, 2, 4)


def test_running_workers_go_on_with_the_epoch_that_is_set(tmp_path: Path) -> None:
    directory = write_rows(tmp_path / "s", LENGTHS)
    run = open_sequences(directory, Pack(10), seed=2)
    run.load_state_dict(run.state_dict(5))
    loader = loader_of(run, 2, persistent_workers=True)
    for epoch in (0, 1):
        run.set_epoch(epoch)
        whole = expected(LENGTHS, Pack(10), 6, 2, epoch)
        assert list(itertools.chain(*loader)) == (whole if epoch else whole[5:])


def test_a_completed_epoch_is_over_for_any_ranks(tmp_path: Path) -> None:
    directory = write_rows(tmp_path / "s", LENGTHS)
    run = open_sequences(directory, Pad(9), batch_size=8, at_end="complete")
    assert len(list(run)) == 16
    state = run.state_dict(16)
    assert (state, state["consumed"]) == (run.state_dict(), 13)
    for dp in (1, 2):
        again = open_sequences(directory, Pad(9), 0, dp, at_end="complete")
        again.load_state_dict(state)
        assert list(again) == []


def test_a_run_goes_on_in_a_stream_that_has_grown(tmp_path: Path) -> None:
    form = Split(size=10, overlap=1)
    write_rows(tmp_path / "s", LENGTHS[:6], end=False)
    first = open_sequences(tmp_path / "s", form, max_wait=0)
    found = [written(one) for one in itertools.islice(first, 2)]
    # Neither waits for what is not published.
    states = [first.state_dict(), open_sequences(tmp_path / "s", form, max_wait=0).state_dict(2)]
    write_rows(tmp_path / "s", LENGTHS)
    for state in states:
        again = open_sequences(tmp_path / "s", form)
        again.load_state_dict(state)
        assert found + list(map(written, again)) == expected(LENGTHS, form, 6)


def test_other_lengths_than_before_are_noticed(tmp_path: Path) -> None:
    directory = write_rows(tmp_path / "s", LENGTHS)
    run = open_sequences(directory, Pack(10))
    within, before = run.state_dict(4), run.state_dict(3)
    put_lengths(directory, [1, 9, 9], first=2)
    with pytest.raises(StateMismatch, match=r"rows from 6 on are not those .*begin an epoch") as refused:
        open_sequences(directory, Pack(10)).load_state_dict(within)
    assert refused.value.field == "lengths"
    # Nothing was made of these rows yet.
    again = open_sequences(directory, Pack(10))
    again.load_state_dict(before)
    changed = [*LENGTHS[:6], 1, 9, 9, *LENGTHS[9:]]
    assert list(map(written, again)) == expected(changed, Pack(10), 6)[3:]


def test_states_of_other_settings_are_refused(tmp_path: Path) -> None:
    directory = write_rows(tmp_path / "s", LENGTHS)
    state = open_sequences(directory, Pack(10)).state_dict(3)
    for field, form, options in [
        ("size", Pack(11), {}),
        ("form", Pad(10), {}),
        ("form", Split(11, eos=1), {}),
        ("window", Pack(10), {"window": 3}),
        ("seed", Pack(10), {"seed": 0}),
    ]:
        with pytest.raises(StateMismatch, match=f"saved with {field} = ") as refused:
            open_sequences(directory, form, **options).load_state_dict(state)
        assert refused.value.field == field
    with pytest.raises(StateMismatch, match="saved with stream = "):
        open_sequences(write_rows(tmp_path / "t", LENGTHS), Pack(10)).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 2}, "in format 2, this release of lazyshard reads format 1"),
        ({"kind": "run"}, "field 'kind': expected 'sequences', found 'run'"),
        ({"epoch": -1}, "field 'epoch'"),
        ({"consumed": 2}, "field 'consumed': expected an integer from 3"),
        ({"rule": {"size": [1]}}, "field 'rule'"),
        ({"stream": None}, "field 'stream'"),
        ({"place": {}}, "field 'place.window': expected a value"),
        ({"place": {"window": 1, "before": 3, "position": 6, "offset": -1, "lengths": "0" * 16}}, "place.offset"),
        ({"place": {"window": 1, "before": 3, "position": 6, "offset": 0, "lengths": "x"}}, "lengths"),
        ({"handed_out": 1, "ranks": 1, "batch_size": 2}, "it stands within a micro batch of 2 of 1 ranks"),
        ({"handed_out": 1, "ranks": 1, "batch_size": 1}, "expected an integer from 0 to 0"),
        ({"worker": 0, "workers": 2}, "expected that of a whole run, found that of DataLoader worker 0 of 2"),
    ],
)
def test_what_is_no_state_is_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    directory = write_rows(tmp_path / "s", LENGTHS)
    state = open_sequences(directory, Pack(10)).state_dict(4)
    with pytest.raises((StateInvalid, VersionUnsupported), match="the state to go on from: .*" + says):
        open_sequences(directory, Pack(10)).load_state_dict(state | change)


@pytest.mark.parametrize("position", [5, 7])
def test_a_place_that_no_window_begins_at_is_refused(tmp_path: Path, position: int) -> None:
    directory = write_rows(tmp_path / "s", LENGTHS)
    state = open_sequences(directory, Pack(10)).state_dict(4)
    state["place"]["position"] = position
    with pytest.raises(StateMismatch, match=f"rows from {position} on"):
        open_sequences(directory, Pack(10)).load_state_dict(state)


def test_consumed_counts_whole_micro_batches(tmp_path: Path) -> None:
    directory = write_rows(tmp_path / "s", LENGTHS)
    run = open_sequences(directory, Pack(10), 0, 2, batch_size=2)
    batches = "consumed counts whole micro batches of dp_size * batch_size = 2 * 2 sequences"
    most = ", which are 4 at the most: the epoch has 7 sequences, of which at_end='drop' leaves 3 over"
    for consumed, says in [
        (-4, f"{batches} from 0 on; got -4"),
        (3, f"{batches} from 0 on, so 0 or 4; got 3"),
        (7, f"{batches}{most}; got 7"),
        (8, f"{batches}{most}; got 8"),
    ]:
        with pytest.raises(ValueError, match=f": {re.escape(says)}$"):
            run.state_dict(consumed)
    whole = open_sequences(directory, Pack(10), 0, 2, batch_size=2, at_end="complete")
    for consumed, says in [
        (7, f"{batches} from 0 on, so 4 or 8; got 7"),
        (12, f"{batches}, which are 8 at the most: the epoch has 7 sequences; got 12"),
    ]:
        with pytest.raises(ValueError, match=f": {re.escape(says)}$"):
            whole.state_dict(consumed)
    assert whole.state_dict(8)["consumed"] == 7
    with pytest.raises(TypeError, match="consumed is a number of sequences"):
        run.state_dict(1.5)  # type: ignore[arg-type]
    # It may go back, too.
    assert [run.state_dict(consumed)["consumed"] for consumed in (4, 0, 4)] == [4, 0, 4]
    again = open_sequences(directory, Pack(10))
    again.load_state_dict(run.state_dict(4))
    with pytest.raises(
        ValueError, match="sequences from 4 on, what was trained when the loaded state was saved; got 3"
    ):
        again.state_dict(3)


def test_all_sequences_of_an_epoch_may_be_more_than_its_whole_micro_batches(tmp_path: Path) -> None:
    directory = write_rows(tmp_path / "s", [6, 7, 8])
    assert open_sequences(directory, Pack(10)).state_dict(3)["consumed"] == 3
    run = open_sequences(directory, Pack(10), 0, 2)
    says = r"2 \* 1 sequences, which are 2 at the most: the epoch has 3 sequences, of which at_end='drop' leaves 1 over"
    with pytest.raises(ValueError, match=says + "; got 3$"):
        run.state_dict(3)


@pytest.mark.parametrize(("form", "window_0"), [(Pack(10), 3), (Pad(9), 6), (Split(size=10, eos=-1), 3)])
def test_a_state_behind_the_end_is_refused_and_one_at_the_end_gives_nothing(
    tmp_path: Path, form: Any, window_0: int
) -> None:
    directory = write_rows(tmp_path / "s", LENGTHS)
    run = open_sequences(directory, form)
    total = len(list(run))
    at_end = run.state_dict()
    again = open_sequences(directory, form)
    again.load_state_dict(at_end)
    assert (again.consumed, list(again)) == (total, [])
    for state in (at_end, run.state_dict(total - 1)):
        before = state["place"]["before"]
        reason = f"all else in it says {before}" if state["consumed"] == before else f"the epoch has {total}"
        with pytest.raises(StateMismatch, match=f"behind 1000 sequences of its epoch, but {reason}: ") as bad:
            open_sequences(directory, form).load_state_dict(state | {"consumed": 1000})
        assert bad.value.field == "consumed"
    # In the middle of the stream the window in which it stands tells.
    with pytest.raises(StateMismatch, match=f"behind {total} .* but up to row 6 there are {window_0}: "):
        open_sequences(directory, form).load_state_dict(run.state_dict(1) | {"consumed": total})


def test_a_state_of_more_sequences_than_rows_is_refused(tmp_path: Path) -> None:
    run = open_sequences(write_rows(tmp_path / "s", LENGTHS), Pack(10))
    state = run.state_dict(3)
    state |= {"consumed": 7, "place": state["place"] | {"before": 7}}
    with pytest.raises(StateMismatch, match="behind 7 sequences of its epoch, but the 6 rows before make no more than"):
        run.load_state_dict(state)


def test_a_state_behind_the_end_of_a_live_stream_is_refused_when_that_is_known(tmp_path: Path) -> None:
    write_rows(tmp_path / "s", LENGTHS[:12], end=False)
    state = open_sequences(tmp_path / "s", Pack(10)).state_dict(6)
    # It stands before window 2, of which nothing is published.
    assert (state["consumed"], state["place"]["window"]) == (6, 2)
    state["place"] |= {"window": 4, "position": 24}
    live = open_sequences(tmp_path / "s", Pack(10))
    live.load_state_dict(state)
    write_rows(tmp_path / "s", LENGTHS)
    says = "behind 6 sequences of its epoch, but those that follow begin with row 24, and the stream has ended with 13"
    with pytest.raises(StateMismatch, match=says):
        list(live)
    with pytest.raises(StateMismatch, match=says):
        open_sequences(tmp_path / "s", Pack(10)).load_state_dict(state)


def test_a_pass_goes_on_in_its_epoch_when_another_is_set_before_its_first_sequence(tmp_path: Path) -> None:
    directory = write_rows(tmp_path / "s", LENGTHS)
    sequences = open_sequences(directory, Pack(10))
    walked = iter(sequences)
    sequences.set_epoch(1)
    next(walked)
    resumed = open_sequences(directory, Pack(10))
    resumed.load_state_dict(sequences.state_dict())
    begun = open_sequences(directory, Pack(10))
    begun.set_epoch(1)
    assert resumed.epoch == 1
    assert [written(one) for one in resumed] == [written(one) for one in begun]
