"""`head.json`: what a writer reports in it, when readers poll it, and how they describe the producer.

Process ids are reused, and containers may share a host name. So a producer also records the boot of the kernel it runs
on, its process namespace, and its start time (`man 5 proc_pid_stat`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lazyshard.errors import LazyShardError, redact
from lazyshard.format.records import HEAD, HEAD_RESERVE, STATES, Head, ProducerState, printable
from lazyshard.store.durable import publish_bytes, remove, this_boot, write_new
from lazyshard.store.files import read_record
from lazyshard.stream.listing import Published

if TYPE_CHECKING:
    from lazyshard.format.writers import Committed
    from lazyshard.stream.lock import WriterLock

HEARTBEAT_S: Final = 5.0
"""Maximum age of `head.json` while rows arrive. Readers only report its age; nothing acts on less than a minute."""

STALE_HEARTBEAT_S: Final = 15.0  # three missed ones are worth a report
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
_log = logging.getLogger("lazyshard")
_STARTED: Final = 19  # field of `/proc/PID/stat` after the program's name: its start, in clock ticks since boot


class Announcer:
    """Writes `head.json`, even on a full disk: it reserves room for one head as long as there is some.

    This is no guarantee on filesystems that copy on write or do not allocate room in advance. `told_at`: when the head
    was last written, by the monotonic clock.
    """

    def __init__(
        self, directory: Path, path: Callable[[str], Path], per_chunk: int, samples: int, clock: Callable[[], float]
    ) -> None:
        self._path = directory / HEAD
        self._temporary, self._reserve = path(HEAD), path(HEAD_RESERVE)
        self._reserved = False
        self._samples_per_chunk, self._clock = per_chunk, clock
        host, self.told_at = socket.gethostname() or "unknown", time.monotonic()
        self._who: dict[str, Any] = {"host": host, "pid": os.getpid(), "process": own_process()}
        self._metered, self._sum, self._weight = (self.told_at, samples), 0.0, 0.0
        self._taken, self._row_at = samples, 0.0

    def tell(self, chunks: int, samples: int, taken: int, state: ProducerState, note: str = "") -> None:
        """Replaces the head, durably at the end. `taken`: rows so far, including unpublished ones; gives the rate."""
        self.told_at, now = time.monotonic(), self._clock()
        if taken != self._taken:
            self._taken, self._row_at = taken, now
        ended = state == "finished"
        # A partial chunk is the last one: no head counts it before `stream.end` exists.
        partial = 0 if ended else samples % self._samples_per_chunk
        chunks, samples, rate = chunks - bool(partial), samples - partial, self._rate(self.told_at, taken)
        # A producer that stops drops the rows of its open chunk.
        rows, at = (taken - samples - partial, self._row_at) if state in ("running", "waiting") else (0, 0.0)
        head = Head(chunks, samples, ended, state, rate, updated_at=now, note=note, open=rows, row_at=at, **self._who)
        try:
            publish_bytes(head.encode(), self._path, self._temporary, durable=ended)
        except OSError as cause:
            if cause.errno not in _NO_ROOM or not self._reserved:
                raise
            self._reserved = False
            publish_bytes(head.encode(), self._path, self._reserve, durable=ended, reserved=True)
            remove(self._temporary)
        if not self._reserved and not ended:
            # After publishing: if the reserve was used, the room of the previous head is free now.
            try:
                # A head with a note has a few hundred bytes. Filesystems allocate pages of this size.
                write_new(self._reserve, bytes(4096))
                self._reserved = True
            except OSError as cause:
                remove(self._reserve)
                if cause.errno not in _NO_ROOM:
                    raise

    def tell_alive(self, tell: Callable[[], object], lock: WriterLock) -> None:
        """Calls `tell`, a heartbeat of the lock's owner; warns if the filesystem refuses it."""
        self.told_at = time.monotonic()
        try:
            lock.check()
            tell()
        except LazyShardError:
            raise
        except OSError as cause:
            lock.check(closely=True)
            # The head is a hint; a full disk must not stop a producer that has nothing to publish yet.
            what = "%s: readers cannot be told that this producer is alive: %s"
            _log.warning(what, self._path.parent, cause)

    def tell_end(self, chunks: int, samples: int) -> None:
        """Tells that the stream has ended. A head that tells it already stays: it names the process that ended it."""
        with contextlib.suppress(LazyShardError, OSError):
            head = read_record(self._path, Head.decode)
            if (head.chunks, head.samples, head.ended) == (chunks, samples, True):
                return
        self.tell(chunks, samples, samples, "finished")

    def close(self) -> None:
        """Frees the reserved room."""
        with contextlib.suppress(OSError):
            remove(self._reserve)

    def _rate(self, now: float, count: int) -> float:
        """Returns exponentially weighted samples per second; 0 until time has passed."""
        last, before = self._metered
        if (elapsed := now - last) > 0:
            # This time constant smooths over one slow chunk and follows a change within a minute.
            fade = math.exp(-elapsed / 30.0)
            self._sum = self._sum * fade + (count - before) / elapsed * (1 - fade)
            self._weight = self._weight * fade + (1 - fade)
            self._metered = now, count
        return self._sum / self._weight if self._weight else 0.0


