"""What commands that look at a stream take alike: its directory, and how a directory without a manifest is read."""

from __future__ import annotations

import os
from typing import Annotated, TypeAlias

import typer

from lazyshard.errors import StreamMissing
from lazyshard.format.manifest import MAX_SAMPLES_PER_CHUNK
from lazyshard.store.urls import check_place, is_folder

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


def check_stream(stream: str, *, may_come: bool = False) -> None:
    """Refuses what is no directory.

    Args:
        stream: its path or URL.
        may_come: a directory that is not there yet will do, in one that is: a producer makes it when it starts.

    Raises:
        typer.BadParameter: it is none. An empty path, of a variable that was not set for instance, must not mean the
            current directory.
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
