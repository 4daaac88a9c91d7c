"""Says how a stream is: published, deleted, on disk; its producer, its consumers, and when something runs out.

Only looks, at any time and from any machine that sees the files; neither locks nor changes anything. How fast a
consumer is takes two looks: see [bold]--watch[/bold].
"""

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
from lazyshard.cli.output import StreamArgument, check_stream, epilog, one_line, say
from lazyshard.cli.status_view import WIDTH, blend_of, problems, status_lines, summary
from lazyshard.errors import LazyShardError, StreamMissing
from lazyshard.inspection.outlook import ConsumerOutlook, Looks, OpenWindow, Outlook
from lazyshard.inspection.survey import Lines, LostChunks, take_survey
from lazyshard.store.urls import stream_path

INTERVAL_S: Final = 2.0
_MIN_INTERVAL_S: Final = 0.1  # A look takes a few milliseconds on a local disk; on a share it takes its server too
_SCHEMA: Final = 1  # Raised when a field goes or changes its meaning; new fields leave it

HELP: Final = __doc__

EPILOG: Final = epilog(
    [
        "lazyshard status /shared/stream",
        "lazyshard status /shared/stream --watch",
        "lazyshard status /shared/stream --json | jq .producer.state",
    ],
    {
        0: "looked, whatever there was to see",
        2: "usage; there is no such directory, or, with --watch, none in which it could be made",
        3: "two files have the same chunk number",
        5: "there is no stream in it, none that is complete, or one of a later format",
        7: "the filesystem or store failed: no permission, no answer",
        130: "Ctrl-C, which is how --watch ends",
    },
)


def command(
    stream: StreamArgument,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again and again, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object on one line for each look.")] = False,
    interval: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=_MIN_INTERVAL_S, help=f"Between looks of --watch. Default: {INTERVAL_S:g}."
        ),
    ] = None,
) -> Callable[[], int]:
    """Returns what is to be done; see `lazyshard.cli.command`."""
    check_stream(stream, may_come=watch)
    if interval is not None and not watch:
        raise typer.BadParameter("goes with --watch only", param_hint="--interval")
    if watch:
        return lambda: _watch(stream_path(stream), as_json, INTERVAL_S if interval is None else interval)

    def once() -> int:
        outlook = Looks().add(take_survey(stream_path(stream), time.time()))
        for line in [json.dumps(status_values(outlook))] if as_json else status_lines(outlook, watching=False):
            say(line)
        return exits.DONE

    return once


def _watch(stream: Path, as_json: bool, interval: float) -> int:
    looks, console, lost = Looks(), Console(), LostChunks()
    width = min(WIDTH, console.width) if console.is_terminal else WIDTH

    def look() -> list[str]:
        """Returns what a look says, or what has gone wrong: the next one may find it mended."""
        now = time.time()
        try:
            outlook = looks.add(take_survey(stream, now, lost))
        except (LazyShardError, OSError) as error:
            if as_json:
                return [json.dumps(failure_values(stream, now, str(error)))]
            missing = f"{stream}: no stream is here; it will be shown as soon as its producer has begun it"
            return [one_line(missing if isinstance(error, StreamMissing) else str(error))]
        return [json.dumps(status_values(outlook))] if as_json else status_lines(outlook, watching=True, width=width)

    try:
        if console.is_terminal and not as_json:
            with Live(console=console, auto_refresh=False) as live:
                for _ in _ticks(interval):
                    live.update(Text("\n".join([*look(), "", f"every {interval:g} s; Ctrl-C ends"])), refresh=True)
        for _ in _ticks(interval):
            at = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
            print("\n".join(look() if as_json else [at, *look(), ""]), flush=True)
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except OSError as error:
        # What is left in the buffer must not fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise
    # Nobody listens any more.
    return exits.DONE


