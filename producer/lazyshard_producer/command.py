"""The typer commands, what each does, and the handling of errors: one line per error, and an exit code.

A command runs after typer has returned, so that signals and errors reach this module unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from lazyshard.cli.output import StreamArgument, application, help_of, refuse_if
from lazyshard.format.records import End
from lazyshard.store.files import is_url, stream_path
from lazyshard_producer import errors
from lazyshard_producer.configuration.given import assemble, example, read_config, sort_arguments, with_options
from lazyshard_producer.configuration.settings import BY_NAME, OPTIONS, Option, Settings
from lazyshard_producer.display import Display, Metrics, choose_display, say
from lazyshard_producer.errors import NAME, count, explain, holding, one_line
from lazyshard_producer.rows.refusals import read_refused, summarize, summary_json, summary_lines
from lazyshard_producer.run import complete_end, describe_run, find_end, run
from lazyshard_producer.shipping import as_directory
from lazyshard_producer.stop import GivenUp, Stop
from lazyshard_producer.writers import describe_end, end, sequence


def _kept_rows(stream: str, directory: str) -> Iterator[str | bytes]:
    lost = 0
    for row in read_refused(directory):
        lost += not row
        if row:
            # A terminal must not interpret the contents of a foreign row.
            yield one_line(row.decode("utf-8", "backslashreplace")) if sys.stdout.isatty() else row
    if lost:
        why = "for rows of tables, of functions, and rows that are too long, only the location is kept"
        say(f"{NAME}: warning: {count(lost, 'row')} could not be printed: {why}: see `{NAME} quarantine {stream}`")


def _print_all(lines: Iterable[str | bytes]) -> int:
    # A reader that closes the pipe, such as `head`, needs no more lines.
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
    "Publishes rows as a stream of numbered chunk files. Training can read the stream while it grows.\n\n"
    f"See [bold]{NAME} COMMAND --help[/bold].",
    epilog=f"[bold]Example[/bold]\n\n{NAME} run --source data.jsonl --out /shared/stream --samples-per-chunk 1000",
)


def execute(arguments: Sequence[str], stop: Stop) -> int:
    """Runs the command and returns its exit code; no exception leaves it."""
    found = sort_arguments(arguments)
    name = found.rest[0] if found.rest else ""
    try:
        task = app(found.rest, standalone_mode=False, prog_name=NAME, obj=(stop, found))
        if callable(task) and name not in ("run", "sequence", "end"):
            # From here on Ctrl-C interrupts the command anywhere; the command leaves no partial state.
            stop.release()
            if stop.requested is signal.SIGINT:
                return errors.INTERRUPTED
        # For an option such as --help, typer has finished and returned the exit code.
        code = task() if callable(task) else task
    except KeyboardInterrupt:
        return errors.INTERRUPTED
    except Exception as error:
        # typer's usage errors extend click's, of which recent releases bundle a copy; both have this method.
        if hasattr(error, "format_message"):
            known = any(name == command.name for command in app.registered_commands)
            # A first argument that is an option means that `run` was forgotten.
            meant = f"; did you mean `{NAME} run ...`?" if name.startswith("--") else ""
            see = f"(see `{NAME}{f' {name}' if known else ''} --help`)"
            say(f"{NAME}: error: {error.format_message()}{meant} {see}")
            return errors.USAGE
        # Line by line, since `say` escapes control characters, which foreign text may contain.
        for line in traceback.format_exc().splitlines() if "--debug" in arguments else ():
            say(line)
        problems = [f"{one.option}: {one.text}" for one in getattr(error, "problems", ())]
        for text in problems or [explain(error)]:
            say(f"{NAME}: error: {text}")
        return errors.exit_code(error)
    return code if isinstance(code, int) else errors.FINISHED


_CONFIG_HELP: Final = "A TOML file of options, see init. Flags override it; sources in flags replace all its sources."
_Config = Annotated[str | None, typer.Option("--config", metavar="FILE", help=_CONFIG_HELP)]
_Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
_Quiet = Annotated[bool, typer.Option("--no-progress", help="Show only warnings, errors and the final line.")]


def _run(
    context: typer.Context, config: _Config = None, no_progress: _Quiet = False, debug: _Debug = False, **given: Any
) -> int:
    """Reads sources, in order or mixed by weight, publishes their rows as a stream, and ends the stream.

    The run can be stopped or killed at any time: the same command continues after the last published row, and each row
    is published exactly once. Until the stream has ended, sources may grow and further sources may be appended; the
    part already read must not change. A line that is not a JSON object ends the run with file, line and byte; fix the
    line and run the command again.

    --transform, --where, --encode and python: sources run your code with all permissions of this command. A
    configuration file can name such code, so trust it only as you would trust a program.

    Examples:
        lazyshard-producer run --source a.jsonl --source b.jsonl --out /shared/stream --samples-per-chunk 1000
        lazyshard-producer run --source 'data/*.jsonl' --out /shared/stream --samples-per-chunk 1000 --rate 500
        lazyshard-producer run --source web.jsonl --weight 0.7 --follow /data/incoming --weight 0.3 --config stream.toml
        lazyshard-producer run --source /shared/stream --out /shared/larger --samples-per-chunk 10000
        lazyshard-producer run --config stream.toml

    Exit codes:
        0  the stream has ended, or SIGTERM stopped the run

    Signals:
        SIGINT   as SIGTERM; a second SIGINT ends the process at once, and the run can still be resumed
        SIGTERM  finish the current publish and stop; the same command continues
        SIGUSR1  live sources deliver the rows that they have, then the stream ends
        SIGHUP   read --config again: rate, limits, max_bad_rows, log_every_seconds
    """
    if context.args:
        first = context.args[0]
        meant = f"{'--config' if first.endswith('.toml') else '--source'} {first}"
        raise errors.SettingInvalid(f"run takes only options, got the argument {first}; did you mean {meant}?")
    stop, flags = context.obj

    def load() -> Settings:
        return assemble(flags.with_values(given), read_config(config))

    settings = load()
    # The port comes first, so that a port in use is reported before anything is created.
    with contextlib.closing(Metrics(settings.metrics_host, settings.metrics_port, settings.writer)) as metrics:
        display = choose_display(no_progress, settings.log_every_s, metrics)
        if metrics.address is not None:
            display.note(f"metrics at {metrics.address}")
        if config is not None and stop.reload_ignored:
            again = "To change a setting, stop the run with SIGTERM and start it again, or start it with setsid"
            display.note(f"SIGHUP is ignored, as under nohup: {config} is not reloaded during this run. {again}")
        with contextlib.closing(display):
            result = run(settings, display, stop, None if config is None else load)
        if isinstance(result, End):
            say(f"already ended: {settings.place} holds {holding(result.samples, result.chunks)}; nothing to do")
            return errors.FINISHED
        display.finish(result)
        return errors.INTERRUPTED if result.end == "interrupted" else errors.FINISHED


def _check(
    context: typer.Context,
    file: Annotated[str | None, typer.Argument(metavar="[CONFIG]", help="The same as --config.")] = None,
    rows: Annotated[int, typer.Option("--rows", metavar="N", min=0, help="Number of rows to show.")] = 3,
    config: _Config = None,
    debug: _Debug = False,
    **given: Any,
) -> int:
    """Shows what a run with these settings would do, and the first rows it would publish.

    Accepts a configuration file, flags, or both, as run does. Creates no files, and reads nothing from pipes. Functions
    that the settings name are imported and called, so read a file from someone else before you check it.

    Examples:
        lazyshard-producer check stream.toml
        lazyshard-producer check stream.toml --rows 10 --transform my_rows:clean

    Exit codes:
        0  a run would start, or the stream has ended
    """
    refuse_if(file is not None and config is not None, "CONFIG", "given twice: here and as --config")
    settings = assemble(context.obj[1].with_values(given), read_config(file if config is None else config))
    with as_directory(settings.out, settings.samples_per_chunk) as directory:
        return _print_all(describe_run(settings, rows, directory))


def _init(
    file: Annotated[str, typer.Argument(metavar="[FILE]", help="The file to write.")] = "lazyshard-producer.toml",
) -> int:
    """Writes an example configuration file with a comment for each setting. Never overwrites a file.

    Examples:
        lazyshard-producer init
        lazyshard-producer init stream.toml

    Exit codes:
        0  written
        2  the file exists already, or usage
        7  the filesystem failed: disk full, read-only, no permission
    """
    try:
        with open(file, "x", encoding="utf-8") as opened:
            opened.write(example())
    except FileExistsError:
        text = "the file exists already and is not overwritten; give another name"
        raise errors.SettingInvalid(f"{file}: {text}", option="FILE") from None
    return _print_all([f"written: {file}; edit it, then run `{NAME} check {file}`"])


def _quarantine(
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="The stream's directory.")],
    rows: Annotated[bool, typer.Option("--rows", help="Print the rows as they were read, one per line.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as one line of JSON.")] = False,
) -> int:
    """Shows the rows refused with --on-bad-row quarantine, counted by reason.

    With --rows, prints the rows as they were read, to be fixed and given as another --source.

    Examples:
        lazyshard-producer quarantine /shared/stream --rows > refused.jsonl

    Exit codes:
        0  shown, or nothing was refused
        2  usage, or there is no such directory
        5  the file of refused rows is damaged
        7  the filesystem or store failed
    """
    refuse_if(rows and as_json, "--rows, --json", "cannot be combined")
    with as_directory(stream, None) as directory:
        if not os.path.isdir(directory):
            raise errors.SettingInvalid(f"STREAM: {stream!r} is not a directory", option="STREAM")
        if rows:
            return _print_all(_kept_rows(stream, directory))
        summary = summarize(directory)
        return _print_all([summary_json(summary)] if as_json else summary_lines(stream, summary))


def _sequence(
    context: typer.Context, stream: StreamArgument, no_progress: _Quiet = False, debug: _Debug = False, **given: Any
) -> int:
    """Gives the chunks of a stream's writers their numbers, until the stream has ended.

    Each run with --writer does this too, if no other process does. A sequencer alone outlives them, and its limits hold
    whichever writers run. If another process sequences, this one takes over when that stops. While there is no stream,
    it waits for the first writer.

    Examples:
        lazyshard-producer sequence /shared/stream --max-ahead 64chunks --retain consumed --consumers train

    Exit codes:
        0  the stream has ended, or SIGTERM stopped the command
    """
    stop, flags = context.obj
    # The limits are checked as those of a run, which needs a source.
    needed = {"out": stream if is_url(stream) else "stream", "samples_per_chunk": "1", "writer": "sequencer"}
    flags = flags.with_values(given)
    limits = assemble(replace(flags, sources=[{"path": "-"}], values={**flags.values, **needed})).limits
    return _sequenced(stream, no_progress, stop, lambda place, display: sequence(place, limits, display, stop))


def _end(
    context: typer.Context,
    stream: StreamArgument,
    force: Annotated[bool, typer.Option("--force", help="End the stream although writers have not ended.")] = False,
    no_progress: _Quiet = False,
    debug: _Debug = False,
) -> int:
    """Ends a stream of several writers, and shows what is left out.

    All chunks that the writers have published become part of the stream. Rows that a writer has not published are left
    out, for good, so the command refuses while a writer runs, after one was killed or has failed, and while a writer
    of --writers has not ended. A stream that was made with --writers ends without it when all of them have ended.

    Examples:
        lazyshard-producer end /shared/stream

    Exit codes:
        0  the stream has ended, or SIGTERM stopped the command; the request stays
        6  a writer still runs or has not ended, see above
    """
    stop = context.obj[0]
    code = _sequenced(stream, no_progress, stop, lambda place, display: end(place, display, stop, force=force))
    return code if stop.requested is not None else _print_all(describe_end(stream_path(stream)))


def _sequenced(stream: str, quiet: bool, stop: Stop, work: Callable[[Path, Display], bool]) -> int:
    with contextlib.closing(choose_display(quiet, 60.0, Metrics())) as display:
        ended = False
        # A signal may arrive while the command waits for an object store.
        with contextlib.suppress(GivenUp):
            ended = work(stream_path(stream), display)
        if not ended:
            say(f"{NAME}: stopped: {stream} has not ended; run the same command again to continue")
            return errors.INTERRUPTED if stop.requested is signal.SIGINT else errors.FINISHED
    if found := find_end(stream, None):
        if not is_url(stream):
            complete_end(stream, found)
        say(f"finished: {stream} holds {holding(found.samples, found.chunks)}")
    return errors.FINISHED


def _offer(command: Callable[..., int], codes: Mapping[int, str], options: Iterable[Option] = (), **more: Any) -> None:
    """Registers a command with typer, which then returns a callable; `options` are those of a run that it has."""
    text, end = help_of(command, codes)
    later: Callable[..., Any] = functools.update_wrapper(functools.partial(functools.partial, command), command)
    app.command(command.__name__[1:], help=text, epilog=end, **more)(with_options(later, options))


_offer(_run, errors.CODES, BY_NAME.values(), context_settings={"allow_extra_args": True})
_offer(_check, errors.CODES, BY_NAME.values())
_offer(_sequence, errors.CODES, [one for one in OPTIONS if one.table == "limits"])
_offer(_end, errors.CODES)
_offer(_init, {})
_offer(_quarantine, {})
