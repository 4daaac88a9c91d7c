"""Settings from flags and a TOML file; flags come first. All that is wrong is said at once.

Sources are taken out of a command line before the rest is parsed: several files may follow one --source, and a weight
belongs to the source before it. Those of the file count where none are flags. A problem is called by what the user
wrote: a flag, or a key with its file. Unknown names are refused: a limit that was misspelt must not be no limit.
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

from lazyshard_producer.configuration import settings as known
from lazyshard_producer.configuration.blends import FoundSource, expand_source, is_indexed, is_pipe
from lazyshard_producer.configuration.problems import find_problems
from lazyshard_producer.configuration.settings import BY_NAME, OPTIONS, SOURCE_OPTIONS, Option, Settings, SourceSettings
from lazyshard_producer.errors import Problem, SettingInvalid, SettingsInvalid

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLES: Final = ("rows", "encoding", "limits")
_PATHS: Final = {"--source": "path", "--follow": "follow"}  # what a ``[[source]]`` is


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
            return known.flag(option)
        if source is not None:
            return f"{self.file}: [[source]] {source + 1}{option and f': {option}'}"
        table = BY_NAME[option].table
        return f"{self.file}: {table}{'.' if table else ''}{option}"

    def with_values(self, given: Mapping[str, Any]) -> Given:
        """Returns the flags with the values of options that a command got, by name, None or [] where there was none."""
        named = [(one, given.get(one.name)) for one in (*SOURCE_OPTIONS, *OPTIONS) if one.name != "weight"]
        values = {one.name: tuple(value) if one.repeat else value for one, value in named if value not in (None, [])}
        return replace(self, values=values)


def sort_arguments(arguments: Sequence[str]) -> Given:
    """Takes the sources out of a command line."""
    if not arguments or arguments[0] not in ("run", "check"):
        return Given(rest=list(arguments))
    sources: list[dict[str, Any]] = []
    problems: list[Problem] = []
    rest: list[str] = []
    taking = False  # files that follow
    left = iter(arguments)
    for argument in left:
        name, equals, value = argument.partition("=")
        if taking and (argument == "-" or not argument.startswith("-")):
            next(iter(sources[-1].values())).append(argument)
            continue
        taking = name in _PATHS and not equals
        if name in _PATHS:
            sources.append({_PATHS[name]: [value] if equals else []})
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
    parameters = [one.replace(kind=one.KEYWORD_ONLY) for one in own]
    for one in BY_NAME.values():
        kind: Any = list[str] | None if one.repeat or one.flag in _PATHS else str | None
        # A bracket would be taken for markup.
        text, panel = one.help.replace("[", r"\["), known.PANELS[one.table]
        shown = typer.Option(one.flag, metavar=one.metavar, help=text, rich_help_panel=panel)
        annotation = Annotated[kind, shown]
        parameters.append(inspect.Parameter(one.name, own[0].KEYWORD_ONLY, default=None, annotation=annotation))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def read_config(path: str | None) -> Given:
    """Reads a configuration file, if there is one."""
    if path is None:
        return Given()
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
    lines = ["", *text.split("\n")]
    number = int(at[1]) if (at := re.search(r"at line (\d+)", message)) else -1
    bare = re.fullmatch(r"\s*([\w.-]+)\s*=\s*([A-Za-z/.~*][^\s\"'#]*)\s*(#.*)?", "".join(lines[number:][:1]).rstrip())
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
            values |= {key: value for key, value in inner.items() if key in _names(table)}
        else:
            problems.append(Problem(f"{name}: {table}", f"a table [{table}] is needed, got {inner!r}"))
    if not isinstance(sources, list) or not all(isinstance(source, dict) for source in sources):
        problems.append(Problem(f"{name}: source", "tables [[source]] are needed, with two brackets on each side"))
        sources = []
    for number, source in enumerate(sources, 1):
        problems += _unknown(f"{name}: [[source]] {number}: ", source, "source")
    return Given(tuple(sources), values, tuple(problems), file=name)


def _names(table: str) -> list[str]:
    return [one.name for one in BY_NAME.values() if one.table == table]


_HEADINGS: Final = {**{table: f"[{table}]" for table in TABLES}, "source": "[[source]]"}
_TOP: Final = "at the top of the file, before the first table"
_PLACES: Final = {one.name: f"in {_HEADINGS[one.table]}" if one.table else _TOP for one in BY_NAME.values()} | {
    table: f"as a table {heading}" for table, heading in _HEADINGS.items()
}
"""Where each name belongs, in words."""


def _unknown(where: str, names: Iterable[str], table: str) -> Iterator[Problem]:
    here = _names(table)
    for name in names:
        if name not in here:
            plain = name.replace("-", "_").lower()
            near = (difflib.get_close_matches(plain, among, 1) for among in (here, _PLACES))
            meant = next((one for some in ([plain], *near) for one in some if one in _PLACES), None)
            if meant is None:
                text = f"known are {', '.join([*here, *([] if table else _HEADINGS.values())])}"
            elif meant in here:
                text = f"is {meant} meant?"
            else:
                text = f"it belongs {_PLACES[meant]}" if meant == plain else f"is {meant} meant, {_PLACES[meant]}?"
            yield Problem(where + name, f"unknown here; {text}")


_FOLLOWS_FROM: Final = {
    "max_bad_rows": "on_bad_row",
    "consumers": "retain",
    "marker": "finished_by",
    "idle_seconds": "finished_by",
    **{option.name: option.needs for option in OPTIONS if option.needs},
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
        self._flags, self._file = flags, file
        self._given = flags if flags.sources else file  # where the sources come from
        self._unread: set[tuple[int | None, str]] = set()  # options that cannot be read, and of which source, from 0
        self._fits: set[str] = set()  # flags about sources that some source can have

    def settings(self) -> Settings:
        """Returns the settings, or raises with all problems, looked for with stand-ins for what cannot be."""
        sources = [(number, one) for number in range(len(self._given.sources)) for one in self._source(number)]
        for option in SOURCE_OPTIONS:
            if sources and option.name in self._flags.values and option.name not in self._fits:
                kind = _ABOUT.get(option.name, ("directories given with --follow", None))[0]
                self._problems.append(Problem(option.flag, f"it is for {kind}, and there are none; leave it out"))
        values: dict[str, Any] = {}
        for option in OPTIONS:
            given = self._from(option.name)
            if option.name in given.values:
                values |= self._read(option, given.values[option.name], given, None)
        names = frozenset(values)
        for name, stand_in in (("out", "out"), ("samples_per_chunk", 1)):
            if name not in values and (None, name) not in self._unread:
                option, place = BY_NAME[name], f", or {name} in {self._file.file}" if self._file.file else ""
                self._add(f"needed, found none; give {option.flag} {option.metavar}{place}", name)
                self._unread.add((None, name))
            values.setdefault(name, stand_in)
        if values.get("on_bad_row", "fail") != "fail":
            # So a broken transform is noticed before it has eaten a data set.
            values.setdefault("max_bad_rows", 1000)
        limits = known.Limits(**_fields(values, known.Limits))
        settings = Settings(sources=tuple(one for _, one in sources), limits=limits, **_fields(values, Settings))
        for name, text, source in find_problems(settings, names):
            # Sources that cannot be are told already.
            if name != "path" or source is not None or sources or not self._given.sources:
                self._add(text, name, None if source is None else sources[source][0])
        if found := tuple(dict.fromkeys(self._problems)):
            message = "; ".join(f"{problem.option}: {problem.text}" for problem in found)
            raise SettingsInvalid(message, option=found[0].option, problems=found)
        return settings

    def _from(self, name: str) -> Given:
        return self._file if name in self._file.values and name not in self._flags.values else self._flags

    def _add(self, text: str, name: str, source: int | None = None) -> None:
        """Adds a problem that follows from no other, as the user calls it; once for all files of a pattern."""
        if self._unread.isdisjoint({(source, name), (source, _FOLLOWS_FROM.get(name, name))}):
            if source is not None:
                self._unread.add((source, name))
            given = self._from(name) if source is None else self._given
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
        source = self._given.sources[number]
        keys = [key for key in _PATHS.values() if key in source]
        if len(keys) != 1:
            self._add(f"either path or follow is needed, got {' and '.join(keys) or 'neither'}", "", number)
            return []
        key, paths = keys[0], source[keys[0]] if isinstance(source[keys[0]], list) else [source[keys[0]]]
        if not paths or not all(isinstance(path, str) for path in paths):
            self._add(f"a path or a list of paths is needed, got {paths!r}", key, number)
            return []
        values: dict[str, Any] = {}
        for option in SOURCE_OPTIONS:
            _, fits = _ABOUT.get(option.name, ("", None))
            about = key == "follow" if fits is None else key == "path" and any(map(fits, paths))
            if option.name in self._flags.values and about:
                self._fits.add(option.name)
                values |= self._read(option, self._flags.values[option.name], self._flags, number)
            elif option.name in source:
                values |= self._read(option, source[option.name], self._given, number)
        if (number, "weight") in self._unread:
            values["weight"] = 1.0
        try:
            return _expanded(key == "follow", paths, _fields(values, SourceSettings))
        except ValueError as cause:
            self._add(str(cause), "path", number)
            return []


def _expanded(follow: bool, paths: Sequence[str], values: dict[str, Any]) -> list[SourceSettings]:
    """Returns the sources of some paths, their weight divided among them: evenly, or as a blend file says."""
    found = [one for path in paths for one in ([FoundSource(path)] if follow else expand_source(path))]
    weight = values.pop("weight", None)
    if weight is not None and len(paths) > 1 and any(one.weight is not None for one in found):
        raise ValueError("a blend file with weights shares a --weight with nothing else; give it a --source of its own")
    total = sum(one.weight or 1.0 for one in found)
    # Files beside IndexedDatasets have not all of their options.
    beside = {key: value for key, value in values.items() if key != "indexed_rows" or not any(map(is_indexed, paths))}
    sources = []
    for path, own in found:
        share = own if weight is None else weight * (own or 1.0) / total
        more = values if is_indexed(path) else beside
        sources.append(SourceSettings(path=path, weight=share, follow=follow, **more))
    return sources


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
    parts = [_START, *_entries(""), order, *_entries("source")]
    for table in TABLES:
        parts += [f"\n# {known.PANELS[table]}\n[{table}]\n", *_entries(table)]
    return "".join(parts)


def _entries(table: str) -> Iterator[str]:
    for option in BY_NAME.values():
        if option.table == table:
            text = "".join(f"# {line}\n" for line in textwrap.wrap(option.help, 100, break_on_hyphens=False))
            # These every run needs; the rest of the example is commented out.
            mark = "" if option.name in ("path", "out", "samples_per_chunk") else "# "
            yield f"\n{text}{mark}{option.name} = {option.example}\n"
