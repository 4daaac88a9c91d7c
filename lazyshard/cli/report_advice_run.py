"""What a report says of how a stream is produced, read and kept: what was found, and what to change. Decisions only.

Sentences and weights are as in `lazyshard.cli.report_advice`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Final

from lazyshard.cli.output import count, duration, per_second, size
from lazyshard.cli.report_advice import LITTLE, Change, Finding, percent
from lazyshard.cli.status_view import room_first, summary
from lazyshard.inspection.outlook import Outlook
from lazyshard.inspection.report_chunks import Made
from lazyshard.inspection.report_course import At, Dry, Pause, mean_rate, rates
from lazyshard.inspection.report_refusals import Refusals

__all__ = [
    "damage_finding",
    "disk_finding",
    "rates_finding",
    "refusals_finding",
    "waits_finding",
]

_DAY_S: Final = 86400.0

_SLOWED: Final = 0.5
"""Publishing has slowed where the last quarter of the time brought less than this of the mean."""

_PAUSED: Final = 0.05
"""Pauses of this share of the time are worth a look."""

_DONE: Final = 0.25
"""So much of what is there must be done with before deleting it is proposed."""


def damage_finding(stream: str, problems: Sequence[str], unread: int) -> Finding | None:
    """Says what could not be read; None where nothing.

    Args:
        stream: its directory or URL.
        problems: what is wrong with its files, a sentence each.
        unread: chunks that could not be looked at.
    """
    if not problems and not unread:
        return None
    parts = [count(unread, "chunk")] if unread else []
    parts += [count(len(problems), "problem") + " with other files"] if problems else []
    text = f"Not all could be read: {' and '.join(parts)}. What follows is told of the rest."
    change = "Look for damage, and restore what it names"
    return Finding(text, (Change(2.0, change, f"lazyshard verify {shlex.quote(stream)}"),))


def rates_finding(
    rows: Sequence[At], sizes: Sequence[At], trained: Mapping[str, Sequence[At]], *, ended: bool
) -> Finding:
    """Says how fast rows were published and trained.

    Args:
        rows: how many were published when.
        sizes: how many bytes.
        trained: samples of each consumer in its checkpoints.
        ended: whether nothing follows.
    """
    if not rows:
        return Finding("Nothing is published yet.", known=False)
    rate, byte_rate = mean_rate(rows), mean_rate(sizes)
    if rate is None or byte_rate is None:
        return Finding("All that was looked at was published at one moment, so there is no rate.", known=False)
    span = rows[-1].time - rows[0].time
    text = f"{per_second(rate, 'rows')} ({size(byte_rate)}/s) were published in the mean, over {_span(span)}."
    for name, points in sorted(trained.items()):
        speed = mean_rate(points)
        if speed is not None and speed > 0:
            text += f" {name} trained {per_second(speed, 'rows')}."
    if ended or len(rows) < 8:
        return Finding(text)
    late = rates(rows, 4)[-1].amount
    if late >= _SLOWED * rate:
        return Finding(text)
    text += f" In the last quarter of that time it was {per_second(late, 'rows')}."
    change = f"Find out what has slowed the producer to {percent(late / rate)} of its mean: see its log and its sources"
    return Finding(text, (Change(0.1, change),))


def waits_finding(
    outlook: Outlook, pauses: Sequence[Pause], span: float, dry: Sequence[Dry], checkpoints: int
) -> Finding:
    """Says who waits now, and who has waited.

    Args:
        outlook: how the stream is.
        pauses: where publishing stood still, the longest first.
        span: seconds from the first chunk that was looked at to the last one.
        dry: checkpoints at which training had used up what was published.
        checkpoints: how many there are.
    """
    said = summary(outlook)
    text = f"{said[:1].upper()}{said[1:]}."
    changes = []
    running = not outlook.survey.census.ended
    if running and outlook.state in ("dead", "idle", "failed"):
        first = "mend what it has failed at, and " if outlook.state == "failed" else room_first(outlook)
        change = f"{first}start the producer again with the same command: it goes on where it was"
        changes.append(Change(1.5, f"{change[0].upper()}{change[1:]}"))
    waiting = [one.consumer.name for one in outlook.consumers if one.supply == "dry"]
    if waiting and outlook.state in ("running", "waiting"):
        who = ", ".join(map(repr, waiting))
        verb = "waits" if len(waiting) == 1 else "wait"
        changes.append(_faster(outlook, f"{who} {verb} for data", 0.9))
    if dry:
        share = len(dry) / max(checkpoints, len(dry))
        text += f" At {len(dry):,} of {count(checkpoints, 'checkpoint')} training had used up all that was published."
        if not waiting:
            changes.append(_faster(outlook, "training came up with it", 0.5 * share))
    lost = sum(pause.seconds for pause in pauses)
    if pauses:
        longest = pauses[0]
        if len(pauses) == 1:
            text += f" Publishing stood still once, for {duration(lost)}, before chunk {longest.chunk:,}."
        else:
            text += (
                f" Publishing stood still {len(pauses):,} times, for {duration(lost)} in all, the longest before chunk "
                f"{longest.chunk:,} for {duration(longest.seconds)}."
            )
        if span > 0 and lost / span >= _PAUSED:
            change = (
                f"See in the producer's log what it waited for before chunk {longest.chunk:,}, or whether it was not "
                f"running then"
            )
            changes.append(Change(min(0.5, lost / span) if dry else LITTLE, change))
    return Finding(text, tuple(changes))


def refusals_finding(stream: str, found: Refusals | None, made: Made) -> Finding:
    """Says which rows were refused."""
    told = made.source_rows.refused if made.source_rows is not None else 0
    if found is None or not found.rows:
        if not told:
            return Finding("No row was refused.")
        rows = f"{count(told, 'row')} {'was' if told == 1 else 'were'}"
        text = f"{rows} refused, and none of them was kept for a look."
        change = "Keep the rows that are refused, to see what is wrong with them"
        return Finding(text, (Change(2 * LITTLE, change, "lazyshard-producer run … --on-bad-row quarantine"),))
    read = made.source_rows.read if made.source_rows is not None else 0
    share = found.rows / read if read >= found.rows else 0.0
    of = f", {percent(share)} of those read" if share else ""
    about = "" if found.complete else "At least "
    top = found.reasons[0]
    why = (
        f"most of them, {top.rows:,}," if len(found.reasons) > 1 else "all of them" if found.rows > 1 else "the reason:"
    )
    were = "was" if found.rows == 1 else "were"
    text = (
        f"{about}{count(found.rows, 'row')} {were} refused{of}; {why}{' for' if found.rows > 1 else ''} “{top.reason}”."
    )
    change = "Look at the refused rows, mend them, and give them to the producer as another source"
    command = f"lazyshard-producer quarantine {shlex.quote(stream)}"
    return Finding(text, (Change(max(share, 2 * LITTLE), change, command),))


def disk_finding(stream: str, outlook: Outlook) -> Finding:
    """Says what a stream takes, and what could be deleted."""
    survey = outlook.survey
    disk, about = survey.disk, "" if survey.disk.exact else "about "
    text = f"The stream takes {about}{size(disk.size)}"
    text += f", and {size(survey.free)} are free." if survey.free is not None else "."
    changes = []
    if outlook.full_in_s is not None:
        text += f" At the rate of now the disk is full in {duration(outlook.full_in_s)}."
        if outlook.full_in_s < _DAY_S:
            change = f"Make room, or have the producer hold back: the disk is full in {duration(outlook.full_in_s)}"
            changes.append(Change(1.2, change, "lazyshard-producer run … --min-free-disk SIZE"))
    done = sum(one.stop - one.first for one in outlook.band.stretches if one.state == "done")
    there = survey.census.chunks - survey.census.retired
    if done and disk.chunk_size is not None and not survey.census.ended:
        text += f" Every consumer is done with {count(done, 'chunk')} that are there."
        if done >= _DONE * there:
            names = shlex.quote(",".join(one.name for one in survey.consumers))
            change = f"Have the chunks deleted that every consumer is done with: {size(done * disk.chunk_size)}"
            changes.append(
                Change(2 * LITTLE, change, f"lazyshard-producer run … --retain consumed --consumers {names}")
            )
    if not survey.census.ended and outlook.state in ("running", "waiting"):
        for one in outlook.consumers:
            ages = [age for age in (one.checkpoint_age_s, one.reading_age_s) if age is not None]
            if ages and min(ages) > _DAY_S and one.lag_chunks:
                name = one.consumer.name
                change = f"Forget {name!r}, unless it will come back: it has given no sign for {duration(min(ages))}"
                command = f"lazyshard forget {shlex.quote(stream)} {shlex.quote(name)}"
                changes.append(Change(5 * LITTLE, change, command))
    return Finding(text, tuple(changes))


def _span(seconds: float) -> str:
    return duration(seconds) if seconds >= 1 else "less than a second"


def _faster(outlook: Outlook, why: str, gain: float) -> Change:
    """Returns that the producer is to be faster; how, only where its rows are known to be made in worker processes."""
    change = f"Make the producer faster, or start training later: {why}"
    manifest = outlook.survey.census.manifest
    if manifest is not None and manifest.encoding is not None:
        return Change(gain, change, "lazyshard-producer run … --workers N")
    return Change(
        gain, f"{change}. With --transform, --workers N makes rows side by side; else its source sets the pace"
    )
