"""What people see of checkpoints, ranks and producers that are not as they should be; every case with its message.

Told elsewhere, and not here again: other settings, and states whose fields contradict each other (test_state); which
deleted chunks a state still needs (test_state); all that is no rank (test_rank); wild states by the thousand
(faults/test_fuzz).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info

from lazyshard import LazyShardedDataset
from lazyshard.errors import (
    CursorTaken,
    LazyShardError,
    RankInvalid,
    StateInvalid,
    StateMismatch,
    VersionUnsupported,
    WaitTimeout,
)
from lazyshard.format.state import RunState
from lazyshard.stream.retire import retire
from tests.data.options import grouped
from tests.data.runs import State, open_ranks, part
from tests.data.workers import loader
from tests.inspection.surveyed import edit_head
from tests.stream.streams import produce

ID = re.compile(r"\b[0-9a-f]{32}\b")
"""The identity of a stream is another one each time."""


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    """Forty samples in ten chunks."""
    return produce(tmp_path / "s", 40, 4)


def saved(stream: Path, consumed: int, dp: int = 2, **options: Any) -> State:
    return open_ranks(stream, dp, **options)[0].state_dict(consumed)


@dataclass(frozen=True)
class Case:
    """A state that cannot be gone on with: `make` gives it, "{d}" in the message is the stream."""

    what: str
    make: Callable[[Path], Any]
    error: type[LazyShardError]
    message: str


AT = "{d}: the state to go on from: "
LOOKS = ", which looks like one"

CASES = [
    Case(
        "of another stream",
        lambda stream: saved(produce(stream.parent / "other", 40, 4), 12),
        StateMismatch,
        "{d}: the state was saved with stream_id ID, here it is ID: it belongs to another stream: give the directory "
        "of that one, or start anew without the state",
    ),
    Case(
        "ahead of the data",
        lambda stream: saved(stream, 40) | {"consumed": 48, "parts": [part(2, 24)]},
        StateMismatch,
        "{d}: the run has drawn 48 samples since its epoch began, but the stream has ended with 40: was it cut, or is "
        "it another one? If the run went on over several epochs, give num_samples as it was",
    ),
    Case(
        "of deleted chunks",
        lambda stream: (saved(stream, 8), retire(stream, 3, 10))[0],
        StateMismatch,
        "{d}: the run goes on with samples of chunk 2, but the stream's producer has deleted all chunks below 3: go on "
        "from a later checkpoint; or produce the stream anew, with --retain all or with --consumers NAME, and commit "
        "no further than the oldest checkpoint that you may go back to",
    ),
    Case(
        "torn: a field is gone",
        lambda stream: {name: value for name, value in saved(stream, 12).items() if name != "seed"},
        StateInvalid,
        AT + "field 'seed': expected a value, found no such field",
    ),
    Case(
        "torn: a part is gone",
        lambda stream: saved(stream, 12) | {"parts": []},
        StateInvalid,
        AT + "field 'parts': expected at least one part, found ()",
    ),
    Case(
        "torn: another number",
        lambda stream: saved(stream, 12) | {"consumed": 13},
        StateInvalid,
        AT + "field 'consumed': expected 12, the sum of dp * draws of the trained parts, found 13",
    ),
    Case(
        "of a tensor",
        lambda stream: saved(stream, 12) | {"consumed": torch.tensor(12)},
        StateInvalid,
        AT + "field 'consumed': expected an integer from 0 to 4611686018427387904, found tensor(12)",
    ),
    Case(
        "of a later release",
        lambda stream: saved(stream, 12) | {"format": 2},
        VersionUnsupported,
        AT + "the state of a run in format 2, this release of lazyshard reads format 1; install a newer lazyshard",
    ),
    Case(
        "of more ranks than there are",
        lambda stream: saved(stream, 0) | {"parts": [part(2**31, 0)]},
        StateMismatch,
        "{d}: the state is of a run with 2147483648 ranks, more than any job has (1048576): it is damaged, go on from "
        "another checkpoint",
    ),
    Case(
        "a whole checkpoint",
        lambda stream: {"model": {}, "lazyshard": saved(stream, 12), "step": 3},
        StateInvalid,
        AT
        + "it holds more than the state of a run, 'model', 'lazyshard' and 'step': give `checkpoint['lazyshard']`"
        + LOOKS,
    ),
    Case(
        "a checkpoint of a checkpoint",
        lambda stream: {"trainer": {"data": {"train": saved(stream, 12), "seen": 1}}},
        StateInvalid,
        AT + "it holds more than the state of a run, 'trainer': give `checkpoint['trainer']['data']['train']`" + LOOKS,
    ),
    Case(
        "two states",
        lambda stream: {"a": saved(stream, 12), "b": saved(stream, 16)},
        StateInvalid,
        AT + "it holds more than the state of a run, 'a' and 'b': give `checkpoint['a']` or `checkpoint['b']`" + LOOKS,
    ),
    Case(
        "a checkpoint without a state",
        lambda stream: {f"layer.{number}": torch.zeros(1) for number in range(9)},
        StateInvalid,
        AT
        + "it holds no state of a run but 'layer.0', 'layer.1', 'layer.2', 'layer.3', 'layer.4', 'layer.5' and 3 more: "
        "give what `state_dict` returned, if it was saved",
    ),
    Case(
        "a blend's",
        lambda stream: {"kind": "blend", "format": 1, "names": ["a"], "consumed": 0},
        StateInvalid,
        AT + "it is the state of a blend: give it to a `BlendedDataset` of the same streams",
    ),
    Case("empty", lambda stream: {}, StateInvalid, AT + "it is empty: give what `state_dict` returned"),
    Case(
        "a path",
        lambda stream: Path("checkpoint.pt"),
        StateInvalid,
        AT + "it is a path or a text: load the checkpoint, as with `torch.load`, and give what `state_dict` returned",
    ),
    Case("None", lambda stream: None, StateInvalid, AT + "expected an object, found None"),
    Case("a list", lambda stream: [saved(stream, 12)][:0], StateInvalid, AT + "expected an object, found []"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_state_that_cannot_be_gone_on_with(case: Case, stream: Path) -> None:
    state = case.make(stream)
    dataset = open_ranks(stream, 2)[0]
    with pytest.raises(case.error) as caught:
        dataset.load_state_dict(state)
    assert type(caught.value) is case.error
    assert ID.sub("ID", str(caught.value)) == case.message.format(d=stream)


def test_refused_state_leaves_the_data_set_where_it_was(stream: Path) -> None:
    dataset = open_ranks(stream, 2)[0]
    with pytest.raises(StateInvalid):
        dataset.load_state_dict({"lazyshard": saved(stream, 12)})
    dataset.load_state_dict(saved(stream, 12))
    assert dataset.consumed == 12


def test_state_that_draws_more_than_any_epoch_holds_is_refused_while_the_stream_is_live(tmp_path: Path) -> None:
    stream = produce(tmp_path / "live", 8, 4, end=False)
    state = saved(stream, 8, max_total_samples=8)
    wild = state | {"parts": [part(16, 4)], "consumed": 64, "max_total_samples": 9}
    with pytest.raises(StateMismatch) as caught:
        open_ranks(stream, 2, wild, max_total_samples=9)
    assert str(caught.value) == (
        f"{stream}: 4 positions of 16 lanes were drawn, but there are 9 samples at the most (max_total_samples), fewer "
        f"than a batch of all its ranks: the state is damaged, or of another run"
    )


@pytest.mark.parametrize("data", [b"", b"{", b"\0" * 40, b"[]", b"null"])
def test_torn_file_of_a_state_names_itself(data: bytes) -> None:
    with pytest.raises(StateInvalid, match=r"^ckpt/state\.json: ") as caught:
        RunState.decode(data, "ckpt/state.json")
    assert caught.value.file == "ckpt/state.json"


def test_second_run_is_told_the_way_out(stream: Path) -> None:
    first, second = (open_ranks(stream, 1, consumer="sft")[0] for _ in range(2))
    first.commit(4, last_epoch=True)
    with pytest.raises(CursorTaken) as caught:
        second.commit(8, last_epoch=True)
    holder = f"process {os.getpid()} on {os.uname().nodename}"
    assert str(caught.value) == (
        f"{stream}: {holder} is running as 'sft' and writes that cursor; stop it first, give this run another name, or "
        f"let it take the cursor over: `commit(..., take_over=True)`"
    )
    assert (caught.value.consumer, caught.value.holder) == ("sft", holder)


BAD_RANKS = [
    ({"dp_rank": 2, "dp_size": 2}, "expected 0 <= dp_rank < dp_size, got dp_rank=2 and dp_size=2"),
    ({"dp_rank": -1, "dp_size": 2}, "expected 0 <= dp_rank < dp_size, got dp_rank=-1 and dp_size=2"),
    ({"dp_rank": 0, "dp_size": 0}, "expected 0 <= dp_rank < dp_size, got dp_rank=0 and dp_size=0"),
    ({"dp_rank": 0.0, "dp_size": 2}, "expected 0 <= dp_rank < dp_size, got dp_rank=0.0 and dp_size=2"),
    ({"dp_rank": 1}, "dp_rank and dp_size belong together, got dp_rank=1 and dp_size=None"),
    ({"dp_size": 4}, "dp_rank and dp_size belong together, got dp_rank=None and dp_size=4"),
]


@pytest.mark.parametrize(("given", "message"), BAD_RANKS)
def test_bad_rank_is_an_error_before_a_stream_is_waited_for(given: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(RankInvalid) as caught:
        LazyShardedDataset(tmp_path / "none", max_wait=0, **grouped(given))
    assert str(caught.value) == message


def test_ranks_that_disagree_each_read_what_is_theirs_by_their_own_number_and_one_only_commits(stream: Path) -> None:
    """No rank speaks with another, so none can tell: but of two that both are rank 0 the later is refused."""
    two, four = open_ranks(stream, 2, consumer="sft")[0], open_ranks(stream, 4, consumer="sft")[0]
    assert (two.rank_indices, four.rank_indices) == (range(20), range(10))
    two.commit(8, last_epoch=True)
    with pytest.raises(CursorTaken, match="is running as 'sft' and writes that cursor"):
        four.commit(8, last_epoch=True)
    with pytest.raises(RuntimeError, match="this data set is in use already and stands elsewhere"):
        four.load_state_dict(two.state_dict(8))


@pytest.mark.parametrize("workers", [0, 1])
def test_producer_that_never_returns_is_a_timeout_with_the_heartbeats_age(tmp_path: Path, workers: int) -> None:
    stream = produce(tmp_path / "s", 4, 4, end=False)
    edit_head(
        stream, state="running", updated_at=time.time() - 7230, host="node7", pid=4711, process="boot 1 1", rate=0.0
    )
    dataset = LazyShardedDataset(stream, dp_rank=0, dp_size=1, max_wait=0, max_total_samples=8)
    with pytest.raises(WaitTimeout) as caught:
        list(loader(dataset, dataset.rank_indices[4:], workers, batch_size=4))
    error = caught.value
    assert error.heartbeat_age is not None
    assert 7230 <= error.heartbeat_age < 7290
    assert (error.chunk, error.state, error.directory) == (1, "running", str(stream))
    who = "rank 0 of 1, worker 0: " if workers else "rank 0 of 1: "
    assert re.search(
        re.escape(f"{who}waiting for chunk 1 of {stream} (0 s of at most 0 s): 4 samples are published, the producer ")
        + r"\(pid 4711 on node7\) is running, but .*; its last heartbeat is 2 h 0 min old, it may be dead\. Gave up: "
        r"see to its producer, or wait longer with max_wait",
        str(error),
    )
    assert get_worker_info() is None
