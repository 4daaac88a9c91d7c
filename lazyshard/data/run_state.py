"""The state of a run: as loaded, at the beginning of each epoch, and after a number of samples.

If epochs are begun with `set_epoch`, the state describes a run that begins with the current epoch.
"""

from __future__ import annotations

import contextlib
import operator
import os
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

from lazyshard.data.rank import Rank, log
from lazyshard.data.settings import RunOrder
from lazyshard.errors import LazyShardError, StateInvalid
from lazyshard.format.seal import DealtByCost
from lazyshard.format.state import BlendPartState, BlendState, RunState, SequenceState, WindowPlace
from lazyshard.part import Part
from lazyshard.store.files import read_seal
from lazyshard.stream import StreamReader
from lazyshard.stream import run_parts as runs

Ranges = Iterable[tuple[int, int]]  # half-open ranges of numbers
StateDicts = Iterable[dict[str, Any]]
Stopping = Literal["first_exhausted", "all_exhausted"]
Worker = tuple[int, int]  # number of a DataLoader worker, and how many there are

# Fields that a `LazyShardedStream` adds to the state of its data set. In a DataLoader worker: its number, the number of
# workers, and how many samples of the pass it has returned. Within a micro batch: how many of its samples were
# returned. After a micro batch that completed the epoch: how many samples it had, over all ranks.
WORKER: Final = "worker"
WORKERS: Final = "workers"
HANDED_OUT: Final = "handed_out"
OVER: Final = "over"
# Within a micro batch of sequences, also the ranks and batch size, and whether this worker has begun to return it.
_RANKS: Final = "ranks"
_BATCH: Final = "batch_size"
_BEGUN: Final = "begun"

_STATES: Final[dict[str, Any]] = {"run": RunState, "blend": BlendState, "sequences": SequenceState}
_FIELDS: Final = {kind: frozenset(one.__slots__) for kind, one in _STATES.items()}

_S = TypeVar("_S", RunState, BlendState)


class States(Generic[_S]):
    """The loaded state of a run, and its state in each epoch. `order` may change until the first state is begun."""

    order: RunOrder
    loaded: _S | None = None

    def in_epoch(self, epoch: int) -> _S | None:
        """Returns the loaded state if it is of this epoch."""
        return self.loaded if self.loaded is not None and epoch == epoch_of(self.loaded) else None


class RunStates(States[RunState]):
    """The state of a run over one stream."""

    settled: int | None = None  # the unit chosen for "auto"

    def __init__(self, order: RunOrder, reader: StreamReader) -> None:
        self.order, self._reader = order, reader

    @property
    def unit(self) -> int | None:
        """Number of consecutive samples that a rank is dealt, as set or from the state; None while "auto" is open."""
        unit = self.order.unit_samples(self._reader.samples_per_chunk) or self.settled
        return self.loaded.unit if unit is None and self.loaded is not None else unit

    def read(self, value: object) -> RunState:
        """Parses a state. Raises StateInvalid, StateMismatch: it is of another stream, or of other settings."""
        state: RunState = read_state(value, f"{self._reader.directory}: the state to continue from", "run")
        unit = self.order.unit_samples(self._reader.samples_per_chunk) or self.settled or state.unit
        runs.check_fits(state, self._anew(unit, Part(1, self.order.batch_size)), str(self._reader.directory))
        return state

    def skip(self, samples: Ranges, chunks: Ranges, steps: Ranges, rank: Callable[[], Rank]) -> None:
        """Excludes samples from now on; see `LazyShardedDataset.skip`."""
        out, wanted = ranges_of(samples, chunks, self._reader.samples_per_chunk), ranges("steps", steps)
        state = self.loaded
        if state is None or wanted:
            state = self.of(0 if state is None else epoch_of(state), rank().dp_size)
        self.loaded = runs.without(state, out, wanted, self.order.known_total(self._reader.refresh()))

    def of(self, epoch: int, dp: int) -> RunState:
        """Returns the state with which `dp` ranks begin or continue in an epoch."""
        if (loaded := self.in_epoch(epoch)) is not None:
            return self._resumed(loaded, dp)
        order, unit, parts = self.order, self.unit, () if self.loaded is None else self.loaded.parts
        assert unit is not None, "settled before a run is begun"
        return self._anew(unit, begun_part(parts, epoch, dp, order.batch_size, order.draws_per_step))

    def _anew(self, unit: int, part: Part) -> RunState:
        order, size, stream_id = self.order, self._reader.samples_per_chunk, self._reader.stream_id
        rules, limit = order.rules(size, unit), order.max_total_samples
        return RunState(stream_id, size, unit, rules.window, order.seed, limit, (part,), consumed=0, split=rules.split)

    def position_of(self, found: RunState, dp: int, *, anywhere: bool) -> int | None:
        """Returns the position of a state in the begun course of `dp` ranks; None if it is of another course."""
        given, here = self._resumed(found, dp), self.of(epoch_of(found), dp)
        position = given.parts[-1].draws
        same = _course(given) == _course(here) and (anywhere or position == here.parts[-1].draws)
        return position if same else None

    def _resumed(self, state: RunState, dp: int) -> RunState:
        size, each = self.order.batch_size, self.order.draws_per_step
        return replace(state, parts=runs.resumed_parts(state.parts, dp, size, draws_per_step=each))


