"""What `lazyshard report --json` prints: the facts and sentences of the page. docs/report.md describes its fields."""

from __future__ import annotations

from typing import Any

from lazyshard.cli.inspect_balance_view import balance_values
from lazyshard.cli.inspect_json import distribution_values, token_values
from lazyshard.cli.inspect_shuffle_view import shuffle_values
from lazyshard.cli.report_advice import Change, in_order
from lazyshard.cli.report_findings import findings_of, problems_of
from lazyshard.cli.status import status_values
from lazyshard.inspection.report_facts import ReportFacts

__all__ = ["report_values"]


def report_values(facts: ReportFacts) -> dict[str, Any]:
    """Returns it."""
    directory, chunks, training = facts.outlook.survey.directory, facts.chunks, facts.training
    findings = findings_of(facts)
    return {
        "schema": 1,
        "stream": str(directory),
        "looked_at_s": facts.outlook.survey.looked_at,
        "changes": [_change(change) for change in in_order(list(findings.values()))],
        "findings": {
            name: {"text": one.text, "known": one.known, "changes": [_change(change) for change in one.changes]}
            for name, one in findings.items()
        },
        "problems": problems_of(facts),
        "checkpoint_problems": facts.no_checkpoints,
        "chunks": {"there": chunks.there, "looked_at": chunks.looked_at, "unread": chunks.unread},
        "row_bytes": distribution_values(chunks.lengths),
        "row_tokens": token_values(chunks.tokens),
        "packing": _packing(facts),
        "training": {
            "ranks": training.ranks,
            "told_by": training.told_by,
            "micro_batch_size": training.micro_batch_size,
            "rank_step_samples": training.rank_step_samples,
            "window_chunks": training.window,
        },
        "balance": None if facts.balance is None else balance_values(directory, facts.balance),
        "balance_of_global_batches": None
        if facts.balance_of_steps is None
        else balance_values(directory, facts.balance_of_steps),
        "shuffle": None if facts.shuffle is None else shuffle_values(directory, facts.shuffle),
        "published_rows": [list(one) for one in facts.rows],
        "published_bytes": [list(one) for one in facts.sizes],
        "trained_samples": {name: [list(one) for one in points] for name, points in facts.trained.items()},
        "pauses": [{"from_s": one.start, "to_s": one.stop, "before_chunk": one.chunk} for one in facts.pauses],
        "dry_checkpoints": [{"consumer": one.consumer, "at_s": one.at, "left_samples": one.left} for one in facts.dry],
        "refused": _refused(facts),
        "status": status_values(facts.outlook),
    }


def _change(change: Change) -> dict[str, Any]:
    return {"weight": round(change.weight, 4), "text": change.text, "command": change.command or None}


def _packing(facts: ReportFacts) -> dict[str, Any] | None:
    packing = facts.packing
    if packing is None:
        return None
    return {
        "form": packing.form,
        "tokens": packing.size,
        "looked_at": packing.rows,
        "filled": round(packing.filled, 6),
        "packs": packing.packs if packing.form is None else None,
        "too_long": packing.too_long if packing.form is None else None,
        "padding": [{"rows": rows, "share": round(share, 6)} for rows, share in packing.padding],
    }


def _refused(facts: ReportFacts) -> dict[str, Any] | None:
    found = facts.refusals
    if found is None:
        return None
    return {
        "rows": found.rows,
        "complete": found.complete,
        "unreadable_lines": found.unreadable,
        "reasons": [
            {
                "reason": one.reason,
                "rows": one.rows,
                "sources": one.sources,
                "source": one.first.source,
                "line": one.first.line,
            }
            for one in found.reasons
        ],
    }
