"""A bar on a terminal while many chunks are worked through; nothing elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

MANY_CHUNKS: Final = 20
"""Fewer are mostly done before anybody has read a bar."""


@contextlib.contextmanager
def chunk_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Gives a function that shows a phase, how many chunks of it are done, and how many there are."""
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
        if total < MANY_CHUNKS:
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
