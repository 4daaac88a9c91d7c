"""`lazyshard inspect`: what a stream holds, and rows of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.highlighter import JSONHighlighter
from rich.text import Text

from lazyshard.cli import exits
from lazyshard.cli.inspect_view import (
    advice_lines,
    chunk_lines,
    chunk_values,
    overview_lines,
    overview_values,
    row_line,
    row_text,
)
from lazyshard.cli.output import (
    SamplesPerChunkOption,
    StreamArgument,
    check_stream,
    count,
    epilog,
    one_line,
    pretty,
    say,
)
from lazyshard.errors import ChunkMissing, ChunkRetired
from lazyshard.inspection.advice import advise, training_of
from lazyshard.inspection.inspection import ShownRow, describe_chunk, overview, read_rows
from lazyshard.inspection.survey import tolerate
from lazyshard.store.urls import stream_path
from lazyshard.stream.consumers import list_consumers
from lazyshard.stream.stream import Stream, open_now

ROWS_OF_CHUNK: Final = 3

HELP: Final = """Shows what a stream holds: its facts, how long its rows are, which keys they have; or rows of it.

Without a number: an overview. Lengths come from the seals, so that no rows are read but the first ones; of a stream of
many chunks evenly spaced ones are looked at. What to change about chunks, lengths and shuffle stands at the end. With a
number: that sample.

Changes nothing, and waits for nothing: of a stream that is being written it shows what is published."""

EPILOG: Final = epilog(
    [
        "lazyshard inspect /shared/stream",
        "lazyshard inspect /shared/stream 123456",
        "lazyshard inspect /shared/stream 0 --rows 5 --full",
        "lazyshard inspect /shared/stream --chunk 17",
        "lazyshard inspect /shared/stream --all --json | jq .advice",
    ],
    {
        0: "shown",
        2: "usage; there is no such directory, sample or chunk",
        3: "a row is no JSON object, or the names of a directory's files contradict each other",
        5: "there is no stream in it, what is to be shown is damaged or deleted, or it is of a later format",
        7: "the filesystem or store failed: no permission, no answer",
    },
)


def command(
    stream: StreamArgument,
    sample: Annotated[int | None, typer.Argument(metavar="N", min=0, help="The sample to show, from 0 on.")] = None,
    chunk: Annotated[
        int | None, typer.Option("--chunk", metavar="K", min=0, help="Show this chunk: its seal and its first rows.")
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(
            "--rows",
            metavar="M",
            min=0,
            help=f"How many rows to show. Default: 1 with N, {ROWS_OF_CHUNK} with --chunk.",
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Shorten nothing.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Look at every chunk for the overview.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on one line; rows are whole.")] = False,
    samples_per_chunk: SamplesPerChunkOption = None,
) -> Callable[[], int]:
    """Returns what is to be done; see `lazyshard.cli.command`."""
    check_stream(stream)
    if sample is not None and chunk is not None:
        raise typer.BadParameter("give either N or --chunk", param_hint="--chunk")
    if rows is not None and sample is None and chunk is None:
        raise typer.BadParameter("goes with N or --chunk", param_hint="--rows")
    if every and not (sample is None and chunk is None):
        raise typer.BadParameter("goes with neither N nor --chunk", param_hint="--all")
    directory = stream_path(stream)
    if chunk is not None:
        shown = ROWS_OF_CHUNK if rows is None else rows
        return lambda: _show_chunk(open_now(directory, samples_per_chunk), chunk, shown, full, as_json)
    if sample is not None:
        shown = 1 if rows is None else rows
        return lambda: _show_rows(open_now(directory, samples_per_chunk), sample, shown, full, as_json)
    return lambda: _show_overview(directory, samples_per_chunk, every, as_json)


def _show_overview(directory: Path, samples_per_chunk: int | None, every: bool, as_json: bool) -> int:
    found = overview(directory, samples_per_chunk, every=every)
    consumers = tolerate(lambda: list_consumers(directory, found.published.chunks), []) or ()
    advice = advise(found, training_of(consumers, found.samples_per_chunk))
    if as_json:
        say(json.dumps(overview_values(found, advice)))
        return exits.DONE
    for line in overview_lines(found):
        say(line)
    for line in advice_lines(advice):
        say(line)
    return exits.DONE


def _show_chunk(stream: Stream, number: int, rows: int, full: bool, as_json: bool) -> int:
    chunks = stream.published().chunks
    if number >= chunks:
        raise typer.BadParameter(f"no chunk {number}: {_published(chunks, 'chunk')}", param_hint="--chunk")
    with _Deleted(stream, number):
        shown = describe_chunk(stream, number)
        if as_json:
            texts = ", ".join(map(row_text, read_rows(stream, number, 0, rows)))
            say(f'{json.dumps(chunk_values(shown))[:-1]}, "rows": [{texts}]}}')
            return exits.DONE
        for line in chunk_lines(shown):
            say(line)
        if shown.seal is not None and shown.seal.source is not None:
            say("")
            say("source position after it")
            _show_json(pretty(shown.seal.source, full=full))
        for row in read_rows(stream, number, 0, rows):
            say("")
            _show_row(row, full)
    return exits.DONE


def _show_rows(stream: Stream, sample: int, rows: int, full: bool, as_json: bool) -> int:
    samples = stream.published().samples
    if sample >= samples:
        raise typer.BadParameter(f"no sample {sample}: {_published(samples, 'sample')}", param_hint="N")
    found = _rows_from(stream, sample, min(rows, samples - sample))
    if as_json:
        say(f'{{"rows": [{", ".join(map(row_text, found))}]}}')
        return exits.DONE
    for number, row in enumerate(found):
        if number:
            say("")
        _show_row(row, full)
    return exits.DONE


def _published(number: int, noun: str) -> str:
    if not number:
        return "none is published"
    return f"{count(number, noun)} {'is' if number == 1 else 'are'} published, from 0 to {number - 1:,}"


def _rows_from(stream: Stream, sample: int, rows: int) -> Iterator[ShownRow]:
    number, first = divmod(sample, stream.samples_per_chunk)
    while rows > 0:
        with _Deleted(stream, number):
            for row in islice(read_rows(stream, number, first, rows), rows):
                yield row
                rows -= 1
        number, first = number + 1, 0


class _Deleted:
    """Tells of a published chunk that is not there whether it was deleted by the stream's own rules."""

    def __init__(self, stream: Stream, number: int) -> None:
        self._stream = stream
        self._number = number

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, FileNotFoundError) or isinstance(error, ChunkMissing | ChunkRetired):
            return
        retired = self._stream.retired()
        if self._number < retired:
            raise ChunkRetired(
                f"{self._stream.directory}: chunk {self._number} was deleted by the stream's producer, as were all "
                f"chunks below {retired}",
                file=error.filename,
                chunk=self._number,
                chunks_before=retired,
            ) from error
        raise ChunkMissing(
            f"{error.filename}: chunk {self._number} is published, but this file of it is not there; on a network "
            f"filesystem it may still have to appear. `lazyshard verify` looks for more",
            file=error.filename,
            chunk=self._number,
        ) from error


def _show_row(row: ShownRow, full: bool) -> None:
    say(row_line(row))
    _show_json(pretty(row.value, row.line, full=full))


def _show_json(text: str) -> None:
    console = Console()
    highlight = JSONHighlighter()
    for line in text.rstrip("\r\n").split("\n"):
        if console.is_terminal:
            shown = Text(one_line(line))
            highlight.highlight(shown)
            console.print(shown, soft_wrap=True)
        else:
            say(line)
