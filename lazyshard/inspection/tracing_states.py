"""Saved states of runs, read from checkpoint files and cursors together with other facts in them; and their steps.

A file holds only the state, as `RunState.to_dict` returns it, or an object with the state in its field `state`, like
`lazyshard.json` in ms-swift's checkpoints, or in `data`. Files of format 1 hold the numbers from which to make a state.

All lanes of a part take `draws_per_step` positions in a step. Steps are counted through the whole run, from 0; skipped
positions belong to no step. There are two kinds of trainers::

    draws_per_step=4, epochs of 10 positions        step 0     1     2     3     4     5
    even: steps continue over the end of an epoch          0-3   4-7   8-11 12-15 16-19 20-23
    cut:  the last step of an epoch takes what is left  0-3   4-7   8-9  10-13 14-17 18-19
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson

from lazyshard.errors import FormatInvalid, StateInvalid, StateMismatch
from lazyshard.format.records import CURSORS, STREAM_ID
from lazyshard.format.state import BLEND, KIND, BlendState, Cursor, RunState, SequenceState, cursor_name
from lazyshard.memory import loads
from lazyshard.part import Part
from lazyshard.plan.blend import BlendCourse
from lazyshard.store.files import read_given_file, stream_name
from lazyshard.stream.listing import read_manifest

NAME: Final = "lazyshard.json"  # the file in a checkpoint's folder
_WRITE: Final = 'json.dump({"state": batches.state_dict(), "step": batches.step}, file)'

# Layouts of runs under ms-swift's own samplers, and what those samplers did
_OWN_ORDERS: Final = {"block": "shuffled", "grouped": "grouped by length"}

_CHECKPOINT: Final = re.compile(r"checkpoint-([0-9]{1,18})")


class SavedState(NamedTuple):
    """A state, and the file in which it was found."""

    state: RunState
    file: Path
    step: int | None = None  # steps trained, from the file; None if it has none
    consumer: str | None = None  # the run's name in the stream's cursors, from the file; None if it has none
    saved_at: float = 0.0  # seconds since 1970 by the writer's clock, or the file's own time if it has none
    folder_step: int | None = None  # the number in the name of the checkpoint's folder, or None
    cursor: Cursor | None = None  # the cursor in which it was found, None for a file
    dated: bool = True  # whether `saved_at` is from the content of the file
    # the stream in the blend of the run; None if the run is over this stream alone
    member: Member | None = None
    # for a run over sequences, which `state` then counts in place of samples
    sequences: SequenceState | None = None

    @property
    def any_step(self) -> int | None:
        """Steps trained, by the file or by the name of its folder."""
        return self.folder_step if self.step is None else self.step


def read_state(path: Path, directory: Path | None = None) -> SavedState:
    """Reads a state from a file, or from a checkpoint's folder, which holds a `lazyshard.json`.

    For a run over a blend, returns the state of the stream in `directory`. Raises StateInvalid: it has no state or an
    invalid one; StateMismatch: it is of a blend of other streams, with field "names"; VersionUnsupported: it has a
    later format; FileRefused: it is not a plain file, or far too large; OSError: the file cannot be read.
    """
    file = path / NAME if path.is_dir() else path
    try:
        data = read_given_file(file)
        # The first bytes of torch.save files: a zip archive, or in old releases a pickle.
        if data[:2] in (b"PK", b"\x80\x02"):
            way = f"write the state next to it, as checkpoint-N/{NAME}, with {_WRITE}"
            raise _refused(file, "a JSON object", "a file of torch.save", way)
        value = loads(data)
    except FileNotFoundError as cause:
        what = f"{file}: there is no such file; give the file of a state, or a checkpoint's folder that holds {NAME}"
        raise StateInvalid(what, file=str(file)) from cause
    except orjson.JSONDecodeError as cause:
        raise _refused(file, "a JSON object", f"{len(data)} bytes that are torn or not JSON ({cause})") from cause
    state, member, sequences = _state(value, directory or file.parent, str(file))
    match, step = _CHECKPOINT.fullmatch(file.resolve().parent.name), _count(value.get("step"))
    saved_at, consumer = value.get("saved_at"), value.get("consumer")
    dated = isinstance(saved_at, int | float)
    at, folder_step = float(saved_at) if dated else file.stat().st_mtime, None if match is None else int(match[1])
    name = consumer if isinstance(consumer, str) else None
    return SavedState(state, file, step, name, at, folder_step, None, dated, member, sequences)


def state_of_cursor(directory: Path, cursor: Cursor) -> SavedState | None:
    """Returns the state in a cursor; None if it has none, as in earlier releases."""
    if cursor.state is None:
        return None
    file = directory / CURSORS / cursor_name(cursor.consumer)
    return SavedState(cursor.state, file, consumer=cursor.consumer, saved_at=cursor.updated_at, cursor=cursor)


def folder_of(path: Path) -> str:
    """Returns the name of a state in messages: its checkpoint's folder, or the file."""
    return str(path.parent) if path.name == NAME else str(path)


