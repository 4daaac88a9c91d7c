"""`lazyshard status`: how a stream is, its producer and its consumers; once, or again and again."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from lazyshard.cli import exits
from lazyshard.cli.status_json import failure_values, status_values
from lazyshard.cli.status_view import WIDTH, status_lines
from lazyshard.cli.stream_options import check_stream
from lazyshard.cli.wording import one_line, say
from lazyshard.errors import LazyShardError, StreamMissing
from lazyshard.inspection.disk_use import LostChunks
from lazyshard.inspection.outlook import Looks, Outlook
from lazyshard.inspection.survey import take_survey
from lazyshard.store.urls import stream_path

INTERVAL_S: Final = 2.0

_MIN_INTERVAL_S: Final = 0.1
"""A look at a stream of any length takes a few milliseconds on a local disk; on a share it takes its server too."""

HELP: Final = """Says how a stream is: what is published, deleted and on disk, what the producer does and what it waits
for, where each consumer is, how far behind, and when something runs out.

Only looks, at any time and from any machine that sees the files; neither locks nor changes anything. How fast a
consumer is takes two looks: see [bold]--watch[/bold]."""

EPILOG: Final = """[bold]Examples[/bold]

lazyshard status /shared/stream

lazyshard status /shared/stream --watch

lazyshard status /shared/stream --json | jq .producer.state

[bold]Exit codes[/bold]

  0  looked, whatever there was to see

  1  typer or rich is missing: pip install 'lazyshard\\[cli]'

  2  usage; there is no such directory, or, with --watch, none in which it could be made

  3  two files have the same chunk number

  5  there is no stream in it, none that is complete, or one of a later format

  7  the filesystem or store failed: no permission, no answer

 70  unexpected error

 71  not enough memory

130  Ctrl-C, which is how --watch ends"""


def command(
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="The stream's directory, or its URL.")],
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again and again, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object on one line for each look.")] = False,
    interval: Annotated[
        float | None,
        typer.Option(
            "--interval",
            metavar="SECONDS",
            min=_MIN_INTERVAL_S,
            help=f"Seconds between two looks of --watch. Default: {INTERVAL_S:g}.",
        ),
    ] = None,
) -> Callable[[], int]:
    """Returns what is to be done; see `lazyshard.cli.command`."""
    check_stream(stream, may_come=watch)
    if interval is not None and not watch:
        raise typer.BadParameter("goes with --watch only", param_hint="--interval")
    if not watch:
        return lambda: _once(stream_path(stream), as_json)
    return lambda: _watch(stream_path(stream), as_json, INTERVAL_S if interval is None else interval)


def _once(stream: Path, as_json: bool) -> int:
    outlook = Looks().add(take_survey(stream, time.time()))
    if as_json:
        say(json.dumps(status_values(outlook)))
    else:
        for line in status_lines(outlook, watching=False):
            say(line)
    return exits.DONE


def _watch(stream: Path, as_json: bool, interval: float) -> int:
    looks, console, lost = Looks(), Console(), LostChunks()

    def look() -> Outlook:
        return looks.add(take_survey(stream, time.time(), lost))

    try:
        if as_json:
            for _ in _ticks(interval):
                _put(json.dumps(_values(stream, look)))
        elif console.is_terminal:
            _watch_terminal(stream, look, interval, console)
        else:
            for _ in _ticks(interval):
                at = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
                _put("\n".join([at, *_lines(stream, look, WIDTH), ""]))
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except OSError as error:
        # What is left in the buffer must not fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise
    # Nobody listens any more.
    return exits.DONE


def _watch_terminal(stream: Path, look: Callable[[], Outlook], interval: float, console: Console) -> None:
    with Live(console=console, auto_refresh=False) as live:
        for _ in _ticks(interval):
            lines = [*_lines(stream, look, min(WIDTH, console.width)), "", f"every {interval:g} s; Ctrl-C ends"]
            live.update(Text("\n".join(lines)), refresh=True)


def _lines(stream: Path, look: Callable[[], Outlook], width: int) -> list[str]:
    """Returns the page of a look, or the line of what has gone wrong: the next look may find it mended."""
    try:
        return status_lines(look(), watching=True, width=width)
    except StreamMissing:
        return [f"{one_line(str(stream))}: no stream is here; it will be shown as soon as its producer has begun it"]
    except (LazyShardError, OSError) as error:
        return [one_line(str(error))]


def _values(stream: Path, look: Callable[[], Outlook]) -> dict[str, Any]:
    now = time.time()
    try:
        return status_values(look())
    except (LazyShardError, OSError) as error:
        return failure_values(stream, now, str(error))


def _ticks(interval: float) -> Iterator[None]:
    """Yields at once and then every so many seconds; a look that takes longer delays the next, and none is made up."""
    due = time.monotonic()
    while True:
        yield
        due = max(due + interval, time.monotonic())
        time.sleep(due - time.monotonic())


def _put(text: str) -> None:
    print(text, flush=True)
