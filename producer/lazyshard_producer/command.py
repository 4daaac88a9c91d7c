"""The commands in typer's terms, what each does, and what becomes of errors: a line each, and an exit code.

A command's function only takes its arguments and returns what is to be done, which runs once typer is through: signals
and errors then reach us as they are.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple

import typer

from lazyshard import __version__
from lazyshard.cli.output import PlainFlags
from lazyshard.format.records import End
from lazyshard_producer import errors
from lazyshard_producer.check import describe_run
from lazyshard_producer.configuration.assembly import assemble
from lazyshard_producer.configuration.given import (
    DEFAULT_FILE,
    Given,
    read_config,
    sort_arguments,
    with_options,
    write_example,
)
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.display.metrics import Metrics
from lazyshard_producer.display.progress import Display, choose_display, say
from lazyshard_producer.rows.refusals import read_refused, summarize, summary_json, summary_lines
from lazyshard_producer.run import reload_settings, run
from lazyshard_producer.shipping import as_directory
from lazyshard_producer.stop import Stop
from lazyshard_producer.wording import NAME, Outcome, count, error_line, explain, holding, one_line, warning_line

_HELP: Final = """Publishes rows as a stream of numbered chunk files, from which training reads while it grows.

See [bold]lazyshard-producer COMMAND --help[/bold]."""


def _epilog(examples: Sequence[str], codes: Mapping[int, str], more: str = "", **titled: Mapping[str, str]) -> str:
    """Returns what comes behind the options in the help."""
    lines = [f"[bold]Example{'s' if len(examples) > 1 else ''}[/bold]", *(f"{NAME} {one}" for one in examples)]
    for title, table in {**titled, "Exit codes": {f"{code:>3}": text for code, text in codes.items()}}.items():
        lines += [f"[bold]{title}[/bold]", *(f"{key}  {text}" for key, text in table.items())] if table else []
    return "\n\n".join([*lines, more]).rstrip()


_CODES: Final = {code: meaning for code, meaning, _ in errors.TABLE}

_PLAIN_CODES: Final = {
    errors.FILESYSTEM: "the filesystem failed: disk full, read-only, no permission",
    errors.INTERRUPTED: "Ctrl-C",
}

_EPILOG: Final = _epilog(["run --source data.jsonl --out /shared/stream --samples-per-chunk 1000"], {})

_RUN_EPILOG: Final = _epilog(
    [
        "run --source a.jsonl --source b.jsonl --out /shared/stream --samples-per-chunk 1000",
        "run --source 'data/*.jsonl' --out /shared/stream --samples-per-chunk 1000 --rate 500",
        "run --source web.jsonl --weight 0.7 --follow /data/incoming --weight 0.3 --out /shared/stream "
        "--samples-per-chunk 1000 --max-ahead 64chunks",
        "run --source /shared/stream --out /shared/larger --samples-per-chunk 10000",
        "run --config stream.toml",
    ],
    _CODES,
    "A second Ctrl-C ends it at once; that can be resumed too.",
    Signals={
        "SIGTERM": "finish the publish in hand and stop; the same command goes on",
        "SIGUSR1": "live sources give what they have, then the stream ends",
        "SIGHUP ": "read --config again: rate, limits, max_bad_rows, log_every_seconds",
    },
)

_CHECK_EPILOG: Final = _epilog(
    ["check stream.toml", "check stream.toml --rows 10 --transform my_rows:clean"],
    {},
    "[bold]Exit codes[/bold]\n\nThose of run: 0 it would run, 2 a setting, 3 a bad row, 4 a source, 5 the stream.",
)

_INIT_EPILOG: Final = _epilog(
    ["init", "init stream.toml"],
    {
        errors.FINISHED: "written",
        errors.NO_EXTRA: _CODES[errors.NO_EXTRA],
        errors.USAGE: "there is such a file already, or usage",
        **_PLAIN_CODES,
    },
)

_QUARANTINE_EPILOG: Final = _epilog(
    ["quarantine /shared/stream --rows > refused.jsonl"],
    {
        errors.FINISHED: "shown, or nothing was refused",
        errors.NO_EXTRA: _CODES[errors.NO_EXTRA],
        errors.USAGE: "usage; there is no such directory",
        errors.STREAM_REFUSED: "the file of refused rows cannot be read as what it is",
        **_PLAIN_CODES,
        errors.FILESYSTEM: "the filesystem or store failed",
    },
)


def load_settings(flags: Given, config: str | None) -> Settings:
    """Returns the settings of a command line and the configuration file that it names, if it does."""
    return assemble(flags, None if config is None else read_config(config))


def _print_rows(stream: str, directory: str) -> int:
    lost = 0
    try:
        for refused in read_refused(directory):
            row = refused or b""
            if not row:
                lost += 1
                continue
            if sys.stdout.isatty():
                # What is in it comes from somebody else.
                row = one_line(row.decode("utf-8", "backslashreplace")).encode("utf-8", "backslashreplace")
            sys.stdout.buffer.write(row + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        return errors.FINISHED
    if lost:
        why = "rows of tables and generators, and those that were too long, are not kept"
        places = f"`{NAME} quarantine {stream}` names their places"
        say(warning_line(f"{count(lost, 'row')} could not be printed: {why}; {places}"))
    return errors.FINISHED


def _print_all(lines: Iterable[str]) -> int:
    # Whoever listened and is gone has heard enough.
    with contextlib.suppress(BrokenPipeError):
        for line in lines:
            print(line, flush=True)
    return errors.FINISHED


def _conclude(result: Outcome | End, out: str, display: Display) -> int:
    if isinstance(result, End):
        say(one_line(f"already ended: {out} holds {holding(result.samples, result.chunks)}; nothing to do"))
        return errors.FINISHED
    display.finish(result)
    return errors.INTERRUPTED if result.end == "interrupted" else errors.FINISHED


app = typer.Typer(
    name=NAME,
    cls=PlainFlags,
    help=_HELP,
    epilog=_EPILOG,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Task = Callable[[], int]
"""What a command does; returns the exit code."""


class Call(NamedTuple):
    """How the command was called: what tells of signals, and the command line, taken apart."""

    stop: Stop
    flags: Given


def execute(arguments: Sequence[str], stop: Stop) -> int:
    """Runs the command and returns its exit code; no exception leaves it."""
    found = sort_arguments(arguments)
    try:
        task = app(found.rest, standalone_mode=False, prog_name=NAME, obj=Call(stop, found))
        # An option such as --help has done it already, and what came is the exit code.
        code = task() if callable(task) else task
    except KeyboardInterrupt:
        return errors.INTERRUPTED
    except Exception as error:
        # The root of typer's own usage errors is click's, which recent releases carry inside; both have this method.
        if hasattr(error, "format_message"):
            known = {command.name for command in app.registered_commands}
            command = f"{NAME} {found.rest[0]}" if found.rest and found.rest[0] in known else NAME
            # Its options without it are what a forgotten `run` looks like.
            meant = f"; did you mean `{NAME} run ...`?" if found.rest and found.rest[0].startswith("--") else ""
            say(error_line(f"{error.format_message()}{meant} (see `{command} --help`)"))
            return errors.USAGE
        return report(error, debug="--debug" in arguments)
    return code if isinstance(code, int) else errors.FINISHED


def report(error: Exception, debug: bool) -> int:
    """Says what went wrong, in a line, or one for each setting that cannot be, and returns the exit code."""
    code = errors.exit_code(error)
    if debug:
        # Line by line: a text in it may be somebody else's.
        for line in traceback.format_exc().splitlines():
            say(one_line(line))
    if isinstance(error, errors.SettingsInvalid):
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
        raise typer.Exit(errors.FINISHED)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(errors.USAGE)


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


def _run_stream(flags: Given, config: str | None, quiet: bool, stop: Stop) -> int:
    settings = load_settings(flags, config)
    # The port first: one that is taken is to be noticed before anything is made.
    with contextlib.closing(Metrics(settings.metrics_host, settings.metrics_port)) as metrics:
        display = choose_display(quiet, settings.log_every_s)

        def reload(old: Settings) -> Settings:
            if config is None:
                display.note("SIGHUP has come, and there is no configuration file to be read again: nothing changes")
                return old
            return reload_settings(old, lambda: load_settings(flags, config), config, display.note, display.warn)

        if metrics.address is not None:
            display.note(f"metrics at {metrics.address}")
        if config is not None and stop.reload_ignored:
            display.note(
                f"SIGHUP is ignored, as under nohup: {config} is not read again while this runs. To change a setting, "
                "stop this with SIGTERM and start it again; to have SIGHUP read it, start this with setsid instead"
            )
        try:
            result = run(settings, display, stop, metrics=metrics, reload=reload)
        finally:
            display.close()
        return _conclude(result, settings.out, display)


@app.command("run", epilog=_RUN_EPILOG, context_settings={"allow_extra_args": True})
@with_options
def _run(
    context: typer.Context,
    config: _Config = None,
    no_progress: Annotated[
        bool, typer.Option("--no-progress", help="Show only warnings, errors and the last line.")
    ] = False,
    debug: _Debug = False,
    **given: Any,
) -> Task:
    """Reads sources, in order or mixed by weights, publishes their rows as a stream, and ends it.

    It can be stopped or killed at any moment: the same command goes on after the last published row, each row once.
    Until the stream has ended, sources may grow and more may be appended; what was read of them must stay as it was.
    A line that is not a JSON object stops it with file, line and byte; mend the line and run it again.

    --transform, --where, --encode and python: sources run code of yours, with all rights of this command. A
    configuration file may name them: trust it as you trust a program.
    """
    call: Call = context.obj
    if context.args:
        first = context.args[0]
        meant = f"{'--config' if first.endswith('.toml') else '--source'} {first}"
        raise errors.SettingInvalid(f"run takes nothing without a flag before it, got {first}; is {meant} meant?")
    flags = call.flags.with_values(given)
    return lambda: _run_stream(flags, config, no_progress, call.stop)


@app.command("check", epilog=_CHECK_EPILOG)
@with_options
def _check(
    context: typer.Context,
    file: Annotated[str | None, typer.Argument(metavar="[CONFIG]", help="The same as --config.")] = None,
    rows: Annotated[int, typer.Option("--rows", metavar="N", min=0, help="How many rows to show.")] = 3,
    config: _Config = None,
    debug: _Debug = False,
    **given: Any,
) -> Task:
    """Says what a run with these settings would do, and shows the first rows it would publish.

    Takes a configuration file, flags, or both, as run does. Makes nothing, and takes nothing from pipes. The functions
    that these settings name are imported and called: do not try a file of somebody else's without reading it.
    """
    call: Call = context.obj
    flags = call.flags.with_values(given)
    if file is not None and config is not None:
        raise typer.BadParameter("given twice: here and as --config", param_hint="CONFIG")

    def task() -> int:
        settings = load_settings(flags, config if file is None else file)
        with as_directory(settings.out, settings.samples_per_chunk) as directory:
            return _print_all(describe_run(settings, rows, directory))

    return _breakable(call.stop, task)


@app.command("init", epilog=_INIT_EPILOG)
def _init(
    context: typer.Context,
    file: Annotated[str, typer.Argument(metavar="[FILE]", help="The file to write.")] = DEFAULT_FILE,
) -> Task:
    """Writes an example of a configuration file, with a comment for each setting. Never overwrites a file."""

    def task() -> int:
        write_example(file)
        return _print_all([f"written: {file}; edit it, then `{NAME} check {file}` says what it means"])

    return _breakable(context.obj.stop, task)


@app.command("quarantine", epilog=_QUARANTINE_EPILOG)
def _quarantine(
    context: typer.Context,
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="The stream's directory.")],
    rows: Annotated[bool, typer.Option("--rows", help="Print the rows, a line each, as they came.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as one line of JSON.")] = False,
) -> Task:
    """Shows the rows refused with --on-bad-row quarantine, counted by reason.

    With --rows prints them as they came, to be mended and given as a further --source.
    """
    if rows and as_json:
        raise typer.BadParameter("the two do not go together", param_hint="--rows, --json")

    def task() -> int:
        with as_directory(stream, None) as directory:
            if not os.path.isdir(directory):
                raise errors.SettingInvalid(f"STREAM: {stream!r} is not a directory", option="STREAM")
            if rows:
                return _print_rows(stream, directory)
            summary = summarize(directory)
            return _print_all([summary_json(summary)] if as_json else summary_lines(stream, summary))

    return _breakable(context.obj.stop, task)


def _breakable(stop: Stop, task: Task) -> Task:
    """Lets Ctrl-C break off a task, which leaves nothing half done."""

    def broken_off() -> int:
        stop.release()
        return errors.INTERRUPTED if stop.requested is signal.SIGINT else task()

    return broken_off
