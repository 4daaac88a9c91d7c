"""The subcommands in typer's terms, and what becomes of errors: one line and an exit code.

A subcommand's function only takes its arguments and returns what is to be done, which runs once typer is through:
Ctrl-C and errors then reach us as they are.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Annotated, Final

import typer

from lazyshard import __version__
from lazyshard.cli import (
    audit,
    check_config,
    doctor,
    exits,
    export,
    forget,
    inspect,
    measure,
    simulate,
    status,
    trace,
    verify,
    verify_filesystem,
    watch,
)
from lazyshard.cli.plain_flags import PlainFlags
from lazyshard.cli.wording import NAME, complain, explain
from lazyshard.errors import LazyShardError

_HELP: Final = """Looks after streams of numbered chunk files.

See [bold]lazyshard COMMAND --help[/bold]. What all commands have in common is told in docs/commands.md."""

app = typer.Typer(
    name=NAME,
    cls=PlainFlags,
    help=_HELP,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("audit", help=audit.HELP, epilog=audit.EPILOG)(audit.command)
app.command("check-config", help=check_config.HELP, epilog=check_config.EPILOG)(check_config.command)
app.command("doctor", help=doctor.HELP, epilog=doctor.EPILOG)(doctor.command)
app.command("export", help=export.HELP, epilog=export.EPILOG)(export.command)
app.command("status", help=status.HELP, epilog=status.EPILOG)(status.command)
app.command("forget", help=forget.HELP, epilog=forget.EPILOG)(forget.command)
app.command("inspect", help=inspect.HELP, epilog=inspect.EPILOG)(inspect.command)
app.command("measure", help=measure.HELP, epilog=measure.EPILOG)(measure.command)
app.command("simulate", help=simulate.HELP, epilog=simulate.EPILOG)(simulate.command)
app.command("trace", help=trace.HELP, epilog=trace.EPILOG)(trace.command)
app.command("verify", help=verify.HELP, epilog=verify.EPILOG)(verify.command)
app.command("verify-filesystem", help=verify_filesystem.HELP, epilog=verify_filesystem.EPILOG)(
    verify_filesystem.command
)
app.command("watch", help=watch.HELP, epilog=watch.EPILOG)(watch.command)


def execute(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code; no exception but KeyboardInterrupt leaves it.

    Args:
        arguments: the command line after the program's name.
    """
    try:
        task = app(list(arguments), standalone_mode=False, prog_name=NAME)
        # An option such as --help has done it already, and what came is the exit code.
        code = task() if callable(task) else task
    except typer.Abort:
        # Ctrl-C, in typer's own words.
        raise KeyboardInterrupt from None
    except Exception as error:
        # The root of typer's own usage errors is click's, which recent releases carry inside; both have this method.
        if hasattr(error, "format_message"):
            complain(f"{error.format_message()} (see `{_called(arguments)} --help`)")
            return exits.USAGE
        return _report(error)
    return code if isinstance(code, int) else exits.DONE


def _called(arguments: Sequence[str]) -> str:
    """Returns the command with its subcommand, if there is one of that name."""
    known = {command.name for command in app.registered_commands}
    return f"{NAME} {arguments[0]}" if arguments and arguments[0] in known else NAME


def _report(error: Exception) -> int:
    """Says in one line what went wrong and returns the exit code."""
    code = exits.exit_code(error)
    if code == exits.OUT_OF_MEMORY:
        complain(
            f"not enough memory: {error or 'the system has no more'}; give this process more, or see whether the "
            f"numbers in the stream's files can be true, and run the same command again"
        )
    elif isinstance(error, LazyShardError):
        complain(str(error))
    elif isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        complain(f"{where}{error.strerror or error}; mend that, and run the same command again")
    else:
        # Line by line: a text in it may be somebody else's.
        for line in traceback.format_exc().splitlines():
            explain(line)
        complain(f"unexpected {type(error).__name__}: {error}; this should not happen, report it with the lines above")
    return code


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"{NAME} {__version__}")
        raise typer.Exit(exits.DONE)
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(exits.USAGE)
