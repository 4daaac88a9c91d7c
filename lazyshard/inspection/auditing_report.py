"""The report of an audit: states of a run put in relation to the newest, what was counted, and what is not in order.

What can be looked at is not taken from the states: the stream's identity, how much is published, how many rows the last
chunk has, which chunks are deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from lazyshard.errors import StateMismatch
from lazyshard.format import Cursor
from lazyshard.inspection.auditing import Branch, BranchAudit, EpochAudit, count_epochs
from lazyshard.inspection.auditing_findings import (
    CONTRADICTIONS,
    Finding,
    Note,
    of_chunks,
    of_epochs,
    of_steps,
    of_stream,
    told_steps,
)
from lazyshard.inspection.auditing_lineage import Related, relate
from lazyshard.inspection.tracing import Tracing
from lazyshard.inspection.tracing_facts import Facts
from lazyshard.inspection.tracing_states import SavedState
from lazyshard.stream.stream import Stream

_SAME_TIME_SECONDS: Final = 2.0


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
        notes: what is in order, and good to know.
    """

    facts: Facts
    head: SavedState
    tracing: Tracing
    states: tuple[AuditedState, ...]
    epochs: tuple[EpochAudit, ...]
    findings: tuple[Finding, ...]
    notes: tuple[Note, ...] = ()

    @property
    def counted(self) -> bool:
        """Whether each sample was trained once, or is known not to be, by what the audited state says."""
        return all(one.proven for one in self.epochs)

    @property
    def consistent(self) -> bool:
        """Whether that is so, and nothing contradicts what the states say."""
        return self.counted and not any(finding.kind in CONTRADICTIONS for finding in self.findings)

    @property
    def proven(self) -> bool:
        """Whether that is so, and the checkpoint's number of steps bears the state's count of samples out."""
        return self.consistent and self.tracing.steps.unknown is None and told_steps(self.head) is not None

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
        if self.tracing.total is None or self.head.member is not None or not part.trained:
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
        files = [saved for saved in files if last - saved.saved_at <= _SAME_TIME_SECONDS]
    steps = [saved.step if saved.step is not None else saved.folder_step for saved in files]
    known = None not in steps

    def trained(at: int) -> tuple[int, int, int, float, str]:
        saved, step = files[at], steps[at]
        # A run that begins its epochs by itself counts the samples of each anew.
        epoch = saved.state.parts[0].epoch or 0
        return step if known and step is not None else 0, epoch, saved.state.consumed, saved.saved_at, str(saved.file)

    chosen = files[max(range(len(files)), key=trained)]
    if dated or len(files) == 1:
        return chosen, None
    return chosen, (
        f"audited as the one that has trained the most {'steps' if known else 'samples'}: not every state says when it "
        f"was saved, and the times of files tell nothing where they were copied; name another one by --state"
    )


def audit(
    stream: Stream,
    facts: Facts,
    states: Sequence[SavedState],
    head: SavedState,
    *,
    cursors: Sequence[Cursor] = (),
    unusable: Sequence[Finding] = (),
    notes: Sequence[Note] = (),
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
        notes: what is to be told besides.
        report: is told a phase, how many chunks of it are done, and how many there are.

    Raises:
        StateMismatch: the audited state is of another stream, or ahead of what is published.
    """
    where = str(stream.directory)
    tracing = Tracing(head, facts, where)
    findings = [*unusable, *of_stream(stream, facts)]
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
    told_of_chunks = list(of_chunks(kept, (head, newest(states)[0]), facts, cursors, where))
    findings += [one for one in told_of_chunks if isinstance(one, Finding)]
    said = (*notes, *(one for one in told_of_chunks if isinstance(one, Note)))
    order = sorted(found, key=lambda one: (one.saved.state.consumed, one.saved.saved_at, str(one.saved.file)))
    return Audit(facts, head, tracing, tuple(order), tuple(epochs), tuple(findings), said)


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
