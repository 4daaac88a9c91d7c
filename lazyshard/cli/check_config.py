"""`lazyshard check-config`: reports all mistakes in a configuration at once."""

from __future__ import annotations

import os
from typing import Annotated

from typer import Argument, Option

from lazyshard.cli import exits, output


def command(
    file: Annotated[str, Argument(metavar="FILE", help="The configuration in YAML.")],
    no_imports: Annotated[bool, Option("--no-imports", help="Import nothing, and do not check functions.")] = False,
    as_json: output.JsonOption = False,
) -> int:
    r"""Checks a configuration for `lazyshard.load` and reports all mistakes at once, each with its line.

    Imports the modules of the functions that the file names, to check that the functions exist. Read a file that you
    did not write first, or give --no-imports. Opens no stream.

    Examples:
        lazyshard check-config train.yaml
        lazyshard check-config train.yaml --json | jq -r '.mistakes[].path'

    Exit codes:
        0  no mistakes
        1  a package is missing: pip install 'lazyshard\[cli,config]'
        2  usage error
        3  mistakes were found, each printed on a line
        7  the file cannot be read
    """
    from lazyshard.config import examine

    output.refuse_if(not file or os.path.isdir(file), "FILE", f"{file!r} is not a file")
    checked = examine(file, imports=not no_imports)
    lines = []
    for one in checked.mistakes:
        line, where = "" if one.line is None else f"{one.line}:", f" {one.path}:" if one.path else ""
        lines.append(f"{file}:{line}{where} {one.text}")
    result = output.count(len(lines), "mistake")
    if checked.config is not None:
        steps = sum(len(dataset.steps) for dataset in checked.config.datasets)
        result = f"no mistakes: {output.count(len(checked.config.datasets), 'data set')}, {output.count(steps, 'step')}"
    mistakes = [one._asdict() for one in checked.mistakes]
    output.show({"file": checked.name, "ok": not lines, "mistakes": mistakes}, [*lines, f"{file}: {result}"], as_json)
    return exits.REFUSED if lines else exits.DONE
