"""Settings from flags and a TOML file; flags come first. All that is wrong is said at once.

Sources are taken out of a command line before the rest is parsed: several files may follow one --source, and a weight
belongs to the source before it. The file has the names of the flags, with underscores: those of the panel "Stream" at
its top, the others in tables, and a [[source]] for each --source (as path) or --follow. What nobody knows is refused,
with the nearest name that is known: a limit that was misspelt must not be no limit.

A problem is called by what the user wrote: a flag, or a key with its file. Where sources are given as flags, those of
the file are left aside, all of them.
"""

from __future__ import annotations

import difflib
import inspect
import re
import reprlib
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, Final, TypeVar, get_type_hints

import typer
from pydantic import ConfigDict, TypeAdapter, ValidationError

from lazyshard_producer.configuration.blends import FoundSource, expand_source, is_indexed, is_pipe
from lazyshard_producer.configuration.problems import find_problems
from lazyshard_producer.configuration.settings import (
    BY_NAME,
    HELP,
    OPTIONS,
    PANELS,
    SOURCE_OPTIONS,
    Limits,
    Option,
    Settings,
    SourceSettings,
    flag,
)
from lazyshard_producer.errors import ExtraMissing, Problem, SettingInvalid, SettingsInvalid

TABLES: Final = ("rows", "encoding", "limits")
PATH_KEYS: Final = ("path", "follow")  # what a ``[[source]]`` is: a --source or a --follow
_SOURCES: Final = {"--source": "path", "--follow": "follow"}


@dataclass(frozen=True, slots=True)
class Given:
    """What the command line says, or a file: each --source, --follow or ``[[source]]``, and options by name."""

    sources: Sequence[Mapping[str, Any]] = ()  # the paths under "path" or "follow", and options
    values: Mapping[str, Any] = field(default_factory=dict)  # as in the file; behind a flag a text, or a tuple of all
    problems: Sequence[Problem] = ()
    rest: Sequence[str] = ()  # the arguments that have nothing to do with sources
    file: str = ""  # its path; "" for the command line

    def where(self, option: str, source: int | None = None) -> str:
        """Returns how messages call an option, or one of the source of this number, of which "" is all."""
        if not self.file:
            return flag(option)
        if source is None:
            table = BY_NAME[option].table
            return f"{self.file}: {table}{'.' if table else ''}{option}"
        return f"{self.file}: [[source]] {source + 1}" + {"": "", "source": ": path"}.get(option, f": {option}")

    def with_values(self, given: Mapping[str, Any]) -> Given:
        """Returns the flags with the values of options that a command got, by name, None or [] where there was none."""
        options = [one for one in BY_NAME.values() if given.get(one.name) not in (None, []) and one.name != "weight"]
        values = {one.name: tuple(given[one.name]) if one.repeat else given[one.name] for one in options}
        return replace(self, values=values)


def sort_arguments(arguments: Sequence[str]) -> Given:
    """Takes the sources out of a command line."""
    if not arguments or arguments[0] not in ("run", "check"):
        return Given(rest=list(arguments))
    sources: list[dict[str, Any]] = []
    problems: list[Problem] = []
    rest: list[str] = []
    paths: list[str] | None = None  # takes files that follow
    left = iter(arguments)
    for argument in left:
        name, equals, value = argument.partition("=")
        if paths is not None and (argument == "-" or not argument.startswith("-")):
            paths.append(argument)
            continue
        paths = None
        if name in _SOURCES:
            found = [value] if equals else []
            sources.append({_SOURCES[name]: found})
            paths = None if equals else found
        elif name == "--weight":
            weight = value if equals else next(left, None)
            if weight is None:
                problems.append(Problem(name, "a number is needed behind it, got none"))
            elif not sources:
                problems.append(Problem(name, f"it belongs behind the --source that it is for, got {weight} first"))
            elif "weight" in sources[-1]:
                problems.append(Problem(name, "one for each --source or --follow is needed, got two"))
            else:
                sources[-1]["weight"] = weight
        elif argument == "--":
            rest += [argument, *left]
        else:
            rest.append(argument)
    return Given(sources, {}, problems, rest)


_Command = TypeVar("_Command", bound=Callable[..., Any])


