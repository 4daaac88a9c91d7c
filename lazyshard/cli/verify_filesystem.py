"""`lazyshard verify-filesystem`: whether lazyshard can use a filesystem that two mounts or two machines share."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer

from lazyshard.cli import exits
from lazyshard.cli.options import JsonOption, epilog
from lazyshard.cli.output import complain, explain, say
from lazyshard.filesystem.judging import Judged, conclude, judge
from lazyshard.filesystem.measuring import Far, Sightings, Untried, measure
from lazyshard.filesystem.side import serve

HELP: Final = """Tells whether lazyshard can use a filesystem that two mounts or two machines share.

Changes are made in A and looked at from the other side: B, the same folder on a second mount of this machine, or what
--far starts on another machine. With A alone two processes use one mount. Says of each thing that lazyshard's protocol
needs whether it holds, what it costs, and what to set. Works in a folder of its own and removes it."""

EPILOG: Final = epilog(
    [
        "lazyshard verify-filesystem /data/folder",
        "lazyshard verify-filesystem /mnt/a/folder /mnt/b/folder",
        'lazyshard verify-filesystem /share/folder --far "ssh node2 lazyshard verify-filesystem --serve /share/folder"',
    ],
    {
        0: "the filesystem fits",
        1: "it works with limits, which are printed; or typer or rich is missing: pip install 'lazyshard\\[cli]'",
        2: "usage; there is no such folder",
        3: "it does not fit",
        4: "it could not be tried: a folder cannot be written, the two are not the same one, the other side did "
        "not answer",
    },
)

_CODES: Final = {"fits": exits.DONE, "limited": exits.LIMITED, "unfit": exits.REFUSED}


def command(
    near: Annotated[str | None, typer.Argument(metavar="A", help="A folder on the first mount.")] = None,
    second: Annotated[
        str | None, typer.Argument(metavar="B", help="The same folder on the second mount. Default: A.")
    ] = None,
    far: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="Starts the other side on another machine: ssh, srun, kubectl exec -i."),
    ] = None,
    serving: Annotated[
        str | None, typer.Option("--serve", metavar="FOLDER", help="Be the other side, for --far.")
    ] = None,
    longest: Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for what does not show.")] = 90.0,
    as_json: JsonOption = False,
) -> Callable[[], int]:
    """Returns what is to be done; see `lazyshard.cli.command`."""
    for folder, hint in ((near, "A"), (second, "B"), (serving, "--serve")):
        if folder is not None and not Path(folder).is_dir():
            raise typer.BadParameter(f"{folder}: expected a folder on a filesystem, found none", param_hint=hint)
    if serving is not None:
        if near is not None or far is not None:
            raise typer.BadParameter("stands alone", param_hint="--serve")
        return lambda: _serve(serving)
    if near is None:
        raise typer.BadParameter("give a folder, twice where it is mounted twice", param_hint="A")
    if far is not None and second is not None:
        raise typer.BadParameter("give B or --far, not both", param_hint="--far")
    if not longest > 0:
        raise typer.BadParameter(f"more than 0 seconds, got {longest}", param_hint="--longest")
    here = [sys.executable, "-m", "lazyshard.filesystem.side", second or near]
    try:
        other = here if far is None else shlex.split(far)
    except ValueError as cause:
        raise typer.BadParameter(f"{far}: {cause}", param_hint="--far") from cause
    if not other:
        raise typer.BadParameter("expected a command, found none", param_hint="--far")
    return lambda: _run(near, other, far or second or near, longest, as_json)


def _serve(folder: str) -> int:
    serve(folder)
    return exits.DONE


def _run(near: str, other: Sequence[str], shown: str, longest: float, as_json: bool) -> int:
    try:
        with Far(other) as far:
            measured = measure(near, far, longest, explain)
    except (Untried, OSError) as error:
        complain(f"it could not be tried: {error}")
        return exits.UNTRIED
    lines = judge(measured)
    verdict, text = conclude(lines)
    if as_json:
        facts = {"verdict": verdict, "text": text, "measured": asdict(measured)}
        say(json.dumps(facts | {"lines": [asdict(line) for line in lines]}))
    else:
        for shown_line in (*_table(measured, lines, near, shown), "", text):
            say(shown_line)
    return _CODES[verdict]


def _table(measured: Sightings, lines: Sequence[Judged], near: str, far: str) -> list[str]:
    left = max(len(line.what) for line in lines)
    shown = [
        f"changes in {near} ({measured.near or 'unknown'}), seen from {far} ({measured.far or 'unknown'}); a question "
        f"there and back takes {1000 * measured.round_trip_s:.1f} ms",
        "",
    ]
    for line in lines:
        shown.append(f"{line.verdict:8} {line.what:{left}}  {line.found}")
        for text in (line.means, f"-> {line.remedy}" if line.remedy else ""):
            if text:
                shown += textwrap.wrap(text, 115, initial_indent=" " * 11, subsequent_indent=" " * 11)
    return shown
