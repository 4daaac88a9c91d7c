"""`lazyshard export`: writes an ended stream of token ids as Megatron's IndexedDataset."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer

from lazyshard.cli import exits
from lazyshard.cli.output import (
    JsonOption,
    SamplesPerChunkOption,
    StreamArgument,
    check_stream,
    chunk_bar,
    count,
    epilog,
    say,
    size,
)
from lazyshard.conversion.exporting import AUTO, Exported, ExportSettings, export
from lazyshard.conversion.indexed import DATA_SUFFIX, DTYPES, INDEX_SUFFIX
from lazyshard.store.urls import stream_path

HELP: Final = """Writes an ended stream of token ids as Megatron's IndexedDataset, PREFIX.bin and PREFIX.idx.

Each row holds a list of integers under --field, which is a sequence and, by default, a document. Both files appear
when the whole is written, the index last. The stream is only read.

It can be killed at any moment, and leaves nothing under these names then: run the same command again, and it begins
anew."""

EPILOG: Final = epilog(
    [
        "lazyshard export /shared/stream /data/corpus",
        "lazyshard export /shared/stream /data/corpus --dtype int32 --document-boundaries key:document --mode mode",
    ],
    {
        0: "written",
        2: "usage; there is no such directory",
        3: "refused: PREFIX is there already; STREAM has not ended, lacks its first chunks, or holds no token; "
        "a row holds no\n"
        "     tokens, or one that the type cannot hold (the message names file and row)",
        5: "STREAM is damaged, or there is none",
        6: "another process is exporting to PREFIX",
        7: "the filesystem or store failed: disk full, read-only, no permission",
        130: "Ctrl-C; nothing was written",
    },
)


def command(
    stream: StreamArgument,
    prefix: Annotated[
        str,
        typer.Argument(
            metavar="PREFIX",
            help=f"Path of the two files, without {DATA_SUFFIX} and {INDEX_SUFFIX}, as Megatron's own.",
        ),
    ],
    field: Annotated[
        str, typer.Option("--field", metavar="KEY", help="Key of the list of tokens. Default: input_ids.")
    ] = "input_ids",
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            metavar="TYPE",
            help=f"Type of the tokens: {', '.join(DTYPES)}. Default: auto, uint16 where all tokens are below 65,499, "
            "else int32, as Megatron chooses.",
        ),
    ] = AUTO,
    boundaries: Annotated[
        str,
        typer.Option(
            "--document-boundaries",
            metavar="row|stream|key:NAME",
            help="What is a document: each row, the whole stream, or rows that follow each other with the same value "
            "under NAME. Default: row.",
        ),
    ] = "row",
    lengths: Annotated[
        str | None,
        typer.Option(
            "--lengths",
            metavar="KEY",
            help="Key of the tokens of each sequence, where rows hold several. Default: none.",
        ),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            "--mode", metavar="KEY", help="Key of the mode of each sequence, which is written too. Default: none is."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files of these names.")] = False,
    as_json: JsonOption = False,
    samples_per_chunk: SamplesPerChunkOption = None,
) -> Callable[[], int]:
    """Returns what is to be done; see `lazyshard.cli.command`."""
    check_stream(stream)
    if not os.path.basename(prefix) or not os.path.isdir(os.path.dirname(prefix) or "."):
        raise typer.BadParameter(f"{prefix!r} is not a name in a directory that is there", param_hint="PREFIX")
    if prefix.endswith((DATA_SUFFIX, INDEX_SUFFIX)):
        raise typer.BadParameter(f"give it without {prefix[-len(INDEX_SUFFIX) :]}, got {prefix!r}", param_hint="PREFIX")
    try:
        settings = ExportSettings(dtype=dtype, field=field, boundaries=boundaries, lengths=lengths, mode=mode)
    except ValueError as cause:
        hint = "--dtype" if dtype != AUTO and dtype not in DTYPES else "--document-boundaries"
        raise typer.BadParameter(str(cause), param_hint=hint) from cause
    directory = stream_path(stream)
    return lambda: _run(directory, Path(prefix), settings, samples_per_chunk, force, as_json)


def _run(
    directory: Path, prefix: Path, settings: ExportSettings, samples_per_chunk: int | None, force: bool, as_json: bool
) -> int:
    started = time.monotonic()
    with chunk_bar() as show:
        made = export(directory, prefix, settings, source_samples_per_chunk=samples_per_chunk, force=force, report=show)
    say(json.dumps(dataclasses.asdict(made)) if as_json else _summary(made, time.monotonic() - started))
    return exits.DONE


def _summary(made: Exported, seconds: float) -> str:
    holds = f"{count(made.documents, 'document')}, {count(made.sequences, 'sequence')}, {count(made.tokens, 'token')}"
    return f"exported: {made.data} and {INDEX_SUFFIX} hold {holds} of {made.dtype}; {size(made.size)} ({seconds:.1f} s)"
