"""Checkpoints, ranks and producers that are not as they should be: what is raised, and what it names."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lazyshard import LazyShardedDataset
from lazyshard.errors import StateInvalid, StateMismatch, VersionUnsupported, WaitTimeout
from lazyshard.stream.listing import retire
from tests.data.runs import State, open_ranks, part
from tests.data.workers import loader
from tests.inspection.surveyed import edit_head
from tests.stream.streams import produce, raised


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    return produce(tmp_path / "s", 40, 4)


def saved(stream: Path, consumed: int, dp: int = 2, **options: Any) -> State:
    return open_ranks(stream, dp, **options)[0].state_dict(consumed)


def other(stream: Path) -> State:
    return saved(produce(stream.parent / "other", 40, 4), 12)


def gone(stream: Path) -> State:
    state = saved(stream, 8)
    retire(stream, 3, 10)
    return state


CASES: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "of another stream": (other, StateMismatch, "stream_id"),
    "of another unit": (lambda s: saved(s, 12, unit=1), StateMismatch, "give unit"),
    "of another window": (lambda s: saved(s, 12, shuffle_window=1), StateMismatch, "give shuffle_window"),
    "of another end": (lambda s: saved(s, 12, max_total_samples=20), StateMismatch, "max_total_samples 20, here"),
    "ahead": (lambda s: saved(s, 40) | {"consumed": 48, "parts": [part(2, 24)]}, StateMismatch, "ended with 40"),
    "of deleted chunks": (gone, StateMismatch, "chunk 2, but the producer has deleted all chunks below 3"),
    "torn: a field": (lambda s: saved(s, 12) | {"seed": None}, StateInvalid, "field 'seed'"),
    "torn: a part is gone": (lambda s: saved(s, 12) | {"parts": []}, StateInvalid, "field 'parts'"),
    "torn: another number": (lambda s: saved(s, 12) | {"consumed": 13}, StateInvalid, "'consumed'"),
    "of a tensor": (lambda s: saved(s, 12) | {"consumed": torch.tensor(12)}, StateInvalid, "tensor(12)"),
    "of a later release": (lambda s: saved(s, 12) | {"format": 2}, VersionUnsupported, "format 2"),
    "of too many ranks": (lambda s: saved(s, 0) | {"parts": [part(2**31, 0)]}, StateMismatch, "1048576"),
    "a whole checkpoint": (
        lambda s: {"model": {}, "lazyshard": saved(s, 12), "step": 3},
        StateInvalid,
        "'model', 'lazyshard' and 'step': pass `checkpoint['lazyshard']`",
    ),
    "a checkpoint of a checkpoint": (
        lambda s: {"trainer": {"data": {"train": saved(s, 12), "seen": 1}}},
        StateInvalid,
        "`checkpoint['trainer']['data']['train']`",
    ),
    "two states": (
        lambda s: {"a": saved(s, 12), "b": saved(s, 16)},
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
    # It stands where it did.
    dataset.load_state_dict(saved(stream, 16))
    assert dataset.consumed == 16


def test_state_that_draws_more_than_any_epoch_holds_is_refused_while_the_stream_is_live(tmp_path: Path) -> None:
    stream = produce(tmp_path / "live", 8, 4, end=False)
    state = saved(stream, 8, max_total_samples=8)
    wild = state | {"parts": [part(16, 4)], "consumed": 64, "max_total_samples": 9}
    with pytest.raises(StateMismatch, match=r"\b4 positions of 16 lanes .*\b9 samples"):
        open_ranks(stream, 2, wild, max_total_samples=9)


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
