"""The command `lazyshard-producer`: its entry point and its exit codes.

    code  meaning                                                       what to do
       0  the stream has ended, now or before; or SIGTERM came          nothing; after SIGTERM the same command goes on
       1  a package that is needed is not installed                     pip install 'lazyshard[producer]'
       2  usage: a setting is missing or cannot be, or a port is taken  see --help
       3  a bad row, more than --max-bad-rows of them, or no others     mend the line named, run again
       4  a source is missing, unreadable, or not what it was           put it back, run again
       5  stream does not fit, is damaged, or ended without new rows    use another --out
       6  another producer has the stream                               stop one of the two
       7  filesystem or store failed: full, read-only, no permission    make room, run again
       8  a worker process has died: out of memory, or killed           run again with fewer --workers
      70  unexpected error                                              run again with --debug, report it
      71  not enough memory; no row was skipped for it                  raise the limit, run again
     130  interrupted (SIGINT, Ctrl-C)                                  run the same command again to go on

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
            if missing not in ("typer", "rich", "click", "pydantic"):
                raise
            install = "which is not installed: pip install 'lazyshard[producer]'"
            print(f"lazyshard-producer needs {missing}, {install}", file=sys.stderr)
            return 1
        code = execute(sys.argv[1:] if arguments is None else arguments, stop)
        drop_what_nobody_reads()
        return code
