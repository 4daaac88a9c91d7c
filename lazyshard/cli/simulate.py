"""`lazyshard simulate`: what chunks, windows and a producer come to for so many ranks, before anything runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from enum import Enum
from typing import Annotated, Any, Final

import typer

from lazyshard.cli import exits
from lazyshard.cli.output import JsonOption, epilog, say, size
from lazyshard.simulation import Setting, outcome
from lazyshard.stream.head import format_seconds

MAX_WAIT_S: Final = 600.0  # A reader gives up after so long, unless it is told otherwise

_TIMES: Final = ("first_step_s", "end_s", "stalled_s", "longest_wait_s", "peak_at_s")
_TABLE: Final = """\
run              {ranks:,} ranks, {step_rows:,} rows a step of {step_seconds:g} s
stream           {rows:,} rows in {chunks:,} chunks of {chunk_size}
published        {producer_rate:,.1f} rows a second
trained at most  {trained:,.1f} rows a second{slow}
limited by       {limited_by}

first step after {first_step_s}
last step after  {end_s}
stalled          {stalled_s}, {stall_share:.1%} of the time, the first step's wait included
later waits      {waits:,}, the longest {longest_wait_s}
disk peak        {peak_chunks:,} chunks, {peak_size}, after {peak_at_s}
cursor           written {cursor_writes:,} times

filesystem       {metadata_a_second:,.1f} metadata operations a second, {metadata_operations:,} in all
  a node         {metadata_a_second_and_node:,.1f} a second from the readers of each of {nodes:,}
  while waiting  {polls_a_second:,.1f} opens a second by {processes:,} processes
  a new stripe   {stripe_operations:,} operations at once
  the end        {tail_chunks:,} chunks fill no stripe, opened {tail_openings:,} times

neighbours       drawn {neighbour_draws:,.1f} samples of a rank apart ({steps:,.2f} steps)
"""

EPILOG: Final = epilog(
    [
        "lazyshard simulate --ranks 512 --step-seconds 2 --batch 4 --producer-rate 1500 --rows 5000000 "
        "--samples-per-chunk 1000",
        "for w in 0 2 4 8; do lazyshard simulate --ranks 64 --rows-a-second 128 --batch 8 --producer-rate 110 "
        "--chunks 2000 --window $w --json; done",
    ],
    {0: "done", 2: "usage: an option is missing, or cannot be"},
)


class Retain(str, Enum):
    """The producer's --retain, as far as it is simulated."""

    all = "all"
    consumed = "consumed"


