"""A look at a stream as a page for people: a sentence that says what is going on, and the figures. Text only."""

from __future__ import annotations

import textwrap
from typing import Final

from lazyshard.cli.status_band import band_line, legend, share_words, source_words, window_words
from lazyshard.cli.status_words import problems, summary
from lazyshard.cli.units import duration, per_second, size
from lazyshard.cli.wording import count, one_line
from lazyshard.format.blend_share import given_shares
from lazyshard.inspection.outlook import ConsumerOutlook, Outlook
from lazyshard.stream.pacing import describe_silence, is_silent

WIDTH: Final = 80
"""Columns of the page; lines wrap there."""

_OLD_RATE_S: Final = 10.0
"""Producers tell their rate every 5 s; an older one comes with its age."""

_LABEL: Final = 14
"""Columns of the labels."""


def status_lines(outlook: Outlook, *, watching: bool, width: int = WIDTH) -> list[str]:
    """Returns the page of a look.

    Args:
        outlook: what the look means.
        watching: whether other looks follow, so that rates which take two will be known.
        width: columns.
    """
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
        words = f", but {describe_silence(head, outlook.survey.looked_at, 0.0)}" if silent else ""
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
        page.add(
            "  checkpoint",
            f"{count(cursor.consumed, 'sample')}, done with {count(cursor.chunks_before, 'chunk')}; "
            f"{duration(one.checkpoint_age_s or 0.0)} old",
        )
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
