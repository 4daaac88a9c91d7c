"""Audit: proves by counting that a run has trained each sample once per epoch, or names the samples where it has not.

Facts that can be checked are not taken from the states: the stream's identity, how much is published, how many rows the
last chunk has, which chunks are deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from lazyshard.errors import LazyShardError, StateMismatch
from lazyshard.format.records import CURSORS
from lazyshard.format.state import Cursor, cursor_name
from lazyshard.inspection.auditing_counts import SETTINGS, AuditedState, EpochAudit, count_epochs, relate, shared_draws
from lazyshard.inspection.tracing import Report, StreamFacts, Tracing
from lazyshard.inspection.tracing_sequences import SequenceTracing, traced
from lazyshard.inspection.tracing_states import SavedState, folder_of
from lazyshard.store.files import stream_path
from lazyshard.stream.stream import Stream

_Kind = Literal[
    "twice", "missing", "count", "steps", "samples", "ahead", "other-settings", "other-stream", "unusable", "cursor",
    "deleted", "stream", "note",
]  # fmt: skip

_NAMED: Final = 3  # how many checkpoints with the same remark are named; a long run has hundreds


class Remark(NamedTuple):
    """A problem of a file, of some `files` or of the stream's directory; or a note."""

    kind: _Kind
    where: str
    what: str
    files: tuple[str, ...] = ()


class Audit(NamedTuple):
    """The result of an audit of the state `head`; `states` are all states, ordered by how much they had trained."""

    head: SavedState
    tracing: Tracing
    states: tuple[AuditedState, ...]
    epochs: tuple[EpochAudit, ...]
    remarks: tuple[Remark, ...]

    @property
    def findings(self) -> list[Remark]:
        """The remarks that are problems."""
        return [one for one in self.remarks if one.kind != "note"]

    @property
    def consistent(self) -> bool:
        """Whether each sample was trained once, or is known not to be, and nothing contradicts the states."""
        # These findings contradict the states or the stream: a count based on them proves nothing.
        contradicted = any(one.kind in ("steps", "samples", "ahead", "stream") for one in self.remarks)
        return not contradicted and all(one.proven for one in self.epochs)

    @property
    def proven(self) -> bool:
        """Whether the run is consistent and the checkpoint's number of steps confirms the state's sample count."""
        return self.consistent and self.tracing.steps.unknown is None and _told_steps(self.head) is not None

    @property
    def ok(self) -> bool:
        """Whether the run is consistent and there are no findings."""
        return self.consistent and not self.findings

    @property
    def fewer_than_step(self) -> int | None:
        """Samples of a step, if fewer than that are to come in the newest epoch: no state says what becomes of them."""
        part, epoch = self.head.state.parts[-1], self.epochs[-1]
        step = part.dp * part.draws_per_step
        known = self.tracing.total is not None and self.head.member is None and self.head.sequences is None
        return step if known and part.trained and 0 < epoch.to_come.samples < step else None


def newest(states: Sequence[SavedState]) -> tuple[SavedState, str | None]:
    """Returns the checkpoint saved last, or if times are unknown trained longest, and a note on the choice."""
    files = [saved for saved in states if saved.cursor is None] or list(states)
    if dated := all(saved.dated for saved in files):
        last = max(saved.saved_at for saved in files)
        files = [saved for saved in files if last - saved.saved_at <= 2.0]
    known = all(saved.any_step is not None for saved in files)

    def trained(saved: SavedState) -> tuple[int, int, int, float, str]:
        # A run that starts its epochs itself counts the samples of each from zero.
        step, epoch = (saved.any_step or 0) if known else 0, saved.state.parts[0].epoch or 0
        return step, epoch, saved.state.consumed, saved.saved_at, str(saved.file)

    chosen = max(files, key=trained)
    if dated or len(files) == 1:
        return chosen, None
    most = f"has trained the most {'steps' if known else 'samples'}"
    return chosen, f"audited as the one that {most}: not every state has a save time; choose another with --state"


