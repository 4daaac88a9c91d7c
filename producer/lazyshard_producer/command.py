"""The commands in typer's terms, and what becomes of errors: a line each, and an exit code.

A command's function only takes its arguments and returns what is to be done, which runs once typer is through: signals
and errors then reach us as they are.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from lazyshard import __version__
from lazyshard_producer import exits, help_texts, tasks
from lazyshard_producer.configuration.arguments import Sorted, sort_arguments
from lazyshard_producer.configuration.flags import flags_given, with_options
from lazyshard_producer.configuration.init import DEFAULT_FILE
from lazyshard_producer.display.progress import say
from lazyshard_producer.errors import SettingInvalid, SettingsInvalid
from lazyshard_producer.plain_flags import PlainFlags
from lazyshard_producer.stop import Stop
from lazyshard_producer.wording import NAME, error_line, explain, one_line

app = typer.Typer(
    name=NAME,
    cls=PlainFlags,
    help=help_texts.HELP,
    epilog=help_texts.EPILOG,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Task = Callable[[], int]
"""What a command does; returns the exit code."""


@dataclass(frozen=True, slots=True)
class Call:
    """How the command was called.

    Attributes:
        stop: tells a run when a signal has come.
        arguments: the command line, taken apart.
    """

    stop: Stop
    arguments: Sorted


def execute(arguments: Sequence[str], stop: Stop) -> int:
    """Runs the command and returns its exit code; no exception leaves it.

    Args:
        arguments: the command line after the program's name.
        stop: tells the run when a signal has come.
    """
    found = sort_arguments(arguments)
    try:
        task = app(found.rest, standalone_mode=False, prog_name=NAME, obj=Call(stop, found))
        # An option such as --help has done it already, and what came is the exit code.
        code = task() if callable(task) else task
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except Exception as error:
        # The root of typer's own usage errors is click's, which recent releases carry inside; both have this method.
        if hasattr(error, "format_message"):
            known = {command.name for command in app.registered_commands}
            command = f"{NAME} {found.rest[0]}" if found.rest and found.rest[0] in known else NAME
            # Its options without it are what a forgotten `run` looks like.
            meant = f"; did you mean `{NAME} run ...`?" if found.rest and found.rest[0].startswith("--") else ""
            say(error_line(f"{error.format_message()}{meant} (see `{command} --help`)"))
            return exits.USAGE
        return report(error, debug="--debug" in arguments)
    return code if isinstance(code, int) else exits.FINISHED


def report(error: Exception, debug: bool) -> int:
    """Says what went wrong, in a line, or one for each setting that cannot be, and returns the exit code.

    Args:
        error: what ended the run.
        debug: whether to print its traceback first.
    """
    code = exits.exit_code(error)
    if debug:
        # Line by line: a text in it may be somebody else's.
        for line in traceback.format_exc().splitlines():
            say(one_line(line))
    if isinstance(error, SettingsInvalid):
        for problem in error.problems:
            say(error_line(f"{problem.option}: {problem.text}"))
    else:
        say(error_line(explain(error)))
    return code


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"{NAME} {__version__}")
        raise typer.Exit(exits.FINISHED)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(exits.USAGE)


_Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="A configuration file (TOML) with the names of these flags; a flag counts where both are given, and "
        "sources given as flags take the place of the file's. See init.",
    ),
]
_Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.command("run", help=help_texts.RUN_HELP, epilog=help_texts.RUN_EPILOG, context_settings={"allow_extra_args": True})
@with_options
def _run(
    context: typer.Context,
    config: _Config = None,
    no_progress: Annotated[
        bool,
        typer.Option("--no-progress", help="Show only warnings, errors and the last line."),
    ] = False,
    debug: _Debug = False,
    **given: Any,
) -> Task:
    call: Call = context.obj
    if context.args:
        first = context.args[0]
        meant = f"{'--config' if first.endswith('.toml') else '--source'} {first}"
        raise SettingInvalid(f"run takes nothing without a flag before it, got {first}; is {meant} meant?")
    flags = flags_given(given, call.arguments)
    return lambda: tasks.run(flags, config, no_progress, call.stop)


@app.command("check", help=help_texts.CHECK_HELP, epilog=help_texts.CHECK_EPILOG)
@with_options
def _check(
    context: typer.Context,
    file: Annotated[str | None, typer.Argument(metavar="[CONFIG]", help="The same as --config.")] = None,
    rows: Annotated[int, typer.Option("--rows", metavar="N", min=0, help="How many rows to show.")] = 3,
    config: _Config = None,
    debug: _Debug = False,
    **given: Any,
) -> Task:
    call: Call = context.obj
    flags = flags_given(given, call.arguments)
    if file is not None and config is not None:
        raise typer.BadParameter("given twice: here and as --config", param_hint="CONFIG")
    return lambda: _breakable(call.stop) or tasks.check(flags, config if file is None else file, rows)


@app.command("init", help=help_texts.INIT_HELP, epilog=help_texts.INIT_EPILOG)
def _init(
    context: typer.Context,
    file: Annotated[str, typer.Argument(metavar="[FILE]", help="The file to write.")] = DEFAULT_FILE,
) -> Task:
    call: Call = context.obj
    return lambda: _breakable(call.stop) or tasks.init(file)


@app.command("quarantine", help=help_texts.QUARANTINE_HELP, epilog=help_texts.QUARANTINE_EPILOG)
def _quarantine(
    context: typer.Context,
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="The stream's directory.")],
    rows: Annotated[bool, typer.Option("--rows", help="Print the rows, a line each, as they came.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as one line of JSON.")] = False,
) -> Task:
    if rows and as_json:
        raise typer.BadParameter("the two do not go together", param_hint="--rows, --json")
    call: Call = context.obj
    return lambda: _breakable(call.stop) or tasks.quarantine(stream, rows, as_json)


def _breakable(stop: Stop) -> int:
    """Lets Ctrl-C break off what follows, which leaves nothing half done; returns the exit code if it has come."""
    stop.release()
    return exits.INTERRUPTED if stop.requested is signal.SIGINT else 0