def with_options(command: _Command) -> _Command:
    """Has typer give a command its own parameters, and those of all options by name, which are None if not given."""
    own = [one for one in inspect.signature(command, eval_str=True).parameters.values() if one.kind != one.VAR_KEYWORD]
    parameters = [
        *(one.replace(kind=one.KEYWORD_ONLY) for one in own),
        _parameter("source", "--source", list[str] | None, "FILE...", _help("path"), "source"),
        _parameter("follow", "--follow", list[str] | None, "DIRECTORY", _help("follow"), "source"),
    ]
    for one in (*SOURCE_OPTIONS, *OPTIONS):
        kind = list[str] | None if one.repeat else str | None
        parameters.append(_parameter(one.name, one.flag, kind, one.metavar, one.help, one.table))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _help(field: str) -> str:
    return HELP.get((SourceSettings.__name__, field), "")


def _parameter(name: str, option: str, kind: Any, metavar: str, text: str, table: str) -> inspect.Parameter:
    # A bracket would be taken for markup.
    shown = typer.Option(option, metavar=metavar, help=text.replace("[", r"\["), rich_help_panel=PANELS[table])
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, shown])


def read_config(path: str | None) -> Given:
    """Reads a configuration file, if there is one."""
    if path is None:
        return Given()
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ModuleNotFoundError:
            text = "a configuration file needs tomli on this Python, which is not installed"
            install = "pip install 'lazyshard[producer]'"
            raise ExtraMissing(f"{text}: {install}", package="tomli", extra="producer") from None
    text = ""
    try:
        with open(path, "rb") as file:
            text = file.read().decode("utf-8-sig")
        return sort_config(path, tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as cause:
        reason = f"no TOML: {cause}{_hint(text, str(cause))}"
    except (OSError, ValueError) as cause:
        reason = getattr(cause, "strerror", None) or str(cause)
    raise SettingInvalid(f"{path}: cannot be read as a configuration file: {reason}", option="--config")


def _hint(text: str, message: str) -> str:
    """Returns what may be wrong in the line that is no TOML: mostly a text without quotes, such as none."""
    lines = text.split("\n")
    number = int(at[1]) if (at := re.search(r"at line (\d+)", message)) else len(lines)
    line = lines[number - 1].rstrip() if 0 < number <= len(lines) else ""
    bare = re.fullmatch(r"\s*([\w.-]+)\s*=\s*([A-Za-z/.~*][^\s\"'#]*)\s*(#.*)?", line)
    return "" if bare is None else f'; text has to be quoted: {bare[1]} = "{bare[2]}"'


def sort_config(name: str, document: dict[str, Any]) -> Given:
    """Sorts what stands in a TOML document."""
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    sources: Any = document.get("source", [])
    top = {key: value for key, value in document.items() if key not in ("source", *TABLES)}
    for table, inner in (("", top), *((key, document[key]) for key in document if key in TABLES)):
        if isinstance(inner, dict):
            problems += _unknown(f"{name}: {table}{'.' if table else ''}", inner, table)
            values |= {key: value for key, value in inner.items() if _TABLE_OF.get(key) == table}
        else:
            problems.append(Problem(f"{name}: {table}", f"a table [{table}] is needed, got {inner!r}"))
    if not isinstance(sources, list) or not all(isinstance(source, dict) for source in sources):
        problems.append(Problem(f"{name}: source", "tables [[source]] are needed, with two brackets on each side"))
        sources = []
    for number, source in enumerate(sources, 1):
        problems += _unknown(f"{name}: [[source]] {number}: ", source, "source")
    return Given(tuple(sources), values, tuple(problems), file=name)


_TABLE_OF: Final = {option.name: option.table for option in BY_NAME.values()} | dict.fromkeys(PATH_KEYS, "source")
_HEADINGS: Final = {**{table: f"[{table}]" for table in TABLES}, "source": "[[source]]"}
_TOP: Final = "at the top of the file, before the first table"
_PLACES: Final = {name: f"in {_HEADINGS[table]}" if table else _TOP for name, table in _TABLE_OF.items()} | {
    table: f"as a table {heading}" for table, heading in _HEADINGS.items()
}
"""Where each name belongs, in words."""


def _unknown(where: str, names: Iterable[str], table: str) -> Iterator[Problem]:
    here = [name for name, home in _TABLE_OF.items() if home == table]
    for name in names:
        if name not in here:
            yield Problem(where + name, f"unknown here; {_nearest(name.replace('-', '_').lower(), here, table)}")


def _nearest(name: str, here: Sequence[str], table: str) -> str:
    """Returns in words what may have been meant."""
    if name in _PLACES and name not in here:
        return f"it belongs {_PLACES[name]}"
    for meant in (name, *difflib.get_close_matches(name, here, 1), *difflib.get_close_matches(name, _PLACES, 1)):
        if meant in _PLACES:
            return f"is {meant} meant?" if meant in here else f"is {meant} meant, {_PLACES[meant]}?"
    return f"known are {', '.join([*here, *([] if table else _HEADINGS.values())])}"


_FOLLOWS_FROM: Final = {
    **{"max_bad_rows": "on_bad_row", "consumers": "retain", "marker": "finished_by", "idle_seconds": "finished_by"},
    **{option.name: option.needs for option in OPTIONS if option.needs is not None},
}
"""What may be wrong only because something else could not be read."""

_ABOUT: Final = {"resume": ("standard input and pipes", is_pipe), "indexed_rows": ("Megatron's .idx files", is_indexed)}
"""What those options of sources are for that are not for followed directories, and what tells it of a path."""


def assemble(flags: Given, file: Given | None = None) -> Settings:
    """Returns the settings. Looks for the files that match patterns, reads blend files, and looks at nothing else."""
    return _Assembly(flags, file or Given()).settings()


class _Assembly:
    """The work of `assemble`, with the problems found so far."""

    def __init__(self, flags: Given, file: Given) -> None:
        self._problems = [*flags.problems, *file.problems]
        self._flags = flags
        self._file = file
        self._sources = flags if flags.sources else file  # where the sources come from
        self._unread: set[tuple[int | None, str]] = set()  # options that cannot be read, and of which source, from 0
        self._fits: set[str] = set()  # flags about sources that some source can have

    def settings(self) -> Settings:
        """Returns the settings, or raises with all problems, looked for with stand-ins for what cannot be."""
        sources: list[SourceSettings] = []
        owners: list[int] = []
        for number in range(len(self._sources.sources)):
            sources += self._source(number)
            owners += [number] * (len(sources) - len(owners))
        for option in SOURCE_OPTIONS:
            if owners and option.name in self._flags.values and option.name not in self._fits:
                kind = _ABOUT.get(option.name, ("directories given with --follow", None))[0]
                self._problems.append(Problem(option.flag, f"it is for {kind}, and there are none; leave it out"))
        values: dict[str, Any] = {}
        for option in OPTIONS:
            given = self._given(option.name)
            if option.name in given.values:
                values |= self._read(option, given.values[option.name], given, None)
        names = frozenset(values)
        for name, stand_in in (("out", "out"), ("samples_per_chunk", 1)):
            if name not in values and (None, name) not in self._unread:
                option, place = BY_NAME[name], f", or {name} in {self._file.file}" if self._file.file else ""
                self._add(f"needed, found none; give {option.flag} {option.metavar}{place}", name, None)
                self._unread.add((None, name))
            values.setdefault(name, stand_in)
        if values.get("on_bad_row", "fail") != "fail":
            # So a broken transform is noticed before it has eaten a data set.
            values.setdefault("max_bad_rows", 1000)
        limits = Limits(**_fields(values, Limits))
        settings = Settings(sources=tuple(sources), limits=limits, **_fields(values, Settings))
        for name, text, source in find_problems(settings, names):
            # Sources that cannot be are told already.
            if name != "source" or source is not None or owners or not self._sources.sources:
                self._add(text, name, None if source is None else owners[source])
        if found := tuple(dict.fromkeys(self._problems)):
            message = "; ".join(f"{problem.option}: {problem.text}" for problem in found)
            raise SettingsInvalid(message, option=found[0].option, problems=found)
        return settings

    def _given(self, name: str) -> Given:
        return self._file if name in self._file.values and name not in self._flags.values else self._flags

    def _add(self, text: str, name: str, source: int | None) -> None:
        """Adds a problem that follows from no other, as the user calls it; once for all files of a pattern."""
        if (source, name) in self._unread or (source, _FOLLOWS_FROM.get(name)) in self._unread:
            return
        if source is not None:
            self._unread.add((source, name))
        given = self._given(name) if source is None else self._sources
        self._problems.append(Problem(given.where(name, source), text))

    def _read(self, option: Option, value: Any, given: Given, source: int | None) -> dict[str, Any]:
        """Returns what a value means, by name; nothing where it cannot be. TOML has types, and is taken at its word."""
        try:
            return {option.name: _reader(option).validate_python(value, strict=bool(given.file))}
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
        self._unread.add((source, option.name))
        cause = first.get("ctx", {}).get("error")
        why = f"should be {cause}" if cause is not None else first["msg"].removeprefix("Input ")
        shown = reprlib.repr(value[-1] if isinstance(value, list | tuple) and value else value)
        text = f"{option.metavar} is needed, got {shown}: {why}"
        self._problems.append(Problem(given.where(option.name, source), text))
        return {}

    def _source(self, number: int) -> list[SourceSettings]:
        """Returns the sources that were given as one: with the flags about sources that they can have."""
        given, source = self._sources, self._sources.sources[number]
        keys = [key for key in PATH_KEYS if key in source]
        if len(keys) != 1:
            found = " and ".join(keys) or "neither"
            self._add(f"either path or follow is needed, got {found}", "", number)
            return []
        key, paths = keys[0], source[keys[0]] if isinstance(source[keys[0]], list) else [source[keys[0]]]
        if not paths or not all(isinstance(path, str) for path in paths):
            name = "source" if key == "path" else key
            self._add(f"a path or a list of paths is needed, got {paths!r}", name, number)
            return []
        values: dict[str, Any] = {}
        for option in SOURCE_OPTIONS:
            _, fits = _ABOUT.get(option.name, ("", None))
            about = key == "follow" if fits is None else key == "path"
            if option.name in self._flags.values and about and (fits is None or any(map(fits, paths))):
                self._fits.add(option.name)
                values |= self._read(option, self._flags.values[option.name], self._flags, number)
            elif option.name in source:
                values |= self._read(option, source[option.name], given, number)
        if (number, "weight") in self._unread:
            values["weight"] = 1.0
        try:
            return _expanded(key == "follow", paths, _fields(values, SourceSettings))
        except ValueError as cause:
            self._add(str(cause), "source", number)
            return []


def _expanded(follow: bool, paths: Sequence[str], values: dict[str, Any]) -> list[SourceSettings]:
    """Returns the sources of some paths, their weight divided among them: evenly, or as a blend file says."""
    found = [one for path in paths for one in ([FoundSource(path)] if follow else expand_source(path))]
    weight = values.pop("weight", None)
    if weight is not None and len(paths) > 1 and any(one.weight is not None for one in found):
        raise ValueError("a blend file with weights shares a --weight with nothing else; give it a --source of its own")
    total = sum(one.weight or 1.0 for one in found)
    # Files beside IndexedDatasets have not all of their options.
    beside = {
        name: value for name, value in values.items() if name != "indexed_rows" or not any(map(is_indexed, paths))
    }
    return [
        SourceSettings(
            path=one.path,
            weight=one.weight if weight is None else weight * (one.weight or 1.0) / total,
            follow=follow,
            **(values if is_indexed(one.path) else beside),
        )
        for one in found
    ]


def _fields(values: Mapping[str, Any], owner: type) -> dict[str, Any]:
    """Returns the values of options, by name, that belong to a class of settings, by field."""
    return {BY_NAME[name].field: value for name, value in values.items() if BY_NAME[name].owner is owner}


@cache
def _reader(option: Option) -> TypeAdapter[Any]:
    """Returns what reads the value of an option: pydantic, by the type of its field."""
    hint = get_type_hints(option.owner, include_extras=True)[option.field]
    return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False))


