"""What `lazyshard audit` shows, as lines of text and as values of JSON. Steps are numbered as trainers do, from 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lazyshard.cli.trace_view import ranges_text
from lazyshard.cli.wording import count
from lazyshard.inspection.auditing import Audit, AuditedState, consumed_at
from lazyshard.inspection.auditing_counts import EpochAudit, Ranges
from lazyshard.inspection.tracing_states import folder_of


def audit_lines(found: Audit, where: str) -> Iterator[str]:
    """Yields the report."""
    facts = found.facts
    deleted = f", those below {facts.retired:,} deleted" if facts.retired else ""
    ended = "ended" if facts.ended else "not ended"
    yield f"{where}: {count(facts.chunks, 'chunk')}{deleted}, {count(facts.samples, 'sample')}, {ended}"
    width = max(len(folder_of(one.saved.file)) for one in found.states)
    for one in found.states:
        steps = _steps(one)
        within = "" if steps is None else f" in {count(steps, 'step')}"
        trained = count(one.saved.state.consumed, "sample")
        yield f"  {folder_of(one.saved.file):{width}}  {_word(one):13}  {trained}{within}"
    for one in found.states:
        yield from _branch_lines(one)
    for epoch in found.epochs:
        yield _epoch_line(epoch, facts.ended, _fewer_than_step(found, epoch))
    for note in found.notes:
        yield f"note: {note.where}: {note.what}"
    for finding in found.findings:
        yield f"not in order: {finding.where}: {finding.what}"
    yield _verdict(found)


def audit_values(found: Audit, where: str) -> dict[str, Any]:
    """Returns the report as JSON values."""
    facts = found.facts
    return {
        "stream": where,
        "ok": found.ok,
        "proven": found.proven,
        "consistent": found.consistent,
        "stream_id": facts.stream_id,
        "samples_per_chunk": facts.samples_per_chunk,
        "chunks": facts.chunks,
        "samples": facts.samples,
        "ended": facts.ended,
        "retired": facts.retired,
        "audited": str(found.head.file),
        "consumed": found.head.state.consumed,
        "steps": found.tracing.steps.trained if found.tracing.steps.unknown is None else None,
        "states": [_state_values(one) for one in found.states],
        "epochs": [_epoch_values(one, _fewer_than_step(found, one)) for one in found.epochs],
        "findings": [finding._asdict() for finding in found.findings],
        "notes": [note._asdict() for note in found.notes],
    }


def _fewer_than_step(found: Audit, epoch: EpochAudit) -> int | None:
    return found.fewer_than_step if epoch is found.epochs[-1] else None


def _word(one: AuditedState) -> str:
    return {"head": "audited"}.get(one.related.relation, one.related.relation)


def _steps(one: AuditedState) -> int | None:
    if one.tracing is None or one.tracing.steps.unknown is not None:
        return None
    return one.tracing.steps.trained


def _branch_lines(one: AuditedState) -> Iterator[str]:
    branch, fork = one.branch, one.related.fork
    if branch is None or fork is None:
        return
    name, at = folder_of(one.saved.file), consumed_at(one.saved, *fork)
    yield (
        f"{name} left the course after {count(at, 'sample')}: it trained {branch.trained:,} more, which are not in the "
        f"audited model"
    )
    for epoch, again in branch.again.items():
        yield (
            f"  {again.samples:,} of them were trained again on the course in epoch {epoch}: "
            f"{ranges_text(again.ranges)}"
        )


def _epoch_line(one: EpochAudit, ended: bool, step: int | None) -> str:
    parts = [f"{one.trained:,} trained"]
    for ranges, word in (
        (one.to_come, "to come"),
        (one.left_over, "left over"),
        (one.skipped, "skipped on purpose"),
        (one.twice, "TRAINED TWICE"),
        (one.again, "TRAINED AND COMING AGAIN"),
        (one.missing, "PASSED OVER"),
    ):
        if ranges.samples:
            told = ranges_text(ranges.ranges) if word != "to come" else ""
            if word == "to come" and step is not None:
                told = f"fewer than the {step:,} of a step: left over too, if training stops here"
            parts.append(f"{ranges.samples:,} {word}" + (f" ({told})" if told else ""))
    far = "" if ended else " published so far"
    return f"epoch {one.epoch}: {count(one.samples, 'sample')}{far}: {', '.join(parts)}"


def _verdict(found: Audit) -> str:
    if not found.counted:
        return "NOT proven: see what is trained twice or passed over"
    if not found.consistent:
        return (
            "NOT proven: the counts hold only for what the states say, and these contradict their steps, their samples "
            "or the stream, see above"
        )
    text = "proven: no sample was trained twice, and none was passed over"
    if not found.proven:
        why = (
            "the state does not say what a step takes"
            if found.tracing.steps.unknown is not None
            else "the checkpoint does not say after how many steps of the run it was saved"
        )
        text = (
            f"consistent, if `consumed` was counted right: by the states no sample was trained twice, and none was "
            f"passed over; {why}, so their count cannot be checked"
        )
    return text if found.ok else f"{text}; but {count(len(found.findings), 'thing')} not in order, see above"


def _state_values(one: AuditedState) -> dict[str, Any]:
    fork, branch = one.related.fork, one.branch
    left = one.related.relation == "abandoned" and fork is not None
    return {
        "file": str(one.saved.file),
        "relation": _word(one),
        "cursor": None if one.saved.cursor is None else one.saved.cursor.consumer,
        "consumed": one.saved.state.consumed,
        "steps": _steps(one),
        "left_after": consumed_at(one.saved, *fork) if left and fork is not None else None,
        "trained_beyond": None if branch is None else branch.trained,
        "trained_again": None
        if branch is None
        else {str(epoch): _ranges_values(again) for epoch, again in branch.again.items()},
    }


def _epoch_values(one: EpochAudit, step: int | None) -> dict[str, Any]:
    values: dict[str, Any] = {"epoch": one.epoch, "proven": one.proven, "samples": one.samples, "trained": one.trained}
    for name in ("to_come", "left_over", "skipped", "twice", "again", "missing"):
        values[name] = _ranges_values(getattr(one, name))
    return values | {"fewer_than_step": step}


def _ranges_values(found: Ranges) -> dict[str, Any]:
    return {"samples": found.samples, "ranges": [list(one) for one in found.ranges]}
