"""What is done to a soak: who is killed or stopped when, and when the disk is full. Storms and calms take turns. In a
storm something happens every few seconds; in a calm nothing does, so that processes live long enough for a leak to
show. What happens is drawn by chance from a seed; when it does, in the life of whatever it meets, is not fixed by that.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from tests.harness.soak import report as soak_report
from tests.harness.soak.watch import children

if TYPE_CHECKING:
    from tests.harness.soak.report import Settings
    from tests.harness.soak.run import Soak

_PAUSE_S: Final = 3.0  # Mean time from one fault of a storm to the next
_STOP_S: Final = 3.0  # The longest time for which somebody is stopped, or the disk is full


_OF_RANKS: Final = (
    soak_report.JOB_KILLED,
    soak_report.JOB_ENDED,
    soak_report.RANK_KILLED,
    soak_report.WORKER_KILLED,
    soak_report.ALL_KILLED,
)


class Chaos:
    def __init__(self, soak: Soak, settings: Settings, dice: random.Random) -> None:
        self.options: tuple[str, ...] = ()  # of the command, besides those that never change
        self.stopped_s = _STOP_S  # the longest that anybody is stopped
        self._soak = soak
        self._dice = dice
        self._half_cycle_s = settings.half_cycle_s
        self._next_s = _PAUSE_S
        self._wake_at = 0.0
        self._stopped: list[int] = []
        self._full_until = -float("inf")
        self._full = False
        self._last = ""
        self._faults: dict[str, tuple[int, Callable[[], bool]]] = {
            soak_report.PRODUCER_KILLED: (3, self._kill_producer),
            soak_report.PRODUCER_ENDED: (1, self._end_producer),
            soak_report.PRODUCER_STOPPED: (1, self._stop_producer),
            soak_report.JOB_KILLED: (3, self._kill_job),
            soak_report.JOB_ENDED: (1, self._end_job),
            soak_report.RANK_KILLED: (2, self._kill_rank),
            soak_report.WORKER_KILLED: (2, self._kill_worker),
            soak_report.RANK_STOPPED: (1, self._stop_rank),
            soak_report.ALL_KILLED: (1, self._kill_all),
            soak_report.DISK_FULL: (2, self._fill_disk),
        }

    def is_full(self, after_s: float) -> bool:
        """Returns whether the disk is full, or was within the last seconds."""
        return time.monotonic() < self._full_until + after_s

    def tick(self, elapsed_s: float) -> None:
        """Does what is due so many seconds after the soak has begun."""
        self._go_on()
        if elapsed_s < self._next_s:
            return
        cycle_s = 2 * self._half_cycle_s
        if elapsed_s % cycle_s >= self._half_cycle_s:
            self._next_s = (elapsed_s // cycle_s + 1) * cycle_s
            return
        self._next_s = elapsed_s + self._dice.expovariate(1 / _PAUSE_S)
        names = [name for name in self._faults if name not in _OF_RANKS or self._may_hit_ranks()]
        name = self._dice.choices(names, [self._faults[name][0] for name in names])[0]
        if self._faults[name][1]():
            self._soak.report.done[name] += 1
            self._soak.moved()

    def calm_down(self) -> None:
        """Takes back whatever is done at the moment, for good."""
        self._wake_at = 0.0
        self._full_until = min(self._full_until, time.monotonic())
        self._go_on()

    def _go_on(self) -> None:
        """Wakes those whose time has come, and keeps the disk full or gives its room back."""
        now = time.monotonic()
        if self._stopped and now >= self._wake_at:
            for pid in self._stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            self._stopped.clear()
            self._soak.moved()
        if self._full and self._soak.ballast is not None:
            self._soak.moved()
            if now < self._full_until:
                self._soak.ballast.fill()
            else:
                self._soak.ballast.drop()
                self._full = False

    def _may_hit_ranks(self) -> bool:
        """Ranks that have only just begun are hit now and then; always, and they would get nowhere."""
        job = self._soak.job
        return job is not None and (job.steps > 0 or self._dice.random() < 0.2)

    def _pause(self) -> float:
        return self._dice.choice([0.0, self._dice.random()])

    def _kill_producer(self) -> bool:
        # Now and then it is to wait for a full disk, and not to fail there.
        self.options = ("--min-free-disk", "1MB") if self._dice.random() < 0.5 else ()
        self._soak.producer.signal(signal.SIGKILL, self._pause())
        return self._soak.producer.pid != 0

    def _end_producer(self) -> bool:
        self._soak.producer.signal(signal.SIGTERM, self._pause())
        return self._soak.producer.pid != 0

    def _stop_producer(self) -> bool:
        pid = self._soak.producer.pid
        return pid != 0 and self._stop(pid)

    def _kill_job(self) -> bool:
        return self._signal_ranks(signal.SIGKILL)

    def _end_job(self) -> bool:
        return self._signal_ranks(signal.SIGTERM)

    def _signal_ranks(self, number: signal.Signals) -> bool:
        job = self._soak.job
        if job is None or job.ended:
            return False
        job.signal(job.pids, number)
        return True

    def _kill_rank(self) -> bool:
        job = self._soak.job
        if job is None or job.ended:
            return False
        job.signal([self._dice.choice(job.pids)], signal.SIGKILL)
        return True

    def _kill_worker(self) -> bool:
        job = self._soak.job
        if job is None or job.ended:
            return False
        workers = [child for pid in job.pids for child in children(pid)]
        if not workers:
            return False
        job.signal([self._dice.choice(workers)], signal.SIGKILL)
        return True

    def _stop_rank(self) -> bool:
        job = self._soak.job
        if job is None or job.ended:
            return False
        return self._stop(self._dice.choice([pid for pid, _ in job.processes()]))

    def _kill_all(self) -> bool:
        self._soak.producer.signal(signal.SIGKILL)
        return self._kill_job()

    def _fill_disk(self) -> bool:
        if self._soak.ballast is None:
            return False
        self._full = True
        self._full_until = time.monotonic() + self._dice.uniform(0.2, _STOP_S)
        return True

    def _stop(self, pid: int) -> bool:
        try:
            os.kill(pid, signal.SIGSTOP)
        except ProcessLookupError:
            return False
        self._stopped.append(pid)
        self._wake_at = max(self._wake_at, time.monotonic() + self._dice.uniform(0.2, _STOP_S))
        return True
