"""`lazyshard measure`: how long the rows of a stream are in tokens, kept beside its seals."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from lazyshard.cli import exits
from lazyshard.cli.options import check_stream
from lazyshard.cli.output import chunk_bar, count, explain, per_second, say
from lazyshard.measure import Measure, Measured, measure_stream
from lazyshard.store.urls import stream_path

_MAX_WORKERS: Final = 1024

HELP: Final = """Measures how long the rows of a stream are in tokens, and keeps that beside the seals.

By ms-swift's template (--model), a Hugging Face tokenizer (--tokenizer), or a function of yours (--function). Chunks
whose lengths are known are passed over, so it can be stopped or killed at any moment: the same command goes on. It can
run beside a producer and training runs; what is published later is measured by the next call."""

EPILOG: Final = """[bold]Examples[/bold]

lazyshard measure /shared/stream --model /models/Qwen3-8B --max-length 8192

lazyshard measure /shared/stream --tokenizer /models/Qwen3-8B --field text

lazyshard measure /shared/stream --function my_rows:length --workers 8

[bold]Exit codes[/bold]

  0  measured, or nothing was to do

  1  typer or rich is missing: pip install 'lazyshard\\[cli]'

  2  usage; there is no such directory

  3  refused: a row cannot be measured, chunks were measured in another way, there is no such function or tokenizer, or
     the stream is not one of ours in a directory

  5  there is no stream in it, or it is damaged, or of a later format

  6  another process is measuring it

  7  the filesystem failed: disk full, read-only, no permission; or a worker process was killed

 70  unexpected error

 71  not enough memory

130  Ctrl-C; run the same command again"""


class OnBadRow(str, Enum):
    """What becomes of a row that cannot be measured."""

    STOP = "stop"
    ZERO = "zero"


def command(
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="The stream's directory.")],
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="DIR", help="Measure as ms-swift would train this model, by its template."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", metavar="DIR", help="Measure by the tokenizer in this directory.")
    ] = None,
    function: Annotated[
        str | None,
        typer.Option(
            "--function", metavar="MODULE:NAME", help="Measure by a function: it takes a row, returns its tokens."
        ),
    ] = None,
    template: Annotated[
        str | None, typer.Option("--template", metavar="T", help="With --model: the template. Default: the model's.")
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option("--max-length", metavar="N", min=1, help="With --model: longer rows make no sample, and count 0."),
    ] = None,
    model_type: Annotated[
        str | None,
        typer.Option("--model-type", metavar="M", help="With --model: its type, where its directory does not tell."),
    ] = None,
    field: Annotated[
        str | None,
        typer.Option(
            "--field",
            metavar="NAME",
            help="With --tokenizer: the text to measure. Default: `messages` by the chat template, or else `text`.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", metavar="K", min=1, max=_MAX_WORKERS, help="Processes that measure. Default: one a core."
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Measure chunks too that were measured in another way, or sealed so.")
    ] = False,
    on_bad_row: Annotated[
        OnBadRow,
        typer.Option("--on-bad-row", help="A row that cannot be measured stops the command, or counts 0."),
    ] = OnBadRow.STOP,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on one line.")] = False,
) -> Callable[[], int]:
    """Returns what is to be done; see `lazyshard.cli.command`."""
    check_stream(stream)
    named = (("--model", model), ("--tokenizer", tokenizer), ("--function", function))
    given = [option for option, name in named if name is not None]
    if len(given) != 1:
        those = f", not {' and '.join(given)}" if given else ""
        raise typer.BadParameter(f"give one of --model, --tokenizer and --function{those}")
    for option, value in (("--template", template), ("--max-length", max_length), ("--model-type", model_type)):
        if value is not None and model is None:
            raise typer.BadParameter("goes with --model", param_hint=option)
    if field is not None and tokenizer is None:
        raise typer.BadParameter("goes with --tokenizer", param_hint="--field")
    for option, folder in (("--model", model), ("--tokenizer", tokenizer)):
        if folder is not None and not os.path.isdir(folder):
            raise typer.BadParameter(f"{folder!r} is not a directory", param_hint=option)
    if function is not None:
        if not function:
            raise typer.BadParameter("expected MODULE:NAME", param_hint="--function")
        measure = Measure("function", function)
    elif tokenizer is not None:
        measure = Measure("tokenizer", tokenizer, field=field)
    else:
        assert model is not None
        measure = Measure("template", model, template=template, max_length=max_length, model_type=model_type)
    count_of = workers or len(os.sched_getaffinity(0))
    return lambda: _run(stream_path(stream), measure, count_of, replace, on_bad_row is OnBadRow.ZERO, as_json)


def _run(stream: Path, measure: Measure, workers: int, replace: bool, zero: bool, as_json: bool) -> int:
    started = time.monotonic()
    with chunk_bar() as show:
        done = measure_stream(stream, measure, workers=workers, replace=replace, zero=zero, report=show)
    seconds = time.monotonic() - started
    if as_json:
        say(json.dumps(_values(stream, done, seconds)))
        return exits.DONE
    if done.bad:
        explain(f"{count(done.bad, 'row')} could not be measured and count 0; the first: {done.why}")
    if done.dropped:
        explain(f"{count(done.dropped, 'row')} make no sample and count 0, too long for instance")
    say(_summary(stream, done, seconds))
    return exits.DONE


def _summary(stream: Path, done: Measured, seconds: float) -> str:
    more = "" if done.ended else "; the stream has not ended, measure again what comes"
    if not done.measured:
        return f"{stream}: lengths of all {count(done.known, 'chunk')} are known, nothing to do{more}"
    known = f", those of {count(done.known, 'chunk')} were known" if done.known else ""
    mean = f"{done.tokens / done.rows:,.1f} in the mean"
    speed = per_second(done.rows / max(seconds, 1e-3), "rows")
    return (
        f"{stream}: measured {count(done.rows, 'row')} in {count(done.measured, 'chunk')}{known}: "
        f"{count(done.tokens, 'token')}, {mean} ({seconds:.1f} s, {speed}){more}"
    )


def _values(stream: Path, done: Measured, seconds: float) -> dict[str, Any]:
    values = asdict(done)
    return {"stream": str(stream), "measure": values.pop("text") or None} | values | {"seconds": round(seconds, 3)}
