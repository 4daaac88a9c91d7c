"""`lazyshard trace`: which sample a rank trained at a step, and at which step a sample was trained."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer

from lazyshard.cli.stream_options import check_stream
from lazyshard.cli.trace_run import Question, Rows, run
from lazyshard.format import check_consumer
from lazyshard.inspection.tracing_sources import SourcePlace
from lazyshard.store.urls import stream_path

FIRST_MATCHES: Final = 20

_MAX_STEP: Final = 10**15

HELP: Final = """Tells which samples each rank trained at a step, and at which step a sample was trained.

All of it is computed from the state in a checkpoint or in the stream's cursor, and from how far the stream is
published: no log of samples is kept. It holds through every change of the number of ranks, and for chunks that are
deleted; only rows cannot be shown then.

Steps are numbered as the trainer does: the first is step 1, and checkpoint-N comes after step N. Samples, chunks, rows,
ranks and epochs are counted from 0. Without a question it shows how far the run is, and the parts of its course."""

EPILOG: Final = """[bold]Examples[/bold]

lazyshard trace /shared/stream --state out/checkpoint-1200

lazyshard trace /shared/stream --state out/checkpoint-1200 --step 1180:1190 --rank 3 --rows

lazyshard trace /shared/stream --sample 48123 --origins

lazyshard trace /shared/stream --source train.jsonl:L1007

lazyshard trace /shared/stream --text 'the odd sentence' --json

[bold]Exit codes[/bold]

  0  told

  1  typer or rich is missing: pip install 'lazyshard\\[cli]'

  2  usage; there is no such directory, state, rank, sample or chunk; or it is not clear whose cursor is meant

  3  no row holds the text; a cursor holds no state

  5  the state is damaged, of another stream, or does not know what is asked; the stream is damaged, or there is none

  7  the filesystem or store failed: no permission, no answer

 70  unexpected error

 71  not enough memory

130  Ctrl-C"""


def command(
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="The stream's directory, or its URL.")],
    state: Annotated[
        str | None,
        typer.Option(
            "--state",
            metavar="FILE",
            help="The state: a checkpoint's folder, its lazyshard.json, or a file with the state alone.",
        ),
    ] = None,
    consumer: Annotated[
        str | None,
        typer.Option(
            "--consumer", metavar="NAME", help="Take the state from this run's cursor. Default: if there is only one."
        ),
    ] = None,
    step: Annotated[
        str | None, typer.Option("--step", metavar="N[:M]", help="What was trained at step N, or at steps N to M - 1.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="R", min=0, help="With --step: only this data-parallel rank.")
    ] = None,
    sample: Annotated[
        str | None, typer.Option("--sample", metavar="N[,N...]", help="When these samples were trained.")
    ] = None,
    chunk: Annotated[
        int | None, typer.Option("--chunk", metavar="K", min=0, help="With --row: when this row was trained.")
    ] = None,
    row: Annotated[int | None, typer.Option("--row", metavar="I", min=0, help="The row in the chunk.")] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--source",
            metavar="FILE:BYTE",
            help="When the row of this byte of a source file was trained; FILE:L17 for its line 17, from 1.",
        ),
    ] = None,
    text: Annotated[
        str | None, typer.Option("--text", metavar="TEXT", help="When the rows that hold this text were trained.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help=f"With --text: all rows that hold it, not the first {FIRST_MATCHES} alone.")
    ] = False,
    rows: Annotated[bool, typer.Option("--rows", help="Print the rows too.")] = False,
    full: Annotated[bool, typer.Option("--full", help="With --rows: shorten nothing.")] = False,
    origins: Annotated[
        bool, typer.Option("--origins", help="Say too which line of which source file each row has come from.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line; rows are whole.")] = False,
) -> Callable[[], int]:
    """Returns what is to be done; see `lazyshard.cli.command`."""
    check_stream(stream)
    if state is not None and not os.path.exists(state):
        raise typer.BadParameter(f"{state!r}: no such file or folder", param_hint="--state")
    if state is not None and consumer is not None:
        raise typer.BadParameter("give either --state or --consumer", param_hint="--consumer")
    if consumer is not None:
        try:
            check_consumer(consumer)
        except ValueError as cause:
            raise typer.BadParameter(str(cause), param_hint="--consumer") from cause
    asked = {"--step": step, "--sample": sample, "--chunk": chunk, "--source": source, "--text": text}
    given = [name for name, value in asked.items() if value is not None]
    if len(given) > 1:
        raise typer.BadParameter(f"one question at a time: give either {' or '.join(given)}", param_hint=given[1])
    for name, value, needed in (("--rank", rank, step), ("--row", row, chunk), ("--chunk", chunk, row)):
        if value is not None and needed is None:
            other = {"--rank": "--step", "--row": "--chunk", "--chunk": "--row"}[name]
            raise typer.BadParameter(f"goes with {other}", param_hint=name)
    if every and text is None:
        raise typer.BadParameter("goes with --text", param_hint="--all")
    if text is not None and not text:
        raise typer.BadParameter("an empty text is in every row", param_hint="--text")
    question = Question(
        steps=None if step is None else _steps(step),
        rank=rank,
        samples=None if sample is None else _samples(sample),
        row=None if chunk is None or row is None else (chunk, row),
        source=None if source is None else _source(source),
        text=text,
        matches=None if every else FIRST_MATCHES,
    )
    shown = Rows(rows, full, as_json, origins)
    return lambda: run(stream_path(stream), None if state is None else Path(state), consumer, question, shown)


def _steps(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,15})(?::([0-9]{1,15}))?", text)
    first = int(match[1]) if match else 0
    stop = int(match[2]) if match and match[2] else first + 1
    if match is None or not 1 <= first < stop <= _MAX_STEP:
        raise typer.BadParameter(
            f"{text!r}: expected N, or N:M for steps N to M - 1; the first step is 1", param_hint="--step"
        )
    return first - 1, stop - 1


def _samples(text: str) -> list[int]:
    if re.fullmatch(r"[0-9]{1,18}(,[0-9]{1,18})*", text) is None:
        raise typer.BadParameter(f"{text!r}: expected numbers of samples, as 17 or 17,23", param_hint="--sample")
    return [int(one) for one in text.split(",")]


def _source(text: str) -> SourcePlace:
    match = re.fullmatch(r"(.+):(L?)([0-9]{1,18})", text, re.DOTALL)
    if match is None or (match[2] and not int(match[3])):
        raise typer.BadParameter(
            f"{text!r}: expected FILE:BYTE, the byte from 0, or FILE:L and the line from 1", param_hint="--source"
        )
    number = int(match[3])
    return SourcePlace(match[1], line=number) if match[2] else SourcePlace(match[1], byte=number)
