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
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Final

import typer

from lazyshard import __version__
from lazyshard.cli.output import PlainFlags, epilog
from lazyshard.format.records import End
from lazyshard_producer import errors
from lazyshard_producer.configuration.given import Given, assemble, example, read_config, sort_arguments, with_options
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.display import Metrics, choose_display, say
from lazyshard_producer.rows.refusals import read_refused, summarize, summary_json, summary_lines
from lazyshard_producer.run import describe_run, run
from lazyshard_producer.shipping import as_directory
from lazyshard_producer.stop import Stop
from lazyshard_producer.wording import NAME, count, explain, holding, one_line

_HELP: Final = """Publishes rows as a stream of numbered chunk files, from which training reads while it grows.

See [bold]lazyshard-producer COMMAND --help[/bold]."""

_CODES: Final = {code: meaning for code, meaning, _ in errors.TABLE}

_RUN_EPILOG: Final = epilog(
    [
        f"{NAME} run --source a.jsonl --source b.jsonl --out /shared/stream --samples-per-chunk 1000",
        f"{NAME} run --source 'data/*.jsonl' --out /shared/stream --samples-per-chunk 1000 --rate 500",
        f"{NAME} run --source web.jsonl --weight 0.7 --follow /data/incoming --weight 0.3 --out /shared/stream "
        "--samples-per-chunk 1000 --max-ahead 64chunks",
        f"{NAME} run --source /shared/stream --out /shared/larger --samples-per-chunk 10000",
        f"{NAME} run --config stream.toml",
    ],
    _CODES,
    "A second Ctrl-C ends it at once; that can be resumed too.",
    "[bold]Signals[/bold]",
    "SIGTERM  finish the publish in hand and stop; the same command goes on",
    "SIGUSR1  live sources give what they have, then the stream ends",
    "SIGHUP   read --config again: rate, limits, max_bad_rows, log_every_seconds",
)

_CHECK_EPILOG: Final = epilog(
    [f"{NAME} check stream.toml", f"{NAME} check stream.toml --rows 10 --transform my_rows:clean"],
    {**_CODES, errors.FINISHED: "it would run, or the stream has ended"},
)

_INIT_EPILOG: Final = epilog(
    [f"{NAME} init", f"{NAME} init stream.toml"],
    {
        errors.FINISHED: "written",
        errors.USAGE: "there is such a file already, or usage",
        errors.FILESYSTEM: "the filesystem failed: disk full, read-only, no permission",
    },
)

_QUARANTINE_EPILOG: Final = epilog(
    [f"{NAME} quarantine /shared/stream --rows > refused.jsonl"],
    {
        errors.FINISHED: "shown, or nothing was refused",
        errors.USAGE: "usage; there is no such directory",
        errors.STREAM_REFUSED: "the file of refused rows cannot be read as what it is",
        errors.FILESYSTEM: "the filesystem or store failed",
    },
)


def _kept_rows(stream: str, directory: str) -> Iterator[bytes]:
    lost = 0
    for refused in read_refused(directory):
        row = refused or b""
        lost += not row
        if row and sys.stdout.isatty():
            # What is in it comes from somebody else.
            row = one_line(row.decode("utf-8", "backslashreplace")).encode("utf-8", "backslashreplace")
        if row:
            yield row
    if lost:
        why = "rows of tables and generators, and those that were too long, are not kept"
        places = f"`{NAME} quarantine {stream}` names their places"
        say(one_line(f"{NAME}: warning: {count(lost, 'row')} could not be printed: {why}; {places}"))


def _print_all(lines: Iterable[str | bytes]) -> int:
    # Whoever listened and is gone has heard enough.
    with contextlib.suppress(BrokenPipeError):
        for line in lines:
            if isinstance(line, str):
                print(line, flush=True)
            else:
                sys.stdout.buffer.write(line + b"\n")
        print(end="", flush=True)
    return errors.FINISHED


