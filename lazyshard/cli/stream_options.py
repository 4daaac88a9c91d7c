"""What commands that look at a stream take alike: its directory, and how a directory without a manifest is read."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

from lazyshard.format.manifest import MAX_SAMPLES_PER_CHUNK
from lazyshard.storage.urls import is_folder

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


def check_stream(stream: str) -> None:
    """Refuses what is no directory.

    Raises:
        typer.BadParameter: it is none. An empty path, of a variable that was not set for instance, must not mean the
            current directory.
    """
    if not stream or not is_folder(stream):
        raise typer.BadParameter(f"{stream!r} is not a directory", param_hint="STREAM")