_START: Final = """\
# What `lazyshard-producer run --config FILE` is to do. `lazyshard-producer check FILE` shows what that means.
# Each key is a flag with underscores, and the flag counts where both are given. Take the "#" away to use an example.
# Paths are relative to the directory in which the command is started. A file like this one is to be trusted like a
# program: transform, where, encode and "python:" sources name code that is run.
"""


def example() -> str:
    """Returns the text of the example."""
    order = "\n# Without weights sources are read one after another, in this order.\n[[source]]"
    parts = [_START, *_entries(""), order]
    parts += [_entry(_help("path"), 'path = "data.jsonl"'), _entry(_help("follow"), '# follow = "incoming"')]
    parts += _entries("source")
    for table in TABLES:
        parts += [f"\n# {PANELS[table]}\n[{table}]\n", *_entries(table)]
    return "".join(parts)


def _entries(table: str) -> Iterator[str]:
    for option in BY_NAME.values():
        if option.table == table:
            # These two every run needs; the rest of the example is commented out.
            mark = "" if option.name in ("out", "samples_per_chunk") else "# "
            yield _entry(option.help, f"{mark}{option.name} = {option.example}")


def _entry(text: str, line: str) -> str:
    lines = "".join(f"# {line}\n" for line in textwrap.wrap(text, 100, break_on_hyphens=False))
    return f"\n{lines}{line}\n"
