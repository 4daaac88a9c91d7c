"""The command `lazyshard`: its entry point and its exit codes.

    code  meaning                                                       what to do
       0  done, or nothing to do                                        nothing
       1  a requirement of the command is not installed                 see the message: pip install 'lazyshard[cli]'
       1  `doctor`: a check failed                                      see the lines marked NOT OK
       1  `verify-filesystem`: it works with limits                     see the report
       2  usage error: an argument is missing or invalid                see --help
       2  `watch`: the port is taken                                    choose another --port
       3  refused: a bad row, file names or numbers of rows             follow the message, run again
       3  `forget`: no consumer of this name                            choose one that the message lists
       3  `export`: PREFIX exists, or the stream has not ended          use --force, or wait for the end
       3  `watch --save`: FILE exists and is not a page of watch        choose another name, or remove it
       3  `trace`: no row holds the text; `audit`: no state to audit    give another text, or the checkpoints
       3  `verify-filesystem`: the filesystem cannot be used            choose another one, or follow the report
       4  `verify-filesystem`: the tests could not run                  see the message
       5  `audit`: problems were found                                  see the report
       5  `status`: no stream in the directory                          check its producer
       5  `verify`: the stream is damaged                               restore the files in the report
       5  the stream is damaged, or has a later format or another id    restore the file in the message
       7  filesystem or store failed: full, read-only, no permission    fix it, run again
       9  `audit`: consistent, but the count of samples is not checked  record steps, as dataset.batches() does
      70  unexpected error                                              report it with its traceback
      71  not enough memory                                             raise the limit, run again
     130  interrupted (SIGINT, Ctrl-C)                                  run the same command again

Codes of `lazyshard-producer` with the same meaning are the same; its 4 is a failed source, its 8 (a failed worker) has
no counterpart.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from lazyshard.cli import exits


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with `arguments`, by default those of the process, and returns its exit code."""
    try:
        from lazyshard.cli.command import execute
        from lazyshard.cli.output import detach_broken_streams

        code = execute(sys.argv[1:] if arguments is None else arguments)
        detach_broken_streams()
        return code
    except ModuleNotFoundError as cause:
        # Raised by the imports above, as `execute` handles all errors of commands.
        missing = (cause.name or "").partition(".")[0]
        if missing not in ("typer", "rich", "click"):
            raise
        print(f"lazyshard needs {missing}, which is not installed: pip install 'lazyshard[cli]'", file=sys.stderr)
        return exits.NO_EXTRA
    except KeyboardInterrupt:
        with contextlib.suppress(OSError, ValueError):
            print("lazyshard: interrupted; run the same command again to continue", file=sys.stderr)
        return exits.INTERRUPTED
