"""Where a run stands: the state that was loaded, what it is in each epoch, and after so many samples.

A run whose epochs are begun with `set_epoch` is, for its state, one that begins with the epoch that was set: what was
trained before decides nothing any more. What is no such state is told by what it looks like.
"""

from __future__ import annotations

import operator
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from lazyshard.data.rank import Rank
from lazyshard.data.settings import RunOrder
from lazyshard.errors import StateInvalid
from lazyshard.format.state import RunState, SequenceState
from lazyshard.part import Part
from lazyshard.plan.deal import Gaps
from lazyshard.stream import StreamReader
from lazyshard.stream.run_state import (
    check_fits,
    ranges_of_steps,
    resumed,
    steps_of,
    with_consumed,
    without_samples,
    without_steps,
)

Ranges = Iterable[tuple[int, int]]
"""Half-open ranges of numbers."""

# What a `LazyShardedStream` adds to the state of its data set, which cannot stand there. Of a DataLoader worker: which
# one it is, of how many, and how many samples it has handed out of the pass. Within a micro batch: how many samples of
# it. Behind a micro batch that completed the epoch: how many samples that had, over all ranks.
WORKER: Final = "worker"
WORKERS: Final = "workers"
HANDED_OUT: Final = "handed_out"
OVER: Final = "over"

# A checkpoint holds thousands of tensors; a state lies near the top of it.
_MAX_DEPTH: Final = 3
_MAX_VALUES: Final = 1000

_SHOWN_KEYS: Final = 6

_RUN: Final = frozenset(RunState.__slots__)


class RunStates:
    """The state of a run, as loaded, in each epoch. `order` may change until a state is begun with it."""

    def __init__(self, order: RunOrder, reader: StreamReader) -> None:
        self.order = order
        self._reader = reader
        # None for "auto", until it is settled.
        self._unit = order.unit_samples(reader.samples_per_chunk)
        self._loaded: RunState | None = None

    @property
    def given(self) -> bool:
        """Whether the run goes on from somewhere, or leaves something out."""
        return self._loaded is not None

    @property
    def unit(self) -> int | None:
        """Samples that are dealt in a row; None as long as "auto" is open.

        Fixed once it is settled; a state that is loaded before then brings its own, that with which its run began.
        """
        return self._loaded.unit if self._unit is None and self._loaded is not None else self._unit

    def settle(self, unit: int) -> None:
        """Settles what "auto" stands for."""
        if self._unit is None:
            self._unit = unit

    def read(self, value: object) -> RunState:
        """Returns what `state_dict` gave. Raises StateInvalid, StateMismatch: of another stream, other settings."""
        where = f"{self._reader.directory}: the state to go on from"
        if (reason := only_of_a_stream(value) or _mistaken(value, _RUN)) is not None:
            raise StateInvalid(f"{where}: {reason}", file=where, expected="the state of a run")
        state = RunState.from_dict(value, where)
        check_fits(state, self._anew(self._unit or state.unit), str(self._reader.directory))
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
            self._loaded = state
            return epoch, state.parts[-1].draws
        given, here = self._resumed(state, settled), self.of(epoch, settled)
        position = given.parts[-1].draws
        if _course(given) != _course(here) or (position != here.parts[-1].draws and not anywhere):
            raise RuntimeError(
                f"{self._reader.directory}: this data set is in use already and stands elsewhere; load the state into "
                f"a new one, before its length, its rank_indices or a loader's workers are asked for"
            )
        return epoch, position

    def skip(self, samples: Ranges, chunks: Ranges, steps: Ranges, rank: Callable[[], Rank]) -> None:
        """Leaves samples out from here on; see `LazyShardedDataset.skip`."""
        size = self._reader.samples_per_chunk
        out = _ranges("samples", samples) + [(a * size, b * size) for a, b in _ranges("chunks", chunks)]
        state, wanted = self._loaded, sorted(_ranges("steps", steps))
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
        if known.joined(out).ranges != known.ranges:
            state = without_samples(state, out)
        self._loaded = state

    def of(self, epoch: int, dp: int) -> RunState:
        """Returns the state with which so many ranks begin or go on in an epoch."""
        order, loaded, unit = self.order, self._loaded, self.unit
        if loaded is not None and epoch == epoch_of(loaded):
            return self._resumed(loaded, dp)
        skip = () if loaded is None else _gaps(loaded).ranges
        # No number for the first epoch, so that a run which sets it is no other than one which does not.
        begin = Part(dp, order.batch_size, epoch=epoch or None, skip=skip, draws_per_step=order.draws_per_step)
        assert unit is not None, "settled before a run is begun"
        return replace(self._anew(unit), parts=(begin,))

    def after(self, consumed: int | None, epoch: int, dp: int) -> RunState:
        """Returns the state after so many samples, None for that with which the epoch began. Raises ValueError."""
        state = self.of(epoch, dp)
        if consumed is None:
            return state
        count = as_count(consumed)
        if count < state.consumed:
            raise ValueError(
                f"consumed is at least {state.consumed}, what was trained when the loaded state was saved, got "
                f"{count}: count on from dataset.consumed"
            )
        after, size = with_consumed(state, count), self.order.batch_size
        if after.parts[-1].draws % size:
            raise ValueError(
                f"consumed counts whole micro batches of all ranks, so it grows by dp_size * batch_size = {dp} * "
                f"{size} a batch, got {count}"
            )
        return after

    def consumed(self, epoch: int) -> int:
        """Returns how many samples were trained in the loaded state, if it is of that epoch; else 0."""
        loaded = self._loaded
        return loaded.consumed if loaded is not None and epoch == epoch_of(loaded) else 0

    def _anew(self, unit: int) -> RunState:
        """Returns the state of a run that begins, with one rank."""
        order, size = self.order, self._reader.samples_per_chunk
        return RunState(
            stream_id=self._reader.stream_id,
            samples_per_chunk=size,
            unit=unit,
            window=order.rules(size, unit).window,
            seed=order.seed,
            max_total_samples=order.max_total_samples,
            parts=(Part(1, order.batch_size),),
            consumed=0,
        )

    def _resumed(self, state: RunState, dp: int) -> RunState:
        return resumed(state, dp, self.order.batch_size, draws_per_step=self.order.draws_per_step)


