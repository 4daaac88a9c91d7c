"""States of `LazyShardedSequences`: exact at every sequence, and with other ranks and workers."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lazyshard import BlendedDataset, LazyShardedSequences, LazyShardedStream, Pack, Pad, Split
from lazyshard.errors import StateInvalid, StateMismatch, VersionUnsupported
from lazyshard.format.state import WindowPlace
from lazyshard.plan.sequences import SplitSequence
from lazyshard.stream.sequences import PlannedWindow, SequenceWalk
from tests.data.runs import LENGTHS, all_written, dealt, expected, loader_of, open_rank, open_sequences, write_rows
from tests.data.test_stream_state import goes_on_at_every_batch, stateful
from tests.stream.streams import put_lengths, raised, refusal_of


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "s", LENGTHS)


def go_on(directory: Path, form: Any, state: Any, rank: int = 0, dp: int = 1, **options: Any) -> LazyShardedSequences:
    return open_sequences(directory, form, rank, dp, state, **options)


@pytest.mark.parametrize("at_end", ["drop", "complete"])
@pytest.mark.parametrize("form", [Pack(10), Split(size=10, eos=-1)])
def test_any_sequence_of_a_rank_can_be_the_next(stream: Path, form: Any, at_end: str) -> None:
    options: dict[str, Any] = {"batch_size": 2, "at_end": at_end}
    whole = all_written(open_sequences(stream, form, 1, 2, **options))
    run = open_sequences(stream, form, 1, 2, **options)
    states = [run.state_dict(), *(json.loads(json.dumps(run.state_dict())) for _ in run)]
    assert len(states) == len(whole) + 1
    assert run.state_dict() == states[-1]
    for count, state in enumerate(states):
        again = go_on(stream, form, state, 1, 2, **options)
        assert again.state_dict() == state
        assert all_written(again) == whole[count:]


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_loader_goes_on_at_every_batch(stream: Path, workers: int) -> None:
    def opened(state: Any = None) -> Any:
        sequences = open_sequences(stream, Pack(10), batch_size=2, at_end="complete", seed=1)
        return stateful(sequences, workers, state=state, collate_fn=all_written)

    # The last micro batch has one pack of one row, twice.
    whole = goes_on_at_every_batch(opened)
    assert sorted(itertools.chain(*itertools.chain(*whole))) == [*range(len(LENGTHS)), 12]


def test_other_workers_go_on_from_the_state_of_the_run(stream: Path) -> None:
    whole = dealt(expected(LENGTHS, Pack(10), 6), 1, 1)[0]
    first = open_sequences(stream, Pack(10))
    found = list(itertools.islice(loader_of(first, 2), 3))
    refusal_of(RuntimeError, "workers return the samples", first.state_dict)
    assert found + list(loader_of(go_on(stream, Pack(10), first.state_dict(3)), 3)) == whole


def test_a_state_sets_its_epoch_and_the_next_one_begins_anew(stream: Path) -> None:
    run = open_sequences(stream, Pack(10), seed=2)
    run.set_epoch(3)
    again = go_on(stream, Pack(10), run.state_dict(5), seed=2)
    assert (again.epoch, again.consumed) == (3, 5)
    assert all_written(again) == expected(LENGTHS, Pack(10), 6, 2, 3)[5:]
    again.set_epoch(4)
    assert again.consumed == 0
    # In running workers too, and in a pass that has begun, but has handed out nothing of it.
    loader = loader_of(again, 2, persistent_workers=True)
    for epoch in (4, 5):
        again.set_epoch(epoch)
        assert list(itertools.chain(*loader)) == expected(LENGTHS, Pack(10), 6, 2, epoch)
    walked = iter(run)
    run.set_epoch(4)
    next(walked)
    resumed = go_on(stream, Pack(10), run.state_dict(), seed=2)
    assert (resumed.epoch, all_written(resumed)) == (4, expected(LENGTHS, Pack(10), 6, 2, 4))


def test_a_completed_epoch_is_over_for_any_ranks(stream: Path) -> None:
    run = open_sequences(stream, Pad(9), batch_size=8, at_end="complete")
    assert len(list(run)) == 16
    state = run.state_dict(16)
    assert (state, state["consumed"]) == (run.state_dict(), 13)
    for dp in (1, 2):
        assert list(go_on(stream, Pad(9), state, 0, dp, at_end="complete")) == []


def test_a_run_goes_on_in_a_stream_that_has_grown(tmp_path: Path) -> None:
    form = Split(size=10, overlap=1)
    write_rows(tmp_path / "s", LENGTHS[:6], end=False)
    first = open_sequences(tmp_path / "s", form, max_wait=0)
    found = all_written(list(itertools.islice(first, 2)))
    states = [first.state_dict(), open_sequences(tmp_path / "s", form, max_wait=0).state_dict(2)]
    write_rows(tmp_path / "s", LENGTHS)
    for state in states:
        assert found + all_written(go_on(tmp_path / "s", form, state)) == expected(LENGTHS, form, 6)


def test_other_lengths_than_before_are_noticed(stream: Path) -> None:
    run = open_sequences(stream, Pack(10))
    within, before = run.state_dict(4), run.state_dict(3)
    for position in (5, 7):
        state = within | {"place": within["place"] | {"position": position}}
        assert raised(StateMismatch, go_on, stream, Pack(10), state).field == "lengths"
    put_lengths(stream, [1, 9, 9], first=2)
    assert raised(StateMismatch, go_on, stream, Pack(10), within).field == "lengths"
    changed = [*LENGTHS[:6], 1, 9, 9, *LENGTHS[9:]]
    assert all_written(go_on(stream, Pack(10), before)) == expected(changed, Pack(10), 6)[3:]


@pytest.mark.parametrize(
    ("field", "form", "options"),
    [
        ("size", Pack(11), {}),
        ("form", Pad(10), {}),
        ("form", Split(11, eos=1), {}),
        ("window", Pack(10), {"window": 3}),
        ("seed", Pack(10), {"seed": 0}),
        ("stream", Pack(10), {}),
    ],
)
def test_states_of_others_are_refused(tmp_path: Path, stream: Path, field: str, form: Any, options: Any) -> None:
    other = write_rows(tmp_path / "t", LENGTHS) if field == "stream" else stream
    refused = raised(StateMismatch, go_on, other, form, open_sequences(stream, Pack(10)).state_dict(3), **options)
    assert refused.field == field


def place(**fields: Any) -> dict[str, Any]:
    return {"place": {"window": 1, "before": 3, "position": 6, "offset": 0, "lengths": "0" * 16} | fields}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kind": "run"}, "kind"),
        ({"epoch": -1}, "epoch"),
        ({"consumed": 2}, "consumed"),
        ({"rule": {"size": [1]}}, "rule"),
        ({"stream": None}, "stream"),
        ({"place": {}}, "place.window"),
        (place(offset=-1), "place.offset"),
        (place(lengths="x"), "lengths"),
        ({"handed_out": 1, "ranks": 1, "batch_size": 2}, "handed_out"),
        ({"handed_out": 1, "ranks": 1, "batch_size": 1}, "handed_out"),
        ({"worker": 0, "workers": 2}, "workers"),
    ],
)
def test_what_is_no_state_is_refused(stream: Path, change: dict[str, Any], field: str) -> None:
    state = open_sequences(stream, Pack(10)).state_dict(4)
    assert str(raised(StateInvalid, go_on, stream, Pack(10), state | change).field).endswith(field)
    raised(VersionUnsupported, go_on, stream, Pack(10), state | {"format": 2})


def test_states_of_something_else_are_named(stream: Path) -> None:
    run = open_sequences(stream, Pack(10))
    refusal_of(StateInvalid, "LazyShardedSequences", open_rank, stream, state=run.state_dict(2))
    state = open_rank(stream).state_dict(2)
    loaders = [stateful(open_sequences(stream, Pack(10)), workers, 1, collate_fn=all_written) for workers in (0, 1)]
    for one in loaders:
        next(iter(one))
    for found, what in [
        (state, "of a LazyShardedDataset or LazyShardedStream"),
        (LazyShardedStream(open_rank(stream)).state_dict(2), "of a LazyShardedDataset or LazyShardedStream"),
        (state | {"handed_out": 1}, "of a LazyShardedStream or LazyShardedIterable"),
        (state | {"worker": 0, "workers": 1}, "of one DataLoader worker"),
        (BlendedDataset([(open_rank(stream), 1.0)]).state_dict(2), "of a blend"),
        *((one.state_dict(), "of a StatefulDataLoader") for one in loaders),
        ({}, "holds nothing"),
        (torch.nn.Linear(1, 1).state_dict(), "'weight' and 'bias'"),
        ({"step": 3, "data": run.state_dict(2)}, r"`checkpoint\['data'\]`"),
        ("last.pt", "a path"),
        (3, "found 3"),
    ]:
        refusal_of(StateInvalid, what, run.load_state_dict, found)
    assert run.consumed == 0


def test_consumed_counts_whole_micro_batches(tmp_path: Path, stream: Path) -> None:
    """Of seven sequences two ranks with batches of two draw four, or eight if these are completed."""
    drops, completes = (open_sequences(stream, Pack(10), 0, 2, batch_size=2, at_end=at) for at in ("drop", "complete"))
    begun = go_on(stream, Pack(10), drops.state_dict(4))
    three = write_rows(tmp_path / "three", [6, 7, 8])
    refusals: list[tuple[LazyShardedSequences, int, str]] = [
        (drops, -4, "at least 0, .*, got -4"),
        (drops, 3, "at least 0, .*, got 3"),
        (drops, 7, "at least 0, at most 4 of the 7 in this epoch, .*, got 7"),
        (drops, 8, "at least 0, at most 4 of the 7 in this epoch, .*, got 8"),
        (completes, 7, "at least 0, .*, got 7"),
        (completes, 12, "at least 0, at most 8 of the 7 in this epoch, .*, got 12"),
        (begun, 3, "at least 4, .*, got 3"),
        # All sequences of an epoch may be more than its whole micro batches.
        (open_sequences(three, Pack(10), 0, 2), 3, "at least 0, at most 2 of the 3 in this epoch, .*, got 3"),
    ]
    for run, consumed, says in refusals:
        refusal_of(ValueError, f"{says}$", run.state_dict, consumed)
    raised(TypeError, drops.state_dict, 1.5)  # type: ignore[arg-type]
    assert [drops.state_dict(consumed)["consumed"] for consumed in (4, 0, 4)] == [4, 0, 4]
    assert completes.state_dict(8)["consumed"] == 7
    assert open_sequences(three, Pack(10)).state_dict(3)["consumed"] == 3


@pytest.mark.parametrize(("form", "window_0"), [(Pack(10), 3), (Pad(9), 6), (Split(size=10, eos=-1), 3)])
def test_state_behind_the_end_is_refused_and_one_at_it_gives_nothing(stream: Path, form: Any, window_0: int) -> None:
    run = open_sequences(stream, form)
    total = len(list(run))
    at_end = run.state_dict()
    again = go_on(stream, form, at_end)
    assert (again.consumed, list(again)) == (total, [])
    for state in (at_end, run.state_dict(total - 1)):
        before = state["place"]["before"]
        bad = raised(StateMismatch, go_on, stream, form, state | {"consumed": 1000})
        reason = f"the rest of the state says {before}" if state["consumed"] == before else f"the epoch has {total}"
        assert (bad.field, bad.actual, bad.expected) == ("consumed", "1000", reason)
    # In the middle of the stream the window in which it stands tells.
    bad = raised(StateMismatch, go_on, stream, form, run.state_dict(1) | {"consumed": total})
    assert bad.expected == f"up to row 6 there are {window_0}"
    state = open_sequences(stream, Pack(10)).state_dict(3)
    further = state | {"consumed": 7, "place": state["place"] | {"before": 7}}
    assert raised(StateMismatch, go_on, stream, Pack(10), further).actual == "7"


def test_a_state_behind_the_end_of_a_live_stream_is_refused_when_that_is_known(tmp_path: Path) -> None:
    write_rows(tmp_path / "s", LENGTHS[:12], end=False)
    state = open_sequences(tmp_path / "s", Pack(10)).state_dict(6)
    assert (state["consumed"], state["place"]["window"]) == (6, 2)
    state["place"] |= {"window": 4, "position": 24}
    live = go_on(tmp_path / "s", Pack(10), state)
    write_rows(tmp_path / "s", LENGTHS)
    refusal_of(StateMismatch, r"row 24, .* ended with 13", lambda: list(live))
    refusal_of(StateMismatch, r"row 24, .* ended with 13", go_on, tmp_path / "s", Pack(10), state)


def test_place_of_a_micro_batch_is_known_that_is_made_of_more_windows_than_are_remembered() -> None:
    class Planner:
        def plan(self, place: WindowPlace, epoch: int) -> PlannedWindow:
            made = [SplitSequence((), False, False)] * ((place.window + 1) % 400 == 0)
            after = WindowPlace(place.window + 1, place.before + len(made), place.window + 1, 0)
            return PlannedWindow(place, made, after, 0)

    planner: Any = Planner()
    walk = SequenceWalk(planner, WindowPlace(), 0)
    walk.let_go(0)
    assert len(walk.sequences(0, 4)) == 4
    assert walk.place_of(0) == WindowPlace(399, 0, 399, 0)
