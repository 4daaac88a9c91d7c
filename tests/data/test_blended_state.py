"""A run over a blend that is stopped and continued: other ranks, other weights, other streams; nothing twice."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazyshard.errors import CursorTaken, StateInvalid, StateMismatch, VersionUnsupported
from lazyshard.format.state import BlendShare
from tests.data.runs import State, Stream, blend, chunks_before, take, write
from tests.data.workers import ids
from tests.format.records import with_field
from tests.stream.streams import cursor_of, raised, refusal_of

STREAMS = (Stream("a", 264, 12), Stream("b", 250, 10), Stream("c", 271, 9))
"""Longer than what five stages of ten positions of four ranks draw."""


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("blends")
    for stream in STREAMS:
        write(directory, stream)
    return directory


def train(
    directory: Path, weights: dict[str, float], dp: int, positions: int, state: State | None, **options: Any
) -> tuple[list[list[str]], State]:
    options = {"num_samples": 10_000, "batch_size": 2, **options}
    ranks = [blend(directory, weights, rank, dp, state, **options) for rank in range(dp)]
    read = [take(one, positions, 2) for one in ranks]
    states = [one.state_dict(one.consumed + dp * positions) for one in ranks]
    assert states[1:] == states[:-1], "ranks disagree on the state"
    return read, json.loads(json.dumps(states[0]))


WEIGHTS = st.dictionaries(st.sampled_from("abc"), st.integers(1, 5), min_size=1)
STAGE = st.tuples(st.integers(1, 4), WEIGHTS, st.integers(0, 5).map(lambda batches: 2 * batches))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(STAGE, min_size=1, max_size=5), st.sampled_from([0, 1, 3]))
def test_every_stream_goes_on(streams: Path, stages: list[tuple[int, dict[str, float], int]], window: int) -> None:
    state: State | None = None
    drawn: list[str] = []
    for dp, weights, positions in stages:
        known = set(state["names"]) if state else None
        if known is not None and not known & {str(one.stream_id) for one in blend(streams, weights).datasets}:
            continue
        read, state = train(streams, weights, dp, positions, state, shuffle_window=window)
        drawn += [one for rank in read for one in rank]
        assert {tuple(one[0] for one in rank) for rank in read} == {tuple(one[0] for one in read[0])}
    if state is None:
        return
    for stream in STREAMS:
        before = [one for one in drawn if one[0] == stream.letter]
        if not before:
            continue
        rest = blend(streams, {stream.letter: 1}, state=state, shuffle_window=window)
        after = ids([rest[index] for index in rest.rank_indices])
        assert Counter(before + after) == Counter(f"{stream.letter}{i}" for i in range(stream.samples))


def test_the_same_weights_go_on_where_they_are_in_their_period(streams: Path) -> None:
    whole, _ = train(streams, {"a": 3, "b": 2}, 1, 34, None)
    first, state = train(streams, {"a": 3, "b": 2}, 1, 12, None)
    second, state = train(streams, {"a": 3, "b": 2}, 2, 6, state)
    third, state = train(streams, {"a": 3, "b": 2}, 1, 16, state)
    assert [one[0] for one in first[0] + second[0] + third[0]] == [one[0] for one in whole[0]]
    assert [part["pieces"] for part in state["parts"]] == [[[0, [3, 2], 0]], [[0, [3, 2], 12]], [[0, [3, 2], 18]]]
    whole, after = train(streams, {"a": 2, "b": 1}, 2, 24, None)
    first, state = train(streams, {"a": 2, "b": 1}, 2, 10, None)
    second, state = train(streams, {"a": 2, "b": 1}, 2, 14, state)
    assert [one + other for one, other in zip(first, second, strict=True)] == whole
    assert (state, len(state["parts"])) == (after, 1)


def test_samples_that_one_stream_leaves_out(streams: Path) -> None:
    _, state = train(streams, {"a": 1, "b": 1}, 1, 4, None)
    blended = blend(streams, {"a": 1, "b": 1}, state=state, num_samples=100, batch_size=2)
    blended.datasets[0].skip([(2, 6)])
    assert take(blended, 6, 2) == ["a6", "b2", "a7", "b3", "a8", "b4"]
    later = blend(streams, {"a": 1, "b": 1}, state=blended.state_dict(10), num_samples=100, batch_size=2)
    assert take(later, 4, 2) == ["a9", "b5", "a10", "b6"]


def test_epochs_are_resumed_in(streams: Path) -> None:
    def run(epoch: int, state: State | None = None) -> Any:
        one = blend(streams, {"a": 1, "b": 1}, state=state, shuffle_window=4, batch_size=2)
        if state is None:
            one.set_epoch(epoch)
        return one

    whole = take(run(2), 40, 2)
    state = run(2).state_dict(16)
    again = run(0, state)
    assert (again.epoch, again.consumed, len(again.rank_indices)) == (2, 16, len(run(2)) - 16)
    assert take(again, 24, 2) == whole[16:]
    again.set_epoch(3)
    assert again.consumed == 0
    assert take(again, 10, 2) == take(run(3), 10, 2)


def test_a_run_to_its_end_has_nothing_left_and_its_length_counts_what_was_trained_before(streams: Path) -> None:
    whole = blend(streams, {"a": 1, "b": 1}, batch_size=2)
    state = whole.state_dict(len(whole))
    for dp in (1, 2):
        assert list(blend(streams, {"a": 1, "b": 1}, 0, dp, state=state, batch_size=2).rank_indices) == []
    _, state = train(streams, {"a": 1, "b": 1}, 2, 10, None, num_samples=60)
    for dp, weight, samples, left in ((4, 1, 60, 10), (1, 2, 60, 40), (1, 2, 6, 0)):
        blended = blend(streams, {"a": 1, "b": weight}, 0, dp, state, num_samples=samples, batch_size=2)
        assert len(blended.rank_indices) == left


def test_a_commit_is_every_streams(tmp_path: Path) -> None:
    for stream in STREAMS[:2]:
        write(tmp_path, stream)
    blended = blend(tmp_path, {"a": 2, "b": 1}, batch_size=6, consumer="run")
    older = blended.state_dict(12)
    shares = (BlendShare(str(tmp_path / "a"), 2 / 3, 40), BlendShare(str(tmp_path / "b"), 1 / 3, 20))
    for done, last_epoch, keep in (((0, 0), True, [older]), ((3, 2), True, []), ((0, 0), False, [])):
        assert blended.commit(60, last_epoch=last_epoch, keep=keep)
        cursors = [cursor_of(tmp_path / letter) for letter in "ab"]
        found = [(one.state.consumed, one.chunks_before) for one in cursors if one.state is not None]
        assert found == [(40, done[0]), (20, done[1])]
        assert [one.blend for one in cursors] == [shares, shares]
    raised(CursorTaken, blend(tmp_path, {"a": 2, "b": 1}, batch_size=6, consumer="run").commit, 0, last_epoch=True)
    refusal_of(ValueError, "consumer=NAME", blend(tmp_path, {"a": 1}).commit, 0, last_epoch=True)


def test_a_stream_that_was_added_is_kept_whole_while_an_older_checkpoint_does_not_know_it(tmp_path: Path) -> None:
    for stream in STREAMS[:2]:
        write(tmp_path, stream)
    older = blend(tmp_path, {"a": 1}, batch_size=12).state_dict(24)
    blended = blend(tmp_path, {"a": 1, "b": 1}, state=older, batch_size=12, consumer="run")
    for keep, done in (([older], {"a": 2, "b": 0}), ([], {"a": 4, "b": 2})):
        assert blended.commit(72, last_epoch=True, keep=keep)
        assert {letter: chunks_before(tmp_path / letter) for letter in "ab"} == done


def test_states_that_do_not_belong_here_are_refused(streams: Path, tmp_path: Path) -> None:
    _, state = train(streams, {"a": 1, "b": 1}, 1, 8, None)
    write(tmp_path, Stream("z", 8, 2))
    for field, folder, letters, seed in (("names", tmp_path, "z", 0), ("seed", streams, "ab", 1)):
        assert raised(StateMismatch, blend, folder, dict.fromkeys(letters, 1.0), state=state, seed=seed).field == field
    raised(VersionUnsupported, blend, streams, {"a": 1, "b": 1}, state=state | {"format": 2})
    others: list[Any] = [state["members"][0], [], 7, "x", {}]
    for wrong in others:
        raised(StateInvalid, blend, streams, {"a": 1, "b": 1}, state=wrong)
    used = blend(streams, {"a": 1, "b": 1}, 0, 2, num_samples=100, batch_size=2)
    used.load_state_dict(used.state_dict())
    refusal_of(RuntimeError, "already in use", used.load_state_dict, state)
    for consumed in (3, -4, 104):
        refusal_of(ValueError, f"consumed.* got {consumed!r}", used.state_dict, consumed)


def places(value: Any, *way: Any) -> Iterator[tuple[Any, ...]]:
    """The ways to all values within a state, but for those of the streams' own states, which are read as such."""
    if way and way[0] != "members":
        yield way
    if isinstance(value, dict | list) and way != ("members",):
        for name in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[name], *way, name)


