"""`lazyshard adopt`: makes a stream out of a directory of chunk files that another program has filled."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from lazyshard.cli import exits
from lazyshard.cli.progress import chunk_bar
from lazyshard.cli.wording import count, say
from lazyshard.conversion.adoption import Adopted, adopt
from lazyshard.format.manifest import MAX_SAMPLES_PER_CHUNK

_FILES: Final = (
    "The files are chunk_00000.jsonl and so on, numbered from 0 without a gap, with .completed markers or without any; "
    "every chunk but the last holds the same number of rows, a JSON object on each line. All of it is checked before "
    "anything is written, and the chunk files themselves are never changed: what is added are seals (in place of the "
    "markers, whatever those hold), stream.json, stream.end and head.json."
)

HELP: Final = f"""Makes a stream out of a directory of chunk files that another program has filled.

{_FILES}

Nobody may be writing to the directory any more. It can be killed at any moment: run it again."""

EPILOG: Final = """[bold]Examples[/bold]

lazyshard adopt /shared/chunks

lazyshard adopt /shared/chunks --samples-per-chunk 1000 --no-end

[bold]Exit codes[/bold]

  0  adopted, or it was a stream already

  1  typer or rich is missing: pip install 'lazyshard\\[cli]'

  2  usage

  3  refused: a bad row (the message names file, line and byte), names or numbers of rows; nothing was changed

  5  there is a stream or a seal already, and it is damaged, of a later format, or says otherwise

  6  another process is writing to it

  7  the filesystem failed: disk full, read-only, no permission

 70  unexpected error

 71  not enough memory

130  Ctrl-C"""


def command(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The directory with the chunk files.")],
    samples_per_chunk: Annotated[
        int | None,
        typer.Option(
            "--samples-per-chunk",
            metavar="N",
            min=1,
            max=MAX_SAMPLES_PER_CHUNK,
            help="Rows in every chunk but the last. Default: those of chunk 0.",
        ),
    ] = None,
    end: Annotated[
        bool,
        typer.Option("--end/--no-end", help="Whether the stream ends here, or stays open for a ChunkWriter to go on."),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on one line.")] = False,
) -> Callable[[], int]:
    """Returns what is to be done; see `lazyshard.cli.command`."""
    # An empty path, of a variable that was not set for instance, must not mean the current directory.
    if not os.path.isdir(directory):
        raise typer.BadParameter(f"{directory!r} is not a directory", param_hint="DIR")
    return lambda: _run(Path(directory), samples_per_chunk, end, as_json)


def _run(directory: Path, samples_per_chunk: int | None, end: bool, as_json: bool) -> int:
    with chunk_bar() as show:
        adopted = adopt(directory, samples_per_chunk, end=end, report=show)
    say(json.dumps(_values(directory, adopted)) if as_json else _summary(directory, adopted))
    return exits.DONE


def _summary(directory: Path, adopted: Adopted) -> str:
    holds = (
        f"{directory} holds {count(adopted.chunks, 'chunk')}, {count(adopted.samples, 'sample')}, "
        f"{adopted.samples_per_chunk:,} a chunk"
    )
    if not adopted.new:
        return f"already a stream: {holds}; {'ended' if adopted.ended else 'open'}, nothing to do"
    left = "ended" if adopted.ended else "open: a ChunkWriter can go on"
    return f"adopted: {holds}, {count(adopted.size or 0, 'byte')}; {left}"


def _values(directory: Path, adopted: Adopted) -> dict[str, Any]:
    return {
        "stream": str(directory),
        "new": adopted.new,
        "chunks": adopted.chunks,
        "samples": adopted.samples,
        "samples_per_chunk": adopted.samples_per_chunk,
        "bytes": adopted.size,
        "ended": adopted.ended,
    }
