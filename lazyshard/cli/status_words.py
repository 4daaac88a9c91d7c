"""What a look at a stream says in sentences: what is going on, and what is wrong. Text only."""

from __future__ import annotations

import shlex
from typing import Final

from lazyshard.cli.units import duration
from lazyshard.cli.wording import chunk_range, count
from lazyshard.inspection.outlook import ConsumerOutlook, Outlook
from lazyshard.stream.pacing import failure_words

_CLOCK_AHEAD_S: Final = 5.0
"""Less is no matter: ages are told in seconds."""

_ROOM: Final = ("--max-disk ", "--min-free-disk ")
"""How the notes of a producer begin that waits for room: with the option that holds it."""


def summary(outlook: Outlook) -> str:
    """Returns in a sentence what is going on."""
    parts = (_of_producer(outlook), _of_readers(outlook))
    return "; ".join(part for part in parts if part)


def problems(outlook: Outlook) -> list[str]:
    """Returns what is wrong, a sentence each."""
    survey = outlook.survey
    found = list(survey.problems)
    for one in survey.consumers:
        if one.problem is not None:
            forget = f"lazyshard forget {shlex.quote(str(survey.directory))} {shlex.quote(one.name)}"
            found.append(
                f"consumer {one.name!r}: {one.problem}; it counts as done with nothing, so no chunk is deleted: mend "
                f"that, or, if it will not come back, run `{forget}`"
            )
        elif one.cursor is not None and one.chunks_before < survey.census.retired:
            found.append(
                f"consumer {one.name!r}: is done with {count(one.chunks_before, 'chunk')} only, but "
                f"{survey.census.retired:,} {'is' if survey.census.retired == 1 else 'are'} deleted, so it cannot go on"
            )
    if outlook.clock_ahead_s > _CLOCK_AHEAD_S:
        found.append(
            f"the producer's clock is {duration(outlook.clock_ahead_s)} ahead of this machine's, so the ages are wrong"
        )
    return found


def _of_producer(outlook: Outlook) -> str:
    head = outlook.survey.census.head
    if outlook.survey.census.ended:
        return "the stream has ended"
    if head is None:
        return "nothing is known of the producer"
    age = duration(outlook.heartbeat_age_s or 0.0)
    room = room_first(outlook)
    if outlook.state == "dead" and outlook.survey.ended:
        return f"the producer is dead, its process has ended: {room}start it again, it goes on where it was"
    if outlook.state == "dead":
        gone = " and its process is gone" if outlook.survey.gone else ""
        return f"the producer is dead, no sign of it for {age}{gone}: {room}start it again, it goes on where it was"
    if outlook.state == "failed":
        what = failure_words(head.note) if head.note else "look at its log, start it again"
        return f"the producer has failed {age} ago: {what}"
    if outlook.state == "idle":
        return f"the producer was stopped {age} ago: {room}start it again to go on"
    if outlook.state == "waiting":
        return f"the producer waits: {head.note}" if head.note else "the producer waits"
    # Otherwise how far it is ahead says so.
    dry = any(one.supply == "dry" for one in outlook.consumers)
    return "the producer is running" if dry or outlook.slowest is None else ""


def room_first(outlook: Outlook) -> str:
    """Returns that room is needed before a producer that has stopped is started again, to stand before that advice.

    The disk is full where another chunk like those that are there has no room; a limit of its own is what the producer
    waited for when it was last heard of. Nothing where neither is known.
    """
    survey, head = outlook.survey, outlook.survey.census.head
    if survey.free is not None and survey.free < (survey.disk.chunk_size or 1.0):
        return "make room, the disk is full, and "
    if head is not None and head.state == "waiting" and head.note.removeprefix("deadlock: ").startswith(_ROOM):
        return f"make room, for which it waited ({head.note}), and "
    return ""


def _of_readers(outlook: Outlook) -> str:
    head = outlook.survey.census.head
    # What a producer waits for says how far ahead of whom it is.
    told = outlook.state == "waiting" and head is not None and head.note
    if not outlook.consumers:
        return "" if told else "no consumer has registered"
    if outlook.survey.census.ended:
        return _of_ended(outlook)
    dry = [one for one in outlook.consumers if one.supply == "dry"]
    if dry:
        waits = ", ".join(f"{one.consumer.name!r} for {count(-(one.ahead_chunks or 0), 'chunk')}" for one in dry)
        return f"waiting for data: {waits}"
    if told:
        return ""
    slowest = outlook.slowest
    if slowest is None or slowest.ahead_chunks is None:
        return _behind(outlook)
    name = slowest.consumer.name
    return f"the producer is {count(slowest.ahead_chunks, 'chunk')} ahead of the slowest reader, {name!r}"


def _of_ended(outlook: Outlook) -> str:
    told = _behind(outlook)
    known = all(one.lag_chunks is not None for one in outlook.consumers)
    return told or ("every consumer is done with it" if known else "")


def _behind(outlook: Outlook) -> str:
    """Returns whose checkpoints are furthest behind, or what one keeps that is not; nothing where there is none."""
    behind = [one for one in outlook.consumers if one.lag_chunks]
    training = [one for one in behind if one.remainder is None]
    if training:
        last = max(training, key=_lag)
        return f"{last.consumer.name!r} is furthest behind, its checkpoints by {count(last.lag_chunks or 0, 'chunk')}"
    return _of_remainder(max(behind, key=_lag), outlook.survey.census.ended) if behind else ""


def _of_remainder(one: ConsumerOutlook, ended: bool) -> str:
    """Returns what holds a consumer back that has trained all that there is for it."""
    left, first = one.remainder, one.consumer.chunks_before
    assert left is not None
    which = " that its max_total_samples lets it take" if left.limited else "" if ended else " that is published"
    but = f"{which} but {count(left.samples, 'sample')}, fewer than its next step takes" if left.samples else ""
    text = f"{one.consumer.name!r} has trained all{but or which or ' of it'}"
    if left.keeps > first:
        why = "as long as it is registered" if left.limited else "for an older checkpoint or another epoch"
        text += f", and keeps {chunk_range(first, left.keeps)} {why}"
    return text


def _lag(one: ConsumerOutlook) -> tuple[int, str]:
    return one.lag_chunks or 0, one.consumer.name
