"""What a blend is given, checked; where a run over it stands, and the state after so many samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, get_args

from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.data.rank import Rank
from lazyshard.data.run_state import as_count, epoch_of
from lazyshard.data.settings import Order
from lazyshard.errors import StateInvalid, StateMismatch, redact
from lazyshard.format.state import BlendPartState, BlendState, RunState
from lazyshard.part import MAX_SAMPLES
from lazyshard.plan.blend import BlendCourse, BlendPiece, BlendSchedule, shares
from lazyshard.store.urls import stream_name

Stand = tuple[int, int]
"""Number of the part of a stream's own state, and draws of a lane in that."""


class BlendStates:
    """The state of a run over a blend, as loaded, in each epoch. `draws_per_step` may be set before the first part."""

    def __init__(self, names: Sequence[str], schedule: BlendSchedule, batch_size: int, draws_per_step: int) -> None:
        self._names = tuple(names)
        self._schedule = schedule
        self._batch_size = batch_size
        self.draws_per_step = draws_per_step
        self._loaded: BlendState | None = None

    def load(self, found: BlendState) -> dict[str, RunState]:
        """Goes on from a state; returns where each stream that it knows stands. Raises StateInvalid, StateMismatch."""
        last = found.parts[-1]
        if _steps(last) > MAX_SAMPLES or last.pieces[-1][2] + last.draws > MAX_SAMPLES:
            most = str(max(_steps(last), last.draws))
            raise _invalid("it has more steps or draws than any run", "parts", f"at most {MAX_SAMPLES}", most)
        epoch, drawn = epoch_of_blend(found), _course(last).counts(last.draws)
        for member, begin, more in zip(last.members, last.begins, drawn, strict=True):
            state, name, field = found.members[member], found.names[member], f"members[{member}]"
            if epoch_of(state) != epoch:
                why = f"it has begun epoch {epoch}, and its stream {name} epoch {epoch_of(state)}"
                raise _invalid(why, field, str(epoch), str(epoch_of(state)))
            stands, expected = (len(state.parts) - 1, state.parts[-1].draws), (begin[0], begin[1] + more)
            if stands != expected:
                why = (
                    f"its last part has drawn {more} of stream {name} behind {begin[1]} of part {begin[0]}, the "
                    f"stream's own state stands at {stands[1]} of part {stands[0]}"
                )
                raise _invalid(why, field, str(expected), str(stands))
        known = {name: one for name, one in zip(found.names, found.members, strict=True) if name in self._names}
        if not known:
            theirs, mine = ", ".join(found.names), ", ".join(self._names)
            raise StateMismatch(
                f"the state is of a blend of {theirs}, here are {mine}: none of them goes on; start anew without the "
                f"state",
                field="names",
                expected=theirs,
                actual=mine,
            )
        self._loaded = found
        return known

    def goes_on(self, epoch: int) -> bool:
        """Returns whether the run goes on, in this epoch, where a loaded state stands."""
        return self._of(epoch) is not None

    def consumed(self, epoch: int) -> int:
        """Returns how many samples were trained in the loaded state, if it is of that epoch; else 0."""
        loaded = self._of(epoch)
        return 0 if loaded is None else loaded.consumed

    def part(self, epoch: int, rank: Rank, stands: Sequence[Stand]) -> BlendPartState:
        """Returns the part with which the run begins or goes on."""
        size, pieces, steps = self._batch_size, self._schedule.pieces(0, self.draws_per_step), self.draws_per_step
        begins, members = tuple(stands), self._members()
        anew = BlendPartState(rank.dp_size, size, 0, members, pieces, begins, epoch or None, draws_per_step=steps)
        loaded = self._of(epoch)
        if loaded is None:
            return anew
        last = loaded.parts[-1]
        if self._same(last, anew):
            return replace(last, draws_per_step=steps or last.draws_per_step)
        trained_steps = _steps(last)
        pieces = self._schedule.pieces(trained_steps, steps)
        first, parts, offset = [piece for piece in last.pieces if piece[0] <= last.draws][-1]
        if last.members == members and parts == pieces[0].parts:
            # The same weights go on where they are in their period.
            pieces = (BlendPiece(0, parts, offset + last.draws - first), *pieces[1:])
        begun = None if last.draws or len(loaded.parts) > 1 else last.epoch
        return replace(anew, pieces=pieces, epoch=begun, first_step=trained_steps)

    def _same(self, last: BlendPartState, anew: BlendPartState) -> bool:
        """Returns whether a part can go on: nothing that decides its draws is another."""
        if (last.dp, last.batch_size, last.members) != (anew.dp, anew.batch_size, anew.members):
            return False
        first, *others = self._schedule.pieces(last.first_step, self.draws_per_step)
        if (first._replace(offset=last.pieces[0][2]), *others) != last.pieces:
            return False
        drawn = _course(last).counts(last.draws)
        return anew.begins == tuple(
            (part, begin + more) for (part, begin), more in zip(last.begins, drawn, strict=True)
        )

    def before(self, epoch: int, part: BlendPartState) -> tuple[BlendPartState, ...]:
        """Returns the parts before the one with which the run goes on; one that has drawn nothing is not kept."""
        loaded = self._of(epoch)
        if loaded is None:
            return ()
        last = loaded.parts[-1]
        same = replace(last, draws_per_step=part.draws_per_step) == part
        return loaded.parts if last.draws and not same else loaded.parts[:-1]

    def position(self, epoch: int, part: BlendPartState, consumed: int | None, block: int) -> int:
        """Returns the position after so many samples, None for where it goes on. Raises as `state_dict`."""
        if consumed is None:
            return part.draws
        count = as_count(consumed)
        before = trained(self.before(epoch, part))
        least, most = before + part.dp * part.draws, before + part.dp * block
        if count < least:
            raise ValueError(
                f"consumed is at least {least}, what was trained when the loaded state was saved, got {count}: count "
                f"on from dataset.consumed"
            )
        if count > most:
            raise ValueError(f"consumed is at most {most}, all that this data set has, got {count}")
        position, beside = divmod(count - before, part.dp)
        if beside or position % part.batch_size:
            raise ValueError(
                f"consumed counts whole micro batches of all ranks, so it grows by dp_size * batch_size = {part.dp} * "
                f"{part.batch_size} a batch, got {count}"
            )
        return position

    def after(self, epoch: int, part: BlendPartState, position: int, members: Mapping[str, RunState]) -> BlendState:
        """Returns the state at a position of the part."""
        # Streams that are blended no more stay, so that they may come back.
        known = {} if self._loaded is None else dict(zip(self._loaded.names, self._loaded.members, strict=True))
        known |= members
        parts = (*self.before(epoch, part), replace(part, draws=position))
        return BlendState(tuple(known), tuple(known.values()), parts, trained(parts))

    def _members(self) -> tuple[int, ...]:
        known = list(dict.fromkeys([*(() if self._loaded is None else self._loaded.names), *self._names]))
        return tuple(known.index(name) for name in self._names)

    def _of(self, epoch: int) -> BlendState | None:
        loaded = self._loaded
        return loaded if loaded is not None and epoch_of_blend(loaded) == epoch else None