def check_state(state: ProducerState) -> ProducerState:
    """Returns a state that a producer may set, or raises ValueError: only the end of the stream sets "finished"."""
    if state not in STATES or state == "finished":
        raise ValueError(f"state is one of {', '.join(s for s in STATES if s != 'finished')}, got {state!r}")
    return state


def own_process() -> str:
    """Returns a string that identifies this process: boot, process namespace and start; "" if these are unknown."""
    place, started = _place(), _started(os.getpid())
    return f"{place} {started}" if place and started else ""


def process_gone(head: Head | Committed) -> bool | None:
    """Returns whether a producer's process does not exist on this machine; None if it runs on another machine."""
    if head.host != socket.gethostname() or head.pid < 1:
        return None
    return no_process(head.pid) or process_ended(head)


def no_process(pid: int) -> bool:
    """Returns whether this process sees no process of this number."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False


def process_ended(head: Head | Committed) -> bool:
    """Returns whether a producer's process has certainly ended: only if it had the boot and namespace of this one."""
    place, _, started = head.process.rpartition(" ")
    return bool(place) and place == _place() and _started(head.pid) not in (None, started)


def _place() -> str:
    boot = this_boot().strip()
    with contextlib.suppress(OSError):
        return boot and f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def _started(pid: int) -> str | None:
    """Returns when a process was started, "" if no such process runs, None if unknown."""
    try:
        # The name of the program, in parentheses, may contain any character.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        # If processes of other users are hidden (hidepid), so is process 1, and the state is unknown.
        return "" if Path("/proc/1/stat").exists() else None
    except OSError:
        return None
    if len(fields) <= _STARTED:
        return None
    # A zombie has ended, too.
    return "" if fields[0] in (b"Z", b"X") else fields[_STARTED].decode("ascii", "replace")


def retry_s(held_s: float) -> float:
    """Returns the seconds until a producer retries: a tenth of the time the chunk has been held, from 0.2 to 2."""
    return min(2.0, max(0.2, held_s / 10))


def next_report(last: float) -> float:
    """Returns after how many seconds of waiting to report; `last`: when the last report was due, 0 before the first."""
    # After 10 s, 20 s later, 40 s later and so on, but at least every ten minutes.
    return last + min(600.0, last + 10.0)


def expected_wait(samples: int, published: Published) -> float | None:
    """Returns in how many seconds `samples` should be published at the producer's rate, None if unknown."""
    head = published.head
    # Nothing tells how long a producer waits for anything but its rate.
    if head is None or head.rate <= 0 or not f"{head.state} {head.note}".startswith(("running", "waiting --rate")):
        return None
    left = max(0, samples - published.samples)
    # A rate that has faded because no row came predicts nothing; near zero the division would overflow.
    return left / head.rate if left < head.rate * 30 * 86400 else None


