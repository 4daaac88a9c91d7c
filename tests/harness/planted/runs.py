"""Mistakes of which the harness must find each: installed in the process that plays a run, before all else."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

from torch.utils.data import get_worker_info

from lazyshard.data.blend_state import BlendStates
from lazyshard.data.blended import BlendedDataset
from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.format.state import BlendState
from lazyshard.plan.segment import Segment
from tests.harness.planted.planting import around
from tests.harness.runs import rank as run_rank
from tests.harness.runs.checkpoints import Checkpoint
from tests.harness.runs.plan import RunPlan, make_blend_plan, make_plan


class Mutant(NamedTuple):
    install: Callable[[], None]  # makes it
    kind: str  # what the harness must find, see `RunViolation`
    besides: str = ""  # what it may find as well, or first
    deletes: bool = False  # else the mistake shows in what is trained, and only there
    blend: bool = False  # whether it is one of blends
    leaves_out: bool = False  # whether every other life leaves out all streams but the first

    def plan(self, seed: int) -> RunPlan:  # Returns the run of a seed in which it is to be found
        run = make_blend_plan(seed) if self.blend else make_plan(seed)
        if self.deletes:
            return run
        if self.leaves_out:
            streams = len(run.streams)
            weights = [(1,) * streams, (1,) + (0,) * (streams - 1)]
            lives = (replace(life, weights=weights[number % 2]) for number, life in enumerate(run.lives))
            run = replace(run, lives=tuple(lives))
        run, *others = (replace(stream, retain="all", pace=("--rate", "1000")) for stream in run.streams)
        return replace(run, others=tuple(others))


def _shifted(steps: int, state_dict: Any, self: LazyShardedDataset, consumed: int) -> Any:
    """The state says that so many micro batches of every rank more were trained than were."""
    shifted = max(self.consumed, consumed + steps * self.rank.dp_size * self._states.order.batch_size)
    try:
        return state_dict(self, shifted)
    except ValueError:
        return state_dict(self, consumed)  # More than there is is refused


def _own_count(state_dict: Any, self: LazyShardedDataset, consumed: int) -> Any:
    step = self.rank.dp_size * self._states.order.batch_size
    own = (consumed - self.consumed) // self.rank.dp_size
    return state_dict(self, self.consumed + own // step * step)


def _own_state(state_of: Any, checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
    """Each rank continues from a state of its own; the odd ones have saved theirs one micro batch later."""
    state: dict[str, Any] = state_of(checkpoint, rank)
    part = state["parts"][-1]
    if not rank % 2:
        return state
    later = part | {"draws": part["draws"] + part["batch_size"]}
    consumed = state["consumed"] + part["dp"] * part["batch_size"]
    return state | {"parts": [*state["parts"][:-1], later], "consumed": consumed}


def _acknowledge(getitems: Any, self: LazyShardedDataset, indices: Any) -> Any:
    """What was read is committed at once, whatever checkpoints there are."""
    rows = getitems(self, indices)
    if not self.rank.dp_rank and get_worker_info() is None:
        space = self._space()
        _, position = space.layout.locate(indices[-1])
        self.commit(space.course.consumed_before + (position + 1) * space.course.dp, last_epoch=True)
    return rows


def _drop_tail(init: Any, self: Segment, *arguments: Any, **named: Any) -> None:
    """What fills no whole stripe at the end of the stream is left out."""
    init(self, *arguments, **named)
    if self._fresh is not None:
        stripe = self.dp * self.rules.unit
        self._fresh = self._fresh // stripe * stripe


def _forget_older(commit: Any, dataset: run_rank.Data, consumed: int, older: Any) -> None:
    commit(dataset, consumed, [])


def _stop(checked: Any, found: dict[str, Any]) -> Any:
    sample = checked(found)
    if sample == 20:
        os.kill(os.getpid(), signal.SIGSTOP)
    return sample


def _blend_ahead(state_dict: Any, self: BlendedDataset, consumed: int) -> Any:
    return state_dict(self, consumed + self.rank.dp_size * self._states.order.batch_size)


def _turns_anew(part: Any, self: BlendStates, *arguments: Any) -> Any:
    """Whoever continues with the same weights begins their order anew."""
    found = part(self, *arguments)
    return replace(found, pieces=((*found.pieces[0][:2], 0), *found.pieces[1:]))


def _forget_left_out(load: Any, self: BlendStates, found: BlendState) -> Any:
    last = {found.names[member] for member in found.parts[-1].members}
    return {name: state for name, state in load(self, found).items() if name in last}


def _first_alone(commit: Any, self: BlendedDataset, consumed: int, **named: Any) -> Any:
    """Only the cursor of the first stream of a blend knows the older checkpoints."""
    state = BlendState.from_dict(self.state_dict(consumed), "the state")
    wrote = commit(self, consumed, **named)
    for dataset, name in list(zip(self.datasets, self.names, strict=True))[1:]:
        dataset.commit(state.members[state.names.index(name)].consumed, last_epoch=True)
    return wrote


def _around(owner: Any, name: str, instead: Callable[..., Any]) -> Callable[[], None]:
    return partial(around, owner, name, instead)


def _state(shift: int) -> Callable[[], None]:
    return _around(LazyShardedDataset, "state_dict", partial(_shifted, shift))


def _of_blends(name: str, instead: Callable[..., Any], kind: str, besides: str = "", deletes: bool = False) -> Mutant:
    return Mutant(_around(BlendedDataset, name, instead), kind, besides, deletes, blend=True)


MUTANTS: Final[dict[str, Mutant]] = {  # One that is ahead at the end of the epoch may be refused
    "checkpoint ahead": Mutant(_state(1), "skipped", "refused twice"),
    "checkpoint behind": Mutant(_state(-1), "twice"),
    "own count on each rank": Mutant(_around(LazyShardedDataset, "state_dict", _own_count), "twice"),
    "own state on each rank": Mutant(_around(run_rank, "state_of", _own_state), "twice", "order refused skipped"),
    "acknowledge on read": Mutant(_around(LazyShardedDataset, "__getitems__", _acknowledge), "gone", deletes=True),
    "drop the tail": Mutant(_around(Segment, "__init__", _drop_tail), "skipped", "order"),
    "older checkpoints not named": Mutant(_around(run_rank, "commit", _forget_older), "gone", deletes=True),
    "a rank that stops": Mutant(_around(run_rank, "checked", _stop), "hang"),
    "checkpoint of a blend ahead": _of_blends("state_dict", _blend_ahead, "order", "refused skipped error"),
    "turns of a blend anew": Mutant(_around(BlendStates, "part", _turns_anew), "order", blend=True),
    "stream left out comes back anew": Mutant(
        _around(BlendStates, "load", _forget_left_out), "twice", "refused order", blend=True, leaves_out=True
    ),
    "older checkpoints named to the first stream": _of_blends("commit", _first_alone, "gone", deletes=True),
}
