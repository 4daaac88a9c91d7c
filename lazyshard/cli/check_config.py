"""`lazyshard check-config`: finds all mistakes of a configuration at once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Annotated, Final

import typer

from lazyshard.cli import exits
from lazyshard.cli.output import JsonOption, count, epilog, say

EPILOG: Final = epilog(
    ["lazyshard check-config train.yaml", "lazyshard check-config train.yaml --json | jq -r '.mistakes[].path'"],
    {
        0: "it is in order",
        1: "a package is missing: pip install 'lazyshard\\[cli,config]'",
        2: "usage",
        3: "there are mistakes: each is told in a line",
        7: "the file cannot be read",
    },
)


def command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The configuration, YAML.")],
    no_imports: Annotated[
        bool, typer.Option("--no-imports", help="Import nothing: whether the functions are there stays unknown.")
    ] = False,
    as_json: JsonOption = False,
) -> Callable[[], int]:
    """Looks through a configuration for `lazyshard.load`, and names all mistakes at once, each with its line.

    The modules of the functions that it names are imported, to see whether these are there: look at a file that
    somebody else has made first, or give --no-imports. No stream is opened.
    """
    if not file or os.path.isdir(file):
        raise typer.BadParameter(f"{file!r} is not a file", param_hint="FILE")
    return lambda: _run(file, not no_imports, as_json)


def _run(file: str, imports: bool, as_json: bool) -> int:
    from lazyshard.config import examine

    checked = examine(file, imports=imports)
    mistakes = checked.mistakes
    if as_json:
        listed = [mistake._asdict() for mistake in mistakes]
        say(json.dumps({"file": checked.name, "ok": not mistakes, "mistakes": listed}))
        return exits.REFUSED if mistakes else exits.DONE
    for mistake in mistakes:
        line = "" if mistake.line is None else f"{mistake.line}:"
        where = f" {mistake.path}:" if mistake.path else ""
        say(f"{file}:{line}{where} {mistake.text}")
    result = count(len(mistakes), "mistake")
    if checked.config is not None:
        datasets = checked.config.datasets
        steps = sum(len(dataset.steps) for dataset in datasets)
        result = f"in order: {count(len(datasets), 'data set')}, {count(steps, 'step')}"
    say(f"{file}: {result}")
    return exits.REFUSED if mistakes else exits.DONE
