"""Mistakes of which the harness must find each: installed in the process that plays a run, before all else."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from torch.utils.data import get_worker_info

from lazyshard.data.blend_state import BlendStates
from lazyshard.data.blended import BlendedDataset
from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.format.blend_state import BlendPartState, BlendState
from lazyshard.format.state import RunState
from lazyshard.plan.segment import Segment
from tests.harness.runs import rank as run_rank
from tests.harness.runs.checkpoints import Checkpoint
from tests.harness.runs.plan import RunPlan, make_blend_plan, make_plan


@dataclass(frozen=True, slots=True)
class Mutant:
    install: Callable[[], None]  # makes it
    kind: str  # what the harness must find, see `Violation`
    besides: frozenset[str] = frozenset()  # what it may find as well, or first
    # whether the producer deletes chunks; else the mistake shows in what is trained, and only there.
    deletes: bool = False
    blend: bool = False  # whether it is one of blends
    leaves_out: bool = False  # whether every other life leaves out all streams but the first

    def plan(self, seed: int) -> RunPlan:
        """Returns the run of a seed in which it is to be found."""
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


def _shifted(steps: int) -> None:
    """The state says that so many micro batches of every rank more were trained than were."""
    original = LazyShardedDataset.state_dict

    def state_dict(self: LazyShardedDataset, consumed: int | None = None) -> dict[str, Any]:
        first = self.consumed
        assert consumed is not None
        shifted = max(first, consumed + steps * self.rank.dp_size * self._draws.order.batch_size)
        try:
            return original(self, shifted)
        except ValueError:
            # More than there is is refused.
            return original(self, consumed)

    LazyShardedDataset.state_dict = state_dict  # type: ignore[method-assign]


def _own_count() -> None:
    """Each rank counts what it has trained itself, as if there were no others."""
    original = LazyShardedDataset.state_dict

    def state_dict(self: LazyShardedDataset, consumed: int | None = None) -> dict[str, Any]:
        assert consumed is not None
        step = self.rank.dp_size * self._draws.order.batch_size
        own = (consumed - self.consumed) // self.rank.dp_size
        return original(self, self.consumed + own // step * step)

    LazyShardedDataset.state_dict = state_dict  # type: ignore[method-assign]


def _own_state() -> None:
    """Each rank goes on from a state of its own; the odd ones have saved theirs one micro batch later."""
    original = run_rank.state_of

    def state_of(checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
        state = original(checkpoint, rank)
        part = state["parts"][-1]
        if not rank % 2:
            return state
        later = part | {"draws": part["draws"] + part["batch_size"]}
        consumed = state["consumed"] + part["dp"] * part["batch_size"]
        return state | {"parts": [*state["parts"][:-1], later], "consumed": consumed}

    run_rank.state_of = state_of


def _acknowledge_on_read() -> None:
    """What was read is committed at once, whatever checkpoints there are."""
    original = LazyShardedDataset.__getitems__

    def getitems(self: LazyShardedDataset, indices: Any) -> list[Any]:
        rows = original(self, indices)
        if not self.rank.dp_rank and get_worker_info() is None:
            space = self._draws.indices()
            _, position = space.layout.locate(indices[-1])
            self.commit(space.course.consumed_before + (position + 1) * space.course.dp, last_epoch=True)
        return rows

    LazyShardedDataset.__getitems__ = getitems  # type: ignore[method-assign]


def _drop_tail() -> None:
    """What fills no whole stripe at the end of the stream is left out."""
    original = Segment.__init__

    def init(self: Segment, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        if self._fresh is not None:
            stripe = self.dp * self.rules.unit
            self._fresh = self._fresh // stripe * stripe

    Segment.__init__ = init  # type: ignore[method-assign]


def _forget_older() -> None:
    """The cursor follows the newest checkpoint, although older ones are kept."""
    original = run_rank.commit

    def commit(dataset: run_rank.Data, consumed: int, older: list[dict[str, Any]]) -> None:
        original(dataset, consumed, [])

    run_rank.commit = commit


def _stop() -> None:
    """A rank never comes to the end of its step."""
    original = run_rank.checked

    def checked(found: dict[str, Any]) -> int:
        sample = original(found)
        if sample == 20:
            os.kill(os.getpid(), signal.SIGSTOP)
        return sample

    run_rank.checked = checked


def _blend_ahead() -> None:
    """The state of a blend says that a micro batch of every rank more was trained than was."""
    original = BlendedDataset.state_dict

    def state_dict(self: BlendedDataset, consumed: int | None = None) -> dict[str, Any]:
        assert consumed is not None
        return original(self, consumed + self.rank.dp_size * self._batch_size)

    BlendedDataset.state_dict = state_dict  # type: ignore[method-assign]


def _turns_anew() -> None:
    """Whoever goes on with the same weights begins their order anew."""
    original = BlendStates.part

    def part(self: BlendStates, *arguments: Any) -> BlendPartState:
        found = original(self, *arguments)
        return replace(found, pieces=((*found.pieces[0][:2], 0), *found.pieces[1:]))

    BlendStates.part = part  # type: ignore[method-assign,assignment]


def _forget_left_out() -> None:
    """A stream that was left out for a while comes back from its beginning."""
    original = BlendStates.load

    def load(self: BlendStates, found: BlendState) -> dict[str, RunState]:
        last = {found.names[member] for member in found.parts[-1].members}
        return {name: state for name, state in original(self, found).items() if name in last}

    BlendStates.load = load  # type: ignore[method-assign]


def _first_alone() -> None:
    """Only the cursor of the first stream of a blend knows the older checkpoints."""
    original = BlendedDataset.commit

    def commit(self: BlendedDataset, consumed: int, **named: Any) -> bool:
        state = BlendState.from_dict(self.state_dict(consumed), "the state")
        wrote = original(self, consumed, **named)
        for dataset, name in list(zip(self._datasets, self._names, strict=True))[1:]:
            dataset.commit(state.members[state.names.index(name)].consumed, last_epoch=True)
        return wrote

    BlendedDataset.commit = commit  # type: ignore[method-assign]


# A state that is ahead at the end of the epoch is in the next one: refused, or all is trained again.
MUTANTS: Final[dict[str, Mutant]] = {
    "checkpoint ahead": Mutant(lambda: _shifted(1), "skipped", frozenset({"refused", "twice"})),
    "checkpoint behind": Mutant(lambda: _shifted(-1), "twice"),
    "own count on each rank": Mutant(_own_count, "twice"),
    "own state on each rank": Mutant(_own_state, "twice", frozenset({"order", "refused", "skipped"})),
    "acknowledge on read": Mutant(_acknowledge_on_read, "gone", deletes=True),
    "drop the tail": Mutant(_drop_tail, "skipped", frozenset({"order"})),
    "older checkpoints not named": Mutant(_forget_older, "gone", deletes=True),
    "a rank that stops": Mutant(_stop, "hang"),
    "checkpoint of a blend ahead": Mutant(
        _blend_ahead, "order", frozenset({"refused", "skipped", "error"}), blend=True
    ),
    "turns of a blend anew": Mutant(_turns_anew, "order", blend=True),
    "stream left out comes back anew": Mutant(
        _forget_left_out, "twice", frozenset({"refused", "order"}), blend=True, leaves_out=True
    ),
    "older checkpoints named to the first stream": Mutant(_first_alone, "gone", deletes=True, blend=True),
}
