"""Audit: proves by counting that a run has trained each sample once an epoch, or names those for which that is not so.

The other states of the run are put in relation to the newest, and it is told what is not in order: steps, chunks,
cursors. What can be looked at is not taken from the states: the stream's identity, how much is published, how many rows
the last chunk has, which chunks are deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

from lazyshard.errors import LazyShardError, StateMismatch
from lazyshard.format.cursor import Cursor, cursor_name
from lazyshard.format.names import CURSORS
from lazyshard.inspection.auditing_counts import SETTINGS, AuditedState, EpochAudit, count_epochs, relate, shared_draws
from lazyshard.inspection.auditing_sequences import count_sequences
from lazyshard.inspection.tracing import StreamFacts, Tracing
from lazyshard.inspection.tracing_sequences import SequenceTracing, traced
from lazyshard.inspection.tracing_states import SavedState, folder_of
from lazyshard.store.urls import stream_path
from lazyshard.stream.stream import Stream

_Kind = Literal[
    "twice", "missing", "count", "steps", "samples", "ahead", "other-settings", "other-stream", "unusable", "cursor",
    "deleted", "stream", "note",
]  # fmt: skip

# Findings by which what the states say, or the stream does, is not so: a count that leans on it proves nothing
_CONTRADICTIONS: Final = frozenset({"steps", "samples", "ahead", "stream"})
_NAMED: Final = 3  # Checkpoints that are named of those that have the same to be said of them; a long run has hundreds


class Remark(NamedTuple):
    """Something that is not in order, about a file or the stream's directory; or a note, which is good to know.

    `files` are those that it is about where these are several.
    """

    kind: _Kind
    where: str
    what: str
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Audit:
    """What an audit of the state `head` has found; `states` are all of them, in the order of what they had trained."""

    facts: StreamFacts
    head: SavedState
    tracing: Tracing
    states: tuple[AuditedState, ...]
    epochs: tuple[EpochAudit, ...]
    remarks: tuple[Remark, ...]

    @property
    def findings(self) -> list[Remark]:
        """What is not in order."""
        return [one for one in self.remarks if one.kind != "note"]

    @property
    def consistent(self) -> bool:
        """Whether each sample was trained once, or is known not to be, and nothing contradicts what the states say."""
        counted = all(one.proven for one in self.epochs)
        return counted and not any(finding.kind in _CONTRADICTIONS for finding in self.findings)

    @property
    def proven(self) -> bool:
        """Whether that is so, and the checkpoint's number of steps bears the state's count of samples out."""
        return self.consistent and self.tracing.steps.unknown is None and _told_steps(self.head) is not None

    @property
    def ok(self) -> bool:
        """Whether nothing was found that is not in order."""
        return self.consistent and not self.findings

    @property
    def fewer_than_step(self) -> int | None:
        """Samples of a step, where what is to come of the newest epoch is too little for one; else None.

        It is trained by a run that goes on into the next epoch, ends its last step with the epoch, or takes smaller
        steps. One that stops at the stream's end leaves it over: which of these the run is, no state tells.
        """
        part, epoch = self.head.state.parts[-1], self.epochs[-1]
        step = part.dp * part.draws_per_step
        counted = self.head.member is None and self.head.sequences is None
        if self.tracing.total is None or not counted or not part.trained:
            return None
        return step if 0 < epoch.to_come.samples < step else None


def newest(states: Sequence[SavedState]) -> tuple[SavedState, str | None]:
    """Returns the checkpoint that was saved last, and what is to be said of the choice; a cursor only without those.

    Where two were saved at about the same time, or some do not say when, it is the one that has trained most: times of
    files tell nothing where a folder was copied.
    """
    files = [saved for saved in states if saved.cursor is None] or list(states)
    dated = all(saved.dated for saved in files)
    if dated:
        last = max(saved.saved_at for saved in files)
        files = [saved for saved in files if last - saved.saved_at <= 2.0]
    known = all(saved.step is not None or saved.folder_step is not None for saved in files)

    def trained(saved: SavedState) -> tuple[int, int, int, float, str]:
        # A run that begins its epochs by itself counts the samples of each anew.
        epoch, step = saved.state.parts[0].epoch or 0, saved.folder_step if saved.step is None else saved.step
        return (step or 0) if known else 0, epoch, saved.state.consumed, saved.saved_at, str(saved.file)

    chosen = max(files, key=trained)
    if dated or len(files) == 1:
        return chosen, None
    return chosen, (
        f"audited as the one that has trained the most {'steps' if known else 'samples'}: not every state says when it "
        f"was saved, and the times of files tell nothing where they were copied; name another one by --state"
    )


def audit(
    stream: Stream,
    facts: StreamFacts,
    states: Sequence[SavedState],
    head: SavedState,
    *,
    cursors: Sequence[Cursor] = (),
    remarks: Sequence[Remark] = (),
    report: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> Audit:
    """Audits a run by one of the states of its history, `head`.

    `remarks` are of states that cannot be used, and what is to be told besides. `report` is told a phase, how many
    chunks of it are done, and how many there are. Raises StateMismatch: the audited state is of another stream, or
    ahead of what is published.
    """
    where = str(stream.directory)
    tracing = traced(head, facts, where)
    found = [*remarks, *_of_stream(stream, facts)]
    audited = [_related(saved, head, tracing, where, found) for saved in states]
    branches = _branches(audited)
    if isinstance(tracing, SequenceTracing):
        epochs = count_sequences(tracing, branches, report)
        if tracing.first.position:
            what = f"its rows before row {tracing.first.position:,}, whose chunks are deleted, count as trained unseen"
            found.append(Remark("note", str(head.file), what))
    else:
        epochs = count_epochs(tracing, branches, report)
    found += (remark for one in epochs for remark in _of_epoch(str(head.file), one))
    kept = [(one.saved, one.tracing) for one in audited if one.tracing is not None]
    found += (Remark("steps", str(saved.file), what) for saved, run in kept for what in _of_steps(saved, run))
    found += _of_chunks(kept, (head, newest(states)[0]), facts, cursors, where)
    audited.sort(key=lambda one: (one.saved.state.consumed, one.saved.saved_at, str(one.saved.file)))
    return Audit(facts, head, tracing, tuple(audited), tuple(epochs), tuple(found))


def _related(saved: SavedState, head: SavedState, tracing: Tracing, where: str, found: list[Remark]) -> AuditedState:
    state, file, own, ahead = saved.state, str(saved.file), None, None
    if saved is head:
        return AuditedState(saved, tracing, "audited")
    if state.stream_id == head.state.stream_id:
        try:
            own = traced(saved, tracing.facts, where)
        except StateMismatch as error:
            ahead = Remark("ahead", file, str(error))
    relation = relate(state, head.state, range(0) if own is None else own.epochs, tracing.epochs)
    rules, others = ({} if one.sequences is None else one.sequences.rule for one in (saved, head))
    if relation != "other stream" and rules != others:
        relation = "other settings"
    if relation == "audited":
        # The same in another place: a cursor, or a copy.
        relation = "on the course"
    elif relation == "other stream":
        what = f"of stream {state.stream_id}, not of {head.state.stream_id}"
        found.append(Remark("other-stream", file, what))
    elif relation == "other settings":
        values = [(name, getattr(state, name), getattr(head.state, name)) for name in SETTINGS]
        values += [(name, rules.get(name), others.get(name)) for name in rules.keys() | others.keys()]
        differ = ", ".join(f"{name} {its}, not {audited}" for name, its, audited in values if its != audited)
        what = f"{differ}: it drew in another order, so it is of another run on the stream"
        found.append(Remark("other-settings", file, what))
        own = ahead = None
    found += [] if ahead is None else [ahead]
    return AuditedState(saved, own, relation, shared_draws(state, head.state))


def _branches(states: Sequence[AuditedState]) -> list[AuditedState]:
    """Returns the abandoned states that no other one goes on from: what they trained holds that of the others."""
    chosen: list[AuditedState] = []
    for one in sorted(states, key=lambda one: -one.saved.state.consumed):
        covered = (relate(one.saved.state, other.saved.state) for other in chosen)
        left = one.relation == "abandoned" and one.tracing is not None
        if left and not any(relation in ("audited", "on the course") for relation in covered):
            one.trained = 0
            chosen.append(one)
    return chosen


def _needed_chunk(tracing: Tracing, newest_epoch: int) -> int:
    """Returns the first chunk that a run may need that goes on from a state: those below it are done with.

    A state of an earlier epoch than the newest state's needs all of that epoch.
    """
    if isinstance(tracing, SequenceTracing):
        return tracing.needed_chunk(newest_epoch)
    total, course = tracing.total, tracing.course
    draws, epoch = course.current.draws, tracing.sections[-1].last_epoch
    if epoch < newest_epoch:
        return 0
    if total is not None and draws > (length := course.epoch_length(total)):
        full = course.full_epoch_length(total)
        draws, course = (draws - length - 1) % full + 1, course.in_epoch(epoch)
    done = course.done_before(draws, total)
    return tracing.facts.chunks if total is not None and done >= total else done // tracing.facts.samples_per_chunk


def _of_stream(stream: Stream, facts: StreamFacts) -> Iterator[Remark]:
    """Yields what the stream tells of itself and its last chunk does not bear out."""
    where, last = str(stream.directory), facts.chunks - 1
    if last < facts.retired:
        return
    try:
        held = last * facts.samples_per_chunk + len(stream.open_chunk(last))
    except (LazyShardError, OSError) as error:
        what = f"how many samples it has cannot be checked: its last chunk, {last}: {error}"
        yield Remark("stream", where, what)
    else:
        if facts.samples != held:
            yield Remark("stream", where, f"{facts.samples:,} samples are told, but its chunks hold {held:,}")


def _of_epoch(file: str, one: EpochAudit) -> Iterator[Remark]:
    """Yields what was counted and must not be."""
    counted: tuple[tuple[_Kind, int, str], ...] = (
        ("twice", one.twice.samples, "were trained more than once"),
        ("twice", one.again.samples, "were trained and come again"),
        ("missing", one.missing.samples, "were passed over"),
    )
    for kind, samples, what in counted:
        if samples:
            yield Remark(kind, file, f"epoch {one.epoch}: {samples:,} samples {what}")
    if not one.whole:
        yield Remark("count", file, f"epoch {one.epoch}: the count is not sound: draws overlap or lie outside")


def _told_steps(saved: SavedState) -> int | None:
    """Returns the steps that a checkpoint has trained by its file, or the name of its folder; None where neither says.

    A state that tells of its own epoch alone counts the steps of that, its folder those of the run.
    """
    if saved.step is None and saved.state.parts[0].epoch:
        return None
    return saved.step if saved.step is not None else saved.folder_step


def _of_steps(saved: SavedState, tracing: Tracing) -> Iterator[str]:
    """Yields where the steps of a checkpoint do not agree with each other."""
    steps, folder = tracing.steps, saved.file.parent.name
    for part, ended, begins in steps.breaks():
        yield f"part {part} begins after {begins} steps, the parts before it have {ended}"
    for part in steps.ragged():
        yield f"part {part} ends within a step: {tracing.state.parts[part].draws} draws a rank"
    told = _told_steps(saved)
    if told is not None and steps.unknown is None and steps.trained != told:
        which, name = "is of", ""
        if saved.step is None:
            which, name = f"lies in {folder}, so it is of", ": call folders by their step"
        yield f"it {which} step {told}, but the state has trained {steps.trained} steps{name}"
    elif saved.step is not None and saved.folder_step is not None and saved.step != saved.folder_step:
        yield f"it is of step {saved.step}, but its folder is called {folder}"


def _of_chunks(
    states: Sequence[tuple[SavedState, Tracing]],
    wanted: Sequence[SavedState],
    facts: StreamFacts,
    cursors: Sequence[Cursor],
    where: str,
) -> Iterator[Remark]:
    """Yields what is deleted, or may be, although a checkpoint that is there still needs it.

    Of those that are wanted, by identity, it is not in order: from the newest and the audited one the run must be able
    to go on. Others are only noted: a run that goes on lets go of what its older checkpoints need.
    """
    epoch = max((tracing.epochs[-1] for _, tracing in states), default=0)
    files = [(saved, _needed_chunk(tracing, epoch)) for saved, tracing in states if saved.cursor is None]
    lost: dict[str, int] = {}
    soon: dict[str, int] = {}
    named = [(cursor, str(stream_path(where) / CURSORS / cursor_name(cursor.consumer))) for cursor in cursors]
    free = max((cursor.chunks_before for cursor in cursors), default=0)
    for saved, need in files:
        must, file = any(saved is one for one in wanted), str(saved.file)
        if need < facts.retired and must:
            what = f"it cannot be gone on from: that needs chunk {need}, and those below {facts.retired} are deleted"
            yield Remark("deleted", file, what)
        elif need < facts.retired:
            lost[file] = need
        elif need < free and not must:
            soon[file] = need
        for cursor, name in named if must else ():
            if cursor.chunks_before > need:
                what = f"it lets the chunks below {cursor.chunks_before} be deleted, but {file} needs chunk {need}"
                yield Remark("cursor", name, what)
    yield from _in_one_note(where, lost, "can no longer be gone on from", f"below {facts.retired} are deleted")
    by = "by the run's cursor"
    yield from _in_one_note(where, soon, "may soon no longer be gone on from", f"below {free} may be deleted, {by}")
    for cursor, name in named:
        yield from (Remark("cursor", name, what) for what in _of_cursor(cursor, [saved for saved, _ in files]))


def _in_one_note(where: str, files: Mapping[str, int], fate: str, why: str) -> Iterator[Remark]:
    """Yields one line, however many checkpoints lose their chunks; by file, the first chunk that each needs."""
    if len(files) == 1:
        [(file, need)] = files.items()
        yield Remark("note", file, f"{fate}: needs chunk {need}, and those {why}")
    elif files:
        named = ", ".join(folder_of(Path(file)) for file in [*files][:_NAMED])
        more = f" and {len(files) - _NAMED} more" if len(files) > _NAMED else ""
        what = f"{len(files)} checkpoints {fate}: they need chunks from {min(files.values())} on, and those {why}"
        yield Remark("note", where, f"{what}: {named}{more}", tuple(files))


def _of_cursor(cursor: Cursor, files: Sequence[SavedState]) -> Iterator[str]:
    """Yields what a run's cursor says that its checkpoints do not."""
    if not files:
        return
    state, most = files[-1].state, max(saved.state.consumed for saved in files)
    if cursor.stream_id != state.stream_id:
        yield f"of stream {cursor.stream_id}, not of {state.stream_id}"
    for field, value in (("unit", state.unit), ("window", state.window), ("seed", state.seed)):
        if (found := cursor.plan.get(field, value)) != value:
            yield f"its plan has {field} {found}, the checkpoints have {value}"
    # A cursor of a run over sequences counts their rows.
    if cursor.state is None and files[-1].sequences is None and cursor.consumed > most:
        yield f"it has consumed {cursor.consumed:,} samples, the checkpoints at most {most:,}; are all given?"
