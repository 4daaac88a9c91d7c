"""`lazyshard report`: one page with pictures of a stream, and what to change."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer

from lazyshard.cli import exits
from lazyshard.cli.options import SamplesPerChunkOption, check_stream
from lazyshard.cli.output import chunk_bar, count, say, size
from lazyshard.cli.report_advice import in_order
from lazyshard.cli.report_findings import findings_of
from lazyshard.cli.report_json import report_values
from lazyshard.cli.report_page import BEGINNING, report_page
from lazyshard.errors import ExportExists
from lazyshard.inspection.report_facts import Asked, ReportFacts, gather
from lazyshard.store.durable import publish_bytes, remove
from lazyshard.store.urls import is_url, stream_path

STDOUT: Final = "-"

OUTPUT: Final = "report.html"

CHUNKS: Final = 200

_MOST_RANKS: Final = 1_000_000
_MOST_TOKENS: Final = 1 << 24

HELP: Final = """Writes a page about a stream: lengths, packing, balance between ranks, shuffle distance, rates, waits,
bad rows and disk, as pictures, with what to change on top.

The page is one file that needs nothing but a browser. Only looks at the stream, at any time: nothing is waited for, and
what cannot be read is told. Of a stream of many chunks evenly spaced ones are looked at."""

EPILOG: Final = """[bold]Examples[/bold]

lazyshard report /shared/stream

lazyshard report /shared/stream -o report.html --dp-size 64 --micro-batch-size 2 --pack 8192

lazyshard report /shared/stream -o report.html --checkpoints out/

lazyshard report /shared/stream --json | jq .changes

[bold]Exit codes[/bold]

  0  written

  1  typer or rich is missing: pip install 'lazyshard\\[cli]'

  2  usage; there is no such directory

  3  FILE is there and is no report: see --force; or two files of the stream have the same chunk number

  5  there is no stream in it, none that is complete, or one of a later format

  7  the filesystem or store failed: no permission, no answer, no room for FILE

 70  unexpected error

 71  not enough memory

130  Ctrl-C"""


def command(
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="The stream's directory, or its URL.")],
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help=f"The page; {STDOUT} for the standard output. A report that is there is replaced, nothing else is. "
            f"Default: {OUTPUT} in this directory; none with --json.",
        ),
    ] = None,
    dp_size: Annotated[
        int | None,
        typer.Option(
            "--dp-size",
            metavar="R",
            min=1,
            max=_MOST_RANKS,
            help="Data-parallel ranks. Default: those of the newest consumer, else those for which rows were dealt.",
        ),
    ] = None,
    micro_batch_size: Annotated[
        int | None,
        typer.Option(
            "--micro-batch-size",
            metavar="B",
            min=1,
            max=1_000_000,
            help="Samples of a rank in a micro batch. Default: as for --dp-size, or 1.",
        ),
    ] = None,
    global_batch_size: Annotated[
        int | None,
        typer.Option(
            "--global-batch-size",
            metavar="G",
            min=1,
            max=1_000_000_000,
            help="Samples of all ranks in a step. Default: that of the newest consumer, where it tells.",
        ),
    ] = None,
    pack: Annotated[
        int | None,
        typer.Option(
            "--pack",
            metavar="TOKENS",
            min=1,
            max=_MOST_TOKENS,
            help="Try packs of so many tokens. Default: the power of two that holds the longest row.",
        ),
    ] = None,
    length_field: Annotated[
        str | None,
        typer.Option(
            "--length-field",
            metavar="NAME",
            help="For the balance: the field with a row's length in tokens, where no seal tells it.",
        ),
    ] = None,
    checkpoints: Annotated[
        list[Path] | None,
        typer.Option(
            "--checkpoints",
            metavar="DIR",
            exists=True,
            help="A run's folder of checkpoints, whose lazyshard.json tell when what was trained. May be repeated.",
        ),
    ] = None,
    chunks: Annotated[
        int, typer.Option("--chunks", metavar="N", min=2, max=1_000_000, help="Chunks to look at, evenly spaced.")
    ] = CHUNKS,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE whatever it is.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the same facts as one JSON object on one line.")
    ] = False,
    samples_per_chunk: SamplesPerChunkOption = None,
) -> Callable[[], int]:
    """Returns what is to be done; see `lazyshard.cli.command`."""
    check_stream(stream)
    if output is None and not as_json:
        output = OUTPUT
    if output == STDOUT and as_json:
        raise typer.BadParameter(f"{STDOUT} and --json both take the standard output", param_hint="--output")
    if output is not None and output != STDOUT:
        _check_output(output)
    asked = Asked(dp_size, micro_batch_size, global_batch_size, length_field, pack, tuple(checkpoints or ()), chunks)
    return lambda: _report(stream_path(stream), samples_per_chunk, asked, output, force, as_json)


def _check_output(output: str) -> None:
    # What is there and no plain file, a device for instance, must not be replaced by one.
    if not output or is_url(output) or (os.path.exists(output) and not os.path.isfile(output)):
        raise typer.BadParameter(f"{output!r} is no name of a plain file on this machine", param_hint="--output")
    parent = os.path.dirname(output) or "."
    if not os.path.isdir(parent):
        raise typer.BadParameter(f"{parent!r} is not a directory", param_hint="--output")


def _report(
    directory: Path, samples_per_chunk: int | None, asked: Asked, output: str | None, force: bool, as_json: bool
) -> int:
    # Where a link leads to, not the link.
    target = None if output is None or output == STDOUT else Path(os.path.realpath(output))
    if target is not None and not force:
        check_replaceable(target)
    with chunk_bar() as show:
        facts = gather(directory, samples_per_chunk, asked, time.time(), show)
    if output == STDOUT:
        sys.stdout.write(report_page(facts))
        sys.stdout.flush()
    elif target is not None:
        page = report_page(facts).encode()
        _write(target, page)
        if not as_json:
            say(_written(str(output), len(page), facts))
    if as_json:
        say(json.dumps(report_values(facts)))
    return exits.DONE


def check_replaceable(target: Path) -> None:
    """Refuses to replace what is no report.

    Raises:
        ExportExists: there is something else under that name.
        OSError: it cannot be looked at.
    """
    beginning = BEGINNING.encode()
    try:
        with open(target, "rb") as file:
            found = file.read(len(beginning))
    except FileNotFoundError:
        return
    if found and found != beginning:
        raise ExportExists(
            f"{target}: is there already and is no report; choose another name, or have it replaced with --force",
            file=str(target),
        )


def _write(target: Path, page: bytes) -> None:
    temporary = target.with_name(f".{target.name[:200]}.{secrets.token_hex(8)}")
    try:
        publish_bytes(page, target, temporary)
    except BaseException:
        remove(temporary)
        raise


def _written(name: str, written: int, facts: ReportFacts) -> str:
    changes = in_order(list(findings_of(facts).values()))
    told = f"{count(len(changes), 'change')} proposed, first: {changes[0].text}" if changes else "nothing to change"
    return f"{name}: {size(written)}; {told}"
