"""The state of a run over a blend, and its indices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lazyshard.data.index_space import Space
from lazyshard.data.rank import Rank
from lazyshard.data.run_state import States, Stopping, epoch_of, read_state
from lazyshard.data.settings import RunOrder
from lazyshard.errors import StateInvalid, StateMismatch
from lazyshard.format.state import BlendPartState, BlendState, RunState
from lazyshard.part import MAX_SAMPLES
from lazyshard.plan.blend import BlendCourse, BlendPiece, BlendSchedule


class BlendSpace(Space):
    """The indices of one blend, from the position of the run, given by its parts.

    They end with num_samples, otherwise with the epoch of the stream that ends first (`first`) or last. `lengths` are
    the draws per lane until then.
    """

    def __init__(
        self, order: RunOrder, rank: Rank, parts: tuple[BlendPartState, ...], lengths: list[int], first: bool
    ) -> None:
        part, before = parts[-1], _trained(parts[:-1])
        self.parts, self.course, size = parts, BlendCourse(part.pieces), part.batch_size
        self._begins = [draws for _, draws in part.begins]
        if order.num_samples is not None:
            block = max(order.num_samples - before, 0) // (rank.dp_size * size) * size
        else:
            left = enumerate(length - begin for length, begin in zip(lengths, self._begins, strict=True))
            drawn = [(stream, max(more, 0) if first else more - 1) for stream, more in left if first or more > 0]
            found = [end for one in drawn if (end := self.course.position(*one)) is not None]
            block = min(found) // size * size if first else -(-(max(found, default=-1) + 1) // size) * size
        super().__init__("the blend", order, rank, max(block, part.draws), part.draws, before)

    def drawn(self, position: int) -> tuple[int, ...]:
        """Returns how many draws per lane the current part of each stream has made at a position."""
        return tuple(map(sum, zip(self._begins, self.course.counts(position), strict=True)))

    def streams(self, index: int, count: int) -> list[int]:
        """Returns the streams of an index and of those after it in its lane, `count` at most. Raises IndexError."""
        position = self.layout.locate(index)[1]
        return self.course.streams_of(position, min(position + count, self.layout.block))

    def locate(self, index: int) -> tuple[int, int]:
        """Returns the stream that an index draws from, and its index there. Raises IndexError."""
        lane, position = self.layout.locate(index)
        stream, draw = self.course.draw(position)
        return stream, (self._begins[stream] + draw) * self.rank.dp_size + lane


class BlendStates(States[BlendState]):
    """The state of a run over a blend of the named streams."""

    def __init__(self, names: Sequence[str], schedule: BlendSchedule, order: RunOrder, stopping: Stopping) -> None:
        self.order, self.names, self.schedule, self.stopping = order, tuple(names), schedule, stopping

    def read(self, value: object) -> BlendState:
        """Parses a state. Raises StateInvalid."""
        state: BlendState = read_state(value, "the state of a blend", "blend")
        return state

    def load(self, found: BlendState) -> dict[str, RunState]:
        """Continues from a state; returns the states of its streams by name. Raises StateInvalid, StateMismatch."""
        last = found.parts[-1]
        most = max(_steps(last), last.pieces[-1][2] + last.draws)
        if most > MAX_SAMPLES:
            raise _invalid("it has more steps or draws than any run can have", "parts", MAX_SAMPLES, most)
        epoch = epoch_of(found)
        for member, drawn in zip(last.members, _end_of(last), strict=True):
            state, name, field = found.members[member], found.names[member], f"members[{member}]"
            if epoch_of(state) != epoch:
                raise _invalid(f"its stream {name} is in another epoch", field, epoch, epoch_of(state))
            if (own := (len(state.parts) - 1, state.parts[-1].draws)) != drawn:
                why = f"its stream {name} is at another position according to its own state"
                raise _invalid(why, field, drawn, own)
        known = {name: one for name, one in zip(found.names, found.members, strict=True) if name in self.names}
        if not known:
            theirs, mine = ", ".join(found.names), ", ".join(self.names)
            text = f"the state is of a blend of {theirs}, this blend has {mine}: no stream continues; start without it"
            raise StateMismatch(text, field="names", expected=theirs, actual=mine)
        self.loaded = found
        return known

    def part(self, epoch: int, rank: Rank, drawn: Sequence[tuple[int, int]]) -> BlendPartState:
        """Returns the part with which the run begins or continues; `drawn` are part and draws of each stream."""
        size, steps = self.order.batch_size, self.order.draws_per_step
        known = list(dict.fromkeys([*(() if self.loaded is None else self.loaded.names), *self.names]))
        members, pieces = tuple(known.index(name) for name in self.names), self.schedule.pieces(0, steps)
        anew = BlendPartState(rank.dp_size, size, 0, members, pieces, tuple(drawn), epoch or None, 0, steps)
        loaded = self.in_epoch(epoch)
        if loaded is None:
            return anew
        last = loaded.parts[-1]
        # If everything that decides the draws is the same, the part continues.
        same = (last.dp, last.batch_size, last.members) == (anew.dp, size, members) and _end_of(last) == anew.begins
        piece, *others = self.schedule.pieces(last.first_step, steps)
        if same and (piece._replace(offset=last.pieces[0][2]), *others) == last.pieces:
            return replace(last, draws_per_step=steps or last.draws_per_step)
        pieces = self.schedule.pieces(_steps(last), steps)
        first, parts, offset = [piece for piece in last.pieces if piece[0] <= last.draws][-1]
        if last.members == members and parts == pieces[0].parts:
            # The same weights continue at the same place of their period.
            pieces = (BlendPiece(0, parts, offset + last.draws - first), *pieces[1:])
        again = None if last.draws or len(loaded.parts) > 1 else last.epoch
        return replace(anew, pieces=pieces, epoch=again, first_step=_steps(last))

    def parts(self, epoch: int, rank: Rank, drawn: Sequence[tuple[int, int]]) -> tuple[BlendPartState, ...]:
        """Returns the parts of the run up to that of `part`, without a previous part that has drawn nothing."""
        part, loaded = self.part(epoch, rank, drawn), self.in_epoch(epoch)
        if loaded is None:
            return (part,)
        last = loaded.parts[-1]
        same = replace(last, draws_per_step=part.draws_per_step) == part
        return (*(loaded.parts if last.draws and not same else loaded.parts[:-1]), part)

    def after(self, parts: Sequence[BlendPartState], position: int, members: Mapping[str, RunState]) -> BlendState:
        """Returns the state at a position of the last part."""
        # Streams that were removed stay in the state, so that they can be added again.
        known = {} if self.loaded is None else dict(zip(self.loaded.names, self.loaded.members, strict=True))
        known |= members
        parts = (*parts[:-1], replace(parts[-1], draws=position))
        return BlendState(tuple(known), tuple(known.values()), parts, _trained(parts))


def _invalid(why: str, field: str, expected: object, actual: object) -> StateInvalid:
    text = f"the state of a blend: {why}: expected {expected}, found {actual}"
    return StateInvalid(text, field=field, expected=str(expected), actual=str(actual))


def _end_of(part: BlendPartState) -> tuple[tuple[int, int], ...]:
    """Returns part and draws of each stream at the end of a part."""
    drawn = BlendCourse(part.pieces).counts(part.draws)
    return tuple((number, begin + more) for (number, begin), more in zip(part.begins, drawn, strict=True))


def _steps(part: BlendPartState) -> int:
    """Returns how many steps were trained by the end of a part, or by its beginning if draws per step are unknown."""
    return part.first_step + (part.draws // part.draws_per_step if part.draws_per_step else 0)


def _trained(parts: Sequence[BlendPartState]) -> int:
    """Returns how many samples were trained in parts of a run, over all ranks."""
    return sum(part.dp * part.draws for part in parts)
