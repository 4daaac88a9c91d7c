"""Entry point of the command `lazyshard-producer`. The exit codes are in `lazyshard_producer.errors`.

Whatever the exit code, published chunks stay, and readers never see partial data.

This module imports nothing slow, so that Ctrl-C works before the rest is loaded. typer may be missing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lazyshard_producer.stop import Stop


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments, by default those of the process, and returns its exit code."""
    with Stop() as stop:
        try:
            from lazyshard.cli.output import detach_broken_streams
            from lazyshard_producer.command import execute
        except ModuleNotFoundError as cause:
            missing = (cause.name or "").partition(".")[0]
            if missing not in ("typer", "rich", "click", "pydantic", "tomli"):
                raise
            install = "which is not installed: pip install 'lazyshard[producer]'"
            print(f"lazyshard-producer needs {missing}, {install}", file=sys.stderr)
            return 1
        code = execute(sys.argv[1:] if arguments is None else arguments, stop)
        detach_broken_streams()
        return code