def _course(state: RunState) -> list[Part]:
    """Returns the parts by which a state draws, ignoring its steps and whether epoch 0 is numbered."""
    parts = [replace(part, first_step=0, draws_per_step=0) for part in state.parts]
    parts[0] = replace(parts[0], epoch=parts[0].epoch or 0)
    return [*parts[:-1], replace(parts[-1], draws=0)]


def epoch_of(state: RunState | BlendState) -> int:
    """Returns the epoch with which the run of a state began, or which `set_epoch` began last."""
    parts: tuple[Part | BlendPartState, ...] = state.parts
    return next((part.epoch for part in reversed(parts) if part.epoch is not None), 0)


def ranges_of(samples: Ranges, chunks: Ranges, samples_per_chunk: int) -> list[tuple[int, int]]:
    """Returns the half-open sample ranges of the arguments of `skip`. Raises ValueError."""
    size = samples_per_chunk
    return ranges("samples", samples) + [(first * size, stop * size) for first, stop in ranges("chunks", chunks)]


def ranges(name: str, given: Ranges) -> list[tuple[int, int]]:
    """Returns the half-open ranges of an argument of `skip`. Raises ValueError."""
    found = []
    for one in given if isinstance(given, Iterable) else [given]:
        try:
            ends = (one.start, one.stop) if isinstance(one, range) and one.step == 1 else one
            start, stop = map(operator.index, ends)
        except (TypeError, ValueError):
            raise ValueError(f"{name} must be half-open ranges such as [(120, 180)], got {given!r}") from None
        if not 0 <= start < stop:
            raise ValueError(f"{name}: expected ranges (FIRST, STOP) with 0 <= FIRST < STOP, got {one!r}")
        found.append((start, stop))
    return found


def is_dealt(reader: StreamReader) -> bool:
    """Returns whether the newest chunk of a stream was dealt by cost; False if there is no chunk, or it is unknown."""
    chunks = reader.seen.chunks
    with contextlib.suppress(LazyShardError, OSError):
        if reader.stream_id and chunks:
            return DealtByCost.read(read_seal(reader.directory, chunks - 1).source) is not None
    # A reader that needs this seal to read the chunk raises the error.
    return False


