"""The subcommands in typer's terms, and what becomes of errors: one line and an exit code.

A subcommand's function only takes its arguments and returns what is to be done, which runs once typer is through:
Ctrl-C and errors then reach us as they are.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from lazyshard import __version__
from lazyshard.cli import (
    audit,
    check_config,
    doctor,
    exits,
    export,
    forget,
    inspect,
    simulate,
    status,
    trace,
    verify,
    verify_filesystem,
    watch,
)
from lazyshard.cli.output import NAME, complain, explain
from lazyshard.errors import LazyShardError

_HELP: Final = """Looks after streams of numbered chunk files.

See [bold]lazyshard COMMAND --help[/bold]. What all commands have in common is told in docs/commands.md."""


class _Commands(TyperGroup):
    """The commands, whose help shows `--json` as what it is, not `--json <bool>` as recent releases of typer do."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns the program's own arguments and options, --help among them."""
        return _plain(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns a command by its name, None where there is none of that name."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _plain(command.get_params(ctx))
        return command


def _plain(params: Iterable[Any]) -> list[Any]:
    shown = list(params)
    for one in shown:
        if getattr(one, "is_flag", False) and one.metavar is None:
            one.metavar = ""
    return shown


app = typer.Typer(
    name=NAME,
    cls=_Commands,
    help=_HELP,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _one in (
    audit,
    check_config,
    doctor,
    export,
    forget,
    inspect,
    simulate,
    status,
    trace,
    verify,
    verify_filesystem,
    watch,
):
    _name = _one.__name__.rpartition(".")[2].replace("_", "-")
    app.command(_name, help=_one.HELP, epilog=_one.EPILOG)(_one.command)


def execute(arguments: Sequence[str]) -> int:
    """Runs a command line and returns its exit code; no exception but KeyboardInterrupt leaves it."""
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
