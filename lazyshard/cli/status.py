"""`lazyshard status`: how a stream is, as a page (`status_view`) or as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Final

from rich.console import Console
from rich.live import Live
from rich.text import Text
from typer import Option

from lazyshard.cli import exits, output
from lazyshard.cli.status_view import WIDTH, blend_of, problems, status_lines, summary
from lazyshard.errors import LazyShardError, StreamMissing
from lazyshard.inspection.outlook import ConsumerOutlook, Looks, OpenWindow, Outlook
from lazyshard.inspection.survey import Lines, LostChunks, take_survey

INTERVAL_S: Final = 2.0


def command(
    stream: output.StreamArgument,
    watch: Annotated[bool, Option("--watch", "-w", help="Look again and again, until Ctrl-C.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print a JSON object on one line for each look.")] = False,
    interval: Annotated[
        float | None, Option(metavar="SECONDS", min=0.1, help=f"Between looks of --watch. Default: {INTERVAL_S:g}.")
    ] = None,
) -> int:
    """Says how a stream is: published, deleted, on disk; its producer, its consumers, and when something runs out.

    Only looks, at any time and from any machine that sees the files; neither locks nor changes anything. How fast a
    consumer is takes two looks: see [bold]--watch[/bold].

    Examples:
        lazyshard status /shared/stream
        lazyshard status /shared/stream --watch
        lazyshard status /shared/stream --json | jq .producer.state

    Exit codes:
        0  looked, whatever there was to see
        2  usage; there is no such directory, or, with --watch, none in which it could be made
        3  two files have the same chunk number
        5  there is no stream in it, none that is complete, or one of a later format
        7  the filesystem or store failed: no permission, no answer
        130  Ctrl-C, which is how --watch ends
    """
    directory = output.find_stream(stream, may_come=watch)
    output.refuse_if(interval is not None and not watch, "--interval", "goes with --watch only")
    if watch:
        return _watch(directory, as_json, interval or INTERVAL_S)
    outlook = Looks().add(take_survey(directory, time.time()))
    output.show(status_values(outlook), status_lines(outlook, watching=False), as_json)
    return exits.DONE


def _watch(stream: Path, as_json: bool, interval: float) -> int:
    looks, console, lost = Looks(), Console(), LostChunks()
    width = min(WIDTH, console.width) if console.is_terminal else WIDTH

    def look() -> list[str]:
        now = time.time()
        try:
            outlook = looks.add(take_survey(stream, now, lost))
        except (LazyShardError, OSError) as error:
            if as_json:
                return [json.dumps(failure_values(stream, now, str(error)))]
            missing = f"{stream}: no stream is here; it will be shown as soon as its producer has begun it"
            return [output.one_line(missing if isinstance(error, StreamMissing) else str(error))]
        return [json.dumps(status_values(outlook))] if as_json else status_lines(outlook, watching=True, width=width)

    live = Live(console=console, auto_refresh=False) if console.is_terminal and not as_json else None
    try:
        with live or nullcontext():
            while True:
                at = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
                if live is not None:
                    live.update(Text("\n".join([*look(), "", f"every {interval:g} s; Ctrl-C ends"])), refresh=True)
                else:
                    print("\n".join(look() if as_json else [at, *look(), ""]), flush=True)
                time.sleep(interval)
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except OSError as error:
        # What is left in the buffer must not fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise
    # Nobody listens any more.
    return exits.DONE


def status_values(outlook: Outlook) -> dict[str, Any]:
    """Returns the values of a look: what is not known is None."""
    survey, census, band, head = outlook.survey, outlook.survey.census, outlook.band, outlook.survey.census.head
    manifest, refused = census.manifest, survey.quarantine or Lines(0, 0, True)

    def samples(chunks: float | None) -> float | None:
        return None if chunks is None or manifest is None else chunks * manifest.samples_per_chunk

    note, failed = None if head is None else head.note or None, head is not None and head.state == "failed"
    producer = head and {
        "state": outlook.state,
        "said_state": head.state,
        "host": head.host,
        "pid": head.pid,
        "process_is_gone": survey.gone,
        "process_has_ended": survey.ended,
        "heartbeat_age_s": outlook.heartbeat_age_s,
        "waits_for": None if failed else note,
        "failure": note if failed else None,
    }
    stretches = [{"first_chunk": one.first, "stop_chunk": one.stop, "state": one.state} for one in band.stretches]
    cells = [cell._asdict() | {"readers": [reader._asdict() for reader in cell.readers]} for cell in band.cells]
    return {
        **failure_values(survey.directory, survey.looked_at, None),
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


def failure_values(directory: Path, looked_at: float, error: str | None) -> dict[str, Any]:
    """Returns the values of a look that has failed, or the first ones of any."""
    # The schema is raised when a field goes or changes its meaning; new fields leave it.
    return {"schema": 1, "directory": str(directory), "looked_at_s": looked_at, "error": error}


def _consumer_values(
    one: ConsumerOutlook, window: OpenWindow | None, samples: Callable[[float | None], float | None]
) -> dict[str, Any]:
    cursor, reading = one.consumer.cursor, one.consumer.reading
    told = {name: getattr(one, name) for name in one.__slots__ if name not in ("consumer", "remainder")}
    blend = [
        {"stream": share.stream, "weight": share.weight, "share": given, "consumed_samples": share.consumed}
        for share, given in blend_of(one)
    ]
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
        "blend": blend,
        "problem": one.consumer.problem,
    }
