"""The subcommands in typer's terms, and what becomes of errors: one line and an exit code."""

from __future__ import annotations

import functools
import importlib
import traceback
from collections.abc import Callable, Sequence

import typer

from lazyshard.cli import exits
from lazyshard.cli.output import NAME, application, complain, explain, help_of
from lazyshard.errors import LazyShardError

app = application(
    NAME,
    "Looks after streams of numbered chunk files.\n\nSee [bold]lazyshard COMMAND --help[/bold]. "
    "What all commands have in common is told in docs/commands.md.",
)


def _offer(*names: str) -> None:
    """Has typer offer commands: each is the function `command` of the module of its name."""
    for name in names:
        command: Callable[..., int] = importlib.import_module(f"lazyshard.cli.{name.replace('-', '_')}").command
        text, end = help_of(command)
        # It gives back what is to be done: Ctrl-C and errors then reach us as they are.
        later = functools.update_wrapper(functools.partial(functools.partial, command), command)
        app.command(name, help=text, epilog=end)(later)


_offer("audit", "check-config", "doctor", "export", "forget", "inspect", "simulate", "status", "trace", "verify")
_offer("verify-filesystem", "watch")


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