app = typer.Typer(
    name=NAME,
    cls=PlainFlags,
    help=_HELP,
    epilog=f"[bold]Example[/bold]\n\n{NAME} run --source data.jsonl --out /shared/stream --samples-per-chunk 1000",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Task = Callable[[], int]
"""What a command does; returns the exit code."""


def execute(arguments: Sequence[str], stop: Stop) -> int:
    """Runs the command and returns its exit code; no exception leaves it."""
    found = sort_arguments(arguments)
    name = found.rest[0] if found.rest else ""
    try:
        task = app(found.rest, standalone_mode=False, prog_name=NAME, obj=(stop, found))
        if callable(task) and name != "run":
            # Ctrl-C breaks it off anywhere: it leaves nothing half done.
            stop.release()
            if stop.requested is signal.SIGINT:
                return errors.INTERRUPTED
        # An option such as --help has done it already, and what came is the exit code.
        code = task() if callable(task) else task
    except KeyboardInterrupt:
        return errors.INTERRUPTED
    except Exception as error:
        # The root of typer's own usage errors is click's, which recent releases carry inside; both have this method.
        if hasattr(error, "format_message"):
            known = any(name == command.name for command in app.registered_commands)
            # Its options without it are what a forgotten `run` looks like.
            meant = f"; did you mean `{NAME} run ...`?" if name.startswith("--") else ""
            _complain(f"{error.format_message()}{meant} (see `{NAME}{f' {name}' if known else ''} --help`)")
            return errors.USAGE
        return _report(error, debug="--debug" in arguments)
    return code if isinstance(code, int) else errors.FINISHED


def _report(error: Exception, debug: bool) -> int:
    """Says what went wrong, in a line, or one for each setting that cannot be, and returns the exit code."""
    code = errors.exit_code(error)
    if debug:
        # Line by line: a text in it may be somebody else's.
        for line in traceback.format_exc().splitlines():
            say(one_line(line))
    problems = error.problems if isinstance(error, errors.SettingsInvalid) else ()
    for text in [f"{one.option}: {one.text}" for one in problems] or [explain(error)]:
        _complain(text)
    return code


def _complain(text: str) -> None:
    say(one_line(f"{NAME}: error: {text}"))


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


_CONFIG_HELP: Final = (
    "A configuration file (TOML) with the names of these flags; a flag counts where both are given, and sources given "
    "as flags take the place of the file's. See init."
)
_Config = Annotated[str | None, typer.Option("--config", metavar="FILE", help=_CONFIG_HELP)]
_Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
_Quiet = Annotated[bool, typer.Option("--no-progress", help="Show only warnings, errors and the last line.")]


def _load(flags: Given, config: str | None) -> Settings:
    return assemble(flags, read_config(config))


def _run_stream(flags: Given, config: str | None, quiet: bool, stop: Stop) -> int:
    settings = _load(flags, config)
    # The port first: one that is taken is to be noticed before anything is made.
    with contextlib.closing(Metrics(settings.metrics_host, settings.metrics_port)) as metrics:
        display = choose_display(quiet, settings.log_every_s)
        if metrics.address is not None:
            display.note(f"metrics at {metrics.address}")
        if config is not None and stop.reload_ignored:
            display.note(
                f"SIGHUP is ignored, as under nohup: {config} is not read again while this runs. To change a setting, "
                "stop this with SIGTERM and start it again; to have SIGHUP read it, start this with setsid instead"
            )
        with contextlib.closing(display):
            load = None if config is None else partial(_load, flags, config)
            result = run(settings, display, stop, metrics=metrics, load=load)
        if isinstance(result, End):
            there = holding(result.samples, result.chunks)
            say(one_line(f"already ended: {settings.out} holds {there}; nothing to do"))
            return errors.FINISHED
        display.finish(result)
        return errors.INTERRUPTED if result.end == "interrupted" else errors.FINISHED


@app.command("run", epilog=_RUN_EPILOG, context_settings={"allow_extra_args": True})
@with_options
def _run(
    context: typer.Context, config: _Config = None, no_progress: _Quiet = False, debug: _Debug = False, **given: Any
) -> Task:
    """Reads sources, in order or mixed by weights, publishes their rows as a stream, and ends it.

    It can be stopped or killed at any moment: the same command goes on after the last published row, each row once.
    Until the stream has ended, sources may grow and more may be appended; what was read of them must stay as it was.
    A line that is not a JSON object stops it with file, line and byte; mend the line and run it again.

    --transform, --where, --encode and python: sources run code of yours, with all rights of this command. A
    configuration file may name them: trust it as you trust a program.
    """
    if context.args:
        first = context.args[0]
        meant = f"{'--config' if first.endswith('.toml') else '--source'} {first}"
        raise errors.SettingInvalid(f"run takes nothing without a flag before it, got {first}; is {meant} meant?")
    stop, flags = context.obj
    return partial(_run_stream, flags.with_values(given), config, no_progress, stop)


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
    flags = context.obj[1].with_values(given)
    if file is not None and config is not None:
        raise typer.BadParameter("given twice: here and as --config", param_hint="CONFIG")

    def task() -> int:
        settings = _load(flags, file if config is None else config)
        with as_directory(settings.out, settings.samples_per_chunk) as directory:
            return _print_all(describe_run(settings, rows, directory))

    return task


@app.command("init", epilog=_INIT_EPILOG)
def _init(
    file: Annotated[str, typer.Argument(metavar="[FILE]", help="The file to write.")] = "lazyshard-producer.toml",
) -> Task:
    """Writes an example of a configuration file, with a comment for each setting. Never overwrites a file."""

    def task() -> int:
        try:
            with open(file, "x", encoding="utf-8") as opened:
                opened.write(example())
        except FileExistsError:
            text = "there is a file of this name already, and it is left as it is; give another name"
            raise errors.SettingInvalid(f"{file}: {text}", option="FILE") from None
        return _print_all([f"written: {file}; edit it, then `{NAME} check {file}` says what it means"])

    return task


@app.command("quarantine", epilog=_QUARANTINE_EPILOG)
def _quarantine(
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
                return _print_all(_kept_rows(stream, directory))
            summary = summarize(directory)
            return _print_all([summary_json(summary)] if as_json else summary_lines(stream, summary))

    return task
