"""The command `lazyshard-producer`: its entry point. `lazyshard_producer.errors` has the exit codes.

Whatever the code, chunks that are published stay, and nothing half done is visible to readers.

This module imports nothing slow, so that Ctrl-C is answered before the rest is loaded, and typer may be missing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lazyshard_producer.stop import Stop


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, with the arguments of the process or others, and returns its exit code."""
    with Stop() as stop:
        try:
            from lazyshard.cli.output import drop_what_nobody_reads
            from lazyshard_producer.command import execute
        except ModuleNotFoundError as cause:
            missing = (cause.name or "").partition(".")[0]
            if missing not in ("typer", "rich", "click", "pydantic", "tomli"):
                raise
            install = "which is not installed: pip install 'lazyshard[producer]'"
            print(f"lazyshard-producer needs {missing}, {install}", file=sys.stderr)
            return 1
        code = execute(sys.argv[1:] if arguments is None else arguments, stop)
        drop_what_nobody_reads()
        return code
