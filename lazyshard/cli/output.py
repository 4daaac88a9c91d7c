"""What the command says, and where: results on stdout, errors on stderr, a line each; amounts for people; a bar."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Final

from lazyshard.errors import redact
from lazyshard.stream.pacing import format_seconds

NAME: Final = "lazyshard"


_SIZES: Final = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))

_DAY_S: Final = 86400.0

_MANY_CHUNKS: Final = 20
"""Fewer are mostly done before anybody has read a bar."""


def one_line(text: str) -> str:
    """Returns a text with control characters escaped: a file name may hold a line end, a message must not."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def count(number: int, noun: str) -> str:
    """Returns a number with its noun.

    >>> count(1, "row"), count(2000, "row")
    ('1 row', '2,000 rows')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def chunk_range(first: int, stop: int) -> str:
    """Returns the chunks of the half-open range [first, stop), at least one.

    >>> chunk_range(3, 4), chunk_range(0, 1200)
    ('chunk 3', 'chunks 0 to 1,199')
    """
    return f"chunk {first:,}" if stop == first + 1 else f"chunks {first:,} to {stop - 1:,}"


def say(text: str) -> None:
    """Prints a result.

    Raises:
        OSError: standard output takes nothing, as on a full disk. That nobody reads it any more is no error.
    """
    # What was done stays done when nobody listens any more.
    with contextlib.suppress(BrokenPipeError, ValueError):
        print(one_line(text), file=sys.stdout, flush=True)


def complain(text: str) -> None:
    """Prints an error."""
    explain(f"{NAME}: error: {text}")


def explain(text: str) -> None:
    """Prints a line that belongs to an error, if it still goes anywhere."""
    with contextlib.suppress(OSError, ValueError):
        print(one_line(redact(text)), file=sys.stderr, flush=True)


def drop_what_nobody_reads() -> None:
    """Lets go of an output that takes nothing any more.

    Python flushes both once more as it ends, and where that fails makes the exit code 120, whatever it was.
    """
    for name in ("stdout", "stderr"):
        try:
            if getattr(sys, name) is not None:
                getattr(sys, name).flush()
        except (OSError, ValueError):
            setattr(sys, name, None)


def size(number: float) -> str:
    """Returns a number of bytes, in powers of 1,000.

    >>> size(999), size(1000), size(12_345_678), size(5e15)
    ('999 bytes', '1.0 kB', '12.3 MB', '5,000.0 TB')
    """
    for unit, one in _SIZES:
        if number >= one:
            return f"{number / one:,.1f} {unit}"
    return "1 byte" if round(number) == 1 else f"{round(number)} bytes"


def duration(seconds: float) -> str:
    """Returns a duration.

    >>> duration(3), duration(125), duration(2 * 86400 + 7200), duration(1e9)
    ('3 s', '2 min 5 s', '2 days 2 h', 'over a year')
    """
    if seconds < 2 * _DAY_S:
        return format_seconds(seconds)
    if seconds > 365 * _DAY_S:
        return "over a year"
    hours = round(seconds / 3600)
    return f"{hours // 24} days {hours % 24} h"


def per_second(number: float, noun: str) -> str:
    """Returns a rate; a slow one with more digits, a very slow one by the hour.

    >>> per_second(1234.56, "samples"), per_second(0.25, "chunks"), per_second(0.001, "chunks"), per_second(0, "rows")
    ('1,234.6 samples/s', '0.25 chunks/s', '3.6 chunks/h', '0 rows/s')
    """
    if number == 0:
        return f"0 {noun}/s"
    if number < 0.01:
        return f"{number * 3600:,.1f} {noun}/h"
    return f"{number:,.1f} {noun}/s" if number >= 1 else f"{number:.2f} {noun}/s"


@contextlib.contextmanager
def chunk_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Shows a bar on a terminal while many chunks are worked through, nothing elsewhere.

    Gives a function that is told a phase, how many chunks of it are done, and how many there are.
    """
    # Only here, since the command's first words are that rich is missing.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda phase, done, total: None
        return
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("chunks"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    task = progress.add_task("", total=None)
    shown = ""

    def show(phase: str, done: int, total: int) -> None:
        nonlocal shown
        if total < _MANY_CHUNKS:
            return
        if phase != shown:
            shown = phase
            progress.reset(task, total=total, completed=done, description=phase)
            progress.start()
        progress.update(task, completed=done)

    try:
        yield show
    finally:
        # Nothing was started where nothing was shown; stopping then would still print an empty line.
        if shown:
            progress.stop()
