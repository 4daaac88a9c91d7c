"""What is shown while a run goes on, all of it on stderr: a bar on a terminal, else a line a minute for the log.

A stderr that is gone (a closed pipe, a full disk) is no reason to stop. A live source that trickles makes a run wait
after every row: waits that last get a line, those that come one after another get one together.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

from lazyshard_producer import wording
from lazyshard_producer.wording import Outcome, Tally


class RecentRate:
    """Rows a second over the last `window_s` seconds; further back only where nothing was noted since."""

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


LASTING_S: Final = 5.0  # From here on a wait is worth a line; the heartbeat in head.json says `waiting` then too
BAR_EVERY_S: Final = 0.2  # How often the bar's figures change; faster than anybody reads
LOG_EVERY_S: Final = 60.0  # At the most one line so often: a run of a day leaves some 1,440 lines
_BAR_RATE_S: Final = 10.0  # The bar's rate is that of so many seconds: it neither jumps nor lags


class Display:
    """A line of key=value at the start, every `every_s` seconds, at the end, and where a wait begins and is over.

    Without `every_s` only warnings and the last line, which is for a log or for people. None raises OSError. `show` is
    wanted `every_s` seconds after its last call.
    """

    every_s: float = LOG_EVERY_S

    def __init__(
        self, log: bool, every_s: float | None = None, clock: Callable[[], float] = time.monotonic, rate_s: float = 0.0
    ) -> None:
        self._log = log
        self._quiet = every_s is None
        self._clock = clock
        self._rate = RecentRate(rate_s)
        # Of the wait that goes on, if one does: why, since when, and whether that was told; and when one was told last.
        self._reason: str | None = None
        self._began = 0.0
        self._told = False
        self._told_at = float("-inf")
        if every_s is not None:
            self.every_s = every_s

    def start(self, out: str, tally: Tally) -> None:
        """Says that the run starts."""
        self._rate.note(tally.new, tally.seconds)
        self._event("start", out=out, **wording.tally_values(tally), sources=tally.sources)

    def show(self, tally: Tally) -> None:
        """Says how far it is; the rate is that since the last time."""
        waiting = self._lasting()
        values = {} if waiting is None else {"waiting": waiting}
        self._event("progress", **wording.tally_values(tally, self._rate.note(tally.new, tally.seconds)), **values)

    def wait(self, reason: str | None) -> None:
        """Is told, as often as one likes, that the run waits and for what, which may change; None: it goes on."""
        now = self._clock()
        if reason is None:
            if self._told:
                self._event("resumed", waited_seconds=now - self._began)
            self._told, self._reason = False, None
            return
        if self._reason is None:
            self._began = now
        self._reason = reason
        if not self._told and now - self._began >= LASTING_S and now - self._told_at >= self.every_s:
            self._told, self._told_at = True, now
            self._event("waiting", reason=reason)

    def note(self, text: str) -> None:
        """Says what may be of interest."""
        self._event("note", message=text)

    def warn(self, text: str) -> None:
        """Says what is odd."""
        self._print(wording.warning_line(text))

    def log_every(self, seconds: float) -> None:
        """Takes another time between two lines of a log; means nothing to a bar."""
        self.every_s = seconds

    def finish(self, outcome: Outcome) -> None:
        """Says how it came out, in the last line: for a log with key=value, for people a sentence."""
        values = {"result": outcome.end, "out": outcome.out} | wording.tally_values(outcome.tally)
        if outcome.end != "finished":
            values["message"] = wording.stopped(outcome)
        say(wording.log_line("end", _now(), **values) if self._log else wording.summary(outcome))

    def close(self) -> None:
        """Takes away what moves on the screen; may be called twice."""

    def _print(self, line: str) -> None:
        say(line)

    def _event(self, event: str, **values: Any) -> None:
        if not self._quiet:
            say(wording.log_line(event, _now(), **values))

    def _lasting(self) -> str | None:
        """Returns what is waited for, if that has gone on long enough to be of interest."""
        return self._reason if self._reason is not None and self._clock() - self._began >= LASTING_S else None


class Bar(Display):
    """A bar: the share of the sources' bytes that is read; where nobody knows how much comes, it only moves."""

    every_s: float = BAR_EVERY_S

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(False, None, clock, _BAR_RATE_S)
        self._console = console
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
            self._progress.reset(self._task)
            self._update(tally)
            self._progress.start()

    def show(self, tally: Tally) -> None:
        """Moves the bar."""
        with contextlib.suppress(OSError):
            self._update(tally)
            self._progress.refresh()

    def log_every(self, seconds: float) -> None:
        """Means nothing here."""

    def note(self, text: str) -> None:
        """Prints a line above the bar."""
        self._print(wording.note_line(text))

    def close(self) -> None:
        """Takes the bar away."""
        with contextlib.suppress(OSError):
            self._progress.stop()

    def _update(self, tally: Tally) -> None:
        text, waiting = wording.figures(tally, self._rate.note(tally.new, tally.seconds)), self._lasting()
        text = text if waiting is None else f"{text}  waiting: {waiting}"
        total = None if tally.bytes_total is None else max(1, tally.bytes_read, tally.bytes_total)
        self._progress.update(self._task, total=total, completed=tally.bytes_read, figures=text)

    def _print(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def choose_display(quiet: bool, log_every_s: float = LOG_EVERY_S) -> Display:
    """Returns the display that suits stderr: warnings and the last line only where `quiet`, else a bar or a log."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        return Display(not console.is_terminal, None if quiet else log_every_s)
    return Bar(console)


def say(line: str) -> None:
    """Prints a line on stderr, if it still goes anywhere."""
    if sys.stderr is None:  # closed before the start; print() would take stdout instead
        return
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
