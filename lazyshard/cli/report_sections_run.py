"""The parts of a report's page that tell of the run: rates, waits, bad rows, disk and damage, as pictures, tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lazyshard.cli.inspect_view import moment
from lazyshard.cli.output import count, duration, size
from lazyshard.cli.report_drawing import Bar, band, bars
from lazyshard.cli.report_drawing_time import Line, lanes, lines
from lazyshard.cli.report_findings import problems_of
from lazyshard.cli.report_sections import figure, legend, pictures, table
from lazyshard.cli.report_svg import escape, short
from lazyshard.inspection.disk_use import sampled_chunks
from lazyshard.inspection.report_course import At, rates
from lazyshard.inspection.report_facts import ReportFacts
from lazyshard.inspection.report_refusals import Refusals

__all__ = ["damage_part", "disk_part", "rates_part", "refusals_part", "waits_part"]

_STRETCHES: Final = 60
_POINTS: Final = 400
_SHOWN: Final = 10
_CONSUMERS: Final = ("b", "c", "d")
"""Classes of the consumers' lines; more than three consumers share the last."""

_LANES: Final = (
    ("a", "publishing"),
    ("soft", "nothing published since"),
    ("bad", "standing still, or waiting"),
    ("c", "checkpoint"),
    ("b", "checkpoint at which all was used up"),
)
"""What the classes of the stretches of time mean."""

_STATES: Final = {
    "deleted": ("empty", "deleted"),
    "done": ("soft", "done with by every consumer"),
    "taken": ("c", "read, not in a checkpoint of all"),
    "reading": ("b", "being read"),
    "ready": ("a", "to be read"),
    "awaited": ("bad", "awaited"),
}


def damage_part(facts: ReportFacts) -> str:
    """Returns what is wrong, a line each."""
    lines = problems_of(facts)
    if facts.chunks.unread:
        lines.append(f"{count(facts.chunks.unread, 'chunk')} could not be looked at: {facts.chunks.reason}")
    more = len(lines) - _SHOWN
    shown = [*lines[:_SHOWN], *([f"and {more:,} more"] if more > 0 else [])]
    return f"""<ul class="plain">{"".join(f"<li>{escape(line)}</li>" for line in shown)}</ul>"""


def rates_part(facts: ReportFacts) -> str:
    """Returns what was published and trained by when, and how fast."""
    if not facts.rows:
        return ""
    named = sorted(facts.trained.items())
    trained = [
        Line(_thinned(points), _CONSUMERS[min(index, len(_CONSUMERS) - 1)], dots=True)
        for index, (_, points) in enumerate(named)
        if points
    ]
    names = [
        ("a", "published"),
        *((one.kind, f"trained by {name}") for one, (name, _) in zip(trained, named, strict=True)),
    ]
    figures = [
        figure(
            "Rows",
            lines([Line(_thinned(facts.rows), dots=len(facts.rows) < 4), *trained], "rows by time"),
            legend(names),
        )
    ]
    for title, course, number in (
        ("Rows published per second", facts.rows, None),
        ("Bytes published per second", facts.sizes, _bytes),
    ):
        if steps := _stairs(course):
            picture = lines([Line(steps)], f"{title} by time", *([number] if number else []))
            figures.append(figure(title, picture))
    note = (
        "Times are UTC: those of the seals, by the producer's clock, and of cursors and checkpoints, by the trainer's."
    )
    if not any(len(points) > 1 for _, points in named):
        note += " Of training a cursor tells one moment only: name the run's folder with --checkpoints for more."
    notes = [note, *facts.no_checkpoints[:_SHOWN]]
    return pictures(figures) + "".join(f'<p class="faint">{escape(one)}</p>' for one in notes)


def _bytes(number: float) -> str:
    return f"{short(number)}B"


def _thinned(course: Sequence[At]) -> list[At]:
    """Returns evenly spaced ones of many points: more than a picture is wide are not seen."""
    return [course[index] for index in sampled_chunks(0, len(course), _POINTS)]