def audit(
    stream: Stream,
    facts: StreamFacts,
    states: Sequence[SavedState],
    head: SavedState,
    *,
    cursors: Sequence[Cursor] = (),
    remarks: Sequence[Remark] = (),
    report: Report = lambda *_: None,
) -> Audit:
    """Audits a run from a state of its history, `head`. Raises StateMismatch: it is of another stream, or ahead."""
    name, tracing = str(head.file), traced(head, facts, str(stream.directory))
    found = [*remarks, *_of_stream(stream, facts)]
    audited = [_related(saved, head, tracing, found) for saved in states]
    epochs = count_epochs(tracing, _branches(audited), report)
    if isinstance(tracing, SequenceTracing) and (first := tracing.first.position):
        found.append(Remark("note", name, f"the rows before row {first:,}, whose chunks are deleted, count as trained"))
    for one in epochs:
        told = {"trained more than once": one.twice, "trained and drawn again": one.again, "passed over": one.missing}
        for what, those in told.items():
            if those.samples:
                kind: _Kind = "missing" if those is one.missing else "twice"
                found.append(Remark(kind, name, f"epoch {one.epoch}: {those.samples:,} samples were {what}"))
        if not one.whole:
            found.append(Remark("count", name, f"epoch {one.epoch}: draws overlap, or are outside the epoch"))
    kept = [(one.saved, one.tracing) for one in audited if one.tracing is not None]
    found += (Remark("steps", str(saved.file), what) for saved, run in kept for what in _of_steps(saved, run))
    found += _of_chunks(kept, (head, newest(states)[0]), cursors, tracing)
    audited.sort(key=lambda one: (one.saved.state.consumed, one.saved.saved_at, str(one.saved.file)))
    return Audit(head, tracing, tuple(audited), tuple(epochs), tuple(found))


def _related(saved: SavedState, head: SavedState, tracing: Tracing, found: list[Remark]) -> AuditedState:
    if saved is head:
        return AuditedState(saved, tracing, "audited")
    state, file, own, ahead = saved.state, str(saved.file), None, list[Remark]()
    if state.stream_id == head.state.stream_id:
        try:
            own = traced(saved, tracing.facts, tracing.where)
        except StateMismatch as error:
            ahead = [Remark("ahead", file, str(error))]
    relation = relate(state, head.state, range(0) if own is None else own.epochs, tracing.epochs)
    rules, others = ({} if one.sequences is None else one.sequences.rule for one in (saved, head))
    if relation != "other stream" and rules != others:
        relation = "other settings"
    if relation == "other stream":
        found.append(Remark("other-stream", file, f"of stream {state.stream_id}, not of {head.state.stream_id}"))
    elif relation == "other settings":
        values = [(name, getattr(state, name), getattr(head.state, name)) for name in SETTINGS]
        values += [(name, rules.get(name), others.get(name)) for name in rules.keys() | others.keys()]
        differ = ", ".join(f"{name} {its}, not {audited}" for name, its, audited in values if its != audited)
        found.append(Remark("other-settings", file, f"{differ}: it is of another run on the stream"))
        own, ahead = None, []
    found += ahead
    return AuditedState(saved, own, relation, shared_draws(state, head.state))


def _branches(states: Sequence[AuditedState]) -> list[AuditedState]:
    """Returns the abandoned states that no other state continues: they include what the others trained."""
    chosen: list[AuditedState] = []
    left = [one for one in states if one.relation == "abandoned" and one.tracing is not None]
    for one in sorted(left, key=lambda one: -one.saved.state.consumed):
        if "on the course" not in (relate(one.saved.state, other.saved.state) for other in chosen):
            one.trained = 0
            chosen.append(one)
    return chosen


def _of_stream(stream: Stream, facts: StreamFacts) -> Iterator[Remark]:
    """Yields where the stream's own statements differ from its last chunk."""
    where, last = str(stream.directory), facts.chunks - 1
    if last < facts.retired:
        return
    try:
        held = last * facts.samples_per_chunk + len(stream.open_chunk(last))
    except (LazyShardError, OSError) as error:
        yield Remark("stream", where, f"its number of samples cannot be checked: its last chunk, {last}: {error}")
        return
    if facts.samples != held:
        yield Remark("stream", where, f"{facts.samples:,} samples are stated, but its chunks hold {held:,}")


def _told_steps(saved: SavedState) -> int | None:
    """Returns the steps trained, by the file or its folder; for a state of later epochs only, by the file alone."""
    return None if saved.step is None and saved.state.parts[0].epoch else saved.any_step


