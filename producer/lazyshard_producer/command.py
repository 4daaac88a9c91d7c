"""The commands in typer's terms, what each does, and what becomes of errors: a line each, and an exit code.

They run once typer is through: signals and errors reach us as they are.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Final

import typer

from lazyshard.cli.output import application, help_of
from lazyshard.format.records import End
from lazyshard_producer import errors
from lazyshard_producer.configuration.given import Given, assemble, example, read_config, sort_arguments, with_options
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.display import Metrics, choose_display, say
from lazyshard_producer.errors import NAME, count, explain, holding, one_line
from lazyshard_producer.rows.refusals import read_refused, summarize, summary_json, summary_lines
from lazyshard_producer.run import describe_run, run
from lazyshard_producer.shipping import as_directory
from lazyshard_producer.stop import Stop


def _kept_rows(stream: str, directory: str) -> Iterator[str | bytes]:
    lost = 0
    for row in read_refused(directory):
        lost += not row
        if row:
            # What is in it comes from somebody else.
            yield one_line(row.decode("utf-8", "backslashreplace")) if sys.stdout.isatty() else row
    if lost:
        why = f"of tables, functions, or too long ones the places are kept: see `{NAME} quarantine {stream}`"
        say(f"{NAME}: warning: {count(lost, 'row')} could not be printed: {why}")


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


app = application(
    NAME,
    "Publishes rows as a stream of numbered chunk files, from which training reads while it grows.\n\n"
    f"See [bold]{NAME} COMMAND --help[/bold].",
    epilog=f"[bold]Example[/bold]\n\n{NAME} run --source data.jsonl --out /shared/stream --samples-per-chunk 1000",
)


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
            see = f"(see `{NAME}{f' {name}' if known else ''} --help`)"
            say(f"{NAME}: error: {error.format_message()}{meant} {see}")
            return errors.USAGE
        # Line by line: a text in it may be somebody else's.
        for line in traceback.format_exc().splitlines() if "--debug" in arguments else ():
            say(line)
        problems = [f"{one.option}: {one.text}" for one in getattr(error, "problems", ())]
        for text in problems or [explain(error)]:
            say(f"{NAME}: error: {text}")
        return errors.exit_code(error)
    return code if isinstance(code, int) else errors.FINISHED


_CONFIG_HELP: Final = "A TOML file with the names of the flags, see init; flags come first, their sources replace its."
_Config = Annotated[str | None, typer.Option("--config", metavar="FILE", help=_CONFIG_HELP)]
_Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
_Quiet = Annotated[bool, typer.Option("--no-progress", help="Show only warnings, errors and the last line.")]


def _load(flags: Given, config: str | None) -> Settings:
    return assemble(flags, read_config(config))


def _run(
    context: typer.Context, config: _Config = None, no_progress: _Quiet = False, debug: _Debug = False, **given: Any
) -> int:
    """Reads sources, in order or mixed by weights, publishes their rows as a stream, and ends it.

    It can be stopped or killed at any moment: the same command continues after the last published row, each row once.
    Until the stream has ended, sources may grow and more may be appended; what was read of them must stay as it was.
    A line that is not a JSON object stops it with file, line and byte; fix the line and run it again.

    --transform, --where, --encode and python: sources run code of yours, with all rights of this command. A
    configuration file may name them: trust it as you trust a program.

    Examples:
        lazyshard-producer run --source a.jsonl --source b.jsonl --out /shared/stream --samples-per-chunk 1000
        lazyshard-producer run --source 'data/*.jsonl' --out /shared/stream --samples-per-chunk 1000 --rate 500
        lazyshard-producer run --source web.jsonl --weight 0.7 --follow /data/incoming --weight 0.3 --config stream.toml
        lazyshard-producer run --source /shared/stream --out /shared/larger --samples-per-chunk 10000
        lazyshard-producer run --config stream.toml

    Exit codes:
        0  the stream has ended, now or before; or SIGTERM came

    Signals:
        SIGINT   finish the publish in hand and stop, as SIGTERM; a second one ends it at once, which can be resumed too
        SIGTERM  finish the publish in hand and stop; the same command continues
        SIGUSR1  live sources give what they have, then the stream ends
        SIGHUP   read --config again: rate, limits, max_bad_rows, log_every_seconds
    """
    if context.args:
        first = context.args[0]
        meant = f"{'--config' if first.endswith('.toml') else '--source'} {first}"
        raise errors.SettingInvalid(f"run takes nothing without a flag before it, got {first}; is {meant} meant?")
    stop, flags = context.obj
    read_again = functools.partial(_load, flags.with_values(given), config)
    settings = read_again()
    # The port first: one that is taken is to be noticed before anything is made.
    with contextlib.closing(Metrics(settings.metrics_host, settings.metrics_port)) as metrics:
        display = choose_display(no_progress, settings.log_every_s, metrics)
        if metrics.address is not None:
            display.note(f"metrics at {metrics.address}")
        if config is not None and stop.reload_ignored:
            again = "To change a setting, stop this with SIGTERM and start it again, or start it with setsid"
            display.note(f"SIGHUP is ignored, as under nohup: {config} is not read again while this runs. {again}")
        with contextlib.closing(display):
            result = run(settings, display, stop, None if config is None else read_again)
        if isinstance(result, End):
            say(f"already ended: {settings.out} holds {holding(result.samples, result.chunks)}; nothing to do")
            return errors.FINISHED
        display.finish(result)
        return errors.INTERRUPTED if result.end == "interrupted" else errors.FINISHED


def _check(
    context: typer.Context,
    file: Annotated[str | None, typer.Argument(metavar="[CONFIG]", help="The same as --config.")] = None,
    rows: Annotated[int, typer.Option("--rows", metavar="N", min=0, help="How many rows to show.")] = 3,
    config: _Config = None,
    debug: _Debug = False,
    **given: Any,
) -> int:
    """Says what a run with these settings would do, and shows the first rows it would publish.

    Takes a configuration file, flags, or both, as run does. Makes nothing, and takes nothing from pipes. The functions
    that these settings name are imported and called: do not try a file of somebody else's without reading it.

    Examples:
        lazyshard-producer check stream.toml
        lazyshard-producer check stream.toml --rows 10 --transform my_rows:clean

    Exit codes:
        0  it would run, or the stream has ended
    """
    if file is not None and config is not None:
        raise typer.BadParameter("given twice: here and as --config", param_hint="CONFIG")
    settings = _load(context.obj[1].with_values(given), file if config is None else config)
    with as_directory(settings.out, settings.samples_per_chunk) as directory:
        return _print_all(describe_run(settings, rows, directory))


def _init(
    file: Annotated[str, typer.Argument(metavar="[FILE]", help="The file to write.")] = "lazyshard-producer.toml",
) -> int:
    """Writes an example of a configuration file, with a comment for each setting. Never overwrites a file.

    Examples:
        lazyshard-producer init
        lazyshard-producer init stream.toml

    Exit codes:
        0  written
        2  there is such a file already, or usage
        7  the filesystem failed: disk full, read-only, no permission
    """
    try:
        with open(file, "x", encoding="utf-8") as opened:
            opened.write(example())
    except FileExistsError:
        text = "there is a file of this name already, and it is left as it is; give another name"
        raise errors.SettingInvalid(f"{file}: {text}", option="FILE") from None
    return _print_all([f"written: {file}; edit it, then `{NAME} check {file}` says what it means"])


def _quarantine(
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="The stream's directory.")],
    rows: Annotated[bool, typer.Option("--rows", help="Print the rows, a line each, as they came.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as one line of JSON.")] = False,
) -> int:
    """Shows the rows refused with --on-bad-row quarantine, counted by reason.

    With --rows prints them as they came, to be fixed and given as a further --source.

    Examples:
        lazyshard-producer quarantine /shared/stream --rows > refused.jsonl

    Exit codes:
        0  shown, or nothing was refused
        2  usage; there is no such directory
        5  the file of refused rows cannot be read as what it is
        7  the filesystem or store failed
    """
    if rows and as_json:
        raise typer.BadParameter("the two do not go together", param_hint="--rows, --json")
    with as_directory(stream, None) as directory:
        if not os.path.isdir(directory):
            raise errors.SettingInvalid(f"STREAM: {stream!r} is not a directory", option="STREAM")
        if rows:
            return _print_all(_kept_rows(stream, directory))
        summary = summarize(directory)
        return _print_all([summary_json(summary)] if as_json else summary_lines(stream, summary))


def _offer(command: Callable[..., int], codes: Mapping[int, str] = MappingProxyType({}), **settings: Any) -> None:
    """Has typer offer a command, to give back what is to be done; with its codes it takes the options of a run."""
    text, end = help_of(command, codes)
    later = functools.update_wrapper(functools.partial(functools.partial, command), command)
    app.command(command.__name__[1:], help=text, epilog=end, **settings)(with_options(later) if codes else later)


_offer(_run, errors.CODES, context_settings={"allow_extra_args": True})
_offer(_check, errors.CODES)
_offer(_init)
_offer(_quarantine)
