"""When to look again, when to speak, and what a waiting reader says: back-off, reports, and the errors that end a wait.

Decisions only: time goes in as numbers, and what is published as the caller saw it. Only `ReaderWait` looks for itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lazyshard.errors import WaitTimeout
from lazyshard.format.fields import printable
from lazyshard.format.names import END
from lazyshard.format.records import Head
from lazyshard.store.files import list_names
from lazyshard.store.urls import UrlPath
from lazyshard.stream.head import process_ended, process_gone
from lazyshard.stream.listing import Published, has_unpublished_rows, other_files

FIRST_POLL_S: Final = 0.005
LAST_POLL_S: Final = 5.0
"""Bounds of the pause between two looks. The upper one keeps a job of thousands of waiting processes from loading a
metadata server (4,000 of them on as many nodes: 800 opens a second), and is the longest that a chunk can lie unseen."""

FIRST_REQUEST_S: Final = 0.2
"""The shortest pause where a look is a request to an object store: it is paid for, and some thousands a second is all
that a prefix of a bucket answers. 1,000 nodes ask so often together."""

_POLL_SHARE: Final = 0.1
"""A pause is a tenth of the time that has passed or is expected to pass, so polling adds at most that share."""

FIRST_REPORT_S: Final = 10.0
LAST_REPORT_S: Final = 600.0
"""Reports come after 10 s, 20 s later, 40 s later and so on, at least every ten minutes."""

_FORESEEABLE_S: Final = 30 * 86400.0
"""A rate that has faded while no row came (towards zero, where a division by it overflows) promises nothing."""

STALE_HEARTBEAT_S: Final = 15.0  # producers beat every 5 s while rows come; three beats missed are worth a word
_SILENT_ROWS: Final = 5  # at its own rate a producer would have told of as many rows

_DEAD_HEARTBEAT_S: Final = 60.0
"""A writer that waits for one slow row does not beat either, so the word for it comes later."""


def next_poll(waited: float, expected: float | None, least: float = FIRST_POLL_S) -> float:
    """Returns the pause before the next look; `expected`: wait by the producer's rate, None where unknown."""
    pause = _POLL_SHARE * (waited if expected is None else max(expected, waited * _POLL_SHARE))
    return min(LAST_POLL_S, max(least, pause))


def next_report(last: float) -> float:
    """Returns after how many seconds of waiting to report; `last`: when the last report was due, 0 for none yet."""
    return last + min(LAST_REPORT_S, last + FIRST_REPORT_S)


def expected_wait(samples: int, published: Published) -> float | None:
    """Returns in how many seconds so many samples should be published at the producer's rate, None where unknown."""
    head = published.head
    if head is None or head.rate <= 0 or head.state not in ("running", "waiting"):
        return None
    left = max(0, samples - published.samples)
    return left / head.rate if left < head.rate * _FORESEEABLE_S else None


def describe_producer(
    published: Published, samples: int, now: float, gone: bool = False, open_rows: bool | None = None
) -> str:
    """Returns in words what the producer is doing, and when to expect so many samples; `gone`: it has no process."""
    gap = "" if published.gap is None else f"; chunk {published.gap} lacks its data or its marker"
    if published.short is not None:
        rows = f"{published.short:,} rows"
        gap += f"; the newest chunk holds only {rows}, so it counts once stream.end says it is the last"
    head = published.head
    if head is None:
        chunks = "1 chunk is" if published.chunks == 1 else f"{published.chunks:,} chunks are"
        return f"{chunks} complete, nothing is known of the producer{gap}"
    age = heartbeat_age(published, now) or 0.0
    who = f"the producer (pid {head.pid} on {printable(head.host)})"
    expected = expected_wait(samples, published)
    left = None if expected is None else expected - age
    least = 1.0 if left is not None and left < 1 else STALE_HEARTBEAT_S
    silence = describe_silence(head, now, least, open_rows)
    if gone:
        doing = "is not there any more, and did not say that it stops: killed? Start it again"
    elif left is not None and left >= 1:
        # The rate was told with the last heartbeat, so what has passed since then counts.
        doing = f"is {head.state} at {head.rate:,.1f} samples/s, so expect it in about {format_seconds(left)}"
        doing += f", though it {silence}" if silence else ""
    elif silence:
        # A rate that was says nothing of a producer that has no row now.
        doing = f"is {head.state}, but {silence}"
    elif left is not None and not head.note:
        doing = f"is {head.state} at {head.rate:,.1f} samples/s, so it should be there by now"
    elif head.state == "failed":
        doing = "has failed; look at its log and start it again"
        if head.note:
            doing = f"has failed: {failure_words(head.note)}"
    elif head.state == "idle":
        doing = "was stopped; start it again"
    else:
        doing = f"is {head.state}"
    beat = f"; its last heartbeat is {format_seconds(age)} old" if age > STALE_HEARTBEAT_S else ""
    if head.state == "waiting" and head.note and not gone:
        doing += f" ({printable(head.note)})"
    silent = age > _DEAD_HEARTBEAT_S and head.state in ("running", "waiting")
    dead = ", it may be dead" if silent and not gone else ""
    return f"{published.samples:,} samples are published, {who} {doing}{beat}{dead}{gap}"


