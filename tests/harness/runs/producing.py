"""The producer of a run: the real command in a fork, started again whenever it was killed, until the stream ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Final

from lazyshard_producer.cli import main as produce
from lazyshard_producer.holding import hold, holdback
from tests.harness.processes.forks import forked, last_words, reap
from tests.harness.runs.history import OF_A_STREAM, Violation
from tests.harness.runs.kills import PRODUCER, Board, count_calls
from tests.harness.runs.plan import RunPlan
from tests.harness.runs.rank import CONSUMER, row

_OFTEN_S: Final = 0.005
"""How often it looks at its consumers: what may be deleted is to be deleted at once, not when all is over."""


class Producing:
    """The producer.

    Args:
        run: the run, as one over this stream alone.
        folder: that of the run.
        board: where its calls are counted.
        number: of the stream.

    Attributes:
        stream: the stream's directory.
        fd: is readable when it has ended; -1 while there is none.
        died: how often it was killed alone.
    """

    def __init__(self, run: RunPlan, folder: Path, board: Board, number: int = 0) -> None:
        self.stream = folder / f"stream-{number}"
        self.fd = -1
        self.died = 0
        self._run = run
        self._board = board
        self._number = number
        self._said = folder / f"producer-{number}.log"
        self._source = folder / f"rows-{number}.jsonl"
        first = number * OF_A_STREAM
        self._source.write_text("".join(json.dumps(row(first + sample)) + "\n" for sample in range(run.samples)))
        self._deaths = iter(run.deaths)
        self._pid = 0
        self._ended = False

    def start(self, group: int) -> None:
        """Starts it if it is not there and the stream has not ended, and moves it into a group; 0 is one of its own."""
        if self._pid == 0 and not self._ended:
            alone_at = next(self._deaths, 0)
            self._pid = forked(lambda: self._produce(alone_at), self._said)
            self.fd = os.pidfd_open(self._pid)
            self._board.set_producing(self._number, True)
        if self._pid:
            # Fails if it is gone by now, which is noticed elsewhere.
            with contextlib.suppress(ProcessLookupError):
                os.setpgid(self._pid, group or self._pid)

    def has_ended(self) -> None:
        """Reaps it; one that was killed alone may be started again.

        Raises:
            Violation: it has failed.
        """
        status = self._reap()
        self._ended = status == 0
        if status not in (0, -signal.SIGKILL):
            raise Violation("producer", f"the producer ended with {status}: {last_words(self._said)}")
        if status and not self._board.killed:
            self.died += 1

    def stop(self) -> None:
        """Kills it, if it is there."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            self._reap()

    def said(self) -> str:
        """Returns its last words."""
        return last_words(self._said)

    def _reap(self) -> int:
        status = reap(self._pid, "the producer")
        os.close(self.fd)
        self._pid, self.fd = 0, -1
        self._board.set_producing(self._number, False)
        return status

    def _produce(self, alone_at: int) -> int:
        holdback.LOOK_S = holdback.HELD_LOOK_S = _OFTEN_S  # type: ignore[misc]
        hold._RETRY_MIN_S = _OFTEN_S  # type: ignore[misc]
        count_calls(self._board, PRODUCER + self._number, alone_at)
        return produce(
            [
                *("run", "--source", str(self._source), "--out", str(self.stream), "--no-progress"),
                *(
                    "--samples-per-chunk",
                    str(self._run.per_chunk),
                    "--retain",
                    self._run.retain,
                    "--consumers",
                    CONSUMER,
                ),
                *self._run.pace,
            ]
        )