def checkpoint_files(folder: Path) -> list[Path]:
    """Returns the state files of the checkpoints in a folder: its own, its checkpoints', and its versions'."""
    if folder.is_file() or (folder / NAME).is_file():
        return [folder if folder.is_file() else folder / NAME]
    # ms-swift makes a separate folder for the checkpoints of each start.
    inside = (file for depth in ("", "[!.]*/") for file in folder.glob(f"{depth}checkpoint-*/{NAME}"))
    found = {file: match for file in inside if (match := _CHECKPOINT.fullmatch(file.parent.name)) and file.is_file()}
    return sorted(found, key=lambda file: (str(file.parent.parent), int(found[file][1])))


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _in_sequences(state: SequenceState, directory: Path, file: str) -> RunState:
    """Returns the course of a run over sequences, in sequences. Raises StateMismatch: it is of other streams."""
    manifest, names = read_manifest(directory, None), state.stream.split(",")
    if manifest is None or manifest.stream_id not in names:
        raise _of_others(file, f"sequences of the rows of {', '.join(names)}", names, directory, None)
    if not (parts := state.parts):
        text = "was written by an earlier release, which did not store which ranks had trained: give a later one"
        raise StateMismatch(f"{file}: the state {text}", directory=str(directory), field="parts")
    trained = sum(part.dp * part.draws for part in parts if part.trained)
    return RunState(manifest.stream_id, manifest.samples_per_chunk, 1, 0, 0, None, parts, trained)


def _of_others(file: str, what: str, names: Sequence[str], directory: Path, actual: str | None) -> StateMismatch:
    text = f"{file}: the state is of {what}, not of {directory}: give one of these, or a state from after it was added"
    return StateMismatch(text, directory=str(directory), field="names", expected=", ".join(names), actual=actual)


def _state(value: Any, directory: Path, file: str) -> tuple[RunState, Member | None, SequenceState | None]:
    if not isinstance(value, dict):
        raise _refused(file, "a JSON object with the state of a run", type(value).__name__)
    layout = value.get("layout")
    if isinstance(layout, str) and layout in _OWN_ORDERS:
        what = f"{file}: the trainer's own sampler {_OWN_ORDERS[layout]} the data (layout {layout}): cannot be traced"
        raise StateInvalid(what, file=file, field="layout")
    places = {"": value, "state": value.get("state"), "data": value.get("data")}
    objects = {within: one for within, one in places.items() if isinstance(one, dict)}
    made = next((one for one in objects.values() if one.get("kind") in (KIND, BLEND)), None)
    within = "state" if "state" in value else next((name for name, one in objects.items() if "parts" in one), None)
    member: Member | None = None
    if made is not None and made["kind"] == KIND:
        sequences = SequenceState.from_dict(made, file)
        return _in_sequences(sequences, directory, file), None, sequences
    if made is not None:
        member = _member_of(BlendState.from_dict(made, file), directory, file)
        state = member.blend.members[member.number]
    elif within is not None:
        state = RunState.from_dict(places[within], file, within=within)
    elif "dp_size" in value and "consumed" in value:
        state = _of_format_1(value, file)
    else:
        keys = ", ".join(sorted(map(str, value))[:8]) + (", ..." if len(value) > 8 else "")
        raise _refused(file, "a state in the field 'state'", f"the fields {keys or 'none'}", f"use {_WRITE}", "state")
    consumed, trained = _count(value.get("consumed")), state.consumed if member is None else member.blend.consumed
    if consumed not in (None, trained):
        raise _refused(file, f"consumed = {trained} as in the state", str(consumed), field="consumed")
    return state, member, None


