"""Counts what a program opens and lists below a folder: numbers that do not depend on how busy the machine is.

    python -m tests.harness.soak.million_touched FOLDER MODULE [ARGUMENT ...]

runs a module as `python -m` would, its output left out, and prints the counts as a JSON line.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final

import orjson

_EVENTS: Final = ("open", "os.listdir", "os.scandir")


def count_touched(folder: Path) -> Counter[str]:
    """Begins to count, for the rest of this process. Returns the counts: ``open`` of files below the folder,
    ``listings`` of folders."""
    counts: Counter[str] = Counter(open=0, listings=0)
    inside = str(folder)

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _EVENTS or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path = os.fsdecode(arguments[0])
        if not path.startswith(inside):
            return
        if event == "open":
            counts["open"] += 1
        else:
            counts["listings"] += 1

    sys.addaudithook(count)
    return counts


def main() -> int:
    folder, module, *arguments = sys.argv[1:]
    counts = count_touched(Path(folder))
    sys.argv = [module, *arguments]
    code: Any = 0
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as error:
            code = error.code
    print(orjson.dumps(counts).decode())
    return int(code or 0)


if __name__ == "__main__":
    raise SystemExit(main())