def epoch_of(state: RunState) -> int:
    """Returns the epoch with which the run that a state tells began, or was begun anew by `set_epoch`."""
    return next((part.epoch for part in reversed(state.parts) if part.epoch is not None), 0)


def as_count(consumed: object, what: str = "samples") -> int:
    """Returns what `state_dict` was given. Raises TypeError: it is no integer."""
    try:
        return operator.index(consumed)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"consumed is a number of {what}, an int, got {consumed!r}") from None


def _ranges(name: str, given: Ranges) -> list[tuple[int, int]]:
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


def _course(state: RunState) -> tuple[Part, ...]:
    """Returns what decides the draws of a state's current part; the first one may name epoch 0 or not."""
    first, *parts = (replace(part, first_step=0, draws_per_step=0) for part in state.parts)
    parts.insert(0, replace(first, epoch=first.epoch or 0))
    return (*parts[:-1], replace(parts[-1], draws=0))


def only_of_a_stream(value: object) -> str | None:
    """Returns why a state is none for a data set, and what to give instead, in words; None where it may be one."""
    if not isinstance(value, dict):
        return None
    if WORKER in value:
        return (
            f"it is that of {_owner(value)}, which only the same number of workers can go on from; save "
            f"`dataset.state_dict(consumed)` too: any ranks and workers can go on from that"
        )
    if value.get("kind") == "sequences":
        return "it is that of LazyShardedSequences, of the same form as there, which alone goes on from it"
    if HANDED_OUT in value:
        return (
            f"it stands within a micro batch, where only {_owner(value)} of as many ranks goes on; give one that was "
            f"saved at the end of a micro batch"
        )
    return None


def mistaken_for_sequences(value: object) -> str | None:
    """Returns what a value is and what to give instead, in words; None where it may be a state of sequences."""
    if isinstance(value, dict) and value.get("kind") not in ("blend", "sequences"):
        # Fields of what torchdata's `StatefulDataLoader` returns, with workers and without (torchdata 0.11).
        if "_snapshot" in value or "_num_yielded" in value:
            return (
                "it is the state of a StatefulDataLoader: give it to `loader.load_state_dict`, of a loader over these "
                "sequences with as many workers"
            )
        if len(value.keys() & _RUN) > 2:
            return (
                f"it is the state of {_owner(value)}, and goes on there alone: it counts samples, not sequences; give "
                f"what `state_dict` of LazyShardedSequences returned, or begin an epoch anew"
            )
    return _mistaken(value, frozenset(SequenceState.__slots__))


def _owner(state: dict[Any, Any]) -> str:
    iterable = "a LazyShardedStream or LazyShardedIterable"
    if WORKER in state:
        return f"one DataLoader worker of {iterable}"
    return iterable if HANDED_OUT in state or OVER in state else "a LazyShardedDataset or LazyShardedStream"


def _mistaken(value: object, fields: frozenset[str]) -> str | None:
    if isinstance(value, (str, os.PathLike)):
        return "it is a path or a text: load the checkpoint, as with `torch.load`, and give what `state_dict` returned"
    if not isinstance(value, dict):
        return None
    if value.get("kind") == "blend":
        return "it is the state of a blend: give it to a `BlendedDataset` of the same streams"
    if value.keys() & fields:
        return None
    # Nothing of a state in it: it is something that holds more, or something else.
    paths = [path for path, inner in _inner(value) if len(inner.keys() & fields) > 2]
    if paths:
        others = " or ".join(f"`checkpoint{path}`" for path in paths[:3])
        return f"it holds more than the state of a run, {_keys(value)}: give {others}, which looks like one"
    if not value:
        return "it is empty: give what `state_dict` returned"
    return f"it holds no state of a run but {_keys(value)}: give what `state_dict` returned, if it was saved"


def _inner(value: dict[Any, Any]) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yields the objects in an object, those near the top first, with the way to each."""
    seen = 0
    holders = [("", 0, value)]
    for path, depth, holder in holders:
        for key, inner in holder.items():
            seen += 1
            if seen > _MAX_VALUES:
                return
            if isinstance(inner, dict):
                found = f"{path}[{reprlib.repr(key)}]"
                yield found, inner
                if depth + 1 < _MAX_DEPTH:
                    holders.append((found, depth + 1, inner))


def _keys(value: dict[Any, Any]) -> str:
    shown = [reprlib.repr(key) for key in list(value)[:_SHOWN_KEYS]]
    more = f"{len(value) - _SHOWN_KEYS} more" if len(value) > _SHOWN_KEYS else shown.pop()
    return f"{', '.join(shown)} and {more}" if shown else more
