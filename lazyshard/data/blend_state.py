"""What a blend is given, checked; what its indices mean; and where a run over it stands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.data.index_space import Space
from lazyshard.data.rank import Rank
from lazyshard.data.run_state import States, epoch_of
from lazyshard.data.settings import Order, RunOrder, check_choice
from lazyshard.errors import LengthUnknown, StateInvalid, StateMismatch, redact
from lazyshard.format.state import BlendPartState, BlendState, RunState
from lazyshard.part import MAX_SAMPLES
from lazyshard.plan.blend import BlendCourse, BlendPiece, BlendSchedule, shares
from lazyshard.store.urls import stream_name

Stopping = Literal["first_exhausted", "all_exhausted"]


class BlendSpace(Space):
    """The indices of one blend in one epoch that was set, from where the run stands (`part`).

    `lengths` are the draws of a lane of each stream until its epoch ends, None where that is not known. Raises
    LengthUnknown: there is no end; ValueError: there is less than one batch of every rank.
    """

    def __init__(
        self, states: BlendStates, epoch: int, rank: Rank, part: BlendPartState, lengths: list[int | None]
    ) -> None:
        order, before = states.order, trained(states.before(epoch, part))
        self.part = part
        self.course = BlendCourse(part.pieces)
        self._begins = [draws for _, draws in part.begins]
        size, first = part.batch_size, states.stopping == "first_exhausted"
        if order.num_samples is not None:
            block = max(order.num_samples - before, 0) // (rank.dp_size * size) * size
        else:
            end = self._end(lengths, first)
            block = end // size * size if first else -(-end // size) * size
        if not block and states.in_epoch(epoch) is None:
            why = "a stream is too short for its weight, or num_samples too small"
            raise ValueError(f"the blend has less than one batch of {size} for each of {rank.dp_size} ranks: {why}")
        super().__init__("the blend", order, rank, max(block, part.draws), part.draws, before)

    def drawn(self, position: int) -> tuple[int, ...]:
        """Returns how many draws of a lane each stream's current part has behind it at a position."""
        return tuple(map(sum, zip(self._begins, self.course.counts(position), strict=True)))

    def streams(self, index: int, count: int) -> list[int]:
        """Returns which stream an index, and up to so many that follow it in its lane, draw from. Raises IndexError."""
        position = self.layout.locate(index)[1]
        return self.course.streams_of(position, min(position + count, self.layout.block))

    def locate(self, index: int) -> tuple[int, int]:
        """Returns which stream an index draws from, and its index in that. Raises as `streams` does."""
        lane, position = self.layout.locate(index)
        stream, draw = self.course.draw(position)
        return stream, (self._begins[stream] + draw) * self.rank.dp_size + lane

    def _end(self, lengths: list[int | None], first: bool) -> int:
        ends = []
        for stream, length in enumerate(lengths):
            if length is None:
                give = "pass num_samples, or give its data set max_total_samples"
                raise LengthUnknown(f"the blend has no length yet, as a stream in it is still being produced: {give}")
            left = length - self._begins[stream]
            if first:
                ends.append(self.course.position(stream, max(left, 0)))
            elif left > 0 and (last := self.course.position(stream, left - 1)) is not None:
                ends.append(last + 1)
        known = [end for end in ends if end is not None]
        return min(known) if first else max(known, default=0)


