"""Where a run stands, and what it leaves out: saved as plain values, loaded by any ranks."""

import json
import pickle
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from lazyshard import LazyShardedDataset
from lazyshard.data import commits as state_checks
from lazyshard.errors import ConfigInvalid, LengthUnknown, StateInvalid, StateMismatch, VersionUnsupported, WaitTimeout
from lazyshard.stream.listing import retire
from tests.data.runs import State, open_ranks, part, read
from tests.data.workers import loader
from tests.stream.damage import edit_head
from tests.stream.streams import foreign, produce, raised, refusal_of


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    return produce(tmp_path / "s", 40, 4)


def saved(stream: Path, dp: int, consumed: int, **options: Any) -> State:
    """Returns a state as a checkpoint brings it back."""
    state = open_ranks(stream, dp, **options)[0].state_dict(consumed)
    return dict(json.loads(json.dumps(state)))


def test_state_is_plain_values_that_any_checkpoint_keeps(stream: Path, tmp_path: Path) -> None:
    dataset = open_ranks(stream, 2, batch_size=2, shuffle_window=1, seed=3, micro_batches_per_step=2)[1]
    begun = dataset.state_dict()
    assert (begun["consumed"], begun["parts"]) == (0, [part(2, 0, batch_size=2, draws_per_step=4)])
    read([dataset], 10)
    assert dataset.state_dict() == begun
    state = dataset.state_dict(torch.tensor(12))  # type: ignore[arg-type]
    assert state == {
        "format": 1,
        "stream_id": dataset.stream_id,
        "samples_per_chunk": 4,
        "unit": 4,
        "window": 4,
        "seed": 3,
        "max_total_samples": None,
        "parts": [part(2, 6, batch_size=2, draws_per_step=4)],
        "consumed": 12,
    }
    assert json.loads(json.dumps(state)) == state
    torch.save({"data": state}, tmp_path / "checkpoint.pt")
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True) == {"data": state}


def test_other_ranks_go_on_with_what_is_left_and_so_does_a_copy(stream: Path) -> None:
    assert read(open_ranks(stream, 2), 6) == [[0, 1, 2, 3, 8, 9], [4, 5, 6, 7, 12, 13]]
    ranks = open_ranks(stream, 3, saved(stream, 2, 12))
    for each in (ranks, pickle.loads(pickle.dumps(ranks))):
        assert [dataset.rank_indices for dataset in each] == [range(9), range(9, 18), range(18, 27)]
        assert [(dataset.consumed, len(dataset), dataset.leftover) for dataset in each] == [(12, 27, 1)] * 3
        assert read(each) == [
            [10, 11, 16, 17, 18, 19, 28, 29, 30],
            [14, 20, 21, 22, 23, 32, 33, 34, 35],
            [15, 24, 25, 26, 27, 36, 37, 38, 39],
        ]


def test_epoch_of_the_state_goes_on_and_every_other_one_is_whole(stream: Path) -> None:
    first = open_ranks(stream, 2, shuffle_window=1)
    for dataset in first:
        dataset.set_epoch(3)
    begun = read(first, 6)
    state = first[0].state_dict(12)
    assert state["parts"] == [part(2, 6, epoch=3)]
    ranks = open_ranks(stream, 3, state, shuffle_window=1)
    assert [(d.epoch, d.consumed, len(d)) for d in ranks] == [(3, 12, 27)] * 3
    rest = read(ranks)
    assert len(set(chain(*begun, *rest))) == 39
    fresh = open_ranks(stream, 3, shuffle_window=1)
    for dataset in (*ranks, *fresh):
        dataset.set_epoch(4)
    assert [(d.epoch, d.consumed, len(d), d.leftover) for d in ranks] == [(4, 0, 39, 1)] * 3
    assert ranks[0].state_dict(9)["parts"] == [part(3, 3, epoch=4)]
    assert read(ranks) == read(fresh)
    for dataset in ranks:
        dataset.set_epoch(3)
    assert read(ranks) == rest


