"""`lazyshard inspect --shuffle`: its options, and what is done."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

import typer

from lazyshard.cli import exits
from lazyshard.cli.inspect_shuffle_view import shuffle_lines, shuffle_values
from lazyshard.cli.output import say
from lazyshard.inspection.inspection_shuffle import ALL, Reading, report_shuffle
from lazyshard.plan import UNIT_NAMES
from lazyshard.stream.opening import open_now

WINDOWS: Final = "0,2,8"
"""In order, and the windows that ms-swift gets by default, of a live stream and of one that has ended."""

MOST: Final = 1_000_000_000
"""Of a number that is typed: more than any run has, and few enough to count with."""

ShuffleOption: TypeAlias = Annotated[
    bool, typer.Option("--shuffle", help="Tell how far apart neighbours are in the order of reading; no row is read.")
]
RanksOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--dp-size", "--ranks", metavar="R", min=1, max=MOST, help="With --shuffle: data-parallel ranks. Default: 1."
    ),
]
WindowOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--window",
        metavar="W,...",
        help=f"With --shuffle: chunks of a rank that are shuffled together, 0 for none, several with commas; '{ALL}' "
        f"for all of a rank. Default: {WINDOWS}.",
    ),
]
UnitOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--unit",
        metavar="UNIT",
        help="With --shuffle: what is dealt to the ranks in turn, 'chunk', 'sample', 'batch', 'auto' or a number of "
        "samples. Default: chunk.",
    ),
]
BatchSizeOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        metavar="B",
        min=1,
        max=1_000_000,
        help="With --shuffle: samples of a rank in a step. Default: 1.",
    ),
]


def windows_of(text: str) -> list[int | Literal["all"]]:
    """Returns the windows that are named.

    Raises:
        typer.BadParameter: naming what is none.

    >>> windows_of("0, 2,all")
    [0, 2, 'all']
    """
    found: list[int | Literal["all"]] = []
    for part in text.split(","):
        name = part.strip()
        if name == ALL:
            found.append(ALL)
        elif re.fullmatch(r"[0-9]{1,10}", name) and int(name) <= MOST:
            found.append(int(name))
        else:
            raise typer.BadParameter(
                f"a window is a number of chunks, 0 for none, or '{ALL}', several with commas: got {name!r}",
                param_hint="--window",
            )
    return found


def unit_of(text: str) -> str | int:
    """Returns the unit that is named.

    Raises:
        typer.BadParameter: it is none.
    """
    if text in UNIT_NAMES:
        return text
    if re.fullmatch(r"[0-9]{1,10}", text) and 1 <= int(text) <= MOST:
        return int(text)
    raise typer.BadParameter(
        f"a unit is 'chunk', 'sample', 'batch', 'auto' or a number of samples: got {text!r}", param_hint="--unit"
    )


def show_shuffle(
    directory: Path,
    samples_per_chunk: int | None,
    reading: Reading,
    windows: list[int | Literal["all"]],
    as_json: bool,
) -> int:
    """Shows how well a stream is shuffled.

    Raises:
        typer.BadParameter: the stream is not such that it could be read in this way.
        LazyShardError, OSError: as `open_now` and `Stream.published`.
    """
    stream = open_now(directory, samples_per_chunk)
    published = stream.published()
    try:
        found = report_shuffle(published, stream.samples_per_chunk, reading, windows)
    except ValueError as cause:
        raise typer.BadParameter(str(cause), param_hint="--shuffle") from cause
    if as_json:
        say(json.dumps(shuffle_values(directory, found)))
    else:
        for line in shuffle_lines(directory, found):
            say(line)
    return exits.DONE
