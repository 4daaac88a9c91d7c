"""What an audit finds that is not in order, besides samples trained twice or passed over: steps, chunks, cursors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from lazyshard.errors import LazyShardError
from lazyshard.format import Cursor
from lazyshard.format.cursor import CURSORS, cursor_name
from lazyshard.inspection.auditing import EpochAudit
from lazyshard.inspection.tracing import Tracing
from lazyshard.inspection.tracing_facts import Facts
from lazyshard.inspection.tracing_states import SavedState, folder_of
from lazyshard.store.urls import stream_path
from lazyshard.stream.stream import Stream

Kind = Literal[
    "twice", "missing", "count", "steps", "samples", "ahead", "other-settings", "other-stream", "unusable", "cursor",
    "deleted", "stream",
]  # fmt: skip

CONTRADICTIONS: Final = frozenset({"steps", "samples", "ahead", "stream"})
"""Findings by which what the states say, or the stream does, is not so: a count that leans on it proves nothing."""


_NAMED: Final = 3
"""Checkpoints that are named of those that have the same to be said of them; a long run has hundreds."""


class Finding(NamedTuple):
    """Something that is not in order.

    Attributes:
        kind: what it is.
        where: the file, or the stream's directory.
        what: in words.
    """

    kind: Kind
    where: str
    what: str


class Note(NamedTuple):
    """Something that is in order, and good to know.

    Attributes:
        where: the file, or the stream's directory.
        what: in words.
        files: those that it is about, where it is about several; empty for one about `where`.
    """

    where: str
    what: str
    files: tuple[str, ...] = ()


def needed_chunk(tracing: Tracing, newest_epoch: int) -> int:
    """Returns the first chunk that a run may need that goes on from a state: those below it are done with.

    Args:
        tracing: the run as the state tells it.
        newest_epoch: the epoch in which the newest state stands; a state of an earlier one needs all of that.
    """
    total, course = tracing.total, tracing.course
    draws, epoch = course.current.draws, tracing.stretches[-1].last_epoch
    if epoch < newest_epoch:
        return 0
    if total is not None and draws > (length := course.epoch_length(total)):
        full = course.full_epoch_length(total)
        draws, course = (draws - length - 1) % full + 1, course.in_epoch(epoch)
    done = course.done_before(draws, total)
    if total is not None and done >= total:
        return tracing.facts.chunks
    return done // tracing.facts.samples_per_chunk


def of_stream(stream: Stream, facts: Facts) -> Iterator[Finding]:
    """Yields what the stream tells of itself and its last chunk does not bear out."""
    where, each = str(stream.directory), facts.samples_per_chunk
    if not facts.chunks or facts.chunks <= facts.retired:
        return
    last = facts.chunks - 1
    try:
        rows = len(stream.open_chunk(last))
    except (LazyShardError, OSError) as error:
        yield Finding("stream", where, f"how many samples it has cannot be checked: its last chunk, {last}: {error}")
        return
    if facts.samples != last * each + rows:
        yield Finding(
            "stream", where, f"{facts.samples:,} samples are told, but its chunks hold {last * each + rows:,}"
        )


def of_epochs(head: SavedState, epochs: Sequence[EpochAudit]) -> Iterator[Finding]:
    """Yields what was counted and must not be."""
    file = str(head.file)
    for one in epochs:
        if one.twice.samples:
            yield Finding(
                "twice", file, f"epoch {one.epoch}: {one.twice.samples:,} samples were trained more than once"
            )
        if one.again.samples:
            yield Finding(
                "twice", file, f"epoch {one.epoch}: {one.again.samples:,} samples were trained and come again"
            )
        if one.missing.samples:
            yield Finding("missing", file, f"epoch {one.epoch}: {one.missing.samples:,} samples were passed over")
        if not one.whole:
            yield Finding("count", file, f"epoch {one.epoch}: the count is not sound: draws overlap or lie outside")


def told_steps(saved: SavedState) -> int | None:
    """Returns the steps that a checkpoint has trained by its file, or the name of its folder; None where neither says.

    A state that tells of its own epoch alone counts the steps of that, its folder those of the run.
    """
    if saved.step is None and saved.state.parts[0].epoch:
        return None
    return saved.step if saved.step is not None else saved.folder_step


def of_steps(saved: SavedState, tracing: Tracing) -> Iterator[Finding]:
    """Yields where the steps of a checkpoint do not agree with each other."""
    file, steps = str(saved.file), tracing.steps
    for part, ended, begins in steps.breaks():
        yield Finding("steps", file, f"part {part} begins after {begins} steps, the parts before it have {ended}")
    for part in steps.ragged():
        yield Finding("steps", file, f"part {part} ends within a step: {tracing.state.parts[part].draws} draws a rank")
    told = told_steps(saved)
    if told is not None and steps.unknown is None and steps.trained != told:
        which = "is of" if saved.step is not None else f"lies in {saved.file.parent.name}, so it is of"
        name = "" if saved.step is not None else ": call folders by their step"
        yield Finding("steps", file, f"it {which} step {told}, but the state has trained {steps.trained} steps{name}")
    elif saved.step is not None and saved.folder_step is not None and saved.step != saved.folder_step:
        yield Finding("steps", file, f"it is of step {saved.step}, but its folder is called {saved.file.parent.name}")


def of_chunks(
    states: Sequence[tuple[SavedState, Tracing]],
    wanted: Sequence[SavedState],
    facts: Facts,
    cursors: Sequence[Cursor],
    where: str,
) -> Iterator[Finding | Note]:
    """Yields what is deleted, or may be, although a checkpoint that is there still needs it.

    Of those that are wanted it is not in order. Others are only noted: a run that goes on lets go of what its older
    checkpoints need.

    Args:
        states: of the run, those in cursors among them.
        wanted: those from which the run must be able to go on, by identity: the newest, and the audited one.
        facts: the stream's.
        cursors: the run's.
        where: the stream's directory.
    """
    epoch = max((tracing.epochs[-1] for _, tracing in states), default=0)
    files = [(saved, needed_chunk(tracing, epoch)) for saved, tracing in states if saved.cursor is None]
    lost: dict[str, int] = {}
    soon: dict[str, int] = {}
    free = max((cursor.chunks_before for cursor in cursors), default=0)
    for saved, need in files:
        must = any(saved is one for one in wanted)
        needs = f"needs chunk {need}, and those below"
        if need < facts.retired:
            if must:
                what = f"it cannot be gone on from: that {needs} {facts.retired} are deleted"
                yield Finding("deleted", str(saved.file), what)
            else:
                lost[str(saved.file)] = need
        for cursor in cursors:
            before = cursor.chunks_before
            if before <= need:
                continue
            if must:
                what = f"it lets the chunks below {before} be deleted, but {saved.file} needs chunk {need}"
                yield Finding("cursor", _file(where, cursor), what)
            elif need >= facts.retired:
                soon[str(saved.file)] = need
    yield from _in_one_note(where, lost, "can no longer be gone on from", f"below {facts.retired} are deleted")
    by = "by the run's cursor"
    yield from _in_one_note(where, soon, "may soon no longer be gone on from", f"below {free} may be deleted, {by}")
    for cursor in cursors:
        yield from _of_cursor(cursor, [saved for saved, _ in files], _file(where, cursor))


def _in_one_note(where: str, files: Mapping[str, int], fate: str, why: str) -> Iterator[Note]:
    """Yields what is to be said of checkpoints whose chunks go: one line, however many they are.

    Args:
        where: the stream's directory.
        files: the first chunk that each of them needs.
        fate: what becomes of them.
        why: of which chunks.
    """
    if len(files) == 1:
        [(file, need)] = files.items()
        yield Note(file, f"{fate}: needs chunk {need}, and those {why}")
    elif files:
        named = ", ".join(folder_of(Path(file)) for file in [*files][:_NAMED])
        more = f" and {len(files) - _NAMED} more" if len(files) > _NAMED else ""
        what = f"{len(files)} checkpoints {fate}: they need chunks from {min(files.values())} on, and those {why}"
        yield Note(where, f"{what}: {named}{more}", tuple(files))


def _file(where: str, cursor: Cursor) -> str:
    return str(stream_path(where) / CURSORS / cursor_name(cursor.consumer))


def _of_cursor(cursor: Cursor, files: Sequence[SavedState], name: str) -> Iterator[Finding]:
    if not files:
        return
    state = files[-1].state
    if cursor.stream_id != state.stream_id:
        yield Finding("cursor", name, f"of stream {cursor.stream_id}, not of {state.stream_id}")
    for field, value in (("unit", state.unit), ("window", state.window), ("seed", state.seed)):
        if (found := cursor.plan.get(field, value)) != value:
            yield Finding("cursor", name, f"its plan has {field} {found}, the checkpoints have {value}")
    most = max(saved.state.consumed for saved in files)
    if cursor.state is None and cursor.consumed > most:
        yield Finding(
            "cursor",
            name,
            f"it has consumed {cursor.consumed:,} samples, the checkpoints at most {most:,}; are all given?",
        )
