"""A run over a blend: its state and those of its streams' data sets, which are saved, loaded and committed together."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from torch.utils.data import get_worker_info

from lazyshard.data.blend_spaces import BlendSpaces
from lazyshard.data.blend_states import BlendStates, epoch_of_blend
from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.data.stream_states import only_of_a_stream
from lazyshard.errors import StateInvalid
from lazyshard.format.blend_share import blend_shares
from lazyshard.format.blend_state import BlendPartState, BlendState
from lazyshard.format.state import RunState

__all__ = ["BlendRun"]

_log = logging.getLogger("lazyshard")


class BlendRun:
    """Where a run over a blend stands, and each of its streams with it.

    Args:
        datasets: that are blended.
        names: how a state calls their streams.
        states: of the blend alone.
        spaces: its indices.
    """

    def __init__(
        self, datasets: Sequence[LazyShardedDataset], names: Sequence[str], states: BlendStates, spaces: BlendSpaces
    ) -> None:
        self._datasets = datasets
        self._names = names
        self._states = states
        self._spaces = spaces

    @property
    def consumed(self) -> int:
        """Samples trained in the state that was loaded, over all ranks; 0 without one, or once another epoch is set."""
        return self._states.consumed(self._epoch)

    def before(self) -> tuple[BlendPartState, ...]:
        """Returns the parts before the one with which the run goes on in the epoch that is set."""
        return self._states.before(self._epoch, self._spaces.current().part)

    def after(self, consumed: int | None) -> BlendState:
        """Returns the state after so many samples; None for what was loaded. Raises as `BlendedDataset.state_dict`."""
        epoch, space = self._epoch, self._spaces.current()
        position = self._states.position(epoch, space.part, consumed, space.layout.block)
        return self._states.after(epoch, space.part, position, self._members(space.drawn(position)))

    def load(self, state: dict[str, Any]) -> None:
        """Goes on where a run stands; see `BlendedDataset.load_state_dict`."""
        if (reason := only_of_a_stream(state)) is not None:
            raise StateInvalid(f"the state of a blend: {reason}")
        found = BlendState.from_dict(state, "the state of a blend")
        if self._spaces.used or get_worker_info() is not None:
            if found != self.after(None):
                raise RuntimeError(
                    "this blend is in use already and stands elsewhere; load the state into a new one, before its "
                    "length, its rank_indices or a loader's workers are asked for"
                )
            return
        stands = self._states.load(found)
        new = [name for name in self._names if name not in stands]
        out = [found.names[member] for member in found.parts[-1].members if found.names[member] not in self._names]
        if new or out:
            _log.warning(
                "the blend goes on with other streams: new are %s, left out are %s",
                ", ".join(new) or "none",
                ", ".join(out) or "none",
            )
        for dataset, name in zip(self._datasets, self._names, strict=True):
            if name in stands:
                dataset.load_state_dict(stands[name].to_dict())
            # One that is new, or comes back from another epoch, begins this one.
            dataset.set_epoch(epoch_of_blend(found))

    def commit(self, consumed: int, *, last_epoch: bool, keep: Iterable[dict[str, Any]], take_over: bool) -> bool:
        """Commits how far the checkpoints are to every stream with a consumer; see `BlendedDataset.commit`."""
        committing = [pair for pair in zip(self._datasets, self._names, strict=True) if pair[0]._commits is not None]
        if not committing:
            raise ValueError("a commit is that of a consumer; make the data sets of the blend with consumer=NAME")
        state = self.after(consumed)
        blend = blend_shares(state, dict(zip(self._names, (one.directory for one in self._datasets), strict=True)))
        kept = [BlendState.from_dict(one, "a state to keep") for one in keep]
        wrote = False
        for dataset, name in committing:
            older = [one.members[one.names.index(name)].to_dict() for one in kept if name in one.names]
            mine = state.members[state.names.index(name)].consumed
            assert dataset._commits is not None
            dataset._commits.blend = blend
            # Who goes on from before a stream was added begins it anew, and needs all of it.
            known = len(older) == len(kept)
            wrote = dataset.commit(mine, last_epoch=last_epoch and known, keep=older, take_over=take_over)
        return wrote

    @property
    def _epoch(self) -> int:
        return self._datasets[0].epoch

    def _members(self, drawn: Sequence[int]) -> dict[str, RunState]:
        """Returns where each stream stands after so many draws of a lane of its current part."""
        found = {}
        for dataset, name, draws in zip(self._datasets, self._names, drawn, strict=True):
            course = dataset._indices().course
            found[name] = dataset._state_after(course.consumed_before + course.dp * draws)
        return found
