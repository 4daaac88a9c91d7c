"""What is shown while a run goes on, all of it on stderr: a bar on a terminal, else a line a minute for the log.

A stderr that is gone (a closed pipe, a full disk) is no reason to stop: what cannot be shown is left out.
"""

from __future__ import annotations

import contextlib
import sys
from datetime import datetime, timezone
from typing import Final, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from lazyshard_producer.wording import Outcome, Tally, log_line, stopped, summary, tally_values, warning_line

BAR_EVERY_S: Final = 0.2
"""How often the bar's figures change; faster than anybody reads."""

LOG_EVERY_S: Final = 60.0
"""At the most one line so often: a run of a day leaves some 1,440 lines."""


class Display(Protocol):
    """Shows a run. Nothing it does raises OSError.

    Attributes:
        every_s: how many seconds after the last call `show` wants the next.
    """

    every_s: float

    def start(self, out: str, tally: Tally) -> None:
        """Says that the run starts."""

    def show(self, tally: Tally) -> None:
        """Says how far it is."""

    def warn(self, text: str) -> None:
        """Says what is odd."""

    def finish(self, outcome: Outcome) -> None:
        """Says how it came out, in the last line."""

    def close(self) -> None:
        """Takes away what moves on the screen; may be called twice."""


class Quiet:
    """Warnings and the last line, nothing else."""

    every_s: float = LOG_EVERY_S

    def __init__(self, log: bool) -> None:
        self._log = log

    def start(self, out: str, tally: Tally) -> None:
        """Says nothing."""

    def show(self, tally: Tally) -> None:
        """Says nothing."""

    def warn(self, text: str) -> None:
        """Prints a line."""
        say(warning_line(text))

    def finish(self, outcome: Outcome) -> None:
        """Prints a line: for a log with key=value, for people a sentence."""
        values = {"result": outcome.end, "out": outcome.out} | tally_values(outcome.tally)
        if outcome.end != "finished":
            values["message"] = stopped(outcome)
        say(log_line("end", _now(), **values) if self._log else summary(outcome))

    def close(self) -> None:
        """Does nothing."""


class Log(Quiet):
    """A line of key=value at the start, every `LOG_EVERY_S` and at the end."""

    def __init__(self) -> None:
        super().__init__(log=True)

    def start(self, out: str, tally: Tally) -> None:
        """Prints a line."""
        say(log_line("start", _now(), out=out, **tally_values(tally)))

    def show(self, tally: Tally) -> None:
        """Prints a line."""
        say(log_line("progress", _now(), **tally_values(tally)))


class Bar(Quiet):
    """A bar: the share of the sources' bytes that is read, and what that means in time."""

    every_s: float = BAR_EVERY_S

    def __init__(self, console: Console) -> None:
        super().__init__(log=False)
        self._console = console
        self._progress = Progress(
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            auto_refresh=False,
        )
        self._task = self._progress.add_task("", total=None, figures="")

    def start(self, out: str, tally: Tally) -> None:
        """Draws the bar."""
        with contextlib.suppress(OSError):
            self._progress.update(self._task, total=max(1, tally.bytes_total), completed=tally.bytes_read)
            self._progress.reset(self._task, completed=tally.bytes_read, figures=_figures(tally))
            self._progress.start()

    def show(self, tally: Tally) -> None:
        """Moves the bar."""
        with contextlib.suppress(OSError):
            total = max(1, tally.bytes_read, tally.bytes_total)
            self._progress.update(self._task, total=total, completed=tally.bytes_read, figures=_figures(tally))
            self._progress.refresh()

    def warn(self, text: str) -> None:
        """Prints a line above the bar."""
        with contextlib.suppress(OSError):
            self._console.print(warning_line(text), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Takes the bar away."""
        with contextlib.suppress(OSError):
            self._progress.stop()


def choose_display(quiet: bool) -> Display:
    """Returns the display that suits stderr."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        return Quiet(log=not console.is_terminal) if quiet else Log()
    return Bar(console)


def say(line: str) -> None:
    """Prints a line on stderr, if it still goes anywhere."""
    if sys.stderr is None:  # closed before the start; print() would take stdout instead
        return
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def _figures(tally: Tally) -> str:
    return f"{tally.samples:,} samples  {tally.rate:,.0f}/s  {tally.chunks:,} chunks"


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