def command(
    context: typer.Context,
    ranks: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")],
    producer_rate: Annotated[float, typer.Option(help="Rows a second that can be published.")],
    step_seconds: Annotated[float | None, typer.Option(help="What a step takes where its data is there.")] = None,
    rows_a_second: Annotated[
        float | None, typer.Option(help="Or: rows trained a second by all ranks, where they are there.")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows of the whole stream.")] = None,
    chunks: Annotated[int | None, typer.Option(min=1, help="Or: its chunks.")] = None,
    samples_per_chunk: Annotated[int, typer.Option(min=1, help="Rows in a chunk.")] = 1000,
    batch: Annotated[int, typer.Option(min=1, help="Samples of one rank in a micro batch.")] = 1,
    micro_batches: Annotated[int, typer.Option(min=1, help="Micro batches of one rank in a step.")] = 1,
    window: Annotated[int, typer.Option(min=0, help="shuffle_window: chunks that each rank shuffles among.")] = 0,
    workers: Annotated[int, typer.Option(min=0, help="Workers of each rank's DataLoader.")] = 2,
    checkpoint_steps: Annotated[int, typer.Option(min=0, help="Steps between checkpoints; 0: none.")] = 0,
    keep_checkpoints: Annotated[int, typer.Option(min=1, help="The cursor stays at the oldest of them.")] = 1,
    row_bytes: Annotated[int, typer.Option(min=0, help="Mean size of a row.")] = 2000,
    head_start: Annotated[int, typer.Option(min=0, help="Rows produced before the training begins.")] = 0,
    max_ahead: Annotated[str | None, typer.Option(metavar="AMOUNT", help="The producer's: 64chunks, 20GB.")] = None,
    retain: Annotated[Retain, typer.Option(help="The producer's.")] = Retain.all,
    latency: Annotated[float, typer.Option(metavar="MS", min=0, help="Of one open, stat or read.")] = 1.0,
    visibility: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Until another machine sees a file.")
    ] = 0.0,
    ranks_a_node: Annotated[int, typer.Option(min=1, help="Ranks on one machine.")] = 8,
    woken: Annotated[bool, typer.Option("--woken", help="A local filesystem wakes readers; others poll.")] = False,
    as_json: JsonOption = False,
) -> Callable[[], int]:
    """Says how a run would go with so many ranks, such chunks, such windows and such a producer.

    When chunks are published and when each step can be trained is arithmetic, with the plan, the pacing and the limits
    of the product itself: nothing is read or written. Thousands of ranks and a million chunks take seconds. What a step
    needs is a stripe, one chunk of every rank, or with windows so many of them; so the first step waits for ranks *
    samples-per-chunk * max(1, window) rows.
    """
    for first, second in (("step_seconds", "rows_a_second"), ("rows", "chunks")):
        names = [f"--{name.replace('_', '-')}" for name in (first, second)]
        if (context.params[first] is None) == (context.params[second] is None):
            raise typer.BadParameter(f"give {names[0]} or {names[1]}, one of them", param_hint=names[0])
    for name, value in context.params.items():
        positive = name in ("step_seconds", "rows_a_second", "producer_rate")
        if isinstance(value, float) and not (math.isfinite(value) and (value > 0 or not positive)):
            expected = "a number above 0" if positive else "a number"
            raise typer.BadParameter(f"is {expected}, got {value}", param_hint=f"--{name.replace('_', '-')}")
    # The others have the names of the fields.
    given = {one.name: context.params[one.name] for one in fields(Setting) if one.name in context.params}
    given["step_seconds"] = step_seconds or ranks * batch * micro_batches / (rows_a_second or 1.0)
    given |= {"latency_s": latency / 1000, "visibility_s": visibility}
    given["rows"] = rows or (chunks or 0) * samples_per_chunk
    try:
        setting = Setting(**given)
    except ValueError as cause:
        raise typer.BadParameter(str(cause)) from cause

    def run() -> int:
        found = outcome(setting)
        for line in [json.dumps(found)] if as_json else run_lines(setting, found):
            say(line)
        return exits.DONE

    return run


def run_lines(setting: Setting, found: dict[str, Any]) -> Iterator[str]:
    """Yields the table of a run, and warnings."""
    trained, computed = setting.step_rows / setting.loaded_step_s, setting.step_rows / setting.step_seconds
    slow = "" if trained > 0.99 * computed else f"; reading keeps it from {computed:,.1f}"
    values = found | {name: _time(found[name]) for name in _TIMES}
    values |= {"chunk_size": size(setting.chunk_bytes), "peak_size": size(found["peak_bytes"]), "slow": slow}
    values |= {"step_rows": setting.step_rows, "trained": trained, "steps": setting.neighbour_draws / setting.draws}
    yield from _TABLE.format(**values).splitlines()
    longest = max(found["first_step_s"], found["longest_wait_s"])
    if longest > MAX_WAIT_S:
        than = f"a wait of {_time(longest)} is longer than readers wait by default, {_time(MAX_WAIT_S)}"
        yield f"warning: {than}: raise max_wait, or take smaller chunks or windows"
    if setting.span_rows > setting.rows:
        takes = f"one window of all ranks takes {setting.span_rows:,} rows, more than the stream has"
        yield f"warning: {takes}: nothing can be trained before the stream has ended"
    if setting.retain == "consumed" and not setting.checkpoint_steps:
        yield "warning: without --checkpoint-steps no cursor is written, so nothing is deleted"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else format_seconds(seconds)
