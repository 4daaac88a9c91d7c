"""A look at a stream as a page for people: a sentence that says what is going on, and the figures. Text only."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence
from typing import Final

from lazyshard.cli.output import chunk_range, count, duration, one_line, per_second, size
from lazyshard.format.blend_state import BlendShare, given_shares
from lazyshard.format.cursor import Cursor
from lazyshard.format.seal import MixedSource
from lazyshard.inspection.band import Band, ChunkState, OpenWindow
from lazyshard.inspection.outlook import ConsumerOutlook, Outlook
from lazyshard.stream.listing import has_unpublished_rows
from lazyshard.stream.pacing import describe_silence, failure_words, is_silent

WIDTH: Final = 80
"""Columns of the page; lines wrap there."""

_OLD_RATE_S: Final = 10.0
"""Producers tell their rate every 5 s; an older one comes with its age."""

_LABEL: Final = 14
"""Columns of the labels."""


SIGNS: Final[dict[ChunkState, str]] = {
    "deleted": ".",
    "done": "-",
    "taken": "=",
    "reading": "#",
    "ready": "+",
    "awaited": "?",
}

_PRECEDENCE: Final[tuple[ChunkState, ...]] = ("deleted", "done", "taken", "ready", "awaited", "reading")
"""Of several that share a column, the last of these is shown: what is read now is seen, however long the stream is."""

_SHOWN_RANKS: Final = 8

_SHOWN_CHUNKS: Final = 32
"""The chunks of each rank are listed where there are no more of either."""

_CLOCK_AHEAD_S: Final = 5.0
"""Less is no matter: ages are told in seconds."""

_ROOM: Final = ("--max-disk ", "--min-free-disk ")
"""How the notes of a producer begin that waits for room: with the option that holds it."""


def status_lines(outlook: Outlook, *, watching: bool, width: int = WIDTH) -> list[str]:
    """Returns the page of a look; where others follow (`watching`), rates which take two will be known."""
    page = _Page(width)
    page.add("", str(outlook.survey.directory))
    page.add("", summary(outlook))
    page.blank()
    _stream(page, outlook)
    if watching and outlook.band.stop:
        page.add("band", band_line(outlook.band, page.room))
        page.add(" ", legend(outlook.band))
    for number, source in enumerate(outlook.survey.mixture):
        page.add(" " if number else "mixture", source_words(source))
    _producer(page, outlook)
    # Said once, however many consumers there are.
    unknown = "not known yet" if watching else "not known from one look; see --watch"
    for one in outlook.consumers:
        _consumer(page, outlook, one, unknown)
        if one.chunk_rate is None:
            unknown = "not known yet" if watching else "not known"
    if not outlook.consumers:
        page.blank()
        page.add("consumers", "none has registered")
    found = problems(outlook)
    if found:
        page.blank()
    for problem in found:
        page.add("problem", problem)
    return page.lines


class _Page:
    """Lines of a label and a text; the text wraps behind its label."""

    def __init__(self, width: int) -> None:
        self.lines: list[str] = []
        self._width = max(width, 2 * _LABEL)

    def add(self, label: str, text: str) -> None:
        wrapped = textwrap.wrap(
            one_line(text),
            self.room if label else self._width,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for number, line in enumerate(wrapped):
            start = f"{label if number == 0 else '':{_LABEL}}" if label else ""
            self.lines.append(start + line)

    @property
    def room(self) -> int:
        """Columns of a text behind a label."""
        return self._width - _LABEL

    def blank(self) -> None:
        self.lines.append("")


def _stream(page: _Page, outlook: Outlook) -> None:
    survey, census = outlook.survey, outlook.survey.census
    published = count(census.chunks, "chunk")
    if census.samples is not None:
        published += f", {count(census.samples, 'sample')}"
    if census.manifest is not None:
        published += f" ({census.manifest.samples_per_chunk:,} a chunk)"
    kind = "" if census.native else "; made by a foreign producer"
    page.add("published", f"{published}; {'ended' if census.ended else 'live'}{kind}")
    if census.retired:
        left = census.chunks - census.retired
        page.add("deleted", f"{count(census.retired, 'chunk')}; {left:,} {'is' if left == 1 else 'are'} there")
    disk = f"{'' if survey.disk.exact else 'about '}{size(survey.disk.size)} used"
    if survey.free is not None:
        disk += f", {size(survey.free)} free"
    if outlook.full_in_s is not None:
        disk += f"; full in about {duration(outlook.full_in_s)} at this rate"
    page.add("disk", disk)
    if survey.quarantine is not None:
        about = "" if survey.quarantine.exact else "about "
        rows = f"{about}{count(survey.quarantine.lines, 'row')} refused so far"
        page.add("quarantine", f"{rows}, {size(survey.quarantine.size)}")


def _producer(page: _Page, outlook: Outlook) -> None:
    head = outlook.survey.census.head
    page.blank()
    if head is None or outlook.state is None:
        page.add("producer", "nothing is known of it")
    else:
        silent = outlook.state == "running" and is_silent(head, outlook.survey.looked_at)
        words = ""
        if silent:
            open_rows = None if head.open else has_unpublished_rows(outlook.survey.directory, head.chunks)
            words = f", but {describe_silence(head, outlook.survey.looked_at, 0.0, open_rows)}"
        page.add("producer", outlook.state + words)
        process = f"{head.pid} on {head.host}, heartbeat {duration(outlook.heartbeat_age_s or 0.0)} old"
        if outlook.survey.ended and outlook.state == "dead":
            process += "; it has ended"
        elif outlook.survey.gone and outlook.state in ("running", "waiting", "dead"):
            process += "; it is not to be seen on this machine"
        page.add("  process", process)
    page.add("  rate", _rate(outlook, outlook.chunk_rate) + _told(outlook) + _growth(outlook))


def _told(outlook: Outlook) -> str:
    """Returns how old the producer's rate is, where it is that: what one that is silent has told last."""
    age = outlook.heartbeat_age_s or 0.0
    return f", told {duration(age)} ago" if outlook.chunk_rate and age > _OLD_RATE_S else ""


