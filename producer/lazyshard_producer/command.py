"""The options of the command in typer's terms, and what becomes of errors: one line and an exit code."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Annotated, Final

import typer

from lazyshard import __version__
from lazyshard.errors import LazyShardError
from lazyshard.format import End
from lazyshard_producer import exits
from lazyshard_producer.progress import Display, choose_display, say
from lazyshard_producer.run import run
from lazyshard_producer.settings import MAX_ROW_BYTES, Settings
from lazyshard_producer.stop import Stop
from lazyshard_producer.wording import NAME, Outcome, count, error_line, one_line

_HELP: Final = """Publishes rows as a stream of numbered chunk files, from which training reads while it grows.

See [bold]lazyshard-producer run --help[/bold]."""

_EPILOG: Final = """[bold]Example[/bold]

lazyshard-producer run --source data.jsonl --out /shared/stream --samples-per-chunk 1000"""

_RUN_HELP: Final = """Reads JSON-lines files in the order given, publishes them as a stream, and ends it.

It can be stopped or killed at any moment: the same command goes on after the last published row, each row once.
Until the stream has ended, sources may grow and more may be appended; what was read of them must stay as it was.
A line that is not a JSON object stops it with file, line and byte; mend the line and run it again."""

_RUN_EPILOG: Final = """[bold]Examples[/bold]

lazyshard-producer run --source a.jsonl --source b.jsonl --out /shared/stream --samples-per-chunk 1000

lazyshard-producer run --source data/*.jsonl --out /shared/stream --samples-per-chunk 1000 --rate 500

[bold]Exit codes[/bold]

  0  the stream has ended, now or before; or SIGTERM came (resumable)

  1  typer or rich is missing: pip install 'lazyshard\\[producer]'

  2  usage

  3  bad input row: the message names file, line and byte

  4  a source is missing, unreadable, compressed, or not what it was

  5  the stream does not fit: another chunk size or program, or damaged

  6  another producer has the stream

  7  the filesystem failed: disk full, read-only, no permission

 70  unexpected error

130  Ctrl-C (a second one ends it at once; it can be resumed)"""

app = typer.Typer(
    name=NAME,
    help=_HELP,
    epilog=_EPILOG,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def execute(arguments: Sequence[str], stop: Stop) -> int:
    """Runs the command and returns its exit code; no exception leaves it.

    Args:
        arguments: the command line after the program's name.
        stop: tells the run when a signal has come.
    """
    try:
        code = app(spread_sources(arguments), standalone_mode=False, prog_name=NAME, obj=stop)
    except Exception as error:
        # The root of typer's own usage errors is click's, which recent releases carry inside; both have this method.
        if hasattr(error, "format_message"):
            say(error_line(f"{error.format_message()} (see `{NAME} run --help`)"))
            return exits.USAGE
        return report(error, debug="--debug" in arguments)
    return code if isinstance(code, int) else exits.FINISHED


def spread_sources(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with `--source` before every file that follows one, so that ``--source *.jsonl`` works.

    >>> spread_sources(["run", "--source", "a", "b", "--out", "c"])
    ['run', '--source', 'a', '--source', 'b', '--out', 'c']
    """
    spread: list[str] = []
    files = -1  # how many have followed the last --source; -1: none is expected
    for argument in arguments:
        if argument.startswith("-"):
            files = 0 if argument == "--source" else -1
        elif files >= 0:
            if files:
                spread.append("--source")
            files += 1
        spread.append(argument)
    return spread


def report(error: Exception, debug: bool) -> int:
    """Says in one line what went wrong and returns the exit code.

    Args:
        error: what ended the run.
        debug: whether to print its traceback first.
    """
    code = exits.exit_code(error)
    if debug:
        say(traceback.format_exc().rstrip())
    say(error_line(explain(error, code)))
    return code


def explain(error: Exception, code: int) -> str:
    """Returns what to say of an error."""
    if isinstance(error, LazyShardError):
        return str(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        return f"{where}{error.strerror or error}; nothing half published is left, run the same command again to go on"
    hint = "this should not happen; run the same command again with --debug for the traceback, and report it"
    return f"unexpected {type(error).__name__}: {error}; {hint}"


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> int:
    if version:
        print(f"{NAME} {__version__}")
        raise typer.Exit(exits.FINISHED)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(exits.USAGE)
    return exits.FINISHED


@app.command("run", help=_RUN_HELP, epilog=_RUN_EPILOG)
def _run(
    context: typer.Context,
    source: Annotated[
        list[str],
        typer.Option(
            "--source",
            metavar="FILE",
            help="A JSON-lines file to read. Repeat it, or give several files after it; they are read in this order.",
        ),
    ],
    out: Annotated[
        str,
        typer.Option("--out", metavar="STREAM", help="The stream's directory; made if it is not there."),
    ],
    samples_per_chunk: Annotated[
        int,
        typer.Option("--samples-per-chunk", metavar="N", help="Rows in a chunk. Never changes for a stream."),
    ],
    rate: Annotated[
        float | None,
        typer.Option("--rate", metavar="SAMPLES_PER_SECOND", help="Publish no faster than this. Default: no limit."),
    ] = None,
    max_row_bytes: Annotated[
        int,
        typer.Option("--max-row-bytes", metavar="BYTES", help="Longest row that is accepted; bounds the memory."),
    ] = MAX_ROW_BYTES,
    no_progress: Annotated[
        bool,
        typer.Option("--no-progress", help="Show only warnings, errors and the last line."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> int:
    settings = Settings(
        sources=tuple(source),
        out=out,
        samples_per_chunk=samples_per_chunk,
        rate=rate,
        max_row_bytes=max_row_bytes,
    )
    display = choose_display(quiet=no_progress)
    try:
        result = run(settings, display, context.obj)
    finally:
        display.close()
    return _conclude(result, out, display)


def _conclude(result: Outcome | End, out: str, display: Display) -> int:
    if isinstance(result, End):
        holds = f"{count(result.samples, 'sample')} in {count(result.chunks, 'chunk')}"
        say(one_line(f"already ended: {out} holds {holds}; nothing to do"))
        return exits.FINISHED
    display.finish(result)
    return exits.INTERRUPTED if result.end == "interrupted" else exits.FINISHED
