"""What is shown while a run goes on, all of it on stderr: a bar on a terminal, else a line a minute for the log.

A stderr that is gone (a closed pipe, a full disk) is no reason to stop: what cannot be shown is left out.

A live source that trickles makes a run wait a little after every row. A line is for waits that last; those that come
one after another get one line together, and the regular lines say the rest.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

from lazyshard_producer.wording import (
    Outcome,
    Tally,
    figures,
    log_line,
    note_line,
    stopped,
    summary,
    tally_values,
    warning_line,
)


class RecentRate:
    """Rows a second over the last while.

    Args:
        window_s: how far to look back, in seconds; further back only where nothing was noted since.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._noted: deque[tuple[float, int]] = deque()

    def note(self, rows: int, seconds: float) -> float:
        """Notes that there were so many rows after so many seconds, and returns the rate; 0 until time has passed."""
        while len(self._noted) > 1 and self._noted[1][0] <= seconds - self._window_s:
            self._noted.popleft()
        self._noted.append((seconds, rows))
        first_seconds, first_rows = self._noted[0]
        return (rows - first_rows) / (seconds - first_seconds) if seconds > first_seconds else 0.0


LASTING_S: Final = 5.0
"""From here on a wait is worth a line; the heartbeat in head.json says `waiting` after the same time."""


class Waits:
    """The wait that goes on, if one does.

    Args:
        every_s: seconds between two lines at the least.

    Attributes:
        every_s: the same.
    """

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self._reason: str | None = None
        self._began = 0.0
        self._told_at: float | None = None
        self._told = False

    def begin(self, reason: str, now: float) -> bool:
        """Notes that a wait goes on, from the first call to `end`; returns whether to say so now.

        Args:
            reason: what is waited for; it may change while the wait goes on.
            now: seconds of a monotonic clock.
        """
        if self._reason is None:
            self._began = now
        self._reason = reason
        if self._told or now - self._began < LASTING_S:
            return False
        if self._told_at is not None and now - self._told_at < self.every_s:
            return False
        self._told, self._told_at = True, now
        return True

    def end(self, now: float) -> float | None:
        """Notes that it is over; returns how many seconds it took if its begin was said."""
        told, self._told, self._reason = self._told, False, None
        return now - self._began if told else None

    def lasting(self, now: float) -> str | None:
        """Returns what is waited for, if that has gone on long enough to be of interest."""
        return self._reason if self._reason is not None and now - self._began >= LASTING_S else None


BAR_EVERY_S: Final = 0.2
"""How often the bar's figures change; faster than anybody reads."""

LOG_EVERY_S: Final = 60.0
"""At the most one line so often: a run of a day leaves some 1,440 lines."""

_BAR_RATE_S: Final = 10.0
"""The bar's rate is that of so many seconds: it neither jumps nor lags."""


class Display:
    """Shows warnings and the last line of a run; others show more. Nothing it does raises OSError.

    Args:
        log: whether the last line is for a log.

    Attributes:
        every_s: how many seconds after the last call `show` wants the next; it may change.
    """

    every_s: float = LOG_EVERY_S

    def __init__(self, log: bool) -> None:
        self._log = log

    def start(self, out: str, tally: Tally) -> None:
        """Says that the run starts."""

    def show(self, tally: Tally) -> None:
        """Says how far it is."""

    def wait(self, reason: str | None) -> None:
        """Is told, as often as one likes, that the run waits and for what; None: it goes on."""

    def note(self, text: str) -> None:
        """Says what may be of interest."""

    def warn(self, text: str) -> None:
        """Says what is odd."""
        say(warning_line(text))

    def log_every(self, seconds: float) -> None:
        """Takes another time between two lines of a log; means nothing to a bar."""

    def finish(self, outcome: Outcome) -> None:
        """Says how it came out, in the last line: for a log with key=value, for people a sentence."""
        values = {"result": outcome.end, "out": outcome.out} | tally_values(outcome.tally)
        if outcome.end != "finished":
            values["message"] = stopped(outcome)
        say(log_line("end", _now(), **values) if self._log else summary(outcome))

    def close(self) -> None:
        """Takes away what moves on the screen; may be called twice."""


