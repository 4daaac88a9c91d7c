"""Runs over blends: which step took which draws of one of the streams, and whose state a blend's state holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lazyshard.errors import FormatInvalid, StateMismatch
from lazyshard.format.blend_state import BlendPartState, BlendState
from lazyshard.plan.blend_course import BlendCourse, BlendPiece
from lazyshard.plan.steps import StepPlace
from lazyshard.store.urls import stream_name
from lazyshard.stream.manifest import read_manifest

__all__ = ["Member", "MemberSteps", "names_of", "of_stream"]


@dataclass(frozen=True, slots=True)
class Member:
    """One of the streams of a blend.

    Attributes:
        blend: the state of the blend.
        number: of the stream among its members.
    """

    blend: BlendState
    number: int

    @property
    def blended(self) -> bool:
        """Whether the stream is one of those that are blended now."""
        return self.number in self.blend.parts[-1].members

    @property
    def share(self) -> float:
        """What it gives of the samples that come next; 0 if it is blended no more."""
        part = self.blend.parts[-1]
        if not self.blended:
            return 0.0
        _, parts, _ = [piece for piece in part.pieces if piece[0] <= part.draws][-1]
        return parts[part.members.index(self.number)] / sum(parts)


def names_of(directory: Path) -> tuple[str, ...]:
    """Returns how a blend's state may call a stream: by its identity, and by its directory."""
    path = stream_name(directory)
    try:
        manifest = read_manifest(directory, None)
    except (OSError, FormatInvalid):
        # Who opens the stream tells.
        return (path,)
    return (path,) if manifest is None else (manifest.stream_id, path)


def of_stream(blend: BlendState, directory: Path, file: str) -> Member:
    """Returns the member of a blend that is the stream of a directory.

    Raises:
        StateMismatch: none is; its field is "names".
    """
    names = names_of(directory)
    for number, name in enumerate(blend.names):
        if name in names:
            return Member(blend, number)
    raise StateMismatch(
        f"{file}: the state is of a blend of {', '.join(blend.names)}, and {directory} is none of these streams, or "
        f"was added later: give the directory of one of them, or a later state",
        directory=str(directory),
        field="names",
        expected=", ".join(blend.names),
        actual=names[0],
    )


class _PartSteps(NamedTuple):
    """The steps in which a part of the stream's own state was drawn from.

    Attributes:
        first_step: the first of them.
        stop_step: the step behind the last one.
        known: whether it is known which step takes what.
    """

    first_step: int
    stop_step: int
    known: bool


class _Stretch(NamedTuple):
    """A part of the blend, as it concerns one stream.

    Attributes:
        state: the part.
        course: which stream each of its positions draws from.
        place: of the stream among those that are blended; None if it is not.
        part: the part of the stream's own state that is drawn from.
        begin: draws of a lane of that part before.
        stop: and behind it; None where it goes on.
    """

    state: BlendPartState
    course: BlendCourse
    place: int | None
    part: int
    begin: int
    stop: int | None


class MemberSteps:
    """The steps of a run over a blend, by the draws of one of its streams: as `lazyshard.plan.steps.Steps`.

    Args:
        member: the stream.

    Attributes:
        parts: steps of each part of the stream's own state.
    """

    def __init__(self, member: Member) -> None:
        self._stretches: list[_Stretch] = []
        part, stop = 0, 0
        for number, state in enumerate(member.blend.parts):
            course = BlendCourse([BlendPiece(*piece) for piece in state.pieces])
            place = state.members.index(member.number) if member.number in state.members else None
            if place is not None:
                part, begin = state.begins[place]
                stop = begin + course.counts(state.draws)[place]
                last = number == len(member.blend.parts) - 1
                self._stretches.append(_Stretch(state, course, place, part, begin, None if last else stop))
            else:
                self._stretches.append(_Stretch(state, course, None, part, stop, stop))
        count = len(member.blend.members[member.number].parts)
        self.parts = tuple(self._of_part(number) for number in range(count))

    @property
    def trained(self) -> int:
        """Steps trained so far, over all streams; as far as it is known."""
        return _stop_step(self._stretches[-1].state)

    @property
    def unknown(self) -> int | None:
        """The first part of the stream's state of which it is not known which step took what; None if of none."""
        return next((number for number, part in enumerate(self.parts) if not part.known), None)

    def place(self, step: int) -> StepPlace | None:
        """Return what a step took of the stream, perhaps nothing; None if that is not known."""
        for number, stretch in enumerate(self._stretches):
            state = stretch.state
            last = number == len(self._stretches) - 1
            if step < state.first_step:
                return None
            if not last and step >= _stop_step(state):
                continue
            if not state.draws_per_step:
                return None
            if stretch.place is None:
                return StepPlace(stretch.part, stretch.begin, stretch.begin)
            at = (step - state.first_step) * state.draws_per_step
            start, stop = (
                stretch.begin + stretch.course.counts(position)[stretch.place]
                for position in (at, at + state.draws_per_step)
            )
            return StepPlace(stretch.part, start, stop)
        return None

    def step_of(self, part: int, position: int) -> int | None:
        """Return the step that takes a position of a part; None if it is not known, or none will."""
        for stretch in self._stretches:
            if stretch.place is None or stretch.part != part or position < stretch.begin:
                continue
            if stretch.stop is not None and position >= stretch.stop:
                continue
            each = stretch.state.draws_per_step
            at = stretch.course.position(stretch.place, position - stretch.begin)
            return None if at is None or not each else stretch.state.first_step + at // each
        return None

    def ragged(self) -> list[int]:
        """Return the parts of the stream's state during which the blend ended within a step."""
        return [
            stretch.part
            for stretch in self._stretches
            if stretch.state.draws_per_step and stretch.state.draws % stretch.state.draws_per_step
        ]

    def breaks(self) -> list[tuple[int, int, int]]:
        """Return where steps do not follow on each other: part of the stream, steps by then, steps it begins at."""
        found = []
        before: int | None = 0
        for stretch in self._stretches:
            first = stretch.state.first_step
            if before is not None and first != before:
                found.append((stretch.part, before, first))
            before = _stop_step(stretch.state) if stretch.state.draws_per_step else None
        return found

    def _of_part(self, number: int) -> _PartSteps:
        own = [stretch for stretch in self._stretches if stretch.place is not None and stretch.part == number]
        if not own:
            # Nothing was drawn from it: it was left behind before.
            return _PartSteps(0, 0, True)
        known = all(stretch.state.draws_per_step for stretch in own)
        return _PartSteps(own[0].state.first_step, _stop_step(own[-1].state), known)


def _stop_step(state: BlendPartState) -> int:
    each = state.draws_per_step
    return state.first_step + (-(-state.draws // each) if each else 0)
