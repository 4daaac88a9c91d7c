"""`lazyshard simulate`: predicts how chunk size, shuffle window and producer rate affect a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated, Any, Final

from typer import BadParameter, Context, Option

from lazyshard.cli import exits, output
from lazyshard.simulation import Setting, outcome
from lazyshard.stream.head import format_seconds

_MAX_WAIT_S: Final = 600.0  # A reader's default `max_wait`
_HIDDEN: Final = {"steps", "deleted", "head_opens", "chunk_opens", *(one.name for one in fields(Setting))}


def command(
    context: Context,
    ranks: Annotated[int, Option(min=1, help="Data-parallel ranks.")],
    producer_rate: Annotated[float, Option(help="Rows per second that the producer can publish.")],
    step_seconds: Annotated[float | None, Option(help="Duration of a step whose data is available.")] = None,
    rows_a_second: Annotated[float | None, Option(help="Or: rows per second that all ranks train.")] = None,
    rows: Annotated[int | None, Option(min=1, help="Rows in the stream.")] = None,
    chunks: Annotated[int | None, Option(min=1, help="Or: chunks in the stream.")] = None,
    samples_per_chunk: Annotated[int, Option(min=1, help="Rows per chunk.")] = 1000,
    batch: Annotated[int, Option(min=1, help="Samples per micro batch of a rank.")] = 1,
    micro_batches: Annotated[int, Option(min=1, help="Micro batches per step of a rank.")] = 1,
    window: Annotated[int, Option(min=0, help="shuffle_window: chunks that each rank shuffles together.")] = 0,
    workers: Annotated[int, Option(min=0, help="DataLoader workers per rank.")] = 2,
    checkpoint_steps: Annotated[int, Option(min=0, help="Steps between checkpoints; 0: none.")] = 0,
    keep_checkpoints: Annotated[int, Option(min=1, help="Checkpoints kept; the cursor is at the oldest.")] = 1,
    row_bytes: Annotated[int, Option(min=0, help="Mean size of a row.")] = 2000,
    head_start: Annotated[int, Option(min=0, help="Rows published before training starts.")] = 0,
    max_ahead: Annotated[str | None, Option(metavar="AMOUNT", help="As the producer's option: 64chunks, 20GB.")] = None,
    retain: Annotated[str, Option(metavar="all|consumed", help="As the producer's option.")] = "all",
    latency: Annotated[float, Option(metavar="MS", min=0, help="Latency of one open, stat or read.")] = 1.0,
    visibility: Annotated[float, Option(metavar="SECONDS", min=0, help="Until other machines see a file.")] = 0.0,
    ranks_a_node: Annotated[int, Option(min=1, help="Ranks per machine.")] = 8,
    woken: Annotated[bool, Option("--woken", help="A local filesystem wakes readers. Default: they poll.")] = False,
    as_json: output.JsonOption = False,
) -> int:
    """Predicts how a run would go with these ranks, chunks, shuffle windows and producer.

    Computes when each chunk is published and when each step can be trained, with lazyshard's own plan, pacing and
    limits. Reads and writes nothing; thousands of ranks and a million chunks take seconds. A step needs a stripe, which
    is one chunk per rank, or one window of chunks per rank. So the first step waits for ranks * samples-per-chunk *
    max(1, window) rows.

    Examples:
        lazyshard simulate --ranks 512 --step-seconds 2 --batch 4 --producer-rate 1500 --rows 5000000
            --samples-per-chunk 1000
        for w in 0 2 4 8; do lazyshard simulate --ranks 64 --rows-a-second 128 --batch 8 --producer-rate 110
            --chunks 2000 --window $w --json; done

    Exit codes:
        0  done
        2  usage error: an option is missing or invalid
    """
    for first, second in (("step_seconds", "rows_a_second"), ("rows", "chunks")):
        names = [f"--{name.replace('_', '-')}" for name in (first, second)]
        alike = (context.params[first] is None) == (context.params[second] is None)
        output.refuse_if(alike, names[0], f"give exactly one of {names[0]} and {names[1]}")
    output.refuse_if(retain not in ("all", "consumed"), "--retain", f"expected all or consumed, got {retain!r}")
    for name, value in context.params.items():
        positive = name in ("step_seconds", "rows_a_second", "producer_rate")
        expected = "a number above 0" if positive else "a number"
        wrong = isinstance(value, float) and not (math.isfinite(value) and (value > 0 or not positive))
        output.refuse_if(wrong, f"--{name.replace('_', '-')}", f"expected {expected}, got {value}")
    # All other options have the names of the fields.
    given = {one.name: context.params[one.name] for one in fields(Setting) if one.name in context.params}
    given["step_seconds"] = step_seconds or ranks * batch * micro_batches / (rows_a_second or 1.0)
    given |= {"latency_s": latency / 1000, "visibility_s": visibility}
    given["rows"] = rows or (chunks or 0) * samples_per_chunk
    try:
        setting = Setting(**given)
    except ValueError as cause:
        raise BadParameter(str(cause)) from cause
    found = outcome(setting)
    output.show(found, run_lines(setting, found), as_json)
    return exits.DONE


def run_lines(setting: Setting, found: dict[str, Any]) -> Iterator[str]:
    """Yields the table of a simulated run, and warnings."""
    trained = setting.step_rows / setting.loaded_step_s
    given = {"ranks": setting.ranks, "step_rows": setting.step_rows, "step_s": setting.step_seconds}
    given |= {"rows": setting.rows, "chunks": setting.chunks, "chunk_bytes": setting.chunk_bytes}
    given |= {"published_a_second": setting.producer_rate, "trained_a_second": trained}
    yield from output.facts(given | {name: figure for name, figure in found.items() if name not in _HIDDEN})
    if (longest := max(found["first_step_s"], found["longest_wait_s"])) > _MAX_WAIT_S:
        than = f"a wait of {format_seconds(longest)} exceeds the default max_wait of {format_seconds(_MAX_WAIT_S)}"
        yield f"warning: {than}: raise max_wait, or use smaller chunks or windows"
    if setting.span_rows > setting.rows:
        takes = f"one window of all ranks takes {setting.span_rows:,} rows, more than the stream has"
        yield f"warning: {takes}: training cannot start before the stream has ended"
    if setting.retain == "consumed" and not setting.checkpoint_steps:
        yield "warning: without --checkpoint-steps no cursor is written, so nothing is deleted"
