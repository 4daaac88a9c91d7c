"""The demo's child processes, which run in their own sessions and are ended with all their descendants.

So Ctrl-C only reaches the demo, which ends the others. The demo is a Linux "child subreaper": a process whose parent
has died becomes its child, so no descendant is lost. If the demo itself is killed, the kernel signals its children to
end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_GRACE_S: Final = 3.0
"""How long a process may take to end after it was signalled."""

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_libc = ctypes.CDLL(None)

_ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",  # the ranks share few cores
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": "lo",  # whatever the machine's name resolves to
    "PYTHONUNBUFFERED": "1",
}


class Child:
    """A process whose output goes to a file.

    Args:
        name: how to call it.
        command: program and arguments.
        log: the file for its output.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | _ENVIRONMENT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def code(self) -> int | None:
        """Returns its exit code, negative for a signal, None while it runs."""
        return self._process.poll()


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant that loses its own."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_all() -> None:
    """Ends every descendant of this process, by SIGKILL if it takes too long, and returns when none is left."""
    forced = time.monotonic() + _GRACE_S
    told: set[int] = set()
    while running := _descendants():
        late = time.monotonic() > forced
        for pid in running if late else running - told:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        told |= running
        time.sleep(0.02)


def _descendants() -> set[int]:
    """Returns the descendants of this process, and reaps its own children that have ended."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            state, parent = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state == "Z":
            if int(parent) == os.getpid():
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(int(entry), os.WNOHANG)
        else:
            children.setdefault(int(parent), []).append(int(entry))
    found: set[int] = set()
    below = children.get(os.getpid(), [])
    while below:
        found.update(below)
        below = [child for pid in below for child in children.get(pid, ())]
    return found


def exit_text(code: int) -> str:
    """Says how a process ended.

    >>> exit_text(1), exit_text(-9)
    ('ended with exit code 1', 'was killed by SIGKILL')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def first_failed_rank(log: str) -> tuple[int, int] | None:
    """Returns rank and exit code of the first failed process in torchrun's log, or None.

    >>> first_failed_rank("E0101 failed (exitcode: -9) local_rank: 1 (pid: 7) of binary: python")
    (1, -9)
    """
    found = re.search(r"\(exitcode: (-?\d+)\) local_rank: (\d+)", log)
    return (int(found[2]), int(found[1])) if found else None


def last_lines(path: Path, count: int = 12) -> list[str]:
    """Returns the last nonempty lines of a log."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [line.rstrip() for line in lines if line.strip()][-count:]