def describe_producer(
    seen: Published, samples: int, now: float, gone: bool = False, open_rows: bool | None = None, name: str = "producer"
) -> str:
    """Describes what the producer is doing, and when to expect `samples`; `gone`: its process does not exist."""
    gap = "" if seen.gap is None else f"; chunk {seen.gap} lacks its data or its marker"
    if seen.short is not None:
        gap += f"; the newest chunk holds only {seen.short:,} rows, so it counts only once stream.end exists"
    if (head := seen.head) is None:
        chunks = "1 chunk is" if seen.chunks == 1 else f"{seen.chunks:,} chunks are"
        return f"{chunks} complete, nothing is known about the producer{gap}"
    age = heartbeat_age(seen, now) or 0.0
    expected = expected_wait(samples, seen)
    # The rate is as old as the last heartbeat, so the time since then counts.
    left = None if expected is None else expected - age
    soon = left is not None and left < 1
    silence = describe_silence(head, now, 1.0 if soon else STALE_HEARTBEAT_S, open_rows)
    rate = f"is {head.state} at {head.rate:,.1f} samples/s, so"
    if gone:
        doing = "no longer runs and did not report a stop (was it killed?); start it again"
    elif left is not None and not soon:
        doing = f"{rate} expect it in about {format_seconds(left)}" + (f", though it {silence}" if silence else "")
    elif silence:
        # The past rate predicts nothing while a producer has no row.
        doing = f"is {head.state}, but {silence}"
    elif soon and not head.note:
        doing = f"{rate} it should be there by now"
    elif head.state == "failed":
        doing = f"has failed{f': {failure_words(head.note)}' if head.note else '; look at its log and start it again'}"
    else:
        doing = "was stopped; start it again" if head.state == "idle" else f"is {head.state}"
    if head.state == "waiting" and head.note and not gone:
        doing += f" ({printable(head.note)})"
    if age > STALE_HEARTBEAT_S:
        doing += f"; its last heartbeat is {format_seconds(age)} old"
    # A writer that waits for one slow row sends no heartbeat either, so this is reported later.
    if age > 60 and head.state in ("running", "waiting") and not gone:
        doing += ", it may be dead"
    who = f"the {name} (pid {head.pid} on {printable(head.host)})"
    return f"{seen.samples:,} samples are published, {who} {doing}{gap}"


def is_silent(head: Head, now: float) -> bool:
    """Returns whether a running producer has reported no row for so long that its rate predicts nothing."""
    # At its own rate it would have reported five rows.
    return head.rate > 0 and bool(describe_silence(head, now, max(STALE_HEARTBEAT_S, 5 / head.rate)))


def describe_silence(head: Head, now: float, least: float, open_rows: bool | None = None) -> str:
    """Describes how long a running producer has reported no row, "" if below `least` seconds.

    `open_rows`: whether its open chunk has rows, None if unknown.
    """
    silent = now - min(head.row_at or head.updated_at, head.updated_at)
    if head.state != "running" or silent < least:
        return ""
    told = f"has reported no new row for {format_seconds(silent)}"
    if not head.open and open_rows is False:
        return f"{told}, and shows no row in its open chunk"
    rows = f"{head.open:,} row{'s' if head.open > 1 else ''} or more"
    if not head.open:
        rows = "rows" if open_rows else "rows, if any,"
    return f"{told}, with {rows} in its open chunk, which is published once it is full or the producer closes it"


def failure_note(error: BaseException | None) -> str:
    """Returns the note of a producer that an error has stopped."""
    return plain(str(error) if isinstance(error, LazyShardError) else f"{type(error).__name__}: {error}")


def plain(text: str) -> str:
    """Returns a text as a note: on one line, shortened, as valid UTF-8; file names need not be."""
    return " ".join(redact(text).encode("utf-8", "backslashreplace").decode().split())[:1000]


def failure_words(note: str) -> str:
    """Returns why a producer has failed, from the note of its head, and what to do, unless the note says so itself."""
    told = printable(note)
    return told if " again" in told else f"{told}; fix that, then start it again"


def heartbeat_age(published: Published, now: float) -> float | None:
    """Returns the age of the producer's last heartbeat in seconds, None if it sends none. Clocks may differ."""
    return None if published.head is None else max(0.0, now - published.head.updated_at)


def format_seconds(seconds: float) -> str:
    """Formats a duration: 3 s, 2 min 5 s, 1 h 20 min, no limit."""
    if seconds == float("inf"):
        return "no limit"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
