"""The typer application, which holds the subcommands and turns errors into one line and an exit code."""

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
    "Inspects, checks and monitors streams of numbered chunk files.\n\nSee [bold]lazyshard COMMAND --help[/bold]. "
    "docs/commands.md describes what all commands have in common.",
)


def _offer(*names: str) -> None:
    """Registers commands with typer: each is the function `command` of the module of the same name."""
    for name in names:
        command: Callable[..., int] = importlib.import_module(f"lazyshard.cli.{name.replace('-', '_')}").command
        text, end = help_of(command)
        # Returns the call for `execute` to make, so that typer does not intercept Ctrl-C and errors.
        later = functools.update_wrapper(functools.partial(functools.partial, command), command)
        app.command(name, help=text, epilog=end)(later)


_offer("audit", "check-config", "doctor", "export", "forget", "inspect", "simulate", "status", "trace", "verify")
_offer("verify-filesystem", "watch")


def execute(arguments: Sequence[str]) -> int:
    """Runs a command line and returns its exit code. Raises nothing but KeyboardInterrupt."""
    try:
        task = app(list(arguments), standalone_mode=False, prog_name=NAME)
        # An option such as --help has already run and returned the exit code.
        code = task() if callable(task) else task
        return code if isinstance(code, int) else exits.DONE
    except typer.Abort:
        # typer's exception for Ctrl-C
        raise KeyboardInterrupt from None
    except Exception as error:
        # Usage errors derive from click's exception or, in recent releases of typer, its vendored copy.
        if not hasattr(error, "format_message"):
            return _report(error)
        known = {command.name for command in app.registered_commands}
        called = f"{NAME} {arguments[0]}" if arguments and arguments[0] in known else NAME
        complain(f"{error.format_message()} (see `{called} --help`)")
        return exits.USAGE


def _report(error: Exception) -> int:
    code, text = exits.exit_code(error), str(error)
    if code == exits.OUT_OF_MEMORY:
        remedy = "raise the limit, or check whether the numbers in the stream's files are plausible"
        text = f"not enough memory: {error or 'the system has none left'}; {remedy}, and run the same command again"
    elif isinstance(error, OSError) and not isinstance(error, LazyShardError):
        where = f"{error.filename}: " if error.filename is not None else ""
        text = f"{where}{error.strerror or error}; fix that, and run the same command again"
    elif code == exits.UNEXPECTED:
        # Line by line, as `explain` escapes control characters, which text from other programs may hold.
        for line in traceback.format_exc().splitlines():
            explain(line)
        text = f"unexpected {type(error).__name__}: {error}; this is a bug, report it with the lines above"
    complain(text)
    return code
