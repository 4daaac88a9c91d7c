"""The command `lazyshard`: its entry point and its exit codes.

    code  meaning                                                       what to do
       0  done, or nothing was to do                                    nothing
       1  a requirement of the command is not installed                 see the message: pip install 'lazyshard[cli]'
       1  `doctor`: something is not as it should be                    see what is marked NOT OK
       1  `verify-filesystem`: it works with limits                     see what is printed
       2  usage: an argument is missing or impossible                   see --help
       2  `watch`: the port is taken                                    choose another --port
       3  refused: a bad row, names or numbers of rows                  do what the message says, run again
       3  `forget`: no consumer of this name                            choose one that the message lists
       3  `export`: PREFIX is there, the stream has not ended           see --force, or wait for its end
       3  `watch --save`: FILE is there and is no page of watch         choose another name, or remove it
       3  `trace`: no row holds the text; `audit`: there is no state    ask for another one, give the checkpoints
       3  `verify-filesystem`: it does not fit                          take another one, or set what is printed
       4  `verify-filesystem`: it could not be tried                    see what the message names
       5  `audit`: something is not in order                            see what the lines name
       5  `status`: there is no stream in the directory                 see to its producer
       5  `verify`: there is damage                                     restore what the lines name
       5  the stream is damaged, of a later format, or another one      restore what the message names
       7  filesystem or store failed: full, read-only, no permission    fix it, run again
       9  `audit`: consistent, but the count of samples is not checked  save steps: dataset.batches() does
      70  unexpected error                                              report it with its traceback
      71  not enough memory                                             raise the limit, run again
     130  interrupted (SIGINT, Ctrl-C)                                  run the same command again

They are those of `lazyshard-producer` where they mean the same; its 4 is a source, its 8 (a worker) has no counterpart.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from lazyshard.cli import exits


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, with the arguments of the process or others, and returns its exit code."""
    try:
        from lazyshard.cli.command import execute
        from lazyshard.cli.output import drop_what_nobody_reads

        code = execute(sys.argv[1:] if arguments is None else arguments)
        drop_what_nobody_reads()
        return code
    except ModuleNotFoundError as cause:
        # Of the imports above: no error leaves a command.
        missing = (cause.name or "").partition(".")[0]
        if missing not in ("typer", "rich", "click"):
            raise
        print(f"lazyshard needs {missing}, which is not installed: pip install 'lazyshard[cli]'", file=sys.stderr)
        return exits.NO_EXTRA
    except KeyboardInterrupt:
        with contextlib.suppress(OSError, ValueError):
            print("lazyshard: interrupted; run the same command again to continue", file=sys.stderr)
        return exits.INTERRUPTED