def warn_if_undone(order: RunOrder, unit: int, reader: StreamReader) -> None:
    """Logs a warning if the stream was dealt by cost and this order breaks up its steps."""
    if order.blended or (made := reader.dealt) is None:
        return
    window, size, micro = order.shuffle_window, order.batch_size, made.micro_batch_size
    swift = "in ms-swift --sharded_lazy_shuffle_window 0"
    reasons = [f"shuffle_window={window} moves rows to other steps, use 0 ({swift})"] if window else []
    if unit != reader.samples_per_chunk:
        reasons.append(f"unit={order.unit!r} gives ranks other rows, use 'chunk'")
    if size > 1 and size % micro:
        reasons.append(f"batch_size={size} is not a multiple of the micro batches of {micro} rows of similar cost")
    if why := "; ".join(reasons):
        said = f"its rows were dealt by cost (lazyshard-producer --balance {made.ranks}), this order undoes that: {why}"
        log.warning("%s: %s", reader.directory, said)


def begun_part(parts: runs.Parts, epoch: int, dp: int, batch_size: int, draws_per_step: int) -> Part:
    """Returns the part that begins an epoch, with the exclusions of the previous parts."""
    # The first epoch has no number, so that setting epoch 0 does not make another run.
    return Part(dp, batch_size, epoch=epoch or None, skip=runs.gaps_of(parts).ranges, draws_per_step=draws_per_step)


def read_state(value: object, where: str, kind: str) -> Any:
    """Parses a state of a kind. Raises VersionUnsupported, and StateInvalid, which says what to pass instead."""
    reason = None
    if isinstance(value, (str, os.PathLike)):
        reason = "it is a path or a text: load the checkpoint, with `torch.load`, and pass the result of `state_dict`"
    elif isinstance(value, dict):
        reason = _other_kind(value, kind) or _no_state(value, _FIELDS[kind])
    if reason:
        what = {"run": "a run", "blend": "a blend", "sequences": "LazyShardedSequences"}[kind]
        raise StateInvalid(f"{where}: {reason}", file=where, expected=f"the state of {what}")
    return _STATES[kind].from_dict(value, where)


def _other_kind(value: dict[Any, Any], kind: str) -> str | None:
    theirs, ours = value.get("kind"), kind == "sequences"
    owner = "a LazyShardedDataset or LazyShardedStream"
    if WORKER in value or HANDED_OUT in value or OVER in value:
        owner = f"{'one DataLoader worker of ' * (WORKER in value)}a LazyShardedStream or LazyShardedIterable"
    # Fields of a state of torchdata's `StatefulDataLoader`, with workers and without (torchdata 0.11).
    if ours and ("_snapshot" in value or "_num_yielded" in value):
        return "it is the state of a StatefulDataLoader: pass it to its `load_state_dict`, with as many workers"
    if ours and theirs is None and len(value.keys() & _FIELDS["run"]) > 2:
        return f"it is the state of {owner}, which counts samples, not sequences: load it there"
    if not ours and WORKER in value:
        way = "resume with the same number of workers, or with any from `dataset.state_dict(consumed)`"
        return f"it is the state of {owner}: {way}"
    if not ours and theirs == "sequences":
        return "it is the state of LazyShardedSequences: load it into sequences of the same form"
    if not ours and HANDED_OUT in value:
        return f"it lies within a micro batch: load it into {owner} of as many ranks, or use one from the end of one"
    blend = "it is the state of a blend: pass it to a `BlendedDataset` of the same streams"
    return blend if kind != theirs == "blend" else None


def _no_state(value: dict[Any, Any], fields: frozenset[str]) -> str | None:
    if value.keys() & fields:
        return None
    # It has no field of a state: it contains more than a state, or is something else.
    keys = [reprlib.repr(key) for key in list(value)[:6]]
    last = f"{len(value) - 6} more" if len(value) > 6 else keys.pop() if keys else "nothing"
    shown = f"{', '.join(keys)} and {last}" if keys else last
    # Search near the top of a checkpoint, which may hold thousands of tensors.
    found, seen = [("", value)], 0
    for path, holder in found:
        for key, inner in holder.items() if path.count("[") < 3 else ():
            seen += 1
            if isinstance(inner, dict) and seen <= 1000:
                found.append((f"{path}[{reprlib.repr(key)}]", inner))
    if paths := [f"`checkpoint{path}`" for path, inner in found[1:] if len(inner.keys() & fields) > 2]:
        return f"it holds more than the state of a run, {shown}: pass {' or '.join(paths[:3])}, which looks like one"
    return f"it holds {shown} instead of the state of a run: pass the result of `state_dict`"


