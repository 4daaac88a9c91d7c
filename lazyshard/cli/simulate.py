"""`lazyshard simulate`: what chunks, windows and a producer come to for so many ranks, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from enum import Enum
from typing import Annotated, Any, Final

from typer import BadParameter, Context, Option

from lazyshard.cli import exits, output
from lazyshard.simulation import Setting, outcome
from lazyshard.stream.head import format_seconds

_MAX_WAIT_S: Final = 600.0  # A reader gives up after so long, unless it is told otherwise
_HIDDEN: Final = {"steps", "deleted", "head_opens", "chunk_opens", *(one.name for one in fields(Setting))}


class Retain(str, Enum):
    """The producer's --retain, as far as it is simulated."""

    all = "all"
    consumed = "consumed"


def command(
    context: Context,
    ranks: Annotated[int, Option(min=1, help="Data-parallel ranks.")],
    producer_rate: Annotated[float, Option(help="Rows a second that can be published.")],
    step_seconds: Annotated[float | None, Option(help="What a step takes where its data is there.")] = None,
    rows_a_second: Annotated[float | None, Option(help="Or: rows trained a second by all ranks.")] = None,
    rows: Annotated[int | None, Option(min=1, help="Rows of the whole stream.")] = None,
    chunks: Annotated[int | None, Option(min=1, help="Or: its chunks.")] = None,
    samples_per_chunk: Annotated[int, Option(min=1, help="Rows in a chunk.")] = 1000,
    batch: Annotated[int, Option(min=1, help="Samples of one rank in a micro batch.")] = 1,
    micro_batches: Annotated[int, Option(min=1, help="Micro batches of one rank in a step.")] = 1,
    window: Annotated[int, Option(min=0, help="shuffle_window: chunks that each rank shuffles among.")] = 0,
    workers: Annotated[int, Option(min=0, help="Workers of each rank's DataLoader.")] = 2,
    checkpoint_steps: Annotated[int, Option(min=0, help="Steps between checkpoints; 0: none.")] = 0,
    keep_checkpoints: Annotated[int, Option(min=1, help="The cursor stays at the oldest of them.")] = 1,
    row_bytes: Annotated[int, Option(min=0, help="Mean size of a row.")] = 2000,
    head_start: Annotated[int, Option(min=0, help="Rows produced before the training begins.")] = 0,
    max_ahead: Annotated[str | None, Option(metavar="AMOUNT", help="The producer's: 64chunks, 20GB.")] = None,
    retain: Annotated[Retain, Option(help="The producer's.")] = Retain.all,
    latency: Annotated[float, Option(metavar="MS", min=0, help="Of one open, stat or read.")] = 1.0,
    visibility: Annotated[float, Option(metavar="SECONDS", min=0, help="Until another machine sees a file.")] = 0.0,
    ranks_a_node: Annotated[int, Option(min=1, help="Ranks on one machine.")] = 8,
    woken: Annotated[bool, Option("--woken", help="A local filesystem wakes readers; others poll.")] = False,
    as_json: output.JsonOption = False,
) -> int:
    """Says how a run would go with so many ranks, such chunks, such windows and such a producer.

    When chunks are published and when each step can be trained is arithmetic, with the plan, the pacing and the limits
    of the product itself: nothing is read or written. Thousands of ranks and a million chunks take seconds. What a step
    needs is a stripe, one chunk of every rank, or with windows so many of them; so the first step waits for ranks *
    samples-per-chunk * max(1, window) rows.

    Examples:
        lazyshard simulate --ranks 512 --step-seconds 2 --batch 4 --producer-rate 1500 --rows 5000000
            --samples-per-chunk 1000
        for w in 0 2 4 8; do lazyshard simulate --ranks 64 --rows-a-second 128 --batch 8 --producer-rate 110
            --chunks 2000 --window $w --json; done

    Exit codes:
        0  done
        2  usage: an option is missing, or cannot be
    """
    for first, second in (("step_seconds", "rows_a_second"), ("rows", "chunks")):
        names = [f"--{name.replace('_', '-')}" for name in (first, second)]
        alike = (context.params[first] is None) == (context.params[second] is None)
        output.refuse_if(alike, names[0], f"give {names[0]} or {names[1]}, one of them")
    for name, value in context.params.items():
        positive = name in ("step_seconds", "rows_a_second", "producer_rate")
        expected = "a number above 0" if positive else "a number"
        wrong = isinstance(value, float) and not (math.isfinite(value) and (value > 0 or not positive))
        output.refuse_if(wrong, f"--{name.replace('_', '-')}", f"is {expected}, got {value}")
    # The others have the names of the fields.
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
    """Yields the table of a run, and warnings."""
    trained = setting.step_rows / setting.loaded_step_s
    given = {"ranks": setting.ranks, "step_rows": setting.step_rows, "step_s": setting.step_seconds}
    given |= {"rows": setting.rows, "chunks": setting.chunks, "chunk_bytes": setting.chunk_bytes}
    given |= {"published_a_second": setting.producer_rate, "trained_a_second": trained}
    yield from output.facts(given | {name: figure for name, figure in found.items() if name not in _HIDDEN})
    if (longest := max(found["first_step_s"], found["longest_wait_s"])) > _MAX_WAIT_S:
        than = f"a wait of {format_seconds(longest)} is longer than readers wait by default"
        yield f"warning: {than}, {format_seconds(_MAX_WAIT_S)}: raise max_wait, or take smaller chunks or windows"
    if setting.span_rows > setting.rows:
        takes = f"one window of all ranks takes {setting.span_rows:,} rows, more than the stream has"
        yield f"warning: {takes}: nothing can be trained before the stream has ended"
    if setting.retain == "consumed" and not setting.checkpoint_steps:
        yield "warning: without --checkpoint-steps no cursor is written, so nothing is deleted"