def test_rank_need_not_be_known_before_the_data_set_is_used(stream: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = saved(stream, 2, 12)
    monkeypatch.setenv("WORLD_SIZE", "3")
    dataset = LazyShardedDataset(stream)
    dataset.load_state_dict(state)
    assert dataset.consumed == 12
    raised(ConfigInvalid, dataset.state_dict, 18)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert dataset.state_dict()["parts"] == [part(2, 6), part(1, 0)]


def test_state_is_loaded_before_the_data_set_is_used_or_not_at_all(stream: Path) -> None:
    state = saved(stream, 2, 12)
    uses: list[Callable[[LazyShardedDataset], object]] = [len, lambda d: d.rank_indices, lambda d: d[0]]
    for use in uses:
        dataset = open_ranks(stream, 2)[0]
        use(dataset)
        refusal_of(RuntimeError, "already in use", dataset.load_state_dict, state)
        # It stands where it did, which is no change; nor do steps decide a draw.
        for options in ({}, {"micro_batches_per_step": 2}):
            dataset.load_state_dict(saved(stream, 2, 0, **options))
            assert dataset.rank_indices == range(20)
    dataset = open_ranks(stream, 2, saved(stream, 2, 20))[0]
    dataset.load_state_dict(state)
    assert dataset.rank_indices == range(6, 20)
    dataset.load_state_dict(state)
    for other in (saved(stream, 2, 20), saved(stream, 3, 12)):
        refusal_of(RuntimeError, "already in use", dataset.load_state_dict, other)


@pytest.mark.parametrize(
    ("dp", "consumed", "error", "fact"),
    [
        (4, 12, ValueError, "at least 16"),  # fewer than when the run continued
        (2, 17, ValueError, "2 \\* 2, got 17"),
        (2, 18, ValueError, "2 \\* 2, got 18"),
        (2, 44, ValueError, "at most 40"),
        (2, 8.0, TypeError, "8.0"),
    ],
)
def test_impossible_count_is_refused(stream: Path, dp: int, consumed: Any, error: type[Exception], fact: str) -> None:
    dataset = open_ranks(stream, dp, saved(stream, 2, 16, batch_size=2), batch_size=2)[0]
    refusal_of(error, fact, dataset.state_dict, consumed)


def test_state_that_needs_deleted_chunks_is_refused_and_a_later_one_is_not(stream: Path) -> None:
    states = {consumed: saved(stream, 2, consumed) for consumed in (8, 12, 16)}
    retire(stream, 3, 10)
    for consumed in (8, 12):
        for dp in (2, 3):
            no = raised(StateMismatch, open_ranks, stream, dp, states[consumed])
            assert (no.expected, no.actual) == ("chunk 2", "chunks from 3 on")
    # Rank 0 has drawn all of chunk 2, which is open with chunk 3 as far as a commit is concerned.
    assert read(open_ranks(stream, 2, states[16]), 4) == [[16, 17, 18, 19], [20, 21, 22, 23]]


@pytest.mark.parametrize("at_once", [3, 1 << 20])
def test_deleted_chunk_that_is_needed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(state_checks, "_DRAWS_AT_ONCE", at_once)
    stream = produce(tmp_path / "s", 16, 2)
    # One rank draws four chunks of two in some order.
    assert read(open_ranks(stream, 1, shuffle_window=4, seed=2), 5) == [[1, 4, 2, 0, 6]]
    states = [saved(stream, 1, drawn, shuffle_window=4, seed=2) for drawn in range(9)]
    retire(stream, 1, 8)
    for state in states[:4]:
        raised(StateMismatch, open_ranks, stream, 3, state, shuffle_window=4, seed=2)
    for state in states[4:]:
        open_ranks(stream, 3, state, shuffle_window=4, seed=2)


def test_stream_that_ended_with_less_than_was_drawn_or_than_a_batch_is_refused(tmp_path: Path) -> None:
    rows = b"".join(b'{"id":%d}\n' % number for number in range(8))
    long = foreign(tmp_path / "long", rows, rows, end=True)
    short = foreign(tmp_path / "short", rows, end=True)
    shortest = foreign(tmp_path / "shortest", b'{"id":0}\n', end=True)
    options = {"samples_per_chunk": 8}
    state = saved(long, 2, 12, **options)
    no = raised(StateMismatch, open_ranks, short, 3, state, **options)
    assert (no.expected, no.actual) == ("at least 12 samples", "8")
    assert open_ranks(short, 2, state, num_samples=16, **options)[0].draw(6).epoch == 1
    for more in ({}, {"num_samples": 16}):
        raised(StateMismatch, open_ranks, shortest, 2, state, **options, **more)
    # Nor in a foreign directory that is as long whether it is the same one.
    assert read(open_ranks(long, 2, state, **options)) == [[6, 7], [6, 7]]


def test_live_stream_is_waited_for_where_it_has_less_than_was_drawn(tmp_path: Path) -> None:
    stream = produce(tmp_path / "s", 16, 4, end=False)
    # Without a maximum it has no length after a resume either.
    state = saved(stream, 2, 8, num_samples=100)
    assert len(open_ranks(stream, 2, state, num_samples=100)[0]) == 100
    raised(LengthUnknown, len, open_ranks(stream, 2, state)[0])
    state = saved(stream, 2, 24, max_total_samples=40)
    ranks = open_ranks(stream, 2, state, max_total_samples=40)
    produce(stream, 40, 4)
    assert read(ranks) == [[24, 25, 26, 27, 32, 33, 34, 35], [28, 29, 30, 31, 36, 37, 38, 39]]


def test_run_that_went_on_with_another_epoch_after_an_early_end_goes_on_there(tmp_path: Path) -> None:
    stream = produce(tmp_path / "s", 8, 4, end=False)
    ranks = open_ranks(stream, 2, max_total_samples=40)
    assert [len(dataset) for dataset in ranks] == [40, 40]
    produce(stream, 16, 4)
    whole = read(ranks, 20)
    assert [draw[:8] for draw in whole] == [draw[8:16] for draw in whole]
    state = ranks[0].state_dict(24)
    assert read(open_ranks(stream, 2, state, max_total_samples=40)) == [lane[12:16] for lane in whole]
    left = read(open_ranks(stream, 1, state, max_total_samples=40))
    assert sorted(left[0]) == sorted(whole[0][12:16] + whole[1][12:16])


@pytest.fixture
def begun(stream: Path) -> State:
    """After three steps, of two micro batches of one, of two ranks: [0, 1, 2, 3, 8, 9] and [4, 5, 6, 7, 12, 13]."""
    return open_ranks(stream, 2, micro_batches_per_step=2)[0].state_dict(12)


def skipping(stream: Path, dp: int, state: State | None, **skip: Any) -> Any:
    ranks = open_ranks(stream, dp, state, micro_batches_per_step=2)
    for dataset in ranks:
        dataset.skip(**skip)
    return ranks


def test_samples_and_chunks_are_left_out_from_here_on(stream: Path, begun: State) -> None:
    ranks = skipping(stream, 2, begun, samples=[(0, 2), (11, 14)], chunks=[(4, 6)])
    # Left of the open windows: 10, 14, 15; from chunk 6 on all is dealt anew.
    assert read(ranks) == [[10, 14, 24, 25, 26, 27, 32, 33, 34], [15, 28, 29, 30, 31, 36, 37, 38, 39]]
    assert ranks[0].state_dict(20)["parts"] == [
        part(2, 6, draws_per_step=2),
        part(2, 4, skip=[[0, 2], [11, 14], [16, 24]], first_step=3, draws_per_step=2),
    ]
    again = open_ranks(stream, 3, ranks[0].state_dict(20), micro_batches_per_step=2)
    assert not {11, 12, 13, *range(16, 24)} & set(chain(*read(again)))
    twice = skipping(stream, 3, ranks[0].state_dict(20), samples=[(0, 2)], chunks=[(4, 6)])
    assert twice[0].state_dict() == again[0].state_dict()
    for dataset in again:
        dataset.set_epoch(1)
    assert len(again[0]) == (40 - 13) // 3 * 3
    assert set(chain(*read(again))) == set(range(40)) - {0, 1, 11, 12, 13, *range(16, 24)}


def test_next_steps_are_passed_over(stream: Path, begun: State) -> None:
    ranks = skipping(stream, 2, begun, steps=[(4, 6)])
    whole = read(open_ranks(stream, 2))
    assert [lane[6:10] for lane in whole] == [[10, 11, 16, 17], [14, 15, 20, 21]]
    assert read(ranks, 2) == [[18, 19], [22, 23]]
    assert sorted(chain(*read(ranks))) == sorted(chain(*(lane[10:] for lane in whole)))
    assert ranks[0].state_dict(16)["parts"] == [
        part(2, 6, draws_per_step=2),
        part(2, 4, trained=False, first_step=3, draws_per_step=2),
        part(2, 2, first_step=3, draws_per_step=2),
    ]


def test_later_steps_are_those_of_the_run_as_it_was(stream: Path, begun: State) -> None:
    ranks = skipping(stream, 2, begun, steps=[(5, 6), (7, 8)])
    assert ranks[0].state_dict()["parts"][-1]["skip"] == [[16, 18], [20, 22], [24, 26], [28, 30]]
    assert sorted(chain(*read(ranks))) == [10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31, *range(32, 40)]


def test_range_that_cannot_be_and_skipping_too_late_is_refused(stream: Path, begun: State) -> None:
    ranges: list[tuple[dict[str, Any], str]] = [
        ({"samples": [(-1, 4)]}, r"samples: .*\(-1, 4\)"),
        ({"chunks": [(2, 1)]}, r"chunks: .*\(2, 1\)"),
        ({"steps": [(3, 5)]}, "steps 3:5: .*4 <= FIRST .*3 steps are trained"),
        ({"steps": [(5, 5)]}, r"steps: .*\(5, 5\)"),
        ({"samples": (3, 5)}, r"samples .*got \(3, 5\)"),
    ]
    for skip, fact in ranges:
        refusal_of(ValueError, fact, skipping, stream, 2, begun, **skip)
    dataset = open_ranks(stream, 2)[0]
    refusal_of(ValueError, "steps", dataset.skip, steps=[(2, 3)])
    len(dataset)
    raised(RuntimeError, dataset.skip, samples=[(0, 1)])


def gone(stream: Path) -> State:
    state = saved(stream, 2, 8)
    retire(stream, 3, 10)
    return state


CASES: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "of another stream": (lambda s: saved(produce(s.parent / "other", 40, 4), 2, 12), StateMismatch, "stream_id"),
    "of another unit": (lambda s: saved(s, 2, 12, unit=1), StateMismatch, "give unit"),
    "of another window": (lambda s: saved(s, 2, 12, shuffle_window=1), StateMismatch, "give shuffle_window"),
    "of another end": (lambda s: saved(s, 2, 12, max_total_samples=20), StateMismatch, "max_total_samples 20, here"),
    "ahead": (lambda s: saved(s, 2, 40) | {"consumed": 48, "parts": [part(2, 24)]}, StateMismatch, "ended with 40"),
    "of deleted chunks": (gone, StateMismatch, "chunk 2, but the producer has deleted all chunks below 3"),
    "torn: a field": (lambda s: saved(s, 2, 12) | {"seed": None}, StateInvalid, "field 'seed'"),
    "torn: a part is gone": (lambda s: saved(s, 2, 12) | {"parts": []}, StateInvalid, "field 'parts'"),
    "torn: another number": (lambda s: saved(s, 2, 12) | {"consumed": 13}, StateInvalid, "'consumed'"),
    "of a tensor": (lambda s: saved(s, 2, 12) | {"consumed": torch.tensor(12)}, StateInvalid, "tensor(12)"),
    "of a later release": (lambda s: saved(s, 2, 12) | {"format": 2}, VersionUnsupported, "format 2"),
    "of too many ranks": (lambda s: saved(s, 2, 0) | {"parts": [part(2**31, 0)]}, StateMismatch, "1048576"),
    "a whole checkpoint": (
        lambda s: {"model": {}, "lazyshard": saved(s, 2, 12), "step": 3},
        StateInvalid,
        "'model', 'lazyshard' and 'step': pass `checkpoint['lazyshard']`",
    ),
    "a checkpoint of a checkpoint": (
        lambda s: {"trainer": {"data": {"train": saved(s, 2, 12), "seen": 1}}},
        StateInvalid,
        "`checkpoint['trainer']['data']['train']`",
    ),
    "two states": (
        lambda s: {"a": saved(s, 2, 12), "b": saved(s, 2, 16)},
        StateInvalid,
        "`checkpoint['a']` or `checkpoint['b']`",
    ),
    "a checkpoint without a state": (
        lambda s: {f"layer.{number}": torch.zeros(1) for number in range(9)},
        StateInvalid,
        "'layer.0', 'layer.1', 'layer.2', 'layer.3', 'layer.4', 'layer.5' and 3 more",
    ),
    "a blend's": (
        lambda s: {"kind": "blend", "format": 1, "names": ["a"], "consumed": 0},
        StateInvalid,
        "`BlendedDataset`",
    ),
    "empty": (lambda s: {}, StateInvalid, "holds nothing"),
    "a path": (lambda s: Path("checkpoint.pt"), StateInvalid, "a path"),
    "None": (lambda s: None, StateInvalid, "None"),
    "a list": (lambda s: [], StateInvalid, "[]"),
}


