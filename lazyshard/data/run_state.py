"""Where a run stands: the state that was loaded, what it is in each epoch, and after so many samples.

A run whose epochs are begun with `set_epoch` is, for its state, one that begins with the epoch that was set: what was
trained before decides nothing any more. What is no such state is told by what it looks like.
"""

from __future__ import annotations

import operator
import os
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final, Generic, TypeVar

from lazyshard.data.rank import Rank
from lazyshard.data.settings import RunOrder
from lazyshard.errors import StateInvalid
from lazyshard.format.state import BlendPartState, BlendState, RunState, SequenceState
from lazyshard.part import Part
from lazyshard.plan.deal import Gaps
from lazyshard.stream import StreamReader
from lazyshard.stream.run_state import check_fits, ranges_of_steps, resumed, steps_of, without_samples, without_steps

Ranges = Iterable[tuple[int, int]]
"""Half-open ranges of numbers."""

# What a `LazyShardedStream` adds to the state of its data set, which cannot stand there. Of a DataLoader worker: which
# one it is, of how many, and how many samples it has handed out of the pass. Within a micro batch: how many samples of
# it. Behind a micro batch that completed the epoch: how many samples that had, over all ranks.
WORKER: Final = "worker"
WORKERS: Final = "workers"
HANDED_OUT: Final = "handed_out"
OVER: Final = "over"

Worker = tuple[int, int]
"""Number of a DataLoader worker, and how many there are."""

_SHOWN_KEYS: Final = 6

_STATES: Final[dict[str, Any]] = {"run": RunState, "blend": BlendState, "sequences": SequenceState}
_FIELDS: Final = {kind: frozenset(one.__slots__) for kind, one in _STATES.items()}

_S = TypeVar("_S", RunState, BlendState)


class States(Generic[_S]):
    """The state of a run, as loaded, in each epoch. `order` may change until a state is begun with it."""

    def __init__(self, order: RunOrder) -> None:
        self.order = order
        self.loaded: _S | None = None

    def in_epoch(self, epoch: int) -> _S | None:
        """Returns the loaded state if the run goes on there in this epoch."""
        return self.loaded if self.loaded is not None and epoch == epoch_of(self.loaded) else None

    def consumed(self, epoch: int) -> int:
        """Returns how many samples were trained in the loaded state, if it is of that epoch; else 0."""
        loaded = self.in_epoch(epoch)
        return 0 if loaded is None else loaded.consumed


