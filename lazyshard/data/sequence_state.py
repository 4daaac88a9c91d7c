"""Where a run stands among the sequences of its epoch, as its state has it, and how it is read."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Final, NamedTuple

from lazyshard.data.rank import Rank
from lazyshard.data.run_state import (
    HANDED_OUT,
    WORKER,
    WORKERS,
    Worker,
    check_micro_batch,
    check_worker,
    mistaken,
    read_count,
)
from lazyshard.data.sequence_forms import AtEnd, SequenceSettings
from lazyshard.errors import StateInvalid
from lazyshard.format.state import SequenceState, WindowPlace
from lazyshard.part import Part
from lazyshard.plan.deal import Gaps
from lazyshard.plan.sequences import SplitSequence, completed
from lazyshard.stream.run_state import resumed_parts
from lazyshard.stream.sequences import misfit, skips_of

_log = logging.getLogger("lazyshard")

_RANKS: Final = "ranks"
_BATCH: Final = "batch_size"
_BEGUN: Final = "begun"


def read_state(value: Any, facts: dict[str, Any], where: str) -> SequenceState:
    """Returns a state of sequences of these facts, the stream among them. Raises as `load_state_dict`."""
    what = f"{where}: the state to go on from"
    if (reason := mistaken(value, "sequences")) is not None:
        raise StateInvalid(f"{what}: {reason}", file=what, expected="the state of LazyShardedSequences")
    state = SequenceState.from_dict(value, what)
    theirs = {"stream": state.stream, **state.rule}
    # The form before what another form has or has not.
    for name in sorted(facts.keys() | theirs, key=lambda name: (name != "stream", name != "form", name)):
        mine, other = facts.get(name), theirs.get(name)
        if (mine, type(mine)) != (other, type(other)):
            why = (
                f"was saved with {name} = {other!s:.100}, here it is {mine!s:.100}: other sequences would be made. "
                f"Take what it was, or begin an epoch anew"
            )
            raise misfit(where, why, name, mine, other)
    return state


class EpochPosition(NamedTuple):
    """Where a run is in an epoch: behind `consumed` sequences, over all ranks, and `within` more of each.

    The next ones are made again from `place`, at or before that. Of which DataLoader worker, of how many, it is the
    position, None for all; `begun` if the micro batch that follows is one of that worker, which it has begun to hand
    out.
    """

    epoch: int
    consumed: int
    place: WindowPlace
    within: int
    worker: Worker | None = None
    begun: bool = False

    @classmethod
    def of_state(
        cls, state: SequenceState, value: dict[str, Any], micro_batch: tuple[int, int], here: Worker | None, where: str
    ) -> EpochPosition:
        """Returns the position of a state, read from a value, if this worker of how many can go on from it."""
        check_worker(value, here, where)
        if value.get(HANDED_OUT, 0) != 0 or here is not None:
            check_micro_batch((value.get(_RANKS), value.get(_BATCH)), micro_batch, where)
        begun = here is not None and value.get(_BEGUN) is True
        # Where a worker has handed all of its micro batch out, the next one is not that which follows this one.
        within = read_count(value, HANDED_OUT, micro_batch[1] - (not begun), where)
        return cls(state.epoch, state.consumed, state.place, within, here, begun)

    def beside(self, ranks: int, batch_size: int) -> dict[str, Any]:
        """Returns what a state has beside that of a whole run."""
        if not self.within and self.worker is None:
            return {}
        found = {HANDED_OUT: self.within, _RANKS: ranks, _BATCH: batch_size}
        worker = {} if self.worker is None else dict(zip((WORKER, WORKERS), self.worker, strict=True))
        return found | (worker | {_BEGUN: self.begun} if worker else {})


class RunSoFar:
    """Where a run begins or goes on, and by which parts it came there in that epoch; none for one that is new."""

    def __init__(self, settings: SequenceSettings) -> None:
        self.position = EpochPosition(0, 0, WindowPlace(), 0)
        self.parts: tuple[Part, ...] = ()
        self._settings = settings
        # What `skip` was told: samples, and whether steps too.
        self._skipped: list[tuple[int, int]] = []
        self._skipped_steps = False

    def note_skipped(self, samples: list[tuple[int, int]], *, of_steps: bool) -> None:
        """Notes what this process was told to leave out, which a state that is loaded later must not undo."""
        self._skipped += samples
        self._skipped_steps |= of_steps

    def check_skipped(self, parts: tuple[Part, ...], where: str) -> None:
        """Raises RuntimeError: the run of a state that is to be loaded does not leave out what was noted."""
        kept = Gaps(one for part in parts for one in part.skip)
        if self._skipped_steps or kept.joined(self._skipped).ranges != kept.ranges:
            raise RuntimeError(
                f"{where}: what to skip was said before this state was loaded, which does not leave it out: load the "
                f"state of `state_dict(consumed)` into new sequences, then skip (a StatefulDataLoader loads its own "
                f"only as it is iterated over)"
            )

    def begun(self, epoch: int) -> EpochPosition:
        """Returns where passes over an epoch begin."""
        return self.position if self.position.epoch == epoch else EpochPosition(epoch, 0, WindowPlace(), 0)

    def skips(self, epoch: int) -> list[tuple[int, Gaps]]:
        """Returns what is left out of an epoch, each from the number of a sequence on."""
        return skips_of(self.parts_of(epoch, 1))

    def parts_of(self, epoch: int, ranks: int) -> tuple[Part, ...]:
        """Returns the parts with which so many ranks begin, or go on, in an epoch."""
        size, each = self._settings.batch_size, self._settings.draws_per_step
        if self.parts and epoch == self.position.epoch:
            return resumed_parts(self.parts, ranks, size, draws_per_step=each)
        skip = Gaps(one for part in self.parts for one in part.skip).ranges
        return (Part(ranks, size, epoch=epoch or None, skip=skip, draws_per_step=each),)

    def parts_at(self, position: EpochPosition, ranks: int) -> tuple[Part, ...]:
        """Returns the same once the run is at a position."""
        *before, last = self.parts_of(position.epoch, ranks)
        # What completes the last micro batch is drawn, too.
        micro = last.dp * last.batch_size
        batches = -(-(position.consumed - sum(part.dp * part.draws for part in before)) // micro)
        return (*before, replace(last, draws=max(batches * last.batch_size, last.draws)))


def last_batch(
    left: list[SplitSequence], total: int | None, rank: Rank, settings: SequenceSettings, where: str
) -> list[SplitSequence]:
    """Returns the micro batches of all ranks that an epoch's last sequences make, none if they are not drawn."""
    micro, at_end = rank.dp_size * settings.batch_size, settings.at_end
    if left and rank.dp_rank == 0:
        done = "they are not drawn" if at_end == "drop" else "one more micro batch of each rank draws them"
        _log.warning(
            "%s: %s sequences; left over at the end of the epoch: %d, fewer than dp_size * batch_size = %d * %d; "
            "at_end=%r: %s",
            *(where, total, len(left), rank.dp_size, settings.batch_size, at_end, done),
        )
    return completed(left, micro, settings.form) if left and at_end == "complete" else []


def not_whole(count: int, begun: int, total: int | None, micro: tuple[int, int], at_end: AtEnd) -> str | None:
    """Returns why a number of sequences was not trained at the end of a micro batch, in words; None if it can be.

    It counts what completes the epoch, too. The run began, or went on, behind `begun`; `micro` is ranks and batch size.
    """
    step = micro[0] * micro[1]
    left = 0 if total is None else (total - begun) % step
    most = None if total is None else total - left + (step if left and at_end == "complete" else 0)
    if count >= begun and not (count - begun) % step and (most is None or count <= most):
        return None
    said = f"consumed counts whole micro batches of dp_size * batch_size = {micro[0]} * {micro[1]} sequences"
    if total is not None and most is not None and count > most:
        over = f", of which at_end='drop' leaves {left} over" if most < total else ""
        return f"{said}, which are {most} at the most: the epoch has {total} sequences{over}; got {count}"
    known = ", what was trained when the loaded state was saved" if begun and count < begun else ""
    return f"{said} from {begun} on{known}; got {count}"
