"""What a writer tells its readers in `head.json`: how far it is, what it is doing, how fast, and which process it is.

A process number alone is given again, and containers may share the name of a machine. So a producer also tells which
start of which kernel it runs on, in which process namespace, and when it was started (`man 5 proc_pid_stat`).
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lazyshard.format.names import HEAD, HEAD_RESERVE
from lazyshard.format.records import STATES, Head, ProducerState
from lazyshard.store.durable import publish_bytes, publish_reserved, remove, reserve
from lazyshard.store.room import this_boot

if TYPE_CHECKING:
    from lazyshard.stream.lock import Workplace

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)

_RESERVED_BYTES: Final = 4096  # A head with a note has some hundred. Filesystems give room by pages of this size
_MEMORY_S: Final = 30.0  # time constant of the average: rides over one slow chunk, and follows a change within a minute
_STARTED: Final = 19  # field of `/proc/PID/stat` behind the program's name: its start, in clock ticks since the boot


class Announcer:
    """Writes `head.json`, on a full disk too: room for one head is reserved as long as there is some.

    Of a disk that copies what is overwritten, or whose server gives no room in advance, that is no promise. `samples`
    were published before; `told_at`, when the head was last written, is by the monotonic clock.
    """

    def __init__(
        self, directory: Path, workplace: Workplace, samples_per_chunk: int, samples: int, clock: Callable[[], float]
    ) -> None:
        self._path = directory / HEAD
        self._temporary, self._reserve = workplace.path(HEAD), workplace.path(HEAD_RESERVE)
        self._reserved = False
        self._samples_per_chunk = samples_per_chunk
        self._clock = clock
        self._host, self._process = socket.gethostname() or "unknown", own_process()
        self.told_at = time.monotonic()
        self._meter = RateMeter(self.told_at, samples)
        self._taken = samples
        self._row_at = 0.0

    def tell(self, chunks: int, samples: int, taken: int, state: ProducerState, note: str = "") -> None:
        """Replaces the head; `taken`: rows so far, those that are not published included, from which the rate is told.

        That of a stream which has ended ("finished") is durable: nobody starts again to tell it anew.
        """
        self.told_at, now = time.monotonic(), self._clock()
        if taken != self._taken:
            self._taken, self._row_at = taken, now
        ended, working = state == "finished", state in ("running", "waiting")
        # A partial chunk is the last one: no head names it before `stream.end` is there.
        partial = 0 if ended else samples % self._samples_per_chunk
        head = Head(
            chunks=chunks - (1 if partial else 0),
            samples=samples - partial,
            ended=ended,
            state=state,
            rate=self._meter.update(self.told_at, taken),
            host=self._host,
            pid=os.getpid(),
            updated_at=now,
            note=note,
            process=self._process,
            # One that stops drops them.
            open=taken - samples if working else 0,
            row_at=self._row_at if working else 0.0,
        )
        try:
            publish_bytes(head.encode(), self._path, self._temporary, durable=ended)
        except OSError as cause:
            if cause.errno not in _NO_ROOM or not self._reserved:
                raise
            self._reserved = False
            publish_reserved(head.encode(), self._path, self._reserve, durable=ended)
            remove(self._temporary)
        if not self._reserved and not ended:
            # After a publish: where the reserve was used, the room of the head before is free now.
            try:
                reserve(self._reserve, _RESERVED_BYTES)
                self._reserved = True
            except OSError as cause:
                if cause.errno not in _NO_ROOM:
                    raise

    def close(self) -> None:
        """Gives the reserved room back."""
        self._reserved = False
        with contextlib.suppress(OSError):
            remove(self._reserve)


def check_state(state: ProducerState) -> ProducerState:
    """Returns a state that a producer may claim, or raises ValueError: "finished" is for the end of the stream."""
    if state not in STATES or state == "finished":
        raise ValueError(f"state is one of {', '.join(s for s in STATES if s != 'finished')}, got {state!r}")
    return state


class RateMeter:
    """Exponentially weighted samples per second; `now` by a monotonic clock, `count` samples so far."""

    def __init__(self, now: float, count: int = 0) -> None:
        self._last, self._count = now, count
        self._sum = self._weight = 0.0

    def update(self, now: float, count: int) -> float:
        """Takes the number of samples so far and returns the rate; 0 until time has passed."""
        elapsed = now - self._last
        if elapsed > 0:
            fade = math.exp(-elapsed / _MEMORY_S)
            self._sum = self._sum * fade + (count - self._count) / elapsed * (1 - fade)
            self._weight = self._weight * fade + (1 - fade)
            self._last, self._count = now, count
        return self._sum / self._weight if self._weight else 0.0


def own_process() -> str:
    """Returns what tells this process from all others: boot, process namespace and start; "" where it is not known."""
    place, started = _place(), _started(os.getpid())
    return f"{place} {started}" if place and started else ""


def process_gone(head: Head) -> bool | None:
    """Returns whether a producer's process is not to be seen on this machine, None where it runs on another one."""
    if head.host != socket.gethostname() or head.pid < 1:
        return None
    if process_ended(head):
        return True
    try:
        os.kill(head.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


def process_ended(head: Head) -> bool:
    """Returns whether a producer's process is known to have ended: it ran where its number means what it means here."""
    place, _, started = head.process.rpartition(" ")
    return bool(place) and place == _place() and _started(head.pid) not in (None, started)


def _place() -> str:
    boot = this_boot().strip()
    try:
        return boot and f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """Returns when a process was started, "" if there is none that runs, None where that is not known."""
    try:
        # The name of the program, in parentheses, may hold any character.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        # Where processes of others are hidden (hidepid), so is the first one, and nothing is known either.
        return "" if Path("/proc/1/stat").exists() else None
    except OSError:
        return None
    if len(fields) <= _STARTED:
        return None
    # One that nobody has waited for yet has ended all the same.
    return "" if fields[0] in (b"Z", b"X") else fields[_STARTED].decode("ascii", "replace")