@pytest.mark.parametrize("case", CASES)
def test_state_that_cannot_be_gone_on_with(case: str, stream: Path) -> None:
    make, error, fact = CASES[case]
    state = make(stream)
    dataset = open_ranks(stream, 2)[0]
    caught = raised(error, dataset.load_state_dict, state)
    assert type(caught) is error
    assert str(caught).startswith(f"{stream}: ")
    assert fact in str(caught)
    dataset.load_state_dict(saved(stream, 2, 16))
    assert dataset.consumed == 16


def test_state_that_draws_more_than_any_epoch_holds_is_refused_while_the_stream_is_live(tmp_path: Path) -> None:
    stream = produce(tmp_path / "live", 8, 4, end=False)
    state = saved(stream, 2, 8, max_total_samples=8)
    wild = state | {"parts": [part(16, 4)], "consumed": 64, "max_total_samples": 9}
    what = r"\b4 positions of 16 lanes .*\b9 samples"
    refusal_of(StateMismatch, what, open_ranks, stream, 2, wild, max_total_samples=9)


@pytest.mark.parametrize("workers", [0, 1])
def test_producer_that_never_returns_is_a_timeout_with_the_heartbeats_age(tmp_path: Path, workers: int) -> None:
    stream = produce(tmp_path / "s", 4, 4, end=False)
    known: dict[str, Any] = {"host": "node7", "pid": 4711, "process": "boot 1 1", "rate": 0.0}
    edit_head(stream, state="running", updated_at=time.time() - 7230, **known)
    dataset = LazyShardedDataset(stream, dp_rank=0, dp_size=1, max_wait=0, max_total_samples=8)
    error = raised(WaitTimeout, lambda: list(loader(dataset, dataset.rank_indices[4:], workers, batch_size=4)))
    assert error.heartbeat_age is not None
    assert 7230 <= error.heartbeat_age < 7290
    assert (error.chunk, error.state, error.directory) == (1, "running", str(stream))
    who = "rank 0 of 1, worker 0: " if workers else "rank 0 of 1: "
    facts = [f"{who}waiting for chunk 1 of {stream} ", "pid 4711 on node7", "2 h 0 min"]
    assert all(fact in str(error) for fact in facts)
    assert "lazyshard-error-fields" not in str(error)