class RunStates(States[RunState]):
    """The state of a run over one stream."""

    def __init__(self, order: RunOrder, reader: StreamReader) -> None:
        super().__init__(order)
        self._reader = reader
        # What "auto" stands for, once somebody has settled it.
        self.settled: int | None = None

    @property
    def unit(self) -> int | None:
        """Samples that are dealt in a row; None as long as "auto" is open.

        Fixed once it is settled; a state that is loaded before then brings its own, that with which its run began.
        """
        unit = self.order.unit_samples(self._reader.samples_per_chunk) or self.settled
        return self.loaded.unit if unit is None and self.loaded is not None else unit

    def read(self, value: object) -> RunState:
        """Returns what `state_dict` gave. Raises StateInvalid, StateMismatch: of another stream, other settings."""
        where = f"{self._reader.directory}: the state to go on from"
        if (reason := mistaken(value)) is not None:
            raise StateInvalid(f"{where}: {reason}", file=where, expected="the state of a run")
        state = RunState.from_dict(value, where)
        unit = self.order.unit_samples(self._reader.samples_per_chunk) or self.settled or state.unit
        check_fits(state, self._anew(unit, Part(1, self.order.batch_size)), str(self._reader.directory))
        return state

    def load(self, value: object, settled: int | None, anywhere: bool) -> tuple[int, int]:
        """Goes on from what `state_dict` gave; returns the epoch that it sets, and the position of its current part.

        Once the data set is used, with so many ranks `settled`, it has to be of the same course, and stand at the same
        place unless `anywhere` will do, or RuntimeError is raised. Raises as `read` and `check_data`.
        """
        state = self.read(value)
        epoch = epoch_of(state)
        if settled is None:
            from lazyshard.data.commits import check_data

            check_data(state, self.order, self._reader)
            self.loaded = state
            return epoch, state.parts[-1].draws
        given, here = self._resumed(state, settled), self.of(epoch, settled)
        position = given.parts[-1].draws
        if _course(given) != _course(here) or (position != here.parts[-1].draws and not anywhere):
            raise stands_elsewhere(f"{self._reader.directory}: this data set")
        return epoch, position

    def skip(self, samples: Ranges, chunks: Ranges, steps: Ranges, rank: Callable[[], Rank]) -> None:
        """Leaves samples out from here on; see `LazyShardedDataset.skip`."""
        out = ranges_of(samples, chunks, self._reader.samples_per_chunk)
        state, wanted = self.loaded, sorted(ranges("steps", steps))
        if state is None or wanted:
            state = self.of(0 if state is None else epoch_of(state), rank().dp_size)
        total = self.order.known_total(self._reader.refresh())
        now = steps_of(state.parts[-1]) + 1
        # All by the steps as they would be trained; the next ones are passed over as they are.
        out += [one for steps in wanted if steps[0] != now for one in ranges_of_steps(state, *steps, total)]
        for start, stop in wanted:
            if start == now:
                state = without_steps(state, start, stop, total)
        known = _gaps(state)
        # What is left out already need not be dealt anew.
        self.loaded = state if known.joined(out).ranges == known.ranges else without_samples(state, out)

    def of(self, epoch: int, dp: int) -> RunState:
        """Returns the state with which so many ranks begin or go on in an epoch."""
        if (loaded := self.in_epoch(epoch)) is not None:
            return self._resumed(loaded, dp)
        order, unit, skip = self.order, self.unit, () if self.loaded is None else _gaps(self.loaded).ranges
        assert unit is not None, "settled before a run is begun"
        # No number for the first epoch, so that a run which sets it is no other than one which does not.
        begin = Part(dp, order.batch_size, epoch=epoch or None, skip=skip, draws_per_step=order.draws_per_step)
        return self._anew(unit, begin)

    def _anew(self, unit: int, part: Part) -> RunState:
        order, size, stream_id = self.order, self._reader.samples_per_chunk, self._reader.stream_id
        window, limit = order.rules(size, unit).window, order.max_total_samples
        return RunState(stream_id, size, unit, window, order.seed, limit, (part,), consumed=0)

    def _resumed(self, state: RunState, dp: int) -> RunState:
        return resumed(state, dp, self.order.batch_size, draws_per_step=self.order.draws_per_step)


def epoch_of(state: RunState | BlendState) -> int:
    """Returns the epoch with which the run that a state tells began, or was begun anew by `set_epoch`."""
    parts: tuple[Part | BlendPartState, ...] = state.parts
    return next((part.epoch for part in reversed(parts) if part.epoch is not None), 0)


def stands_elsewhere(what: str) -> RuntimeError:
    """Returns the error for a state that is loaded too late."""
    return RuntimeError(f"{what} is in use already and stands elsewhere; load the state into a new one, before its use")


def ranges_of(samples: Ranges, chunks: Ranges, samples_per_chunk: int) -> list[tuple[int, int]]:
    """Returns the half-open ranges of samples that `skip` was given, or chunks of. Raises ValueError."""
    size = samples_per_chunk
    return ranges("samples", samples) + [(first * size, stop * size) for first, stop in ranges("chunks", chunks)]


def ranges(name: str, given: Ranges) -> list[tuple[int, int]]:
    """Returns half-open ranges, of what `skip` was given. Raises ValueError."""
    found = []
    for one in given if isinstance(given, Iterable) else [given]:
        try:
            ends = (one.start, one.stop) if isinstance(one, range) and one.step == 1 else one
            start, stop = map(operator.index, ends)
        except (TypeError, ValueError):
            raise ValueError(f"{name} are half-open ranges such as [(120, 180)], got {given!r}") from None
        if not 0 <= start < stop:
            raise ValueError(f"{name}: expected ranges (FIRST, STOP) with 0 <= FIRST < STOP, got {one!r}")
        found.append((start, stop))
    return found


def _gaps(state: RunState) -> Gaps:
    return Gaps(one for part in state.parts for one in part.skip)


def _course(state: RunState) -> list[Part]:
    """Returns what decides the draws of a state's current part; the first one may name epoch 0 or not."""
    parts = [replace(part, first_step=0, draws_per_step=0) for part in state.parts]
    parts[0] = replace(parts[0], epoch=parts[0].epoch or 0)
    return [*parts[:-1], replace(parts[-1], draws=0)]


