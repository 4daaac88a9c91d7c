"""Whether the producer's process still runs, as far as that can be seen from this machine.

A process number alone tells little: it is given again, and containers may share the name of a machine but not its
processes. So a producer also tells which start of which kernel it runs on, in which process namespace, and when it was
started. Where the first two are ours, its entry in `/proc` is the answer; `man 5 proc_pid_stat` has the fields.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

from lazyshard.format import Head

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

_STATE: Final = 0
_STARTED: Final = 19
"""Fields of `/proc/PID/stat` behind the name of the program: its state, and its start in clock ticks since the boot."""


def own_process() -> str:
    """Returns what tells this process from all others: boot, process namespace and start; "" where it is not known."""
    place, started = _place(), _started(os.getpid())
    return f"{place} {started}" if place and started else ""


def process_gone(head: Head) -> bool | None:
    """Returns whether a producer's process is not to be seen on this machine, None where it runs on another one.

    Not guaranteed: that it has ended, see `process_ended`.
    """
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
    """Returns whether a producer's process is known to have ended: it ran where its number means what it means here.

    False says nothing: it may run, or nothing is known.
    """
    place, _, started = head.process.rpartition(" ")
    return bool(place) and place == _place() and _started(head.pid) not in (None, started)


def _place() -> str:
    """Returns which start of the machine this is, and which process namespace; "" where that cannot be read."""
    try:
        return f"{_BOOT_ID.read_text(encoding='ascii').strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """Returns when a process was started, "" if there is none that runs, None where that is not known."""
    try:
        # The name of the program, in parentheses, may hold any character.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        # Where processes of others are hidden (hidepid), nothing is known either.
        return "" if _lists_all() else None
    except OSError:
        return None
    if len(fields) <= _STARTED:
        return None
    # One that nobody has waited for yet has ended all the same.
    return "" if fields[_STATE] in (b"Z", b"X") else fields[_STARTED].decode("ascii", "replace")


def _lists_all() -> bool:
    """Whether `/proc` hides no process: it shows the first one, which is somebody else's or our own."""
    return Path("/proc/1/stat").exists()
