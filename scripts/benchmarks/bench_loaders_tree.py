"""The processor time and the memory of a process with all that it has started.

They are found by their session, so a process whose parent has ended is counted too. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from pathlib import Path
from typing import Final, NamedTuple

_SESSION, _UTIME, _STIME, _CUTIME, _CSTIME = 3, 11, 12, 13, 14
"""Fields of /proc/PID/stat behind the name, which may hold anything."""

TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


class Memory(NamedTuple):
    """MB (10^6 bytes) of all processes together, each page counted once.

    Attributes:
        pss: the proportional shares, mapped files included.
        anonymous: what of it is no file's.
    """

    pss: float
    anonymous: float


def stat_fields(text: str) -> list[str]:
    """Returns the fields of a /proc/PID/stat that come behind the name."""
    return text.rpartition(")")[2].split()


def rollup_memory(text: str) -> Memory:
    """Returns what a /proc/PID/smaps_rollup says."""
    kb = {}
    for line in text.splitlines():
        name, *rest = line.split()
        if name in ("Pss:", "Pss_Anon:"):
            kb[name] = int(rest[0])
    return Memory(*(kb.get(name, 0) * 1024 / 1e6 for name in ("Pss:", "Pss_Anon:")))


def members(session: int) -> dict[int, list[str]]:
    """Returns the processes of a session, with the fields of their stat behind the name."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            # Some end meanwhile.
            with contextlib.suppress(OSError):
                fields = stat_fields(Path("/proc", entry, "stat").read_text(errors="replace"))
                if int(fields[_SESSION]) == session:
                    found[int(entry)] = fields
    return found


def memory(session: int) -> Memory:
    """Returns the memory of the processes of a session."""
    total = Memory(0.0, 0.0)
    for pid in members(session):
        with contextlib.suppress(OSError):
            one = rollup_memory(Path("/proc", str(pid), "smaps_rollup").read_text())
            total = Memory(total.pss + one.pss, total.anonymous + one.anonymous)
    return total


def end(session: int, patience_s: float) -> None:
    """Kills the processes of a session; Python's trackers of leaked resources may do their work first.

    Args:
        session: that of processes which the caller has started.
        patience_s: how long the trackers may take.
    """
    deadline = time.monotonic() + patience_s
    while found := members(session):
        late = time.monotonic() > deadline
        for pid in found:
            with contextlib.suppress(OSError):
                if late or b"resource_tracker" not in Path("/proc", str(pid), "cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        if all(fields[0] == "Z" for fields in found.values()):
            return
        time.sleep(0.01)


def processor_s() -> float:
    """Returns the processor time, of the system too, of this session: of what runs, and of what has been waited for."""
    own = time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    ticks = 0
    for pid, fields in members(os.getsid(0)).items():
        if pid != os.getpid():
            ticks += sum(int(fields[at]) for at in (_UTIME, _STIME, _CUTIME, _CSTIME))
    return own + ticks / TICKS_PER_S
