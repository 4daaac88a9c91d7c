"""`lazyshard rechunk`: makes a stream with another number of samples in a chunk out of one that is there."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from lazyshard.cli import exits
from lazyshard.cli.progress import chunk_bar
from lazyshard.cli.units import size
from lazyshard.cli.wording import complain, count, say
from lazyshard.conversion.rechunking import MAX_WAIT_S, Rechunked, rechunk
from lazyshard.conversion.rechunking_target import check_directories
from lazyshard.errors import WaitTimeout
from lazyshard.format.manifest import MAX_SAMPLES_PER_CHUNK

HELP: Final = """Makes a stream with another number of samples in a chunk out of one that is there.

The rows keep their order, their bytes and their lengths in tokens; each is checked against its digest on the way. The
old stream is only read. The new one ends where the old one does.

It can be killed at any moment: run the same command again, and it goes on after the last chunk that it has
published."""

EPILOG: Final = """[bold]Examples[/bold]

lazyshard rechunk /shared/stream /shared/larger --samples-per-chunk 10000

lazyshard rechunk /shared/live /shared/copy --samples-per-chunk 100 --follow

lazyshard rechunk /shared/damaged /shared/rest --samples-per-chunk 1000 --end-at-damage

[bold]Exit codes[/bold]

  0  made, or it had been made before

  1  typer or rich is missing: pip install 'lazyshard\\[cli]'

  2  usage; there is no such directory; OUT is STREAM or lies in it

  3  refused: STREAM has not ended, its first chunks are deleted, or a row of it is no JSON object

  5  STREAM is damaged, or OUT is something else than its copy with so many samples in a chunk

  6  another process is writing to OUT

  7  the filesystem failed: disk full, read-only, no permission

 70  unexpected error

 71  not enough memory

 75  --follow: nothing came within --max-wait; run the same command again

130  Ctrl-C; run the same command again"""

_SAMPLES: Final = "--samples-per-chunk"


def command(
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="The directory of the stream that is there.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The directory of the new one; made if it is not there.")],
    samples_per_chunk: Annotated[
        int,
        typer.Option(
            _SAMPLES, metavar="N", min=1, max=MAX_SAMPLES_PER_CHUNK, help="Samples in every chunk of OUT but the last."
        ),
    ],
    source_samples_per_chunk: Annotated[
        int | None,
        typer.Option(
            "--source-samples-per-chunk",
            metavar="N",
            min=1,
            max=MAX_SAMPLES_PER_CHUNK,
            help="For a STREAM without stream.json: rows in every chunk but the last. Default: those of its first.",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Take a stream that has not ended, and go on until it does.")
    ] = False,
    max_wait: Annotated[
        float | None,
        typer.Option(
            "--max-wait",
            metavar="SECONDS",
            min=0.0,
            help=f"With --follow, how long to wait at the most for the next chunk. Default: {MAX_WAIT_S:g}.",
        ),
    ] = None,
    end_at_damage: Annotated[
        bool,
        typer.Option(
            "--end-at-damage",
            help="End OUT before the first row of STREAM that is damaged or lost, instead of leaving it open there.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on one line.")] = False,
) -> Callable[[], int]:
    """Returns what is to be done; see `lazyshard.cli.command`."""
    # An empty path, of a variable that was not set for instance, must not mean the current directory.
    if not os.path.isdir(stream):
        raise typer.BadParameter(f"{stream!r} is not a directory", param_hint="STREAM")
    if not out or (os.path.lexists(out) and not os.path.isdir(out)):
        raise typer.BadParameter(f"{out!r} is not a directory", param_hint="OUT")
    if max_wait is not None and not follow:
        raise typer.BadParameter("goes with --follow only", param_hint="--max-wait")
    source, target = Path(stream), Path(out)
    try:
        check_directories(source, target)
    except ValueError as cause:
        raise typer.BadParameter(str(cause), param_hint="OUT") from cause
    job = functools.partial(
        rechunk,
        source,
        target,
        samples_per_chunk,
        source_samples_per_chunk=source_samples_per_chunk,
        follow=follow,
        max_wait=MAX_WAIT_S if max_wait is None else max_wait,
        end_at_damage=end_at_damage,
    )
    return lambda: _run(job, target, samples_per_chunk, as_json)


def _run(job: Callable[..., Rechunked], target: Path, samples_per_chunk: int, as_json: bool) -> int:
    started = time.monotonic()
    try:
        with chunk_bar() as show:
            made = job(report=show)
    except WaitTimeout as error:
        # The reader names the argument that its callers in Python have.
        complain(str(error).replace("with max_wait", "with --max-wait"))
        return exits.TIMED_OUT
    seconds = time.monotonic() - started
    if as_json:
        say(json.dumps(_values(target, made, samples_per_chunk, seconds)))
    else:
        say(_summary(target, made, samples_per_chunk, seconds))
    return exits.DONE


def _summary(target: Path, made: Rechunked, samples_per_chunk: int, seconds: float) -> str:
    where = "" if made.damage is None else f" before what is damaged ({made.damage})"
    holds = (
        f"{target} holds {count(made.chunks, 'chunk')}, {count(made.samples, 'sample')}, "
        f"{samples_per_chunk:,} a chunk; ended{where}"
    )
    if not made.new:
        return f"already made: {holds}, nothing to do"
    before = made.samples - made.copied
    went_on = f" went on after {count(before, 'sample')};" if before else ""
    speed = size(made.size / max(seconds, 1e-3))
    return f"made: {holds};{went_on} copied {size(made.size)} ({seconds:.1f} s, {speed}/s)"


def _values(target: Path, made: Rechunked, samples_per_chunk: int, seconds: float) -> dict[str, Any]:
    return {
        "stream": str(target),
        "new": made.new,
        "chunks": made.chunks,
        "samples": made.samples,
        "samples_per_chunk": samples_per_chunk,
        "copied_samples": made.copied,
        "copied_bytes": made.size,
        "damage": made.damage,
        "seconds": round(seconds, 3),
    }
