"""What the user says, read into values that are not yet settings: the command line, and a TOML file.

Sources are taken out of a command line before the rest is parsed: several files may follow one --source, and a weight
belongs to the source before it. The file has the names of the flags, with underscores: those of the panel "Stream" at
its top, the others in tables, and a [[source]] for each --source (as path) or --follow. What nobody knows is refused,
with the nearest name that is known: a limit that was misspelt must not be no limit.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final

import typer

from lazyshard.store.durable import NEW_FILE_MODE
from lazyshard_producer.configuration.settings import BY_NAME, OPTIONS, PANELS, SOURCE_OPTIONS, Option, flag
from lazyshard_producer.errors import ExtraMissing, Problem, SettingInvalid

COMMANDS: Final = ("run", "check")  # those that take sources
TABLES: Final = ("rows", "encoding", "limits")
PATH_KEYS: Final = ("path", "follow")  # what a ``[[source]]`` is: a --source or a --follow
_SOURCE: Final = "source"
_SOURCES: Final = {"--source": "path", "--follow": "follow"}
_WEIGHT: Final = "--weight"


@dataclass(frozen=True, slots=True)
class Given:
    """What the command line says, or a file: each --source, --follow or ``[[source]]``, and options by name."""

    sources: Sequence[Mapping[str, Any]] = ()  # the paths under "path" or "follow", and options
    values: Mapping[str, Any] = field(default_factory=dict)  # as they are in the file, or all texts behind a flag
    problems: Sequence[Problem] = ()
    rest: Sequence[str] = ()  # the arguments that have nothing to do with sources
    file: str = ""  # its path; "" for the command line

    def where(self, option: str) -> str:
        """Returns how messages call an option of the file."""
        table = BY_NAME[option].table
        return f"{self.file}: {table}.{option}" if table else f"{self.file}: {option}"

    def where_in_source(self, number: int, option: str) -> str:
        """Returns how messages call an option of the source of this number, from 0; "" is all of it."""
        key = {"": "", "source": ": path"}.get(option, f": {option}")
        return f"{self.file}: [[source]] {number + 1}{key}" if self.file else flag(option)

    def with_values(self, given: Mapping[str, Any]) -> Given:
        """Returns the flags with the values of options that a command got, by name, None where there was none."""
        values = {}
        for option in (*SOURCE_OPTIONS, *OPTIONS):
            texts = given[option.name]
            found = [] if texts is None else list(texts) if option.repeat else [texts]
            if found and option.name != "weight":
                values[option.name] = found
        return replace(self, values=values)


def sort_arguments(arguments: Sequence[str]) -> Given:
    """Takes the sources out of a command line."""
    if not arguments or arguments[0] not in COMMANDS:
        return Given([], {}, [], list(arguments))
    sources: list[dict[str, Any]] = []
    problems: list[Problem] = []
    rest: list[str] = []
    paths: list[str] | None = None  # takes files that follow
    left = iter(arguments)
    for argument in left:
        flag, equals, value = argument.partition("=")
        if flag in _SOURCES:
            found = [value] if equals else []
            sources.append({_SOURCES[flag]: found})
            paths = None if equals else found
        elif flag == _WEIGHT:
            problems += _take_weight(sources, value if equals else next(left, None))
            paths = None
        elif argument == "--":
            rest += [argument, *left]
        elif paths is not None and (argument == "-" or not argument.startswith("-")):
            paths.append(argument)
        else:
            paths = None
            rest.append(argument)
    for flag, key in _SOURCES.items():
        problems += [Problem(flag, "a path is needed behind it, got none") for one in sources if one.get(key) == []]
    return Given(sources, {}, list(dict.fromkeys(problems)), rest)


def _take_weight(sources: list[dict[str, Any]], value: str | None) -> Iterator[Problem]:
    if value is None:
        yield Problem(_WEIGHT, "a number is needed behind it, got none")
    elif not sources:
        yield Problem(_WEIGHT, f"it belongs behind the --source that it is for, got {value} first")
    elif "weight" in sources[-1]:
        yield Problem(_WEIGHT, "one for each --source or --follow is needed, got two")
    else:
        sources[-1]["weight"] = value


_SOURCE_HELP: Final = (
    "Where rows come from: JSON lines (.gz and .zst too), Parquet, Arrow, the directory of a Hugging Face data set, a "
    "stream (a directory with stream.json, or with chunk files and their .completed markers; a URL), - for "
    "standard input, a named pipe, python:MODULE:FUNCTION (which runs that code, with all rights of this command), "
    "PREFIX.idx or megatron:PREFIX for Megatron's IndexedDataset, megatron-blend:FILE for a file of such prefixes. "
    "Repeat it, or give several files after it, or a quoted pattern; they are read in this order."
)

_FOLLOW_HELP: Final = "A directory into which other programs write files: takes them as they are completed."


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the command with a parameter behind its own for each option, by name, which is None if not given."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [
        *(one for one in own if one.kind is not one.VAR_KEYWORD),
        _parameter("source", "--source", list[str] | None, "FILE...", _SOURCE_HELP, _SOURCE),
        _parameter("follow", "--follow", list[str] | None, "DIRECTORY", _FOLLOW_HELP, _SOURCE),
    ]
    for one in (*SOURCE_OPTIONS, *OPTIONS):
        kind = list[str] | None if one.repeat else str | None
        parameters.append(_parameter(one.name, one.flag, kind, one.metavar, one.help, one.table))
    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]

    def taking_options(**given: Any) -> Any:
        return command(**given)

    # What typer asks for. A wrapper of functools would lead it to the signature of `command`.
    taking_options.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    taking_options.__doc__ = command.__doc__
    taking_options.__annotations__ = {parameter.name: parameter.annotation for parameter in keywords}
    return taking_options


def _parameter(name: str, flag: str, kind: Any, metavar: str, text: str, table: str) -> inspect.Parameter:
    # A bracket would be taken for markup.
    shown = typer.Option(flag, metavar=metavar, help=text.replace("[", r"\["), rich_help_panel=PANELS[table])
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, shown])


_AT_LINE: Final = re.compile(r"at line (\d+)")
_BARE_TEXT: Final = re.compile(r"\s*([\w.-]+)\s*=\s*([A-Za-z/.~*][^\s\"'#]*)\s*(#.*)?")


def read_config(path: str) -> Given:
    """Reads a configuration file."""
    try:
        with open(path, "rb") as file:
            text = file.read().decode("utf-8-sig")
    except (OSError, ValueError) as cause:
        raise _refuse(path, getattr(cause, "strerror", None) or str(cause)) from None
    return sort_config(path, _parse(path, text))


def sort_config(name: str, document: dict[str, Any]) -> Given:
    """Sorts what stands in a TOML document."""
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    sources: Any = []
    for key, value in document.items():
        if key == _SOURCE:
            sources = value
        elif key in TABLES:
            if isinstance(value, dict):
                values |= {inner: item for inner, item in value.items() if inner in _names(key)}
                problems += _unknown(f"{name}: {key}.", value, key)
            else:
                problems.append(Problem(f"{name}: {key}", f"a table [{key}] is needed, got {value!r}"))
        elif key in _names(""):
            values[key] = value
        else:
            problems += _unknown(f"{name}: ", [key], "")
    if not isinstance(sources, list) or not all(isinstance(source, dict) for source in sources):
        problems.append(Problem(f"{name}: source", "tables [[source]] are needed, with two brackets on each side"))
        sources = []
    for number, source in enumerate(sources, 1):
        problems += _unknown(f"{name}: [[source]] {number}: ", source, _SOURCE)
    return Given(tuple(sources), values, tuple(problems), file=name)


def _parse(path: str, text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ModuleNotFoundError:
            raise ExtraMissing(
                "a configuration file needs tomli on this Python, which is not installed: "
                "pip install 'lazyshard[producer]'",
                package="tomli",
                extra="producer",
            ) from None
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as cause:
        raise _refuse(path, f"no TOML: {cause}{_hint(text, str(cause))}") from None


def _hint(text: str, message: str) -> str:
    """Returns what may be wrong in the line that is no TOML: mostly a text without quotes, such as none."""
    at = _AT_LINE.search(message)
    lines = text.split("\n")
    number = int(at[1]) if at is not None else len(lines)
    bare = _BARE_TEXT.fullmatch(lines[number - 1].rstrip()) if 0 < number <= len(lines) else None
    return "" if bare is None else f'; text has to be quoted: {bare[1]} = "{bare[2]}"'


def _refuse(path: str, reason: str) -> SettingInvalid:
    return SettingInvalid(f"{path}: cannot be read as a configuration file: {reason}", option="--config")


def _names(table: str) -> tuple[str, ...]:
    if table == _SOURCE:
        return (*PATH_KEYS, *(option.name for option in SOURCE_OPTIONS))
    return tuple(option.name for option in OPTIONS if option.table == table)


def _unknown(where: str, names: Sequence[str] | dict[str, Any], table: str) -> Iterator[Problem]:
    here = _names(table)
    for name in names:
        if name not in here:
            yield Problem(where + name, f"unknown here; {_nearest(name.replace('-', '_').lower(), here, table)}")


def _nearest(name: str, here: Sequence[str], table: str) -> str:
    """Returns in words what may have been meant."""
    everywhere = (*BY_NAME, *PATH_KEYS, *TABLES, _SOURCE)
    if name in everywhere and name not in here:
        return f"it belongs {_place(name)}"
    for meant in (name, *difflib.get_close_matches(name, here, 1), *difflib.get_close_matches(name, everywhere, 1)):
        if meant in here:
            return f"is {meant} meant?"
        if meant in everywhere:
            return f"is {meant} meant, {_place(meant)}?"
    known = [*here, *([f"[{other}]" for other in TABLES] + ["[[source]]"] if not table else [])]
    return f"known are {', '.join(known)}"


def _place(name: str) -> str:
    """Returns in words where a name belongs."""
    if name in (*TABLES, _SOURCE):
        return "as a table [[source]]" if name == _SOURCE else f"as a table [{name}]"
    table = _SOURCE if name in PATH_KEYS else BY_NAME[name].table
    if not table:
        return "at the top of the file, before the first table"
    return "in [[source]]" if table == _SOURCE else f"in [{table}]"


DEFAULT_FILE: Final = "lazyshard-producer.toml"

_START: Final = """\
# What `lazyshard-producer run --config FILE` is to do. `lazyshard-producer check FILE` shows what that means.
#
# Each key is a flag with underscores, and the flag counts where both are given. Lines that begin with "#" are
# examples: take the "#" away to use one. Paths are relative to the directory in which the command is started.
#
# A file like this one is to be trusted like a program: transform, where, encode and "python:" sources name code
# that is run.
"""

_EXAMPLE_SOURCES: Final = """\

