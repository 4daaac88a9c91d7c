"""A pass over the sequences of one rank, micro batch by micro batch, to the end of the epoch, and its state."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from torch.utils.data import get_worker_info
from torch.utils.data._utils.worker import WorkerInfo

from lazyshard.data.rank import Rank, enter_process
from lazyshard.data.run_state import as_count, mistaken_for_sequences
from lazyshard.data.sequence_forms import SequenceMaker, SequenceSettings
from lazyshard.data.sequence_plan import SequencePlanner, SequenceWalk, check_beginning
from lazyshard.data.shared import SharedNumbers, Stats
from lazyshard.errors import LazyShardError, StateInvalid, StateMismatch
from lazyshard.format.state import SequenceState, WindowPlace
from lazyshard.plan.sequences import completed
from lazyshard.plan.splitting import SplitSequence
from lazyshard.stream import StreamReader

_log = logging.getLogger("lazyshard")

_WITHIN: Final = "handed_out"
_RANKS: Final = "ranks"
_BATCH: Final = "batch_size"
_WORKER: Final = "worker"
_WORKERS: Final = "workers"
_BEGUN: Final = "begun"
"""What a state has beside that of a whole run, as `lazyshard.format.state` reads it."""


class EpochPosition(NamedTuple):
    """Where a run is in an epoch.

    Attributes:
        epoch: in which.
        consumed: sequences of it that are behind the run, over all ranks.
        place: where the next ones are made again, at or before that.
        within: sequences of a rank that are behind it besides, in the micro batch that follows.
        worker: of which DataLoader worker, of how many, it is the position; None for all.
        begun: whether the micro batch that follows is one of that worker, which it has begun to hand out.
    """

    epoch: int
    consumed: int
    place: WindowPlace
    within: int
    worker: tuple[int, int] | None = None
    begun: bool = False


class _HandedOut(NamedTuple):
    """What a pass in this process has handed out.

    Attributes:
        epoch: of the pass.
        first: first sequence of the micro batch of all ranks that it is at.
        within: sequences of this rank's part of it that were handed out.
        place: where that micro batch can be made again.
        walk: through the sequences.
    """

    epoch: int
    first: int
    within: int
    place: WindowPlace
    walk: SequenceWalk


class SequencePasses:
    """The passes of one process, one at a time, and where they are.

    Attributes:
        checked: as given, or by a pass since.
    """

    def __init__(
        self,
        reader: StreamReader,
        planner: SequencePlanner,
        maker: SequenceMaker,
        settings: SequenceSettings,
        shared: SharedNumbers,
        *,
        checked: bool,
    ) -> None:
        self.checked = checked
        self._reader = reader
        self._planner = planner
        self._maker = maker
        self._settings = settings
        self._shared = shared
        self._progress: _HandedOut | None = None
        self._reported = Stats()
        # Rows in no sequence, of the passes before.
        self._dropped = 0
        # What `after` has planned last, from which position on.
        self._counted: tuple[EpochPosition, SequenceWalk] | None = None

    def begin(self, position: EpochPosition, rank: Rank, worker: WorkerInfo | None) -> Iterator[Any]:
        """Begins a pass at a position. What it raises, `LazyShardedSequences.__iter__` says."""
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        micro = rank.dp_size * self._settings.batch_size
        first, within = position.consumed, position.within
        if not position.begun:
            first += number * micro
            within = 0 if number else within
        walk = SequenceWalk(self._planner, position.place, position.epoch)
        self._progress = None
        self._dropped = self._reported.dropped - self._maker.stats.dropped
        enter_process(self._reader, rank, worker)
        self._planner.tells = rank.dp_rank == 0 and number == 0
        return self._pass(walk, position.epoch, rank, (first, within), workers * micro, counts=self._planner.tells)

    def position(self, epoch: int, ranks: int, *, in_worker: bool) -> EpochPosition | None:
        """Returns where the run is by what this pass has handed out; None if it handed out none of that epoch.

        Args:
            epoch: that is set.
            ranks: of the run.
            in_worker: whether to stay in a micro batch that was handed out whole, as the next one is not this worker's.
        """
        progress = self._progress
        if progress is None or progress.epoch != epoch:
            return None
        _, first, within, place, walk = progress
        size = self._settings.batch_size
        if in_worker or within != size:
            return EpochPosition(epoch, first, place, within, begun=in_worker)
        behind = first + ranks * size
        behind = behind if walk.total is None else min(behind, walk.total)
        return EpochPosition(epoch, behind, walk.place_of(behind), 0)

    def after(self, consumed: int, begun: EpochPosition, ranks: int) -> EpochPosition:
        """Returns where a run is after so many sequences of an epoch, by planning the windows up to there.

        Each call goes on where the one before has ended, if that is not behind.

        Raises:
            ValueError, TypeError, WaitTimeout: as `LazyShardedSequences.state_dict`.
        """
        count = as_count(consumed, "sequences")
        known = self._counted
        if known is None or known[0] != begun or not known[1].holds(count):
            known = self._counted = begun, SequenceWalk(self._planner, begun.place, begun.epoch)
        walk = known[1]
        place = walk.place_of(max(count, begun.consumed))
        whole = count if walk.total is None else min(count, walk.total)
        micro = ranks, self._settings.batch_size
        wrong = _not_whole(count, begun.consumed, walk.total, micro, self._settings.at_end)
        if wrong is not None:
            raise ValueError(f"{self._reader.directory}: {wrong}")
        walk.let_go(whole)
        return EpochPosition(begun.epoch, whole, place, begun.within if whole == begun.consumed else 0)

    def forget(self) -> None:
        """Forgets what was handed out and planned: the run goes on elsewhere, perhaps by other lengths."""
        self._progress = self._counted = None

    def state_at(self, position: EpochPosition, ranks: int) -> dict[str, Any]:
        """Returns the state that says where a run of so many ranks is."""
        assert self._reader.stream_id is not None  # others have no lengths
        epoch, consumed, place, within, worker, begun = position
        lengths, facts = self._planner.digest(place, consumed), self._settings.facts
        state = SequenceState(self._reader.stream_id, facts, epoch, consumed, place, lengths).to_dict()
        if within or worker is not None:
            state |= {_WITHIN: within, _RANKS: ranks, _BATCH: self._settings.batch_size}
        return state if worker is None else state | {_WORKER: worker[0], _WORKERS: worker[1], _BEGUN: begun}

    def position_of(self, value: Any, ranks: int, here: tuple[int, int] | None) -> EpochPosition:
        """Returns where a state stands, if so many ranks can go on from it here.

        Args:
            value: as loaded.
            ranks: of the run.
            here: this DataLoader worker, of how many; None for none.

        Raises:
            StateInvalid, VersionUnsupported, StateMismatch, ChunkRetired: see `LazyShardedSequences.load_state_dict`.
        """
        where = f"{self._reader.directory}: the state to go on from"
        if (mistaken := mistaken_for_sequences(value)) is not None:
            raise StateInvalid(f"{where}: {mistaken}", file=where, expected="the state of LazyShardedSequences")
        state, facts = SequenceState.from_dict(value, where), self._settings.facts
        if state.stream != self._reader.stream_id:
            raise self._mismatch("stream", str(self._reader.stream_id), state.stream)
        # The form before what another form has or has not.
        for name in sorted(facts.keys() | state.rule.keys(), key=lambda name: (name != "form", name)):
            mine, theirs = facts.get(name), state.rule.get(name)
            if (mine, type(mine)) != (theirs, type(theirs)):
                raise self._mismatch(name, str(mine), str(theirs))
        worker, within, begun = _within_micro_batch(value, (ranks, self._settings.batch_size), here, where)
        self._planner.check(state)
        return EpochPosition(state.epoch, state.consumed, state.place, within, worker, begun)

    def _mismatch(self, field: str, expected: str, actual: str) -> StateMismatch:
        return StateMismatch(
            f"{self._reader.directory}: the state to go on from was saved with {field} = {actual:.100}, here it is "
            f"{expected:.100}: other sequences would be made. Take what it was, or begin an epoch anew",
            directory=str(self._reader.directory),
            field=field,
            expected=expected,
            actual=actual,
        )

    def _pass(
        self, walk: SequenceWalk, epoch: int, rank: Rank, start: tuple[int, int], step: int, *, counts: bool
    ) -> Iterator[Any]:
        # The epoch is given: by now, at the first sequence that is asked for, another one may be set.
        number, size = rank.dp_rank, self._settings.batch_size
        micro = rank.dp_size * size
        first, within = start
        try:
            if not self.checked:
                self._reader.wait_for(1)
                self.checked = check_beginning(self._reader, self._settings)
            while True:
                walk.let_go(first)
                planned = walk.sequences(first, first + micro)
                if len(planned) < micro and not (planned := self._last(planned, rank, walk)):
                    return
                place = walk.place_of(first)
                for at in range(number * size + within, (number + 1) * size):
                    made = self._maker.make(planned[at], walk.window_of(first + at).sequences)
                    within += 1
                    self._progress = _HandedOut(epoch, first, within, place, walk)
                    self._report(walk.dropped if counts else 0)
                    yield made
                first, within = first + step, 0
        except LazyShardError as error:
            if get_worker_info() is not None:
                error.carry_fields()
            raise
        finally:
            self._report(walk.dropped if counts else 0)

    def _last(self, left: list[SplitSequence], rank: Rank, walk: SequenceWalk) -> list[SplitSequence]:
        """Returns what the epoch ends with, behind its whole micro batches."""
        if not left:
            return []
        size, at_end = self._settings.batch_size, self._settings.at_end
        if rank.dp_rank == 0:
            done = "they are not drawn" if at_end == "drop" else "one more micro batch of each rank draws them"
            _log.warning(
                "%s: %s sequences; left over at the end of the epoch: %d, fewer than dp_size * batch_size = %d * %d; "
                "at_end=%r: %s",
                *(self._reader.directory, walk.total, len(left), rank.dp_size, size, at_end, done),
            )
        return [] if at_end == "drop" else completed(left, rank.dp_size * size, self._settings.form.rule)

    def _report(self, dropped: int) -> None:
        now, before = self._maker.stats, self._reported
        now = now._replace(dropped=now.dropped + self._dropped + dropped)
        if now != before:
            self._reported = now
            self._shared.report(now, before)


def _within_micro_batch(
    value: dict[str, Any], micro_batch: tuple[int, int], here: tuple[int, int] | None, where: str
) -> tuple[tuple[int, int] | None, int, bool]:
    """Returns the worker of a state, what is handed out of a micro batch, and whether that is one of its own.

    Args:
        value: the state.
        micro_batch: ranks and batch size.
        here: this DataLoader worker, of how many; None for none.
        where: for messages.

    Raises:
        StateInvalid: it is that of another worker, or within another micro batch.
    """
    worker = (value[_WORKER], value.get(_WORKERS)) if _WORKER in value else None
    if worker != here:
        names = [f"DataLoader worker {one[0]} of {one[1]}" if one else "a whole run" for one in (here, worker)]
        raise StateInvalid(
            f"{where}: expected that of {names[0]}, found that of {names[1]}; with another number of workers go on "
            f"from what `state_dict(consumed)` gave",
            field=_WORKERS,
            expected=names[0],
            actual=names[1],
        )
    within, given = value.get(_WITHIN, 0), (value.get(_RANKS), value.get(_BATCH))
    ranks, size = micro_batch
    if (within != 0 or worker is not None) and given != micro_batch:
        raise StateInvalid(
            f"{where}: it stands within a micro batch of {given[1]!r:.20} of {given[0]!r:.20} ranks, here it is {size} "
            f"of {ranks}: go on from one that was saved at the end of a micro batch",
            field=_WITHIN,
            expected=f"{ranks} ranks, batch_size {size}",
            actual=f"{given[0]!r:.20} ranks, batch_size {given[1]!r:.20}",
        )
    begun = worker is not None and value.get(_BEGUN) is True
    # Where a worker has handed all of its micro batch out, the next one is not that which follows this one.
    most = size if begun else size - 1
    if type(within) is not int or not 0 <= within <= most:
        raise StateInvalid(
            f"{where}: expected an integer from 0 to {most} as {_WITHIN!r}, found {within!r:.100}; go on from an older "
            f"checkpoint",
            field=_WITHIN,
            expected=f"an integer from 0 to {most}",
            actual=f"{within!r:.100}",
        )
    return worker, within, begun


def _not_whole(count: int, begun: int, total: int | None, micro: tuple[int, int], at_end: str) -> str | None:
    """Returns why a number of sequences was not trained at the end of a micro batch, in words; None if it can be.

    Args:
        count: sequences of an epoch, over all ranks, what completes it included.
        begun: behind which the run began, or went on.
        total: of the epoch; None as long as its end is not known.
        micro: ranks, and batch size.
        at_end: "drop", or "complete" for one more micro batch with what is left over.
    """
    step = micro[0] * micro[1]
    batches = f"consumed counts whole micro batches of dp_size * batch_size = {micro[0]} * {micro[1]} sequences"
    if count < begun:
        known = ", what was trained when the loaded state was saved" if begun else ""
        return f"{batches} from {begun} on{known}; got {count}"
    most = None
    if total is not None:
        left = (total - begun) % step
        most = total - left + (step if left and at_end == "complete" else 0)
        if count > most:
            over = f", of which at_end='drop' leaves {left} over" if most < total else ""
            return f"{batches}, which are {most} at the most: the epoch has {total} sequences{over}; got {count}"
    below = begun + (count - begun) // step * step
    if below == count:
        return None
    other = "" if most == below else f" or {below + step}"
    return f"{batches} from {begun} on, so {below}{other}; got {count}"