def _of_format_1(value: dict[str, Any], file: str) -> RunState:
    """Returns the state of a run with the same ranks from its start, from the numbers of ms-swift's format 1."""
    counts = []
    for name in ("consumed", "step", "dp_size", "batch_size", "samples_per_chunk", "window", "seed"):
        if (count := _count(value.get(name))) is None:
            raise _refused(file, f"{name}: an integer from 0", repr(value.get(name))[:80])
        counts.append(count)
    consumed, step, dp, batch_size, unit, window, seed = counts
    if not dp or consumed % dp:
        raise _refused(file, f"consumed: a multiple of dp_size = {dp}", str(consumed))
    draws, stream = consumed // dp, value.get("stream")
    # The last step of an epoch may have fewer draws: then the number of the other steps is unknown.
    each = -(-draws // step) if step else 0
    part = Part(dp, max(1, batch_size), draws, draws_per_step=each if draws == step * each else 0)
    known = stream if STREAM_ID.fits(stream) else None
    return RunState(known, unit, unit, window * unit, seed, None, (part,), consumed)


def _refused(
    file: str | Path, expected: str, actual: str, advice: str = "take another checkpoint", field: str | None = None
) -> StateInvalid:
    message = f"{file}: expected {expected}, found {actual}; {advice}"
    return StateInvalid(message, file=str(file), field=field, expected=expected, actual=actual)


class StepPlace(NamedTuple):
    """The draws of a step: positions [start, stop) of every lane, counted from the beginning of a part."""

    part: int
    start: int
    stop: int


class PartSteps(NamedTuple):
    """The steps of one part after `first_step`; `draws` positions of each lane were drawn, trained or skipped.

    `draws_per_step` is 0 if unknown. `cut`: if steps end with an epoch, its positions in the first one and in others;
    otherwise the first one has no end.
    """

    first_step: int
    draws: int
    draws_per_step: int
    trained: bool = True
    cut: tuple[int, int] = (1 << 62, 0)

    @property
    def known(self) -> bool:
        """Whether the draws of each step are known; a skipped part has no steps."""
        return not self.trained or self.draws_per_step > 0

    @property
    def stop_step(self) -> int:
        """Steps trained by the end of the part, including one that was begun and not ended."""
        return self.first_step if not self.trained or not self.draws else self._step(self.draws - 1) + 1

    def step_of(self, position: int) -> int | None:
        """Returns the step that takes a position; None if it is unknown, or was skipped."""
        return self._step(position) if self.trained and self.draws_per_step else None

    def positions(self, step: int) -> tuple[int, int]:
        """Returns the positions [start, stop) that a step of this part takes. ValueError: it has none."""
        within, each = step - self.first_step, self.draws_per_step
        if within < 0 or not self.trained or not each:
            raise ValueError(f"step {step} is not in the part that begins with step {self.first_step}")
        start, (length, full) = 0, self.cut
        if (later := within + length // -each) >= 0:
            if not full:
                raise ValueError(f"step {step} is past the end: later epochs hold no whole batch")
            epoch, within = divmod(later, -(-full // each))
            start, length = length + epoch * full, full
        return start + within * each, start + min((within + 1) * each, length)

    def _step(self, position: int) -> int:
        each = self.draws_per_step
        if not each:
            return self.first_step
        if position < self.cut[0]:
            return self.first_step + position // each
        length, full = self.cut
        if not full:
            raise ValueError(f"position {position} is past the end: later epochs hold no whole batch")
        epoch, within = divmod(position - length, full)
        return self.first_step - (-length // each) + epoch * -(-full // each) + within // each


class Steps:
    """The steps of a run, part by part; the last part is current, so its steps have no end."""

    def __init__(self, parts: Sequence[PartSteps]) -> None:
        self.parts = tuple(parts)

    @property
    def trained(self) -> int:
        """Steps trained so far, as far as known."""
        return self.parts[-1].stop_step

    @property
    def unknown(self) -> int | None:
        """The first part whose steps are unknown, or None."""
        return next((number for number, part in enumerate(self.parts) if not part.known), None)

    def place(self, step: int) -> StepPlace | None:
        """Returns what a step took, or will take if the run continues unchanged; None if unknown."""
        last = len(self.parts) - 1
        for number, part in enumerate(self.parts):
            if step < part.first_step:
                return None
            if not part.trained or (number < last and step >= part.stop_step):
                continue
            return StepPlace(number, *part.positions(step)) if part.draws_per_step else None
        return None

    def step_of(self, part: int, position: int) -> int | None:
        """Returns the step that takes a position of a part; None if it is unknown, or was skipped."""
        return self.parts[part].step_of(position)

    def ragged(self) -> list[int]:
        """Returns the parts whose draws end within a step: a trainer only stops between two steps."""
        begun = [(n, one) for n, one in enumerate(self.parts) if one.trained and one.draws_per_step and one.draws]
        return [number for number, part in begun if part.positions(part.stop_step - 1)[1] != part.draws]

    def breaks(self) -> list[tuple[int, int, int]]:
        """Returns where steps of known parts are not consecutive: part, steps before it, its first step."""
        befores = [0, *(part.stop_step for part in self.parts)]
        return [
            (number, before, part.first_step)
            for number, (before, part) in enumerate(zip(befores, self.parts, strict=False))
            if part.first_step != before and (not number or self.parts[number - 1].known)
        ]


class Member(NamedTuple):
    """One of the streams of a blend, by its number among the members of the blend's state."""

    blend: BlendState
    number: int

    @property
    def blended(self) -> bool:
        """Whether the stream is currently blended."""
        return self.number in self.blend.parts[-1].members

    @property
    def share(self) -> float:
        """Its share of the next samples; 0 if it is no longer blended."""
        part = self.blend.parts[-1]
        _, parts, _ = [piece for piece in part.pieces if piece[0] <= part.draws][-1]
        return parts[part.members.index(self.number)] / sum(parts) if self.blended else 0.0


def _member_of(blend: BlendState, directory: Path, file: str) -> Member:
    """Returns the member for the stream in a directory, by the stream's identity or its directory."""
    names = [stream_name(directory)]
    # Opening the stream reports the error.
    with contextlib.suppress(OSError, FormatInvalid):
        if (manifest := read_manifest(directory, None)) is not None:
            names.insert(0, manifest.stream_id)
    for number, name in enumerate(blend.names):
        if name in names:
            return Member(blend, number)
    raise _of_others(file, f"a blend of {', '.join(blend.names)}", blend.names, directory, names[0])


class _MemberPart(NamedTuple):
    """A part of the blend for one stream: its place there, if any, and its first draw in the stream's own `part`."""

    steps: PartSteps
    course: BlendCourse
    place: int | None
    part: int
    begin: int

    def drawn(self, position: int) -> int:
        return self.begin + (0 if self.place is None else self.course.counts(position)[self.place])


class MemberSteps(Steps):
    """The steps of a run over a blend, by the draws of one stream, from which a step may take nothing."""

    def __init__(self, member: Member) -> None:
        self._own: list[_MemberPart] = []
        part = stop = 0
        for state in member.blend.parts:
            steps = PartSteps(state.first_step, state.draws, state.draws_per_step)
            course, place, begin = BlendCourse(state.pieces), None, stop
            if member.number in state.members:
                place = state.members.index(member.number)
                part, begin = state.begins[place]
                stop = begin + course.counts(state.draws)[place]
            self._own.append(_MemberPart(steps, course, place, part, begin))
        self._blend = Steps([one.steps for one in self._own])
        super().__init__([self._of_part(number) for number in range(len(member.blend.members[member.number].parts))])

    @property
    def trained(self) -> int:
        """As of `Steps`."""
        return self._blend.trained

    def place(self, step: int) -> StepPlace | None:
        """As of `Steps`."""
        if (found := self._blend.place(step)) is None:
            return None
        own = self._own[found.part]
        return StepPlace(own.part, own.drawn(found.start), own.drawn(found.stop))

    def step_of(self, part: int, position: int) -> int | None:
        """As of `Steps`."""
        for own in reversed(self._own):
            if own.place is not None and own.part == part and own.begin <= position:
                at = own.course.position(own.place, position - own.begin)
                return None if at is None else own.steps.step_of(at)
        return None

    def ragged(self) -> list[int]:
        """As of `Steps`."""
        return [self._own[number].part for number in self._blend.ragged()]

    def breaks(self) -> list[tuple[int, int, int]]:
        """As of `Steps`."""
        return [(self._own[number].part, before, first) for number, before, first in self._blend.breaks()]

    def _of_part(self, number: int) -> PartSteps:
        own = [one.steps for one in self._own if one.place is not None and one.part == number]
        if not own:
            # Nothing was drawn from it: an earlier part replaced it.
            return PartSteps(0, 0, 1)
        first, steps = own[0].first_step, own[-1].stop_step - own[0].first_step
        return PartSteps(first, steps, 1) if all(one.known for one in own) else PartSteps(first, 0, 0)
