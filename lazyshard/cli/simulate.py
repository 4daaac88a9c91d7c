"""`lazyshard simulate`: what chunks, windows and a producer come to for so many ranks, before anything runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from enum import Enum
from typing import Annotated, Any, Final

import typer

from lazyshard.cli import exits
from lazyshard.cli.output import epilog, say, size
from lazyshard.simulation.run import outcome
from lazyshard.simulation.setting import Setting
from lazyshard.stream.head import format_seconds

MAX_WAIT_S: Final = 600.0  # A reader gives up after so long, unless it is told otherwise

SWEPT: Final[dict[str, Callable[[str], Any]]] = {
    **dict.fromkeys(
        ("samples_per_chunk", "window", "ranks", "batch", "workers", "head_start", "checkpoint_steps"), int
    ),
    **dict.fromkeys(("step_seconds", "producer_rate"), float),
}
"""What can be swept, and what its values are."""

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

MOST_RUNS: Final = 400  # Of a sweep

Axis = tuple[str, list[Any]]

HELP: Final = """Says how a run would go with so many ranks, such chunks, such windows and such a producer.

When chunks are published and when each step can be trained is arithmetic, with the plan, the pacing and the limits of
the product itself: nothing is read or written. Thousands of ranks and a million chunks take seconds. What a step needs
is a stripe, one chunk of every rank, or with windows so many of them; so the first step waits for
ranks * samples-per-chunk * max(1, window) rows."""

EPILOG: Final = epilog(
    [
        "lazyshard simulate --ranks 512 --step-seconds 2 --batch 4 --producer-rate 1500 --rows 5000000 "
        "--samples-per-chunk 1000",
        "lazyshard simulate --ranks 64 --rows-a-second 128 --batch 8 --producer-rate 110 --chunks 2000 "
        "--sweep window=0,2,4,8",
    ],
    {0: "done", 2: "usage: an option is missing, or cannot be"},
)


class Retain(str, Enum):
    """The producer's --retain, as far as it is simulated."""

    all = "all"
    consumed = "consumed"


