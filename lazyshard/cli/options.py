"""What commands take and say alike: the stream's directory, common options, and the end of their help."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, TypeAlias

import typer

from lazyshard.errors import StreamMissing
from lazyshard.format.records import MAX_SAMPLES_PER_CHUNK
from lazyshard.store.urls import check_place, is_folder

StreamArgument: TypeAlias = Annotated[str, typer.Argument(metavar="STREAM", help="The stream's directory, or its URL.")]

JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object on one line.")]

SamplesPerChunkOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--samples-per-chunk",
        metavar="N",
        min=1,
        max=MAX_SAMPLES_PER_CHUNK,
        help="For a directory without stream.json: rows in every chunk but the last. Default: those of its first.",
    ),
]

_CODES: Final = {
    1: "typer or rich is missing: pip install 'lazyshard\\[cli]'",
    70: "unexpected error",
    71: "not enough memory",
    130: "Ctrl-C",
}
"""Exit codes of every command."""


def epilog(examples: Sequence[str], codes: Mapping[int, str]) -> str:
    """Returns the end of a command's help: examples, and its exit codes besides those that every command has."""
    listed = [f"{code:3}  {meaning}" for code, meaning in sorted({**_CODES, **codes}.items())]
    return "\n\n".join(["[bold]Examples[/bold]", *examples, "[bold]Exit codes[/bold]", *listed])


def check_stream(stream: str, *, may_come: bool = False) -> None:
    """Refuses what is no directory; with `may_come` one will do that a producer may still make, in one that is there.

    An empty path, of a variable that was not set for instance, must not mean the current directory.
    """
    if stream and is_folder(stream):
        return
    if not (stream and may_come) or os.path.lexists(stream):
        what = (
            "is a file: give the directory that it lies in"
            if os.path.lexists(stream)
            else "see whether the path is right"
        )
        advice = f": {what}" if stream else ""
        raise typer.BadParameter(f"{stream!r} is not a directory{advice}", param_hint="STREAM")
    try:
        check_place(stream)
    except StreamMissing as error:
        raise typer.BadParameter(str(error), param_hint="STREAM") from None
