"""The subcommands in typer's terms, and what becomes of errors: one line and an exit code."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

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
    simulate,
    status,
    trace,
    verify,
    verify_filesystem,
    watch,
)
from lazyshard.cli.output import NAME, PlainFlags, complain, explain, help_of
from lazyshard.errors import LazyShardError

app = typer.Typer(
    name=NAME,
    cls=PlainFlags,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _later(run: Callable[..., int]) -> Callable[..., Callable[[], int]]:
    """Wraps a command for typer, to give back what is to be done: Ctrl-C and errors then reach us as they are."""

    @functools.wraps(run)
    def take(**given: Any) -> Callable[[], int]:
        return functools.partial(run, **given)

    return take


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
    _help, _epilog = help_of(_one.command)
    app.command(_one.__name__.rpartition(".")[2].replace("_", "-"), help=_help, epilog=_epilog)(_later(_one.command))


def execute(arguments: Sequence[str]) -> int:
    """Runs a command line and returns its exit code; no exception but KeyboardInterrupt leaves it."""
    try:
        task = app(list(arguments), standalone_mode=False, prog_name=NAME)
        # An option such as --help has done it already, and what came is the exit code.
        code = task() if callable(task) else task
        return code if isinstance(code, int) else exits.DONE
    except typer.Abort:
        # Ctrl-C, in typer's own words.
        raise KeyboardInterrupt from None
    except Exception as error:
        # The root of typer's own usage errors is click's, which recent releases carry inside; both have this method.
        if not hasattr(error, "format_message"):
            return _report(error)
        known = {command.name for command in app.registered_commands}
        called = f"{NAME} {arguments[0]}" if arguments and arguments[0] in known else NAME
        complain(f"{error.format_message()} (see `{called} --help`)")
        return exits.USAGE


def _report(error: Exception) -> int:
    code, text = exits.exit_code(error), str(error)
    if code == exits.OUT_OF_MEMORY:
        remedy = "give it more, or see whether the numbers in the stream's files can be true"
        text = f"not enough memory: {error or 'the system has no more'}; {remedy}, and run the same command again"
    elif isinstance(error, OSError) and not isinstance(error, LazyShardError):
        where = f"{error.filename}: " if error.filename is not None else ""
        text = f"{where}{error.strerror or error}; fix that, and run the same command again"
    elif code == exits.UNEXPECTED:
        # Line by line: a text in it may be somebody else's.
        for line in traceback.format_exc().splitlines():
            explain(line)
        text = f"unexpected {type(error).__name__}: {error}; this should not happen, report it with the lines above"
    complain(text)
    return code


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    """Looks after streams of numbered chunk files.

    See [bold]lazyshard COMMAND --help[/bold]. What all commands have in common is told in docs/commands.md.
    """
    if version:
        print(f"{NAME} {__version__}")
        raise typer.Exit(exits.DONE)
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(exits.USAGE)
