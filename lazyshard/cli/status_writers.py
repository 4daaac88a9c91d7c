"""What `lazyshard status` and `lazyshard watch` show of the writers of a stream that several write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from lazyshard.cli.output import count, duration, per_second
from lazyshard.inspection.outlook import Outlook
from lazyshard.inspection.survey import WriterOutlook, WriterState

_SHOWN: Final = 8  # writers in the text of `status`
_LISTED: Final = 3  # names in a sentence
_VERBS: Final = {"failed": "failed", "dead": "did not respond: restart", "unknown": "did not begin, or cannot be read"}


def writers_values(outlook: Outlook) -> dict[str, Any]:
    """Returns the values of --json about writers; unknown ones are None."""
    sequencer = outlook.survey.sequencer
    told = sequencer and {
        "host": sequencer.host,
        "pid": sequencer.pid,
        "process_is_gone": outlook.survey.sequencer_gone,
        "stopped": sequencer.stopped or outlook.survey.census.ended,
        "sign_age_s": max(0.0, outlook.survey.looked_at - sequencer.updated_at),
    }
    return {"sequencer": told, "writers": [one._asdict() for one in outlook.survey.writers]}


def by_urgency(outlook: Outlook) -> list[WriterOutlook]:
    """Returns the writers: those in trouble, then those that publish, from the slowest on, then the others."""

    def urgency(one: WriterOutlook) -> tuple[int, float, str]:
        active = one.state in ("running", "waiting")
        return 0 if one.in_trouble else 1 if active else 2, one.samples_per_s or 0.0, one.name

    return sorted(outlook.survey.writers, key=urgency)


def writers_facts(outlook: Outlook) -> Iterator[tuple[str, str]]:
    """Yields labels and texts: how many writers there are in each state, and some of them."""
    manifest = outlook.survey.census.manifest
    if manifest is None or manifest.writers is None:
        return
    declared = manifest.writers if isinstance(manifest.writers, int) else len(manifest.writers)
    ordered, label = by_urgency(outlook), "  writer"
    states = Counter(one.state for one in ordered)
    known = ": " * bool(states) + ", ".join(f"{number:,} {state}" for state, number in states.items())
    yield "writers", f"{len(outlook.survey.writers):,}{f' of {declared:,}' if declared else ''}{known}"
    for one in ordered[:_SHOWN]:
        yield label, f"{one.name}: {writer_words(one)}"
        label = " "
    if (more := len(ordered) - _SHOWN) > 0:
        yield label, f"and {more:,} more, which --json lists"


def producer_label(outlook: Outlook) -> str:
    """Returns what the producer of the stream is called: if there are several writers, it is their sequencer."""
    manifest = outlook.survey.census.manifest
    return "producer" if manifest is None or manifest.writers is None else "sequencer"


def writer_words(one: WriterOutlook) -> str:
    """Returns the facts of a writer."""
    if one.published_samples is None:
        return f"{one.state}: {one.reason or 'it has not begun, or its head.json cannot be read'}"
    waiting = f", {count(one.waiting_pieces, 'piece')} waiting" if one.waiting_pieces else ""
    waiting += f", {count(one.left_out_samples, 'row')} not part of the stream" if one.left_out_samples else ""
    rate = f", {per_second(one.samples_per_s or 0.0, 'rows')}" if one.state in ("running", "waiting") else ""
    sign = f"{one.pid} on {one.host}, last sign {duration(one.heartbeat_age_s or 0.0)} old"
    why = f"; {one.reason}" if one.reason else ""
    return f"{one.state}, {count(one.published_samples, 'row')}{rate}{waiting}; {sign}{why}"


def writers_summary(outlook: Outlook) -> str:
    """Returns which writers are in trouble, as a part of a sentence; or nothing."""
    found: dict[WriterState, list[str]] = {}
    for one in outlook.survey.writers if not outlook.survey.census.ended else ():
        if one.in_trouble:
            found.setdefault(one.state, []).append(repr(one.name))
    parts = []
    for state, names in found.items():
        more = f" and {len(names) - _LISTED:,} more" if len(names) > _LISTED else ""
        verb = f"{'is' if len(names) == 1 else 'are'} {state}" if state not in _VERBS else _VERBS[state]
        parts.append(f"{'writer' if len(names) == 1 else 'writers'} {', '.join(names[:_LISTED])}{more} {verb}")
    return "; ".join(parts)
