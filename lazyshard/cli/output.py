"""Shared by the commands: arguments and options, help texts, results on stdout, errors on stderr, shortened values."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timezone
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import orjson
import typer
from rich import filesize
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typer.core import TyperGroup

from lazyshard import __version__
from lazyshard.errors import StreamMissing, redact
from lazyshard.format.arrays import DTYPES, media_type
from lazyshard.format.records import MAX_SAMPLES_PER_CHUNK
from lazyshard.format.state import check_consumer
from lazyshard.part import Array
from lazyshard.store.files import check_place, is_folder, stream_path
from lazyshard.stream.head import format_seconds

NAME: Final = "lazyshard"
MAX_CHARACTERS: Final = 200
MAX_ITEMS: Final = 20
MAX_KEYS: Final = 100

StreamArgument = Annotated[str, typer.Argument(metavar="STREAM", help="The stream's directory or URL.")]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on one line.")]

_ROWS: Final = "Rows per chunk of a directory without stream.json (its last may have fewer). Default: as in its first."
SamplesPerChunkOption = Annotated[int | None, typer.Option(metavar="N", min=1, max=MAX_SAMPLES_PER_CHUNK, help=_ROWS)]

_CODES: Final = {
    1: "typer or rich is missing: pip install 'lazyshard\\[cli]'",
    70: "unexpected error",
    71: "not enough memory",
    130: "Ctrl-C",
}
"""Exit codes of every command."""


class PlainFlags(TyperGroup):
    """A group of commands whose help shows flags as `--json`, not as `--json <bool>` like recent typer releases."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns the program's own arguments and options, including --help."""
        return _plain(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns a command by its name, or None if it is unknown."""
        command = super().get_command(ctx, cmd_name)
        _plain([] if command is None else command.get_params(ctx))
        return command


def _plain(params: list[Any]) -> list[Any]:
    for one in params:
        if getattr(one, "is_flag", False):
            one.metavar = one.metavar or ""
    return params


def application(name: str, text: str, **settings: Any) -> typer.Typer:
    """Returns a typer application without commands; `text` is its help."""
    settings |= {"rich_markup_mode": "rich", "context_settings": {"help_option_names": ["-h", "--help"]}}
    app = typer.Typer(name=name, cls=PlainFlags, pretty_exceptions_enable=False, **settings)

    @app.callback(invoke_without_command=True, help=text)
    def root(
        context: typer.Context,
        version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
    ) -> None:
        if version:
            print(f"{name} {__version__}")
            raise typer.Exit(0)
        if context.invoked_subcommand is None:
            print(context.get_help())
            raise typer.Exit(2)

    return app


def help_of(command: Callable[..., Any], codes: Mapping[int, str] = _CODES) -> tuple[str, str]:
    """Returns a command's help text and its epilog: the sections of its docstring, with the common exit codes added.

    Lines with deeper indentation continue the previous line.
    """
    doc = re.sub(r"\n {5,}", " ", inspect.getdoc(command) or "").replace("\n    ", "\n")
    text, *parts = re.split(r"\n\n(Examples|Exit codes|Signals):\n", doc)
    sections = {"Examples": "", "Exit codes": "", **dict(zip(parts[::2], parts[1::2], strict=True))}
    own, *more = sections["Exit codes"].split("\n\n")
    meanings = {**_CODES, **codes, **{int(line[:3]): line[3:].strip() for line in own.splitlines()}}
    sections["Exit codes"] = "\n".join(f"{code:3}  {meanings[code]}" for code in sorted(meanings))
    lines = [line for title, part in sections.items() for line in (f"[bold]{title}[/bold]", *part.splitlines())]
    return text, "\n\n".join([*lines, *(one.replace("\n", " ") for one in more)])


def refuse_if(wrong: object, where: str, why: str) -> None:
    """Raises BadParameter for the option or argument `where` if `wrong` is true."""
    if wrong:
        raise typer.BadParameter(why, param_hint=where)


def check_name(consumer: str, where: str) -> None:
    """Raises BadParameter if a consumer's name is invalid."""
    try:
        check_consumer(consumer)
    except ValueError as cause:
        raise typer.BadParameter(str(cause), param_hint=where) from cause


def find_stream(stream: str, *, may_appear: bool = False) -> Path:
    """Returns a stream's directory. Raises BadParameter if it does not exist; with `may_appear` it may still appear."""
    if not (stream and is_folder(stream)):
        there = os.path.lexists(stream)
        advice = "it is a file, give the directory that holds it" if there else "check the path"
        text = f"{stream!r} is not a directory{f': {advice}' if stream else ''}"
        refuse_if(there or not (stream and may_appear), "STREAM", text)
        try:
            check_place(stream)
        except StreamMissing as error:
            raise typer.BadParameter(str(error), param_hint="STREAM") from None
    return stream_path(stream)


def one_line(text: str) -> str:
    """Returns a text with control characters escaped, as a file name may hold a newline but a message must not."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def count(number: int, noun: str) -> str:
    """Returns a number with its noun.

    >>> count(1, "row"), count(2000, "row")
    ('1 row', '2,000 rows')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def chunk_range(first: int, stop: int) -> str:
    """Returns the chunks of the nonempty half-open range [first, stop) as text.

    >>> chunk_range(3, 4), chunk_range(0, 1200)
    ('chunk 3', 'chunks 0 to 1,199')
    """
    return f"chunk {first:,}" if stop == first + 1 else f"chunks {first:,} to {stop - 1:,}"


def say(text: str) -> None:
    """Prints a result. Raises OSError if standard output cannot be written, for example on a full disk."""
    # A closed pipe must not fail a command that has done its work.
    with contextlib.suppress(BrokenPipeError, ValueError):
        print(one_line(text), file=sys.stdout, flush=True)


def show(values: Any, lines: Iterable[str], as_json: bool) -> None:
    """Prints a result: its values as one line of JSON, or its lines."""
    for line in [json.dumps(values)] if as_json else lines:
        say(line)


def complain(text: str) -> None:
    """Prints an error to stderr."""
    explain(f"{NAME}: error: {text}")


def explain(text: str) -> None:
    """Prints a line to stderr, with credentials redacted; does nothing if stderr cannot be written."""
    with contextlib.suppress(OSError, ValueError):
        print(one_line(redact(text)), file=sys.stderr, flush=True)


def detach_broken_streams() -> None:
    """Detaches stdout and stderr if they cannot be flushed: otherwise Python would end with exit code 120."""
    for name in ("stdout", "stderr"):
        try:
            print(end="", file=getattr(sys, name), flush=True)
        except (OSError, ValueError):
            setattr(sys, name, None)


def size(number: float) -> str:
    """Returns a number of bytes as text, in powers of 1,000.

    >>> size(999), size(1000), size(12_345_678)
    ('999 bytes', '1.0 kB', '12.3 MB')
    """
    return filesize.decimal(round(number))


def duration(seconds: float) -> str:
    """Returns a duration as text.

    >>> duration(3), duration(125), duration(2 * 86400 + 7200), duration(1e9)
    ('3 s', '2 min 5 s', '2 days 2 h', 'over a year')
    """
    if seconds < 2 * 86400:
        return format_seconds(seconds)
    return "over a year" if seconds > 365 * 86400 else "{} days {} h".format(*divmod(round(seconds / 3600), 24))


def estimate(seconds: float) -> str:
    """Returns an estimated duration as text: "about 3 s", "over a year"."""
    text = duration(seconds)
    return text if text.startswith("over") else f"about {text}"


def moment(seconds: float) -> str:
    """Returns a time as text, as a number of seconds if it is outside the calendar.

    >>> moment(1700000000.5)
    '2023-11-14 22:13:20 UTC'
    """
    with contextlib.suppress(OverflowError, OSError, ValueError):
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"{seconds:g} s after 1970"


def per_second(number: float, noun: str) -> str:
    """Returns a rate as text: slow rates with more digits, very slow ones per hour.

    >>> per_second(1234.56, "samples"), per_second(0.25, "chunks"), per_second(0.001, "chunks"), per_second(0, "rows")
    ('1,234.6 samples/s', '0.25 chunks/s', '3.6 chunks/h', '0 rows/s')
    """
    if 0 < number < 0.01:
        return f"{number * 3600:,.1f} {noun}/h"
    return f"{number:,.1f} {noun}/s" if number >= 1 else f"{number:.2f} {noun}/s" if number else f"0 {noun}/s"


def facts(values: Mapping[str, Any]) -> list[str]:
    """Returns the JSON values that are not None as a table; names in `_s` are seconds, in `_at` times.

    >>> facts({"begun_at": None, "rows_read": 1200, "lag_s": 7.0, "exact": True})
    ['  rows read  1,200', '  lag        7.0 s', '  exact      yes']
    """
    known = {name: value for name, value in values.items() if value is not None}
    return table({name.removesuffix("_s").replace("_", " "): _words(name, value) for name, value in known.items()})


def table(texts: Mapping[str, str]) -> list[str]:
    """Returns one line per text, preceded by its name."""
    width = min(40, max(map(len, texts), default=0))
    return [f"  {name:{width}}  {text}" for name, text in texts.items()]


def _words(name: str, value: Any) -> str:
    if isinstance(value, dict):
        known = {key: one for key, one in value.items() if one is not None}
        return ", ".join(f"{key.replace('_', ' ')} {_words(key, one)}" for key, one in known.items())
    if isinstance(value, bool | str):
        return value if isinstance(value, str) else "yes" if value else "no"
    if name.endswith("_s"):
        return f"{value:.1f} s" if value < 60 else format_seconds(value)
    if name.endswith("bytes") or isinstance(value, int):
        return size(value) if name.endswith("bytes") else f"{value:,}"
    return moment(value) if name.endswith("_at") else f"{value:.1%}" if name.endswith("share") else f"{value:,.1f}"


@contextlib.contextmanager
def chunk_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Yields a function (phase, chunks done, total) that shows a progress bar on a terminal for 20 or more chunks."""
    console = Console(stderr=True)
    counts = (BarColumn(), MofNCompleteColumn(), TextColumn("chunks"), TimeRemainingColumn())
    progress = Progress(TextColumn("{task.description}"), *counts, console=console, transient=True)
    task = progress.add_task("", total=None)
    with contextlib.ExitStack() as shown:

        def show(phase: str, done: int, total: int) -> None:
            # Fewer chunks usually take less time than reading the bar.
            if console.is_terminal and total >= 20:
                if not progress.live.is_started:
                    shown.enter_context(progress)
                progress.update(task, description=phase, total=total, completed=done)

        yield show


def pretty(value: Any, line: bytes | None = None, *, full: bool) -> list[str]:
    """Returns a value as indented JSON lines, shortened unless `full`, or its `line` if it is nested too deep.

    Bytes are always shown by their type and number.
    """
    try:
        own = value if full else shorten(value)
        shown = orjson.dumps(own, partial(_array, full=full), orjson.OPT_INDENT_2)
    except orjson.JSONEncodeError:
        if line is None:
            raise
        shown = line
    return shown.decode().rstrip("\r\n").split("\n")


def shorten(value: Any, depth: int = 0) -> Any:
    """Returns a value with long parts shortened and their lengths given; arrays are not changed.

    >>> shorten({"a": "x" * 300})["a"][195:], shorten(list(range(25)))[19:]
    ('xxxxx... (300 characters)', [19, '... (25 items)'])
    """
    if isinstance(value, str):
        return _text(value)
    # Rows may nest up to 254 levels deep.
    if isinstance(value, dict | list) and value and depth >= 40:
        return f"... ({count(len(value), 'key' if isinstance(value, dict) else 'item')})"
    if isinstance(value, dict):
        fields = {_text(key): shorten(item, depth + 1) for key, item in islice(value.items(), MAX_KEYS)}
        return fields if len(value) <= MAX_KEYS else {**fields, "...": f"({count(len(value), 'key')})"}
    if isinstance(value, list):
        items = [shorten(item, depth + 1) for item in value[:MAX_ITEMS]]
        return items if len(value) <= MAX_ITEMS else [*items, f"... ({count(len(value), 'item')})"]
    return value


def _array(value: Array | bytes, *, full: bool = False) -> Any:
    """Returns an array as text: dtype, shape and first numbers, or all its numbers as a list; of bytes type and number.

    >>> _array(np.arange(30, dtype=np.int16).reshape(2, 15))[:52], _array(b"GIF89a...")
    ('array of int16, shape 2 x 15: 0, 1, 2, 3, 4, 5, 6, 7', 'image/gif, 9 bytes')
    """
    if isinstance(value, bytes):
        return f"{media_type(value) or 'bytes of an unknown type'}, {count(len(value), 'byte')}"
    if full:
        return _numbers(value).tolist()
    name = next((name for name, dtype in DTYPES.items() if dtype == value.dtype), str(value.dtype))
    shape = " x ".join(map(str, value.shape)) or "()"
    some = ", ".join(str(number) for number in _numbers(value.reshape(-1)[:MAX_ITEMS]).tolist())
    return f"array of {name}, shape {shape}: {some}{', ...' if value.size > MAX_ITEMS else ''}".rstrip(": ")


def _numbers(value: Array) -> Array:
    """Returns an array that numpy can print: bfloat16, the upper half of a float32, is converted to float32."""
    if value.dtype != DTYPES["bfloat16"]:
        return value
    return (value.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _text(value: str) -> str:
    return value if len(value) <= MAX_CHARACTERS else f"{value[:MAX_CHARACTERS]}... ({count(len(value), 'character')})"