def _growth(outlook: Outlook) -> str:
    if not outlook.byte_rate:
        return ""
    word = "grows" if outlook.byte_rate > 0 else "shrinks"
    return f"; the stream {word} by {size(abs(outlook.byte_rate))}/s"


def _consumer(page: _Page, outlook: Outlook, one: ConsumerOutlook, unknown: str) -> None:
    page.blank()
    page.add("consumer", one.consumer.name)
    cursor, reading = one.consumer.cursor, one.consumer.reading
    if one.consumer.problem is not None:
        page.add("  checkpoint", "not known, see below")
    elif cursor is None:
        page.add("  checkpoint", "none yet")
    else:
        page.add("  checkpoint", checkpoint_words(cursor, one.checkpoint_age_s or 0.0))
    if one.lag_chunks is not None:
        lag = count(one.lag_chunks, "chunk")
        if one.lag_samples is not None:
            lag += f", {count(one.lag_samples, 'sample')}"
        page.add("  lag", lag + ("" if one.lag_s is None else f", {duration(one.lag_s)}"))
    if reading is not None and one.ahead_chunks is not None:
        page.add(
            "  reading",
            # Of a stream that has ended all is there, whatever a window would take.
            f"needs {count(reading.needs_chunks, 'chunk')}"
            f"{'' if outlook.survey.census.ended else f', {_ahead(one.ahead_chunks)}'}; "
            f"{duration(one.reading_age_s or 0.0)} old",
        )
    window = outlook.band.windows.get(one.consumer.name)
    if window is not None:
        published = outlook.survey.census.chunks
        page.add("  now" if window.stop <= published else "  waits for", window_words(window, published))
    shares = [] if cursor is None else list(zip(cursor.blend, given_shares(cursor.blend), strict=True))
    for number, (share, given) in enumerate(shares):
        page.add(" " if number else "  blend", share_words(share, given))
    rate = unknown if one.chunk_rate is None else _rate(outlook, one.chunk_rate)
    page.add("  rate", rate + _supply(one))