def is_silent(head: Head, now: float) -> bool:
    """Returns whether a running producer has told of no row for so long that its rate says nothing any more."""
    return head.rate > 0 and bool(describe_silence(head, now, max(STALE_HEARTBEAT_S, _SILENT_ROWS / head.rate)))


def describe_silence(head: Head, now: float, least: float, open_rows: bool | None = None) -> str:
    """Returns in words since when a running producer has told of no row; nothing if that is less than `least` s.

    `open_rows`: whether its open chunk holds rows of which it has not told; None where that is not known.
    """
    silent = now - min(head.row_at or head.updated_at, head.updated_at)
    if head.state != "running" or silent < least:
        return ""
    told = f"has told of no new row for {format_seconds(silent)}"
    if not head.open and open_rows is False:
        return f"{told}, and shows no row in its open chunk"
    unknown = "rows" if open_rows else "rows, if any,"
    rows = unknown if not head.open else "1 row or more" if head.open == 1 else f"{head.open:,} rows or more"
    return f"{told}, with {rows} in its open chunk, which is published once it is full or the producer closes it"


def failure_words(note: str) -> str:
    """Returns why a producer has failed, by the note of its head, and what to do: what the note advises, if it does."""
    told = printable(note)
    return told if " again" in told else f"{told}; start it again when that is mended"


def heartbeat_age(published: Published, now: float) -> float | None:
    """Returns how many seconds ago the producer last gave a sign, None where it gives none. Clocks may differ."""
    return None if published.head is None else max(0.0, now - published.head.updated_at)


def format_seconds(seconds: float) -> str:
    """Returns a duration for people: 3 s, 2 min 5 s, 1 h 20 min, no limit."""
    if seconds == float("inf"):
        return "no limit"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


@dataclass(frozen=True, slots=True)
class ReaderWait:
    """A wait for something that a producer has still to publish; `seen`: at the last look."""

    directory: Path
    label: str
    seen: Published
    samples: int  # how many must be there; 0 where there is no stream yet
    chunk: int | None  # that of the last of them
    waited: float
    max_wait: float
    foreign: bool = False  # another program fills the directory

    def open_rows(self) -> bool | None:
        """Looks whether a running producer holds rows of which its head does not tell; None where that is not known."""
        head = self.seen.head
        if head is None or head.state != "running" or head.open:
            return None
        return has_unpublished_rows(self.directory, self.seen.chunks)

    def describe(self, now: float, open_rows: bool | None = None) -> str:
        """Says what is waited for, and what the producer is doing; `open_rows`: as the method has found."""
        who = f"{self.label}: " if self.label else ""
        so_far = f"({format_seconds(self.waited)} of at most {format_seconds(self.max_wait)})"
        if self.chunk is None:
            return (
                f"{who}{self.directory}: no stream there yet, waiting for a producer to create it {so_far}"
                f"{_path_hint(self.directory)}"
            )
        producer = describe_producer(self.seen, self.samples, now, _producer_gone(self.seen, now), open_rows)
        end = ""
        if self.foreign and self.seen.gap is None and self.seen.short is None:
            end = f"; if no more are to come, an empty file {self.directory / END} says so"
        return f"{who}waiting for chunk {self.chunk} of {self.directory} {so_far}: {producer}{end}"

    def timeout(self, now: float, open_rows: bool | None = None) -> WaitTimeout:
        """Returns the error for a wait that is given up; arguments as for `describe`."""
        head = self.seen.head
        hint = "start its producer" if self.chunk is None or head is None else "see to its producer"
        return WaitTimeout(
            f"{self.describe(now, open_rows)}. Gave up: {hint}, or wait longer with max_wait",
            directory=str(self.directory),
            chunk=self.chunk,
            waited=self.waited,
            state=head.state if head else None,
            heartbeat_age=heartbeat_age(self.seen, now),
        )


def _producer_gone(published: Published, now: float) -> bool:
    """Whether a producer of this machine, by its own word at work, has ended, or is silent and has no process."""
    head = published.head
    if head is None or head.state not in ("running", "waiting"):
        return False
    return process_ended(head) or (now - head.updated_at >= STALE_HEARTBEAT_S and process_gone(head) is True)


def _path_hint(directory: Path) -> str:
    """Returns a hint where not even the directory is there, which a producer makes, or it holds something else."""
    if isinstance(directory, UrlPath):
        return ""
    try:
        found = other_files(list_names(directory))
    except FileNotFoundError:
        return "; there is no such directory yet, so see whether the path is right"
    except OSError:
        return ""
    return f"; the directory holds other files ({found}), so see whether the path is right" if found else ""