def _invalid(why: str, field: str, expected: str, actual: str) -> StateInvalid:
    return StateInvalid(f"the state of a blend: {why}", field=field, expected=expected, actual=actual)


def epoch_of_blend(state: BlendState) -> int:
    """Returns the epoch with which the run that a state tells began, or begins anew: what was set by `set_epoch`."""
    return next((part.epoch for part in reversed(state.parts) if part.epoch is not None), 0)


def _course(part: BlendPartState) -> BlendCourse:
    return BlendCourse(part.pieces)


def _steps(part: BlendPartState) -> int:
    """Returns how many steps were trained by the end of a part; where it is not known, by its beginning."""
    return part.first_step + (part.draws // part.draws_per_step if part.draws_per_step else 0)


def trained(parts: Sequence[BlendPartState]) -> int:
    """Returns how many samples were trained in parts of a run, over all ranks."""
    return sum(part.dp * part.draws for part in parts)


Stopping = Literal["first_exhausted", "all_exhausted"]

_PAIRS: Final = "a blend takes pairs of a data set and its weight, as in [(dataset, 0.8), (other, 0.2)]"
_POINTS: Final = "a schedule takes pairs of a step and the weights from there on, as in [(1000, [1, 3])]"


def blend_members(given: Iterable[tuple[LazyShardedDataset, float]]) -> tuple[list[LazyShardedDataset], list[float]]:
    """Returns the data sets and their weights. Raises TypeError, ValueError: these are no pairs of them."""
    pairs = [_pair(one, _PAIRS) for one in _items(given, _PAIRS)]
    for dataset, _ in pairs:
        if not isinstance(dataset, LazyShardedDataset):
            raise TypeError(f"{_PAIRS}; {_shown(dataset)} is no LazyShardedDataset")
    if not pairs:
        raise ValueError("a blend is one of at least one data set, none was given")
    return [dataset for dataset, _ in pairs], [_number(weight) for _, weight in pairs]


def blend_schedule(weights: list[float], later: Any) -> BlendSchedule:
    """Returns the weights over the steps of a run. Raises TypeError, or ValueError as `BlendSchedule`."""
    points: list[tuple[int, list[float]]] = [(0, weights)]
    for step, changed in (_pair(one, _POINTS) for one in _items(later, _POINTS)):
        points.append((step, [_number(weight) for weight in _items(changed, _POINTS)]))
    if len(points) == 1:
        shares(weights)
    return BlendSchedule(points)


def check_settings(batch_size: Any, num_samples: Any, stopping: str, order: Order) -> None:
    """Raises ValueError: a setting of a `BlendedDataset` is wrong."""
    for name, value in (("batch_size", batch_size), ("num_samples", num_samples)):
        if (type(value) is not int or value < 1) and (value is not None or name == "batch_size"):
            raise ValueError(f"{name} is an integer from 1, got {value!r}")
    if order != Order(layout=order.layout, micro_batches_per_step=order.micro_batches_per_step):
        raise ValueError("unit, shuffle_window and seed are those of each data set of a blend: give them to those")
    if stopping not in get_args(Stopping):
        raise ValueError(f"stopping is one of {', '.join(get_args(Stopping))}, got {stopping!r}")


def stream_names(datasets: list[LazyShardedDataset]) -> list[str]:
    """Returns how a state calls the streams: by identities, or directories. Raises ValueError: two are the same."""
    names = [dataset.stream_id or stream_name(dataset.directory) for dataset in datasets]
    for number, name in enumerate(names):
        first = names.index(name)
        if first < number:
            raise ValueError(
                f"two data sets of a blend are of the same stream, {datasets[first].directory} and "
                f"{datasets[number].directory}: give it once, with the sum of the weights"
            )
    return names


def _items(value: Any, expected: str) -> list[Any]:
    try:
        return list(value)
    except TypeError:
        raise TypeError(f"{expected}; got {_shown(value)}") from None


def _pair(value: Any, expected: str) -> tuple[Any, Any]:
    pair = () if isinstance(value, (str, LazyShardedDataset)) else tuple(_items(value, expected))
    if len(pair) != 2:
        raise TypeError(f"{expected}; got {_shown(value)}")
    return pair


def _shown(value: Any) -> str:
    return redact(repr(value))[:100]


def _number(weight: Any) -> float:
    try:
        return float(weight)
    except (TypeError, ValueError):
        raise ValueError(f"a weight is a number, got {weight!r:.100}") from None