def mistaken(value: object, kind: str = "run") -> str | None:
    """Returns what a value is that is no state of this kind, and what to give instead; None if it may be one."""
    if isinstance(value, (str, os.PathLike)):
        return "it is a path or a text: load the checkpoint, as with `torch.load`, and give what `state_dict` returned"
    if not isinstance(value, dict):
        return None
    theirs, fields = value.get("kind"), _FIELDS[kind]
    owner = "a LazyShardedDataset or LazyShardedStream"
    if WORKER in value or HANDED_OUT in value or OVER in value:
        owner = f"{'one DataLoader worker of ' * (WORKER in value)}a LazyShardedStream or LazyShardedIterable"
    # Fields of what torchdata's `StatefulDataLoader` returns, with workers and without (torchdata 0.11).
    if kind == "sequences" and ("_snapshot" in value or "_num_yielded" in value):
        return "it is the state of a StatefulDataLoader: give it to one's `load_state_dict`, with as many workers"
    if kind == "sequences" and theirs is None and len(value.keys() & _FIELDS["run"]) > 2:
        return f"it is the state of {owner}, which counts samples, not sequences, and goes on there alone"
    if kind != "sequences" and WORKER in value:
        return f"it is that of {owner}: the same number of workers goes on, or any from `dataset.state_dict(consumed)`"
    if kind != theirs == "sequences":
        return "it is that of LazyShardedSequences, of the same form as there, which alone goes on from it"
    if kind != "sequences" and HANDED_OUT in value:
        return f"it stands within a micro batch, where {owner} of as many ranks goes on: give one from the end of one"
    if kind != theirs == "blend":
        return "it is the state of a blend: give it to a `BlendedDataset` of the same streams"
    if value.keys() & fields:
        return None
    # Nothing of a state in it: it is something that holds more, or something else.
    keys = [reprlib.repr(key) for key in list(value)[:_SHOWN_KEYS]]
    last = f"{len(value) - _SHOWN_KEYS} more" if len(value) > _SHOWN_KEYS else keys.pop() if keys else "empty"
    shown = f"{', '.join(keys)} and {last}" if keys else last
    if paths := [path for path, inner in _inner(value) if len(inner.keys() & fields) > 2]:
        others = " or ".join(f"`checkpoint{path}`" for path in paths[:3])
        return f"it holds more than the state of a run, {shown}: give {others}, which looks like one"
    return f"it holds no state of a run but is {shown}: give what `state_dict` returned"


def _inner(value: dict[Any, Any]) -> list[tuple[str, dict[Any, Any]]]:
    """Returns the objects in an object, those near the top first, with the way to each.

    A checkpoint holds thousands of tensors; a state lies near the top of it.
    """
    found, seen = [("", value)], 0
    for path, holder in found:
        for key, inner in holder.items() if path.count("[") < 3 else ():
            seen += 1
            if isinstance(inner, dict) and seen <= 1000:
                found.append((f"{path}[{reprlib.repr(key)}]", inner))
    return found[1:]


def check_worker(state: dict[str, Any], here: Worker | None, where: str) -> None:
    """Raises StateInvalid: a state is that of another worker than this, or of none; None for the whole run."""
    there = (state[WORKER], state.get(WORKERS)) if WORKER in state else None
    if there != here:
        mine, other = (f"DataLoader worker {one[0]} of {one[1]}" if one else "a whole run" for one in (here, there))
        way = "with another number of workers go on from what `state_dict(consumed)` gave"
        text = f"{where}: expected that of {mine}, found that of {other}; {way}"
        raise StateInvalid(text, field=WORKERS, expected=mine, actual=other)


def check_micro_batch(there: tuple[Any, Any], here: tuple[int, int], where: str) -> None:
    """Raises StateInvalid: a state stands within a micro batch of other ranks, or of another batch size."""
    if there != here:
        mine, other = (f"{ranks!r:.20} ranks, batch_size {size!r:.20}" for ranks, size in (here, there))
        text = f"{where}: it stands within a micro batch of {other}, here it is {mine}: go on from the end of one"
        raise StateInvalid(text, field=HANDED_OUT, expected=mine, actual=other)


def read_count(state: dict[str, Any], name: str, most: int | None, where: str) -> int:
    """Returns how many were handed out, by a field of a state, 0 if it has none.

    Raises StateInvalid: it is no integer from 0, or above the most.
    """
    found = state.get(name, 0)
    if type(found) is not int or found < 0 or (most is not None and found > most):
        expected, actual = "an integer from 0" + ("" if most is None else f" to {most}"), f"{found!r:.100}"
        text = f"{where}: expected {expected} as {name!r}, found {actual}; go on from an older checkpoint"
        raise StateInvalid(text, field=name, expected=expected, actual=actual)
    return found