def _ticks(interval: float) -> Iterator[None]:
    """Yields at once and then every so many seconds; a look that takes longer delays the next, and none is made up."""
    due = time.monotonic()
    while True:
        yield
        due = max(due + interval, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


def status_values(outlook: Outlook) -> dict[str, Any]:
    """Returns the values of a look: what is not known is None."""
    survey, census, band, head = outlook.survey, outlook.survey.census, outlook.band, outlook.survey.census.head
    manifest, refused = census.manifest, survey.quarantine or Lines(0, 0, True)

    def samples(chunks: float | None) -> float | None:
        return None if chunks is None or manifest is None else chunks * manifest.samples_per_chunk

    producer = head and {
        "state": outlook.state,
        "said_state": head.state,
        "host": head.host,
        "pid": head.pid,
        "process_is_gone": survey.gone,
        "process_has_ended": survey.ended,
        "heartbeat_age_s": outlook.heartbeat_age_s,
        "waits_for": (head.note or None) if head.state != "failed" else None,
        "failure": (head.note or None) if head.state == "failed" else None,
    }
    stretches = [{"first_chunk": one.first, "stop_chunk": one.stop, "state": one.state} for one in band.stretches]
    cells = [cell._asdict() | {"readers": [reader._asdict() for reader in cell.readers]} for cell in band.cells]
    return {
        "schema": _SCHEMA,
        "directory": str(survey.directory),
        "looked_at_s": survey.looked_at,
        "error": None,
        "summary": summary(outlook),
        "kind": "native" if census.native else "foreign",
        "stream_id": manifest and manifest.stream_id,
        "samples_per_chunk": manifest and manifest.samples_per_chunk,
        "ended": census.ended,
        "published_chunks": census.chunks,
        "published_samples": census.samples,
        "retired_chunks": census.retired,
        "retired_samples": samples(census.retired),
        "present_chunks": census.chunks - census.retired,
        "published_chunks_per_s": outlook.chunk_rate,
        "published_samples_per_s": samples(outlook.chunk_rate),
        "used_bytes": survey.disk.size,
        "used_bytes_is_exact": survey.disk.exact,
        "free_bytes": survey.free,
        "growth_bytes_per_s": outlook.byte_rate,
        "full_in_s": outlook.full_in_s,
        "quarantined_rows": refused.lines,
        "quarantined_rows_is_exact": refused.exact,
        "quarantine_bytes": refused.size,
        "mixture": [
            {"name": one.name, "weight": one.weight, "share": one.share}
            | {"drawn_rows": one.rows, "finished": one.finished}
            for one in survey.mixture
        ],
        "band": {"stop_chunk": band.stop, "stretches": stretches, "close_up": cells},
        "producer": producer,
        "consumers": [_consumer_values(one, band.windows.get(one.consumer.name), samples) for one in outlook.consumers],
        "problems": problems(outlook),
    }


def failure_values(directory: Path, looked_at: float, error: str) -> dict[str, Any]:
    """Returns the values of a look that has failed."""
    return {"schema": _SCHEMA, "directory": str(directory), "looked_at_s": looked_at, "error": error}


def _consumer_values(
    one: ConsumerOutlook, window: OpenWindow | None, samples: Callable[[float | None], float | None]
) -> dict[str, Any]:
    cursor, reading = one.consumer.cursor, one.consumer.reading
    told = {name: getattr(one, name) for name in one.__slots__ if name not in ("consumer", "remainder")}
    return {
        "name": one.consumer.name,
        **told,
        "ranks": reading and reading.dp_size,
        "consumed_samples": cursor and cursor.consumed,
        "chunks_before": cursor and cursor.chunks_before,
        "needs_chunks": reading and reading.needs_chunks,
        "window_first_chunk": window and window.first,
        "window_stop_chunk": window and window.stop,
        "ahead_samples": samples(one.ahead_chunks),
        "read_samples_per_s": samples(one.read_chunks_per_s),
        "blend": [
            {"stream": share.stream, "weight": share.weight, "share": given, "consumed_samples": share.consumed}
            for share, given in blend_of(one)
        ],
        "problem": one.consumer.problem,
    }