def _of_steps(saved: SavedState, tracing: Tracing) -> Iterator[str]:
    """Yields contradictions between the steps of a checkpoint."""
    steps, folder = tracing.steps, saved.file.parent.name
    for part, ended, begins in steps.breaks():
        yield f"part {part} begins after {begins} steps, the parts before it have {ended}"
    for part in steps.ragged():
        yield f"part {part} ends within a step: {tracing.state.parts[part].draws} draws per rank"
    told = _told_steps(saved)
    if told is not None and steps.unknown is None and steps.trained != told:
        which = "is of" if saved.step is not None else f"is in {folder}, named after the step, so it is of"
        yield f"it {which} step {told}, but the state has trained {steps.trained} steps"
    elif saved.step is not None and saved.folder_step is not None and saved.step != saved.folder_step:
        yield f"it is of step {saved.step}, but its folder is named {folder}"


def _of_chunks(
    states: Sequence[tuple[SavedState, Tracing]], wanted: Sequence[SavedState], cursors: Sequence[Cursor], head: Tracing
) -> Iterator[Remark]:
    """Yields chunks that a checkpoint needs and that are or may be deleted; a note unless it is one of the `wanted`."""
    epoch, retired, where = max((one.epochs[-1] for _, one in states), default=0), head.facts.retired, head.where
    files = [(saved, tracing.needed_chunk(epoch)) for saved, tracing in states if saved.cursor is None]
    named = [(cursor, str(stream_path(where) / CURSORS / cursor_name(cursor.consumer))) for cursor in cursors]
    older = dict[str, int]()
    for saved, need in files:
        file = str(saved.file)
        if not any(saved is one for one in wanted):
            older[file] = need
            continue
        if need < retired:
            yield Remark("deleted", file, f"resuming from it needs chunk {need}; chunks below {retired} are deleted")
        for cursor, name in named:
            if cursor.chunks_before > need:
                below = f"the chunks below {cursor.chunks_before}"
                yield Remark("cursor", name, f"it allows deleting {below}, but {file} needs chunk {need}")
    fate, free = "no longer be resumed from", max((cursor.chunks_before for cursor in cursors), default=0)
    lost = {file: need for file, need in older.items() if need < retired}
    yield from _in_one_note(where, lost, f"can {fate}", f"below {retired} are deleted")
    soon = {file: need for file, need in older.items() if retired <= need < free}
    may = f"below {free} may be deleted, by the run's cursor"
    yield from _in_one_note(where, soon, f"can {fate} if the producer deletes chunks (--retain consumed)", may)
    for cursor, name in named:
        yield from (Remark("cursor", name, what) for what in _of_cursor(cursor, [saved for saved, _ in files]))


def _in_one_note(where: str, files: Mapping[str, int], fate: str, why: str) -> Iterator[Remark]:
    """Yields one line for all checkpoints that lose their chunks; `files` gives the first chunk that each needs."""
    if len(files) == 1:
        [(file, need)] = files.items()
        yield Remark("note", file, f"{fate}: needs chunk {need}, and chunks {why}")
    elif files:
        named = ", ".join(folder_of(Path(file)) for file in [*files][:_NAMED])
        more = f" and {len(files) - _NAMED} more" if len(files) > _NAMED else ""
        what = f"{len(files)} checkpoints {fate}: they need chunks from {min(files.values())} on, and chunks {why}"
        yield Remark("note", where, f"{what}: {named}{more}", tuple(files))


def _of_cursor(cursor: Cursor, files: Sequence[SavedState]) -> Iterator[str]:
    """Yields where a run's cursor contradicts its checkpoints."""
    if not files:
        return
    state, most = files[-1].state, max(saved.state.consumed for saved in files)
    if cursor.stream_id != state.stream_id:
        yield f"of stream {cursor.stream_id}, not of {state.stream_id}"
    for field, value in (("unit", state.unit), ("window", state.window), ("seed", state.seed)):
        if (found := cursor.plan.get(field, value)) != value:
            yield f"its plan has {field} {found}, the checkpoints have {value}"
    # The cursor of a run over sequences counts their rows.
    if cursor.state is None and files[-1].sequences is None and cursor.consumed > most:
        yield f"it has consumed {cursor.consumed:,} samples, the checkpoints at most {most:,}; are some not given?"
