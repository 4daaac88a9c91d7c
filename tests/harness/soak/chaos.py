"""What is done to a soak: who is killed or stopped when, and when the disk is full, drawn by chance from a seed.
Storms and calms take turns: in a calm nothing happens, so that processes live long enough for a leak to show."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from tests.harness.soak.watch import children

if TYPE_CHECKING:
    from tests.harness.soak.job import Job
    from tests.harness.soak.run import Settings, Soak

_PAUSE_S: Final = 3.0  # Mean time from one fault of a storm to the next
STOP_S: Final = 3.0  # The longest time for which somebody is stopped, or the disk is full
DISK_FULL: Final = "disk full for a while"


class Chaos:
    def __init__(self, soak: Soak, settings: Settings, dice: random.Random) -> None:
        self.options: tuple[str, ...] = ()  # of the command, besides those that never change
        self._soak, self._dice = soak, dice
        self._half_cycle_s = settings.half_cycle_s
        self._next_s, self._wake_at = _PAUSE_S, 0.0
        self._stopped: list[int] = []
        self._full_until, self._full = -float("inf"), False
        # Name, how often beside the others, whether it ends ranks, and what is done.
        self._faults: list[tuple[str, int, bool, Callable[[], bool]]] = [
            ("producer killed (SIGKILL)", 3, False, self._kill_producer),
            ("producer asked to end (SIGTERM)", 1, False, lambda: self._signal_producer(signal.SIGTERM)),
            ("producer stopped for a while (SIGSTOP, SIGCONT)", 1, False, lambda: self._stop([soak.producer.pid])),
            ("all ranks killed at once (SIGKILL)", 3, True, lambda: self._end(lambda job: job.pids)),
            ("all ranks asked to end (SIGTERM)", 1, True, lambda: self._end(lambda job: job.pids, signal.SIGTERM)),
            ("one rank killed, then the others (SIGKILL)", 2, True, lambda: self._end(lambda job: self._one(job.pids))),
            ("one DataLoader worker killed (SIGKILL)", 2, True, lambda: self._end(self._worker)),
            ("one rank or worker stopped for a while", 1, False, self._stop_rank),
            ("producer and ranks killed at once (SIGKILL)", 1, True, self._kill_all),
            (DISK_FULL, 2, False, self._fill_disk),
        ]

    def is_full(self, after_s: float) -> bool:
        return time.monotonic() < self._full_until + after_s

    def tick(self, elapsed_s: float) -> None:
        self._go_on()
        if elapsed_s < self._next_s:
            return
        cycle_s = 2 * self._half_cycle_s
        if elapsed_s % cycle_s >= self._half_cycle_s:
            self._next_s = (elapsed_s // cycle_s + 1) * cycle_s
            return
        self._next_s = elapsed_s + self._dice.expovariate(1 / _PAUSE_S)
        job = self._soak.job  # Ranks that have only just begun are hit now and then; always, and they would get nowhere
        hits_ranks = job is not None and (job.steps > 0 or self._dice.random() < 0.2)
        faults = [one for one in self._faults if hits_ranks or not one[2]]
        name, _, _, do = self._dice.choices(faults, [one[1] for one in faults])[0]
        if do():
            self._soak.report.done[name] += 1
            self._soak.report.kills += 1
            self._soak.moved()

    def calm_down(self) -> None:
        self._wake_at = 0.0
        self._full_until = min(self._full_until, time.monotonic())
        self._go_on()

    def _go_on(self) -> None:
        now = time.monotonic()
        if self._stopped and now >= self._wake_at:
            for pid in self._stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            self._stopped.clear()
            self._soak.moved()
        if self._full and self._soak.ballast is not None:
            self._soak.moved()
            self._full = now < self._full_until
            (self._soak.ballast.fill if self._full else self._soak.ballast.drop)()

    def _one(self, of: list[int]) -> list[int]:
        return [self._dice.choice(of)] if of else []

    def _signal_producer(self, number: signal.Signals) -> bool:
        self._soak.producer.signal(number, self._dice.choice([0.0, self._dice.random()]))
        return self._soak.producer.pid != 0

    def _kill_producer(self) -> bool:
        # Now and then it is to wait for a full disk, and not to fail there.
        self.options = ("--min-free-disk", "1MB") if self._dice.random() < 0.5 else ()
        return self._signal_producer(signal.SIGKILL)

    def _end(self, which: Callable[[Job], list[int]], number: signal.Signals = signal.SIGKILL) -> bool:
        job = self._soak.job
        if job is None or job.ended or not (pids := which(job)):
            return False
        job.signal(pids, number)
        return True

    def _worker(self, job: Job) -> list[int]:
        return self._one([child for pid in job.pids for child in children(pid)])

    def _kill_all(self) -> bool:
        self._soak.producer.signal(signal.SIGKILL)
        return self._end(lambda job: job.pids)

    def _stop_rank(self) -> bool:
        job = self._soak.job
        return job is not None and not job.ended and self._stop(self._one([pid for pid, _ in job.processes()]))

    def _fill_disk(self) -> bool:
        if self._soak.ballast is None:
            return False
        self._full, self._full_until = True, time.monotonic() + self._dice.uniform(0.2, STOP_S)
        return True

    def _stop(self, pids: list[int]) -> bool:
        for pid in filter(None, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                self._stopped.append(pid)
                self._wake_at = max(self._wake_at, time.monotonic() + self._dice.uniform(0.2, STOP_S))
                return True
        return False
