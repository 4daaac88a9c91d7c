"""The report of an audit: states of a run put in relation to the newest, what was counted, and what is not in order.

What can be looked at is not taken from the states: the stream's identity, how much is published, how many rows the last
chunk has, which chunks are deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lazyshard.errors import StateMismatch
from lazyshard.format import Cursor
from lazyshard.storage.auditing import Branch, BranchAudit, EpochAudit, count_epochs
from lazyshard.storage.auditing_findings import Finding, of_chunks, of_epochs, of_steps, of_stream
from lazyshard.storage.auditing_lineage import Related, relate
from lazyshard.storage.stream import Stream
from lazyshard.storage.tracing import Tracing
from lazyshard.storage.tracing_facts import Facts
from lazyshard.storage.tracing_states import SavedState


@dataclass(frozen=True, slots=True)
class AuditedState:
    """A state of the run's history.

    Attributes:
        saved: the state.
        tracing: the run as it tells it; None where it does not fit the stream.
        related: what it is to the one that is audited.
        branch: of an abandoned one, what it trained behind the fork; None where a longer one on its branch tells it.
    """

    saved: SavedState
    tracing: Tracing | None
    related: Related
    branch: BranchAudit | None = None


@dataclass(frozen=True, slots=True)
class Audit:
    """What an audit has found.

    Attributes:
        facts: the stream's.
        head: the state that was audited.
        tracing: the run as it tells it.
        states: all of them, the audited one among them, in the order of what they had trained.
        epochs: what was counted.
        findings: what is not in order.
    """

    facts: Facts
    head: SavedState
    tracing: Tracing
    states: tuple[AuditedState, ...]
    epochs: tuple[EpochAudit, ...]
    findings: tuple[Finding, ...]

    @property
    def proven(self) -> bool:
        """Whether each sample was trained once, or is known not to be."""
        return all(one.proven for one in self.epochs)

    @property
    def ok(self) -> bool:
        """Whether nothing was found that is not in order."""
        return self.proven and not self.findings


def newest(states: Sequence[SavedState]) -> SavedState:
    """Returns the checkpoint that was saved last; a cursor only where there is no checkpoint."""
    files = [saved for saved in states if saved.cursor is None] or list(states)
    return max(files, key=lambda saved: (saved.saved_at, saved.state.consumed, str(saved.file)))


def audit(
    stream: Stream,
    facts: Facts,
    states: Sequence[SavedState],
    head: SavedState,
    *,
    cursors: Sequence[Cursor] = (),
    unusable: Sequence[tuple[str, str]] = (),
    report: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> Audit:
    """Audits a run.

    Args:
        stream: the stream.
        facts: what is published of it.
        states: of the run's history, the one that is audited among them.
        head: that one.
        cursors: the run's cursors.
        unusable: files of states that cannot be used, each with the reason.
        report: is told a phase, how many chunks of it are done, and how many there are.

    Raises:
        StateMismatch: the audited state is of another stream, or ahead of what is published.
    """
    where = str(stream.directory)
    tracing = Tracing(head, facts, where)
    findings = [Finding("unusable", file, why) for file, why in unusable]
    findings += of_stream(stream, facts)
    related = [_related(saved, head, tracing, where, findings) for saved in states]
    chosen = _longest(related)
    branches = [Branch(one.tracing, one.related.beyond) for one in chosen if one.tracing is not None]
    epochs, branched = count_epochs(tracing, branches, report)
    # By identity: the same state may lie in two files.
    told = {id(one): result for one, result in zip(chosen, branched, strict=True)}
    found = [AuditedState(one.saved, one.tracing, one.related, told.get(id(one))) for one in related]
    findings += of_epochs(head, epochs)
    kept = [(one.saved, one.tracing) for one in found if one.tracing is not None]
    for saved, run in kept:
        findings += of_steps(saved, run)
    findings += of_chunks(kept, facts, cursors, where)
    order = sorted(found, key=lambda one: (one.saved.state.consumed, one.saved.saved_at, str(one.saved.file)))
    return Audit(facts, head, tracing, tuple(order), tuple(epochs), tuple(findings))


def _related(
    saved: SavedState, head: SavedState, tracing: Tracing, where: str, findings: list[Finding]
) -> AuditedState:
    file = str(saved.file)
    own = tracing if saved is head else None
    if own is None and saved.state.stream_id == head.state.stream_id:
        try:
            own = Tracing(saved, tracing.facts, where)
        except StateMismatch as error:
            related = relate(saved.state, head.state, range(0), tracing.epochs)
            if related.relation != "other settings":
                findings.append(Finding("ahead", file, str(error)))
                return AuditedState(saved, None, related)
    related = relate(saved.state, head.state, range(0) if own is None else own.epochs, tracing.epochs)
    if saved is head:
        related = Related("head")
    elif related.relation == "head":
        # The same as the audited one, in another place: a cursor, or a copy.
        related = Related("on the course")
    if related.relation == "other stream":
        findings.append(
            Finding("other-stream", file, f"of stream {saved.state.stream_id}, not of {head.state.stream_id}")
        )
    if related.relation == "other settings":
        differ = ", ".join(
            f"{name} {getattr(saved.state, name)}, not {getattr(head.state, name)}" for name in related.differs
        )
        findings.append(
            Finding(
                "other-settings", file, f"{differ}: it drew in another order, so it is of another run on the stream"
            )
        )
        own = None
    return AuditedState(saved, own, related)


def _longest(states: Sequence[AuditedState]) -> list[AuditedState]:
    """Returns the abandoned states that no other one goes on from: what they trained holds that of the others."""
    abandoned = [one for one in states if one.related.relation == "abandoned" and one.tracing is not None]
    chosen: list[AuditedState] = []
    for one in sorted(abandoned, key=lambda one: -one.saved.state.consumed):
        empty = range(0)
        covered = (relate(one.saved.state, other.saved.state, empty, empty).relation for other in chosen)
        if not any(relation in ("head", "on the course") for relation in covered):
            chosen.append(one)
    return chosen


def consumed_at(saved: SavedState, part: int, draws: int) -> int:
    """Returns how many samples a run had trained after so many positions of a part."""
    parts = saved.state.parts
    whole = sum(one.dp * one.draws for one in parts[:part] if one.trained)
    return whole + (parts[part].dp * draws if parts[part].trained else 0)


def folder_of(path: Path) -> str:
    """Returns how to call a state: its checkpoint's folder, or the file."""
    return str(path.parent) if path.name == "lazyshard.json" else str(path)
