"""Forks that end with the process that made them, are reaped whatever becomes of them, and say why they failed."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import selectors
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

GONE_S: Final = 30.0
"""How long a killed process may take to be gone, on a machine that is very busy."""

PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


def adopt_orphans() -> None:
    """Makes this process the parent of whatever its children leave behind, so that it can be waited for."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def forked(work: Callable[[], int], said: Path) -> int:
    """Starts work in a fork and returns the process id. `said`: where its standard output and error go."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    # Else a full collection would write to all objects of the parent, and so make a copy of its memory.
    gc.freeze()
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            for fd in (1, 2):
                os.dup2(out, fd)
            code = work()
    except BaseException:
        with open(said, "a") as file:
            traceback.print_exc(file=file)
    finally:
        os._exit(code)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def has_ended(pid: int, within_s: float) -> bool:
    """Waits for so long for the end of a child; returns whether it has ended. It is still to be reaped."""
    fd = os.pidfd_open(pid)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            return bool(selector.select(within_s))
    finally:
        os.close(fd)


def exit_status(pid: int) -> int:
    """Reaps a child; returns its exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def reap(pid: int, what: str) -> int:
    """Waits for the end of a child; returns its exit status, negative for a signal. Raises TimeoutError: it does not
    end."""
    if not has_ended(pid, GONE_S):
        raise TimeoutError(f"{what} is still there after {GONE_S:.0f} s")
    return exit_status(pid)


def reap_group(group: int) -> None:
    """Kills and reaps what is left of a process group: the DataLoader workers whose rank is gone. Raises TimeoutError:
    some of it does not end."""
    deadline = time.monotonic() + GONE_S
    while True:
        try:
            found, _ = os.waitpid(-group, os.WNOHANG)
        except ChildProcessError:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"process group {group} is still there {GONE_S:.0f} s after it was killed")
        if not found:
            os.killpg(group, signal.SIGKILL)
            time.sleep(0.001)


def has_children() -> bool:
    """Returns whether anything is left of what this process has started."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def last_words(said: Path) -> str:
    try:
        return said.read_text(errors="replace")[-3000:]
    except FileNotFoundError:
        return ""