WRONG: list[tuple[str, Any]] = [
    ("format", 0),
    ("names", ["ab"]),
    ("names.0", ""),
    ("members", None),
    ("members.0.seed", -1),
    ("parts", []),
    ("parts.0.dp", 0),
    ("parts.0.batch_size", 0),
    ("parts.0.members", [0, 0]),
    ("parts.0.members.1", 2),
    ("parts.0.pieces", []),
    ("parts.0.pieces.0", [0, [1, 1]]),
    ("parts.0.pieces.0.0", 1),
    ("parts.0.pieces.0.1", [1]),
    ("parts.0.pieces.0.1", [0, 0]),
    ("parts.0.pieces.0.1", [1, 2**40]),
    ("parts.0.begins", [[0, 0]]),
    ("parts.0.begins.0.0", 1),
    ("parts.0.begins.1.1", 3),
    ("consumed", 7),
]


def test_damaged_states_are_refused_by_the_name_of_the_field(streams: Path) -> None:
    _, state = train(streams, {"a": 1, "b": 1}, 1, 8, None)
    blended = blend(streams, {"a": 1, "b": 1})
    data = orjson.dumps(state)
    for path, value in [*WRONG, *((".".join(map(str, way)), wrong) for way in places(state) for wrong in (-1, [-1.5]))]:
        assert raised(StateInvalid, blended.load_state_dict, with_field(data, path, value)).field is not None
        if not path.rpartition(".")[2].isdigit():
            raised(StateInvalid, blended.load_state_dict, with_field(data, path))
    blended.load_state_dict(state)