class Log(Display):
    """A line of key=value at the start, every so many seconds, at the end, and where a wait begins and is over.

    Args:
        every_s: those seconds.
    """

    def __init__(self, every_s: float = LOG_EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(log=True)
        self.every_s = every_s
        self._clock = clock
        self._waits = Waits(every_s)
        self._rate = RecentRate(0.0)

    def start(self, out: str, tally: Tally) -> None:
        """Prints a line."""
        self._rate.note(tally.new, tally.seconds)
        say(log_line("start", _now(), out=out, **tally_values(tally), sources=tally.sources))

    def show(self, tally: Tally) -> None:
        """Prints a line; its rate is that since the last one."""
        values = tally_values(tally, self._rate.note(tally.new, tally.seconds))
        waiting = self._waits.lasting(self._clock())
        if waiting is not None:
            values["waiting"] = waiting
        say(log_line("progress", _now(), **values))

    def wait(self, reason: str | None) -> None:
        """Prints a line where a wait has gone on for a while, and one where that is over."""
        now = self._clock()
        if reason is not None:
            if self._waits.begin(reason, now):
                say(log_line("waiting", _now(), reason=reason))
            return
        waited = self._waits.end(now)
        if waited is not None:
            say(log_line("resumed", _now(), waited_seconds=waited))

    def note(self, text: str) -> None:
        """Prints a line."""
        say(log_line("note", _now(), message=text))

    def log_every(self, seconds: float) -> None:
        """Takes another time between two lines."""
        self.every_s = self._waits.every_s = seconds


class Bar(Display):
    """A bar: the share of the sources' bytes that is read, and what that means in time.

    Where nobody can know how much there will be, it only moves, and the figures count.
    """

    every_s: float = BAR_EVERY_S

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(log=False)
        self._console = console
        self._clock = clock
        self._waits = Waits(LOG_EVERY_S)
        self._rate = RecentRate(_BAR_RATE_S)
        self._progress = Progress(
            BarColumn(bar_width=20),
            TaskProgressColumn(),
            TextColumn("{task.fields[figures]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            auto_refresh=False,
        )
        self._task = self._progress.add_task("", total=None, figures="")

    def start(self, out: str, tally: Tally) -> None:
        """Draws the bar."""
        with contextlib.suppress(OSError):
            self._progress.reset(self._task, completed=tally.bytes_read, figures=self._figures(tally))
            self._progress.update(self._task, total=_total(tally))
            self._progress.start()

    def show(self, tally: Tally) -> None:
        """Moves the bar."""
        with contextlib.suppress(OSError):
            text = self._figures(tally)
            self._progress.update(self._task, total=_total(tally), completed=tally.bytes_read, figures=text)
            self._progress.refresh()

    def wait(self, reason: str | None) -> None:
        """Notes what is to stand beside the bar."""
        now = self._clock()
        if reason is not None:
            self._waits.begin(reason, now)
        else:
            self._waits.end(now)

    def note(self, text: str) -> None:
        """Prints a line above the bar."""
        self._print(note_line(text))

    def warn(self, text: str) -> None:
        """Prints a line above the bar."""
        self._print(warning_line(text))

    def close(self) -> None:
        """Takes the bar away."""
        with contextlib.suppress(OSError):
            self._progress.stop()

    def _figures(self, tally: Tally) -> str:
        text = figures(tally, self._rate.note(tally.new, tally.seconds))
        waiting = self._waits.lasting(self._clock())
        return text if waiting is None else f"{text}  waiting: {waiting}"

    def _print(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def choose_display(quiet: bool, log_every_s: float = LOG_EVERY_S) -> Display:
    """Returns the display that suits stderr.

    Args:
        quiet: whether to show warnings and the last line only.
        log_every_s: seconds between two lines where stderr is no terminal.
    """
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        return Display(log=not console.is_terminal) if quiet else Log(log_every_s)
    return Bar(console)


def say(line: str) -> None:
    """Prints a line on stderr, if it still goes anywhere."""
    if sys.stderr is None:  # closed before the start; print() would take stdout instead
        return
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def _total(tally: Tally) -> int | None:
    return None if tally.bytes_total is None else max(1, tally.bytes_read, tally.bytes_total)


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