def command(
    context: typer.Context,
    ranks: Annotated[int, typer.Option(help="Data-parallel ranks.")],
    producer_rate: Annotated[float, typer.Option(help="Rows a second that can be published.")],
    step_seconds: Annotated[float | None, typer.Option(help="What a step takes where its data is there.")] = None,
    rows_a_second: Annotated[
        float | None, typer.Option(help="Or: rows trained a second by all ranks, where they are there.")
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Rows of the whole stream.")] = None,
    chunks: Annotated[int | None, typer.Option(min=1, help="Or: its chunks.")] = None,
    samples_per_chunk: Annotated[int, typer.Option(help="Rows in a chunk.")] = 1000,
    batch: Annotated[int, typer.Option(help="Samples of one rank in a micro batch.")] = 1,
    micro_batches: Annotated[int, typer.Option(help="Micro batches of one rank in a step.")] = 1,
    window: Annotated[int, typer.Option(help="shuffle_window: chunks that each rank shuffles among.")] = 0,
    workers: Annotated[int, typer.Option(help="Workers of each rank's DataLoader.")] = 2,
    checkpoint_steps: Annotated[int, typer.Option(help="Steps between checkpoints; 0: none.")] = 0,
    keep_checkpoints: Annotated[int, typer.Option(help="The cursor stays at the oldest of them.")] = 1,
    row_bytes: Annotated[int, typer.Option(help="Mean size of a row.")] = 2000,
    head_start: Annotated[int, typer.Option(help="Rows produced before the training begins.")] = 0,
    max_ahead: Annotated[str | None, typer.Option(metavar="AMOUNT", help="The producer's: 64chunks, 20GB.")] = None,
    retain: Annotated[Retain, typer.Option(help="The producer's.")] = Retain.all,
    latency: Annotated[float, typer.Option(metavar="MS", help="Of one open, stat or read.")] = 1.0,
    visibility: Annotated[float, typer.Option(metavar="SECONDS", help="Until another machine sees a file.")] = 0.0,
    ranks_a_node: Annotated[int, typer.Option(help="Ranks on one machine.")] = 8,
    woken: Annotated[bool, typer.Option("--woken", help="A local filesystem wakes readers; others poll.")] = False,
    swept: Annotated[
        list[str] | None,
        typer.Option("--sweep", metavar="NAME=VALUES", help=f"1,2,4 or 100:10000; of {', '.join(SWEPT)}."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures, a JSON object a line and run.")] = False,
) -> Callable[[], int]:
    """Returns what is to be done; see `lazyshard.cli.command`."""
    if (step_seconds is None) == (rows_a_second is None):
        raise typer.BadParameter("give --step-seconds or --rows-a-second, one of them", param_hint="--step-seconds")
    if (rows is None) == (chunks is None):
        raise typer.BadParameter("give --rows or --chunks, one of them", param_hint="--rows")
    if rows_a_second is not None:
        if not rows_a_second > 0:
            raise typer.BadParameter(f"is above 0, got {rows_a_second}", param_hint="--rows-a-second")
        step_seconds = ranks * batch * micro_batches / rows_a_second
    # The others have the names of the fields.
    given = {one.name: context.params[one.name] for one in fields(Setting) if one.init and one.name in context.params}
    given |= {"step_seconds": step_seconds, "latency_s": latency / 1000, "visibility_s": visibility}
    given["rows"] = rows if rows is not None else (chunks or 0) * samples_per_chunk
    try:
        axes = parse_axes(swept or [])
        settings = sweep(Setting(**given), axes)
    except ValueError as cause:
        raise typer.BadParameter(str(cause)) from cause
    return lambda: _run(settings, axes, as_json)


def _run(settings: Sequence[Setting], axes: Sequence[Axis], as_json: bool) -> int:
    found = [outcome(setting) for setting in settings]
    lines = [json.dumps(one) for one in found]
    if not as_json:
        lines = swept_lines(axes, found) if axes else run_lines(settings[0], found[0])
    for line in lines:
        say(line)
    return exits.DONE


def run_lines(setting: Setting, found: dict[str, Any]) -> list[str]:
    """Returns the table of a run, and warnings."""
    trained, computed = setting.step_rows / setting.loaded_step_s, setting.step_rows / setting.step_seconds
    slow = "" if trained > 0.99 * computed else f"; reading keeps it from {computed:,.1f}"
    values = found | {name: _time(value) for name, value in found.items() if name in _TIMES}
    values |= {"chunk_size": size(setting.chunk_bytes), "peak_size": size(found["peak_bytes"]), "slow": slow}
    values |= {"step_rows": setting.step_rows, "trained": trained, "steps": setting.neighbour_draws / setting.draws}
    longest, told = max(found["first_step_s"], found["longest_wait_s"]), []
    if longest > MAX_WAIT_S:
        told.append(
            f"a wait of {_time(longest)} is longer than readers wait by default, {_time(MAX_WAIT_S)}: raise max_wait, "
            f"or take smaller chunks or windows"
        )
    if setting.span_rows > setting.rows:
        told.append(
            f"one window of all ranks takes {setting.span_rows:,} rows, more than the stream has: nothing can be "
            f"trained before the stream has ended"
        )
    if setting.retain == "consumed" and not setting.checkpoint_steps:
        told.append("without --checkpoint-steps no cursor is written, so nothing is deleted")
    return [*_TABLE.format(**values).splitlines(), *(f"warning: {text}" for text in told)]


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else format_seconds(seconds)


def swept_lines(axes: Sequence[Axis], found: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a table, a line for each run."""
    names = [name for name, _ in axes]
    columns = {
        ("first step", "s"): ("first_step_s", ",.1f"),
        ("stalled", "share"): ("stall_share", ".1%"),
        ("later waits", "s"): ("longest_wait_s", ",.1f"),
        ("disk peak", "GB"): ("peak_gb", ",.2f"),
        ("metadata", "a second"): ("metadata_a_second", ",.1f"),
        ("neighbours", "draws"): ("neighbour_draws", ",.1f"),
    }
    rows = [[*names, *(head for head, _ in columns)], [*("" for _ in names), *(unit for _, unit in columns)]]
    for one in found:
        figures = one | {"peak_gb": one["peak_bytes"] / 1e9}
        axis = [f"{figures[name]:,}" for name in names]
        rows.append([*axis, *(f"{figures[name]:{form}}" for name, form in columns.values())])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def parse_axis(text: str) -> Axis:
    """Returns name and values of ``name=1,2,4`` or ``name=100:10000``: both ends, and 1, 2, 5, 10, ... between.

    >>> parse_axis("samples_per_chunk=100:1500")
    ('samples_per_chunk', [100, 200, 500, 1000, 1500])
    """
    name, _, values = text.partition("=")
    name = name.replace("-", "_")
    if name not in SWEPT:
        raise ValueError(f"{name!r} cannot be swept; one of {', '.join(SWEPT)} can")
    number = SWEPT[name]
    try:
        found = _between(*map(number, values.split(":"))) if ":" in values else [*map(number, values.split(","))]
    except (ValueError, OverflowError) as cause:
        raise ValueError(f"{text!r}: expected NAME=VALUE,VALUE,... or NAME=LOW:HIGH with 0 < LOW < HIGH") from cause
    return name, found


def parse_axes(texts: Sequence[str]) -> list[Axis]:
    """Returns the axes of a sweep. Raises ValueError where one cannot be read, or they are too many."""
    axes = [parse_axis(text) for text in texts]
    if len(axes) > 2 or len({name for name, _ in axes}) < len(axes):
        raise ValueError("one or two different settings can be swept")
    runs = math.prod(len(values) for _, values in axes)
    if runs > MOST_RUNS:
        raise ValueError(f"a sweep of {runs} runs is more than {MOST_RUNS}")
    return axes


def _between(low: Any, high: Any) -> list[Any]:
    if not 0 < low < high:
        raise ValueError("LOW is above 0 and below HIGH")
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = [type(low)(step * 10.0**power) for power in powers for step in (1, 2, 5)]
    return [low, *(value for value in steps if low < value < high), high]


def sweep(setting: Setting, axes: Sequence[Axis]) -> list[Setting]:
    """Returns the settings of a run for all values of one or two axes, the last one changing fastest."""
    found = [setting]
    for name, values in axes:
        found = [replace(one, **{name: value}) for one in found for value in values]
    return found