def check_worker(state: dict[str, Any], here: Worker | None, where: str) -> None:
    """Raises StateInvalid if a state is not of this worker; None is the whole run."""
    there = (state[WORKER], state.get(WORKERS)) if WORKER in state else None
    if there != here:
        mine, other = (f"DataLoader worker {one[0]} of {one[1]}" if one else "a whole run" for one in (here, there))
        way = "resume from `state_dict(consumed)` with any workers"
        text = f"{where}: expected the state of {mine}, found that of {other}; {way}"
        raise StateInvalid(text, field=WORKERS, expected=mine, actual=other)


def check_micro_batch(there: tuple[Any, Any], here: tuple[int, int], where: str) -> None:
    """Raises StateInvalid if a state lies within a micro batch of other ranks, or of another batch size."""
    if there != here:
        mine, other = (f"{ranks!r:.20} ranks, batch_size {size!r:.20}" for ranks, size in (here, there))
        text = f"{where}: it lies within a micro batch of {other}, this run has {mine}: resume from the end of one"
        raise StateInvalid(text, field=HANDED_OUT, expected=mine, actual=other)


def read_count(state: dict[str, Any], name: str, most: int | None, where: str) -> int:
    """Returns a field of a state, 0 if missing. Raises StateInvalid: it is not an integer from 0 to `most`."""
    found = state.get(name, 0)
    if type(found) is not int or found < 0 or (most is not None and found > most):
        expected, actual = "an integer from 0" + ("" if most is None else f" to {most}"), f"{found!r:.100}"
        text = f"{where}: expected {expected} as {name!r}, found {actual}; continue from an older checkpoint"
        raise StateInvalid(text, field=name, expected=expected, actual=actual)
    return found


class EpochPosition(NamedTuple):
    """The position of a run in an epoch: after `consumed` sequences, over all ranks, and `within` more of each rank.

    The next sequences are rebuilt from `place`, which is at or before the position. It is the position of one
    DataLoader `worker`, or of all; `begun` says whether that worker has begun to return the next micro batch.
    """

    epoch: int
    consumed: int = 0
    place: WindowPlace = WindowPlace()
    within: int = 0
    worker: Worker | None = None
    begun: bool = False

    @classmethod
    def of_state(
        cls, state: SequenceState, value: dict[str, Any], here: tuple[int, int], worker: Worker | None, where: str
    ) -> EpochPosition:
        """Parses a position. Raises StateInvalid if this worker, ranks and batch size cannot resume there."""
        check_worker(value, worker, where)
        if value.get(HANDED_OUT, 0) != 0 or worker is not None:
            check_micro_batch((value.get(_RANKS), value.get(_BATCH)), here, where)
        begun = worker is not None and value.get(_BEGUN) is True
        # If a worker has returned its whole micro batch, its next one is not the one that follows.
        within = read_count(value, HANDED_OUT, here[1] - (not begun), where)
        return cls(state.epoch, state.consumed, state.place, within, worker, begun)

    def extra_fields(self, ranks: int, batch_size: int) -> dict[str, Any]:
        """Returns the additional fields of the state, empty for a position of a whole run."""
        if not self.within and self.worker is None:
            return {}
        found: dict[str, Any] = {HANDED_OUT: self.within, _RANKS: ranks, _BATCH: batch_size}
        if self.worker is not None:
            found |= {WORKER: self.worker[0], WORKERS: self.worker[1], _BEGUN: self.begun}
        return found