def test_weights_follow_the_steps_of_a_run_however_often_it_is_stopped(streams: Path) -> None:
    options: dict[str, Any] = {"micro_batches_per_step": 2, "schedule": [(2, (1, 1)), (5, (0, 1))]}

    def by_step(read: list[str]) -> list[str]:
        return ["".join(one[0] for one in read[at : at + 4]) for at in range(0, len(read), 4)]

    ((whole,), _) = train(streams, {"a": 1, "b": 0}, 1, 40, None, **options)
    assert by_step(whole) == ["aaaa", "aaaa", "abab", "abab", "abab", *["bbbb"] * 5]
    assert whole[20:22] == ["b6", "b7"]
    state: State | None = None
    read: list[str] = []
    for steps in (1, 2, 4):
        some, state = train(streams, {"a": 1, "b": 0}, 1, 4 * steps, state, **options)
        read += some[0]
    assert read == whole[: len(read)]
    state = None
    for dp, positions in ((2, 4), (1, 8), (2, 12)):
        two, state = train(streams, {"a": 1, "b": 0}, dp, positions, state, **options)
    assert state is not None
    assert by_step(two[0]) == ["abab", "abab", "bbbb"]
    assert [part["pieces"] for part in state["parts"]][-1] == [[0, [1, 1], 6], [8, [0, 1], 1]]


def test_a_schedule_may_be_changed_on_the_way(streams: Path) -> None:
    options: dict[str, Any] = {"micro_batches_per_step": 1}
    _, state = train(streams, {"a": 1, "b": 1}, 1, 8, None, schedule=[(100, (1, 0))], **options)
    read, _ = train(streams, {"a": 1, "b": 1}, 1, 8, state, schedule=[(5, (1, 0))], **options)
    assert read == [["a4", "b4", "a5", "a6", "a7", "a8", "a9", "a10"]]