class BlendStates(States[BlendState]):
    """The state of a run over a blend of streams of these names."""

    def __init__(self, names: Sequence[str], schedule: BlendSchedule, order: RunOrder, stopping: Stopping) -> None:
        super().__init__(order)
        self.stopping = stopping
        self.names = tuple(names)
        self.schedule = schedule

    def load(self, found: BlendState) -> dict[str, RunState]:
        """Goes on from a state; returns where each stream that it knows stands. Raises StateInvalid, StateMismatch."""
        last = found.parts[-1]
        most = max(_steps(last), last.pieces[-1][2] + last.draws)
        if most > MAX_SAMPLES:
            raise _invalid("it has more steps or draws than any run", "parts", MAX_SAMPLES, most)
        epoch, drawn = epoch_of(found), BlendCourse(last.pieces).counts(last.draws)
        for member, (part, draws), more in zip(last.members, last.begins, drawn, strict=True):
            state, name, field = found.members[member], found.names[member], f"members[{member}]"
            if epoch_of(state) != epoch:
                raise _invalid(f"its stream {name} is in another epoch", field, epoch, epoch_of(state))
            stands, expected = (len(state.parts) - 1, state.parts[-1].draws), (part, draws + more)
            if stands != expected:
                raise _invalid(f"its stream {name} stands elsewhere by its own state", field, expected, stands)
        known = {name: one for name, one in zip(found.names, found.members, strict=True) if name in self.names}
        if not known:
            theirs, mine = ", ".join(found.names), ", ".join(self.names)
            text = f"the state is of a blend of {theirs}, here are {mine}: none of them goes on; start anew without it"
            raise StateMismatch(text, field="names", expected=theirs, actual=mine)
        self.loaded = found
        return known

    def part(self, epoch: int, rank: Rank, stands: Sequence[tuple[int, int]]) -> BlendPartState:
        """Returns the part with which the run begins or goes on; `stands` are the part and draws of each stream."""
        size, steps, members = self.order.batch_size, self.order.draws_per_step, self._members()
        pieces, begins = self.schedule.pieces(0, steps), tuple(stands)
        anew = BlendPartState(rank.dp_size, size, 0, members, pieces, begins, epoch or None, draws_per_step=steps)
        loaded = self.in_epoch(epoch)
        if loaded is None:
            return anew
        last = loaded.parts[-1]
        if self._same(last, anew):
            return replace(last, draws_per_step=steps or last.draws_per_step)
        pieces = self.schedule.pieces(_steps(last), steps)
        first, parts, offset = [piece for piece in last.pieces if piece[0] <= last.draws][-1]
        if last.members == members and parts == pieces[0].parts:
            # The same weights go on where they are in their period.
            pieces = (BlendPiece(0, parts, offset + last.draws - first), *pieces[1:])
        begun = None if last.draws or len(loaded.parts) > 1 else last.epoch
        return replace(anew, pieces=pieces, epoch=begun, first_step=_steps(last))

    def _same(self, last: BlendPartState, anew: BlendPartState) -> bool:
        """Returns whether a part can go on: nothing that decides its draws is another."""
        if (last.dp, last.batch_size, last.members) != (anew.dp, anew.batch_size, anew.members):
            return False
        first, *others = self.schedule.pieces(last.first_step, self.order.draws_per_step)
        drawn = BlendCourse(last.pieces).counts(last.draws)
        stands = tuple((part, begin + more) for (part, begin), more in zip(last.begins, drawn, strict=True))
        return (first._replace(offset=last.pieces[0][2]), *others) == last.pieces and anew.begins == stands

    def before(self, epoch: int, part: BlendPartState) -> tuple[BlendPartState, ...]:
        """Returns the parts before the one with which the run goes on; one that has drawn nothing is not kept."""
        loaded = self.in_epoch(epoch)
        if loaded is None:
            return ()
        last = loaded.parts[-1]
        same = replace(last, draws_per_step=part.draws_per_step) == part
        return loaded.parts if last.draws and not same else loaded.parts[:-1]

    def after(self, epoch: int, part: BlendPartState, position: int, members: Mapping[str, RunState]) -> BlendState:
        """Returns the state at a position of the part."""
        # Streams that are blended no more stay, so that they may come back.
        known = {} if self.loaded is None else dict(zip(self.loaded.names, self.loaded.members, strict=True))
        known |= members
        parts = (*self.before(epoch, part), replace(part, draws=position))
        return BlendState(tuple(known), tuple(known.values()), parts, trained(parts))

    def _members(self) -> tuple[int, ...]:
        known = list(dict.fromkeys([*(() if self.loaded is None else self.loaded.names), *self.names]))
        return tuple(known.index(name) for name in self.names)


def _invalid(why: str, field: str, expected: object, actual: object) -> StateInvalid:
    text = f"the state of a blend: {why}: expected {expected}, found {actual}"
    return StateInvalid(text, field=field, expected=str(expected), actual=str(actual))


def _steps(part: BlendPartState) -> int:
    """Returns how many steps were trained by the end of a part; where it is not known, by its beginning."""
    return part.first_step + (part.draws // part.draws_per_step if part.draws_per_step else 0)


def trained(parts: Sequence[BlendPartState]) -> int:
    """Returns how many samples were trained in parts of a run, over all ranks."""
    return sum(part.dp * part.draws for part in parts)


def read_blend(
    given: Any, later: Any, order: Order, batch_size: int, num_samples: int | None, stopping: Stopping
) -> tuple[list[LazyShardedDataset], BlendStates]:
    """Returns the data sets of a blend, and where a run over them stands. Raises as `BlendedDataset`."""
    pairs = _pairs(given, "a blend takes pairs of a data set and its weight, as in [(dataset, 0.8), (other, 0.2)]")
    datasets, weights = [dataset for dataset, _ in pairs], _numbers([weight for _, weight in pairs])
    for dataset in datasets:
        if not isinstance(dataset, LazyShardedDataset):
            raise TypeError(f"a blend is one of data sets; {redact(repr(dataset)):.100} is no LazyShardedDataset")
    if not datasets:
        raise ValueError("a blend is one of at least one data set, none was given")
    if order != Order(layout=order.layout, micro_batches_per_step=order.micro_batches_per_step):
        raise ValueError("unit, shuffle_window and seed are those of each data set of a blend: give them to those")
    check_choice("stopping", stopping, Stopping)
    run_order = RunOrder(**vars(order), batch_size=batch_size, max_total_samples=None, num_samples=num_samples)
    points = _pairs(later, "a schedule takes pairs of a step and the weights from there on, as in [(1000, [1, 3])]")
    if not points:
        shares(weights)
    schedule = BlendSchedule([(0, weights), *((step, _numbers(changed)) for step, changed in points)])
    if not schedule.constant and not run_order.draws_per_step:
        raise ValueError("a schedule counts in optimiser steps: give order=Order(micro_batches_per_step=...)")
    names = [dataset.stream_id or stream_name(dataset.directory) for dataset in datasets]
    for name in names:
        if len(same := [str(one.directory) for one, other in zip(datasets, names, strict=True) if other == name]) > 1:
            raise ValueError(f"data sets of a blend are of the same stream, {', '.join(same)}: give it once")
    return datasets, BlendStates(names, schedule, run_order, stopping)


def _pairs(given: Any, expected: str) -> list[Any]:
    """Returns what is given, known to be pairs; a data set, which could be read like a list, is none."""
    found = list(given) if isinstance(given, Iterable) else [None]
    if not all(isinstance(one, (list, tuple)) and len(one) == 2 for one in found):
        raise TypeError(f"{expected}; got {redact(repr(given)):.100}")
    return found


def _numbers(weights: Any) -> list[float]:
    try:
        return [float(weight) for weight in weights]
    except (TypeError, ValueError) as cause:
        raise type(cause)(f"weights are numbers, got {weights!r:.100}") from None