def _stairs(course: Sequence[At]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    before = course[0].time if course else 0.0
    for one in rates(course, _STRETCHES):
        found += [(before, one.amount), (one.time, one.amount)]
        before = one.time
    return found


def waits_part(facts: ReportFacts) -> str:
    """Returns when publishing stood still, and who waits, over time."""
    survey = facts.outlook.survey
    now = survey.looked_at
    rows: list[tuple[str, list[tuple[float, float, str, str]]]] = []
    if len(facts.rows) > 1:
        found = [(facts.rows[0].time, facts.rows[-1].time, "a", "published")]
        found += [
            (one.start, one.stop, "bad", f"nothing for {duration(one.seconds)} before chunk {one.chunk:,}")
            for one in facts.pauses
        ]
        if not survey.census.ended and facts.outlook.state != "running" and now > facts.rows[-1].time:
            found.append((facts.rows[-1].time, now, "soft", "nothing since the newest chunk"))
        rows.append(("producer: publishing", found))
    for name, points in sorted(facts.trained.items()):
        dry = {one.at for one in facts.dry if one.consumer == name}
        found = [
            (at, at, "b" if at in dry else "c", f"{moment(at)}: {amount:,.0f} samples trained") for at, amount in points
        ]
        rows.append((f"{name}: checkpoints", found))
    for one in facts.outlook.consumers:
        reading = one.consumer.reading
        if one.supply == "dry" and reading is not None and reading.updated_at < now:
            told = f"waits for {count(-(one.ahead_chunks or 0), 'chunk')} since {moment(reading.updated_at)}"
            rows.append((f"{one.consumer.name}: {told}", [(reading.updated_at, now, "bad", told)]))
    if not rows:
        return ""
    used = {kind for _, stretches in rows for _, _, kind, _ in stretches}
    names = [(kind, name) for kind, name in _LANES if kind in used]
    text = _waiting(facts)
    shown = [[moment(one.start), duration(one.seconds), f"before chunk {one.chunk:,}"] for one in facts.pauses[:_SHOWN]]
    return (
        pictures([figure("Over time", lanes(rows, "who waited when"), legend(names))])
        + (table(("from", "for", "publishing stood still"), shown) if shown else "")
        + "".join(f'<p class="faint">{escape(line)}</p>' for line in text)
    )


def _waiting(facts: ReportFacts) -> list[str]:
    found = []
    head = facts.outlook.survey.census.head
    if facts.outlook.state == "waiting" and head is not None:
        found.append(f"The producer waits, as it says: {head.note or 'for what, it does not say'}.")
    for one in facts.outlook.consumers:
        if one.ahead_chunks is not None and one.ahead_chunks >= 0 and not facts.outlook.survey.census.ended:
            found.append(f"{one.consumer.name!r} has {count(one.ahead_chunks, 'chunk')} before it.")
    if facts.chunks.looked_at < facts.chunks.there:
        found.append("Shorter pauses between chunks that were not looked at do not show; --chunks looks at more.")
    return found


def refusals_part(found: Refusals | None) -> str:
    """Returns how many rows were refused for which reason, with an example of each."""
    if found is None or not found.reasons:
        return ""
    shown = found.reasons[:_SHOWN]
    drawn = [Bar(one.reason, one.rows, f"{one.rows:,}", "b") for one in shown]
    rows = [
        [f"{one.rows:,}", one.reason, f"{one.first.source}:{one.first.line}", one.first.row or "not text"]
        for one in shown
    ]
    note = []
    if len(found.reasons) > len(shown):
        note.append(f"{len(found.reasons) - len(shown):,} more reasons are left out.")
    if found.unreadable:
        note.append(f"{count(found.unreadable, 'line')} of quarantine.jsonl could not be read.")
    return (
        pictures([figure("Refused rows by reason", bars(drawn, "refused rows by reason"))])
        + table(("rows", "reason", "first of them", "how it begins"), rows, (0,))
        + "".join(f'<p class="faint">{escape(line)}</p>' for line in note)
    )


def disk_part(facts: ReportFacts) -> str:
    """Returns the stream as a band of chunks, by what has become of them, and its bytes."""
    survey = facts.outlook.survey
    counts: dict[str, int] = {}
    for stretch in facts.outlook.band.stretches:
        counts[stretch.state] = counts.get(stretch.state, 0) + stretch.stop - stretch.first
    if not counts:
        return ""
    each = survey.disk.chunk_size or 0.0
    names, parts = [], []
    for stretch in facts.outlook.band.stretches:
        number = stretch.stop - stretch.first
        kind, name = _STATES[stretch.state]
        parts.append((float(number), kind, f"chunks {stretch.first:,} to {stretch.stop - 1:,}: {name}"))
    for state, number in counts.items():
        kind, name = _STATES[state]
        there = f", {size(number * each)}" if state not in ("deleted", "awaited") else ""
        names.append((kind, f"{name}: {count(number, 'chunk')}{there}"))
    return pictures([figure("Chunks", band(parts, "what has become of the chunks"), legend(names))])