# Where rows come from: a [[source]] for each. Without weights they are read one after another, in this order.
[[source]]
# JSON lines (.gz and .zst too), a pattern such as "data/*.jsonl", or a list of these; Parquet or Arrow files; a
# directory of a Hugging Face data set; "-" for standard input, or a named pipe; "python:MODULE:FUNCTION".
path = "data.jsonl"

# Or a directory into which other programs write, for as long as they do:
# [[source]]
# follow = "incoming"
"""


def example() -> str:
    """Returns the text of the example."""
    parts = [_START, *_entries(""), _EXAMPLE_SOURCES, *map(_entry, SOURCE_OPTIONS)]
    for table in TABLES:
        parts += [f"\n# {PANELS[table]}\n[{table}]\n", *_entries(table)]
    return "".join(parts)


def write_example(path: str) -> None:
    """Writes the example to a file that is not there yet; SettingInvalid where there is something of this name."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, NEW_FILE_MODE)
    except FileExistsError:
        raise SettingInvalid(
            f"{path}: there is a file of this name already, and it is left as it is; give another name", option="FILE"
        ) from None
    with open(fd, "w", encoding="utf-8") as file:
        file.write(example())


def _entries(table: str) -> Iterator[str]:
    return (_entry(option) for option in OPTIONS if option.table == table)


def _entry(option: Option) -> str:
    lines = "".join(f"# {line}\n" for line in textwrap.wrap(option.help, 100, break_on_hyphens=False))
    # These two every run needs; the rest of the example is commented out.
    mark = "" if option.name in ("out", "samples_per_chunk") else "# "
    return f"\n{lines}{mark}{option.name} = {option.example}\n"
