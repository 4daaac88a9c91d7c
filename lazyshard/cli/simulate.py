"""`lazyshard simulate`: what chunks, windows and a producer come to for so many ranks, before anything runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from typing import Annotated, Any, Final

import typer

from lazyshard.cli import exits
from lazyshard.cli.output import epilog, say, size
from lazyshard.simulation.run import Simulated, outcome
from lazyshard.simulation.setting import Setting
from lazyshard.stream.pacing import format_seconds

MAX_WAIT_S: Final = 600.0
"""A reader gives up after so long, unless it is told otherwise."""

SWEPT: Final[dict[str, Callable[[str], Any]]] = {
    **dict.fromkeys(
        ("samples_per_chunk", "window", "ranks", "batch", "workers", "head_start", "checkpoint_steps"), int
    ),
    **dict.fromkeys(("step_seconds", "producer_rate"), float),
}
"""What can be swept, and what its values are."""

MOST_RUNS: Final = 400
"""Of a sweep."""

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
    {
        0: "done",
        2: "usage: an option is missing, or cannot be",
    },
)


class Retain(str, Enum):
    """The producer's --retain, as far as it is simulated."""

    all = "all"
    consumed = "consumed"


def command(
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
    try:
        setting = Setting(
            ranks=ranks,
            batch=batch,
            micro_batches=micro_batches,
            step_seconds=step_seconds or 0.0,
            samples_per_chunk=samples_per_chunk,
            window=window,
            producer_rate=producer_rate,
            rows=rows if rows is not None else (chunks or 0) * samples_per_chunk,
            row_bytes=row_bytes,
            head_start=head_start,
            max_ahead=max_ahead,
            retain=retain.value,
            checkpoint_steps=checkpoint_steps,
            keep_checkpoints=keep_checkpoints,
            workers=workers,
            latency_s=latency / 1000,
            visibility_s=visibility,
            woken=woken,
            ranks_a_node=ranks_a_node,
        )
        axes = parse_axes(swept or [])
        settings = sweep(setting, axes)
    except ValueError as cause:
        raise typer.BadParameter(str(cause)) from cause
    return lambda: _run(settings, axes, as_json)


def _run(settings: Sequence[Setting], axes: Sequence[Axis], as_json: bool) -> int:
    found = [outcome(setting) for setting in settings]
    if as_json:
        lines = [json.dumps(one.figures()) for one in found]
    else:
        lines = swept_lines(axes, found) if axes else run_lines(found[0])
    for line in lines:
        say(line)
    return exits.DONE


def run_lines(found: Simulated) -> list[str]:
    """Returns the table of a run."""
    setting, timeline, disk, files = found.setting, found.timeline, found.disk, found.files
    trained, computed = setting.step_rows / timeline.step_s, setting.step_rows / setting.step_seconds
    slow = "" if trained > 0.99 * computed else f"; reading keeps it from {computed:,.1f}"
    stalled = f"{_time(timeline.stalled_s)}, {timeline.stall_share:.1%} of the time, the first step's wait included"
    rows = [
        ("run", f"{setting.ranks:,} ranks, {setting.step_rows:,} rows a step of {setting.step_seconds:g} s"),
        ("stream", f"{setting.rows:,} rows in {setting.chunks:,} chunks of {size(setting.chunk_bytes)}"),
        ("published", f"{setting.producer_rate:,.1f} rows a second"),
        ("trained at most", f"{trained:,.1f} rows a second{slow}"),
        ("limited by", found.limited_by),
        ("", ""),
        ("first step after", _time(timeline.first_step_s)),
        ("last step after", _time(timeline.end_s)),
        ("stalled", stalled),
        ("later waits", f"{len(timeline.waits) - 1:,}, the longest {_time(found.longest_wait_s)}"),
        ("disk peak", f"{disk.peak_chunks:,} chunks, {size(disk.peak_bytes)}, after {_time(disk.peak_at_s)}"),
        ("cursor", f"written {disk.cursor_writes:,} times"),
        ("", ""),
        (
            "filesystem",
            f"{files.metadata_a_second:,.1f} metadata operations a second, {files.metadata_operations:,} in all",
        ),
        ("  a node", f"{files.metadata_a_second_and_node:,.1f} a second from the readers of each of {files.nodes:,}"),
        ("  while waiting", f"{files.polls_a_second:,.1f} opens a second by {files.processes:,} processes"),
        ("  a new stripe", f"{files.stripe_operations:,} operations at once"),
        ("  the end", f"{setting.tail_chunks:,} chunks fill no stripe, opened {setting.tail_openings:,} times"),
        ("", ""),
        (
            "neighbours",
            f"drawn {setting.neighbour_draws:,.1f} samples of a rank apart "
            f"({setting.neighbour_draws / setting.draws:,.2f} steps)",
        ),
    ]
    return [f"{name:17}{value}".rstrip() for name, value in rows] + _warnings(found)


def _warnings(found: Simulated) -> list[str]:
    setting, waits = found.setting, float(found.timeline.waits.max())
    told = []
    if waits > MAX_WAIT_S:
        told.append(
            f"a wait of {_time(waits)} is longer than readers wait by default, {_time(MAX_WAIT_S)}: raise max_wait, or "
            f"take smaller chunks or windows"
        )
    if setting.span_rows > setting.rows:
        told.append(
            f"one window of all ranks takes {setting.span_rows:,} rows, more than the stream has: nothing can be "
            f"trained before the stream has ended"
        )
    if setting.retain == "consumed" and not setting.checkpoint_steps:
        told.append("without --checkpoint-steps no cursor is written, so nothing is deleted")
    return [f"warning: {text}" for text in told]


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else format_seconds(seconds)


def swept_lines(axes: Sequence[Axis], found: Sequence[Simulated]) -> list[str]:
    """Returns a table, a line for each run."""
    heads = ["first step", "stalled", "later waits", "disk peak", "metadata", "neighbours"]
    units = ["s", "share", "s", "GB", "a second", "draws"]
    names = [name for name, _ in axes]
    rows = [[*names, *heads], ["" for _ in names] + units]
    for one in found:
        figures = one.figures()
        rows.append(
            [f"{figures[name]:,}" for name in names]
            + [
                f"{figures['first_step_s']:,.1f}",
                f"{figures['stall_share']:.1%}",
                f"{figures['longest_wait_s']:,.1f}",
                f"{figures['peak_bytes'] / 1e9:,.2f}",
                f"{figures['metadata_a_second']:,.1f}",
                f"{figures['neighbour_draws']:,.1f}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def parse_axis(text: str) -> Axis:
    """Returns name and values of ``name=1,2,4`` or ``name=100:10000``: both ends, and 1, 2, 5, 10, ... between.

    >>> parse_axis("samples_per_chunk=100:1500")
    ('samples_per_chunk', [100, 200, 500, 1000, 1500])

    Raises:
        ValueError: it is neither; says why.
    """
    name, _, values = text.partition("=")
    name = name.replace("-", "_")
    if name not in SWEPT:
        raise ValueError(f"{name!r} cannot be swept; one of {', '.join(SWEPT)} can")
    number = SWEPT[name]
    try:
        if ":" in values:
            low, high = map(number, values.split(":"))
            found = list(_between(low, high))
        else:
            found = [number(value) for value in values.split(",")]
    except (ValueError, OverflowError) as cause:
        raise ValueError(f"{text!r}: expected NAME=VALUE,VALUE,... or NAME=LOW:HIGH with 0 < LOW < HIGH") from cause
    return name, found


def parse_axes(texts: Sequence[str]) -> list[Axis]:
    """Returns the axes of a sweep.

    Raises:
        ValueError: one cannot be read, or they are too many, or make too many runs.
    """
    axes = [parse_axis(text) for text in texts]
    if len(axes) > 2 or len({name for name, _ in axes}) < len(axes):
        raise ValueError("one or two different settings can be swept")
    runs = math.prod(len(values) for _, values in axes)
    if runs > MOST_RUNS:
        raise ValueError(f"a sweep of {runs} runs is more than {MOST_RUNS}")
    return axes


def _between(low: Any, high: Any) -> Iterator[Any]:
    if not 0 < low < high:
        raise ValueError("LOW is above 0 and below HIGH")
    yield low
    power = math.floor(math.log10(low))
    while 10.0**power < high:
        for step in (1, 2, 5):
            value = type(low)(step * 10.0**power)
            if low < value < high:
                yield value
        power += 1
    yield high


def sweep(setting: Setting, axes: Sequence[Axis]) -> list[Setting]:
    """Returns the settings of a run for all values of one or two axes, the last one changing fastest."""
    found = [setting]
    for name, values in axes:
        found = [replace(one, **{name: value}) for one in found for value in values]
    return found
