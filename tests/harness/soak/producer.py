"""The producer of a soak: the real command, started again whenever it has ended, until the stream has."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.harness.processes.forks import forked, kill, last_words, reap
from tests.harness.soak import rows as soak_rows
from tests.harness.soak.ledger import Violation
from tests.producer.commands import environment

FULL: Final = 7
"""The exit code of a run that the filesystem has refused."""


class Producer:
    """Starts and reaps it.

    Args:
        stream: the stream's directory.
        options: of the command, besides source and stream.
        said: where its words go.
        stop: the file that asks the source to end.

    Attributes:
        pid: of the process, 0 while there is none.
        starts: how often it was started.
        fulls: how often it ended since the disk was full.
        ended: whether the stream has ended.
    """

    def __init__(self, stream: Path, options: Sequence[str], said: Path, stop: Path) -> None:
        self.pid = 0
        self.starts = self.fulls = 0
        self.ended = False
        self._stream = stream
        self._options = tuple(options)
        self._said = said
        self._stop = stop
        self._expected: set[int] = set()
        self._start_at = 0.0

    def start(self, more: Sequence[str] = ()) -> None:
        """Starts it if it is not there, the stream has not ended, and the pause before it is over."""
        if self.pid or self.ended or time.monotonic() < self._start_at:
            return
        self._expected.clear()
        command = [sys.executable, "-m", "lazyshard_producer", "run", "--no-progress"]
        command += ["--source", soak_rows.SOURCE, "--out", str(self._stream), *self._options, *more]
        variables = environment() | {soak_rows.STOP: str(self._stop)}
        # Of all its lives the last words of one are enough.
        self._said.write_bytes(b"")
        self.pid = forked(lambda: os.execve(sys.executable, command, variables), self._said)
        self.starts += 1

    def signal(self, number: signal.Signals, pause_s: float = 0.0) -> None:
        """Sends it a signal; one by which it ends is expected from now on, and it is started again after a pause."""
        if not self.pid:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self._expected |= {-signal.SIGKILL} if number == signal.SIGKILL else {0, -signal.SIGTERM}
            self._start_at = time.monotonic() + pause_s

    def check(self, *, full: bool) -> bool:
        """Reaps it if it has ended; returns whether it has just now.

        Args:
            full: whether the disk is full, or was a moment ago.

        Raises:
            Violation: it has ended for no reason.
        """
        if not self.pid:
            return False
        found, status = os.waitpid(self.pid, os.WNOHANG)
        if not found:
            return False
        self.pid = 0
        code = os.waitstatus_to_exitcode(status)
        if code == 0 and (self._stream / "stream.end").exists():
            self.ended = True
        elif code == FULL and full:
            self.fulls += 1
            self._start_at = max(self._start_at, time.monotonic() + 0.5)
        elif code not in self._expected:
            raise Violation("producer", f"it ended by itself with {code}: {last_words(self._said)}")
        return True

    def close(self) -> None:
        """Kills it, if it is there."""
        if self.pid:
            kill(self.pid)
            reap(self.pid, "the producer")
            self.pid = 0

    def said(self) -> str:
        """Returns its last words."""
        return last_words(self._said)