def checkpoint_words(cursor: Cursor, age_s: float) -> str:
    """Returns how far the checkpoint of a consumer is, and how old."""
    done = count(cursor.chunks_before, "chunk")
    return f"{count(cursor.consumed, 'sample')}, done with {done}; {duration(age_s)} old"


def _rate(outlook: Outlook, chunks: float | None) -> str:
    manifest = outlook.survey.census.manifest
    if chunks is None:
        return "not known"
    if manifest is None:
        return per_second(chunks, "chunks")
    return per_second(chunks * manifest.samples_per_chunk, "samples")


def _ahead(chunks: int) -> str:
    return f"{count(chunks, 'chunk')} ahead of it" if chunks >= 0 else f"waits for {count(-chunks, 'chunk')}"


def _supply(one: ConsumerOutlook) -> str:
    if one.supply == "shrinking":
        return f"; has to wait in about {duration(one.dry_in_s or 0.0)} at these rates"
    return "; does not have to wait at these rates" if one.supply == "steady" else ""


def band_line(band: Band, width: int) -> str:
    """Returns the band in characters, at most `width`.

    >>> from lazyshard.inspection.band import ChunkStretch
    >>> band_line(Band(10, (ChunkStretch(0, 6, "done"), ChunkStretch(6, 10, "reading")), (), {}), 5)
    '---##'
    """
    columns = min(width, band.stop)
    shown = [0] * columns
    for one in band.stretches:
        first, last = one.first * columns // band.stop, (one.stop - 1) * columns // band.stop
        for column in range(first, last + 1):
            shown[column] = max(shown[column], _PRECEDENCE.index(one.state))
    return "".join(SIGNS[_PRECEDENCE[number]] for number in shown)


def legend(band: Band) -> str:
    """Returns what the characters of its line mean, of the states that are in it."""
    there = {one.state for one in band.stretches}
    words = {"reading": "read now"}
    return ", ".join(f"{sign} {words.get(state, state)}" for state, sign in SIGNS.items() if state in there)


def window_words(window: OpenWindow, published: int) -> str:
    """Returns which chunks a consumer reads now, and which rank which of them; or which it waits for, to read those."""
    chunks = range(window.first, window.stop)
    words = chunk_range(chunks.start, chunks.stop)
    if window.first < published < window.stop:
        words = f"{chunk_range(published, window.stop)}, to read {words}"
    if len(chunks) > _SHOWN_CHUNKS:
        return f"{words}, by {count(window.dp, 'rank')}"
    by_rank: dict[int | None, list[int]] = {}
    for chunk in chunks:
        by_rank.setdefault(window.rank(chunk), []).append(chunk)
    if len(by_rank) > _SHOWN_RANKS:
        return f"{words}, by {count(window.dp, 'rank')}"
    shared = by_rank.pop(None, [])
    parts = [
        f"rank {rank}: {_numbers(found)}" for rank, found in sorted(by_rank.items(), key=lambda item: item[0] or 0)
    ]
    if shared:
        parts.append(f"shared by ranks: {_numbers(shared)}")
    return f"{words} ({'; '.join(parts)})"


def source_words(source: MixedSource) -> str:
    """Returns how much of the rows a source has given, against its weight."""
    share = "none yet" if source.share is None else f"{source.share:.1%}, {count(source.rows, 'row')}"
    aim = "finished" if source.finished else f"weight {source.weight:.1%}"
    return f"{one_line(source.name)}: {share}; {aim}"


def share_words(one: BlendShare, given: float | None) -> str:
    """Returns how much of a consumer's samples a stream of its blend has given so far, against its weight now."""
    share = "none yet" if given is None else f"{given:.1%}, {count(one.consumed, 'sample')}"
    return f"{one_line(one.stream)}: {share}; weight {one.weight:.1%}"


def _numbers(chunks: Sequence[int]) -> str:
    return ", ".join(f"{chunk:,}" for chunk in chunks)


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
