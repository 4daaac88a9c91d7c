"""Settings from flags and a TOML file. Flags override the file. All problems are reported together.

Sources are removed from the command line before the rest is parsed, because several files may follow one --source, and
a weight belongs to the preceding source. Sources of the file are used only if there are none in flags. A problem is
reported under the name that the user wrote: a flag, or a key with its file. Unknown names are refused, because a
misspelt limit must not mean no limit.
"""

from __future__ import annotations

import contextlib
import difflib
import glob
import inspect
import math
import os
import re
import reprlib
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer
from pydantic import ConfigDict, TypeAdapter, ValidationError

from lazyshard.conversion.indexed import INDEX_SUFFIX
from lazyshard.memory import loads
from lazyshard_producer.configuration import settings as known
from lazyshard_producer.configuration.problems import find_problems
from lazyshard_producer.configuration.settings import BY_NAME, OPTIONS, SOURCE_OPTIONS, Option, Settings, SourceSettings
from lazyshard_producer.errors import Problem, SettingInvalid, SettingsInvalid

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLES: Final = ("rows", "encoding", "limits")
_PATHS: Final = {"--source": "path", "--follow": "follow"}  # the key in a ``[[source]]`` for each flag


MEGATRON: Final = "megatron:"  # precedes the prefix of an IndexedDataset's two files
MEGATRON_BLEND: Final = "megatron-blend:"  # precedes the path of a file of such prefixes
MAX_BLEND_BYTES: Final = 16 << 20  # so a data file named by mistake is not read in full

FoundSource = tuple[str, float | None]
"""A source found for a path, and its weight within one blend file, None without a weight."""


def expand_source(path: str) -> list[FoundSource]:
    """Returns the sources for a path of --source: a file, files that match a pattern, Megatron's prefixes, a blend.

    Raises ValueError.
    """
    if not path.startswith(MEGATRON_BLEND):
        found = _index(path.removeprefix(MEGATRON)) if path.startswith(MEGATRON) else path
        return [(one, None) for one in expand_path(found)]
    path = path.removeprefix(MEGATRON_BLEND)
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BLEND_BYTES + 1)
        if len(data) > MAX_BLEND_BYTES:
            raise ValueError(f"a blend file must have at most {MAX_BLEND_BYTES} bytes, this one has more")
        return [(_index(prefix), weight) for prefix, weight in parse_blend(data)]
    except OSError as cause:
        raise ValueError(f"expected a readable blend file, got {path!r}: {(cause.strerror or '').lower()}") from None
    except ValueError as cause:
        raise ValueError(f"{path}: {cause}") from None


def _index(prefix: str) -> str:
    return prefix if not prefix or prefix.endswith(INDEX_SUFFIX) else prefix + INDEX_SUFFIX


def expand_path(path: str) -> list[str]:
    """Returns the files that match a shell pattern ("**" includes subdirectories), or the path itself if none do."""
    if not glob.has_magic(path) or "\0" in path or os.path.lexists(path):
        return [path]
    return sorted(name for name in glob.glob(path, recursive=True) if not os.path.isdir(name)) or [path]


def is_pipe(path: str) -> bool:
    """Whether a path is standard input or an existing named pipe."""
    with contextlib.suppress(OSError):
        return path == "-" or Path(path).is_fifo()
    return False


def parse_blend(data: bytes) -> list[FoundSource]:
    """Returns the prefixes in a blend file, in order, without `.idx` and `.bin`.

    The file holds "0.7 data/web 0.3 data/code" as text or a JSON list, with or without weights, as in
    `get_blend_from_list` of megatron/core/datasets/utils.py, or {"train": [...]} as for --per-split-data-args-path.
    """
    words = _words(data)
    if not all(words):
        raise ValueError("expected weights and prefixes, such as 0.7 data/web 0.3 data/code, got an empty one")
    weights = [_number(word) for word in words[::2]]
    if len(words) % 2 or not any(weight is not None for weight in weights):
        return [(word, None) for word in words]
    for word, weight in zip(words[::2], weights, strict=True):
        if weight is None or not 0 < weight < math.inf:
            raise ValueError(f"expected a weight above 0, got {word!r}; to exclude a prefix, remove it")
    return list(zip(words[1::2], weights, strict=True))


def _words(data: bytes) -> list[str]:
    try:
        text = data.decode("utf-8-sig").strip()
        value = loads(text.encode()) if text.startswith(("[", "{")) else text
    except UnicodeDecodeError:
        raise ValueError("expected a text of weights and prefixes, got bytes that are not UTF-8") from None
    except ValueError as cause:
        raise ValueError(f"expected a blend in JSON, got invalid JSON: {cause}") from None
    if isinstance(value, dict):
        if "train" not in value:
            raise ValueError(f'expected a blend under "train", got {", ".join(map(repr, list(value)[:5])) or "none"}')
        value = value["train"]
    words = value.split() if isinstance(value, str) else value
    if not words or not isinstance(words, list) or not all(type(item) in (str, int, float) for item in words):
        raise ValueError(f"expected a list of weights and prefixes, got {repr(value)[:120] if words else 'none'}")
    return [item.strip() if isinstance(item, str) else repr(item) for item in words]


def _number(word: str) -> float | None:
    with contextlib.suppress(ValueError):
        return float(word)
    return None


@dataclass(frozen=True, slots=True)
class Given:
    """The contents of the command line or of a file: each --source, --follow or ``[[source]]``, and options by name."""

    sources: Sequence[Mapping[str, Any]] = ()  # the paths under "path" or "follow", and options
    values: Mapping[str, Any] = field(default_factory=dict)  # as in the file; of a flag the text, or a tuple of texts
    problems: Sequence[Problem] = ()
    rest: Sequence[str] = ()  # the arguments not about sources
    file: str = ""  # its path; "" for the command line

    def where(self, option: str, source: int | None = None) -> str:
        """Returns the name of an option in messages, or of an option of source number `source`; "" means the source."""
        if not self.file:
            return known.flag(option)
        if source is not None:
            return f"{self.file}: [[source]] {source + 1}{option and f': {option}'}"
        table = BY_NAME[option].table
        return f"{self.file}: {table}{'.' if table else ''}{option}"

    def with_values(self, given: Mapping[str, Any]) -> Given:
        """Returns the flags with a command's options, by name; None or [] means that the option was not given."""
        named = [(one, given.get(one.name)) for one in (*SOURCE_OPTIONS, *OPTIONS) if one.name != "weight"]
        values = {one.name: tuple(value) if one.repeat else value for one, value in named if value not in (None, [])}
        return replace(self, values=values)


def sort_arguments(arguments: Sequence[str]) -> Given:
    """Separates the sources from the other arguments of a command line."""
    if not arguments or arguments[0] not in ("run", "check"):
        return Given(rest=list(arguments))
    sources: list[dict[str, Any]] = []
    problems: list[Problem] = []
    rest: list[str] = []
    files: list[str] | None = None  # of the preceding flag; more may follow
    left = iter(arguments)
    for argument in left:
        name, equals, value = argument.partition("=")
        if files is not None and (argument == "-" or not argument.startswith("-")):
            files.append(argument)
            continue
        files = [] if name in _PATHS and not equals else None
        if name in _PATHS:
            sources.append({_PATHS[name]: [value] if files is None else files})
        elif name == "--weight":
            weight = value if equals else next(left, None)
            if weight is None:
                problems.append(Problem(name, "expected a number after it, got none"))
            elif not sources or "weight" in sources[-1]:
                problems.append(Problem(name, "expected one after each --source or --follow, got another one"))
            else:
                sources[-1]["weight"] = weight
        elif argument == "--":
            rest += [argument, *left]
        else:
            rest.append(argument)
    return Given(sources, {}, problems, rest)


def with_options(command: Callable[..., Any], options: Iterable[Option]) -> Callable[..., Any]:
    """Gives a command typer parameters for options, by name, after its own; an option not given is None."""
    own = [one for one in inspect.signature(command, eval_str=True).parameters.values() if one.kind != one.VAR_KEYWORD]
    parameters = [one.replace(kind=one.KEYWORD_ONLY) for one in own]
    for one in options:
        kind: Any = list[str] | None if one.repeat or one.flag in _PATHS else str | None
        # A bracket would be read as markup.
        text, panel = one.help.replace("[", r"\["), known.PANELS[one.table]
        annotation = Annotated[kind, typer.Option(one.flag, metavar=one.metavar, help=text, rich_help_panel=panel)]
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
        text = Path(path).read_bytes().decode("utf-8-sig")
        return sort_config(path, tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as cause:
        reason = f"not valid TOML: {cause}{_hint(text, str(cause))}"
    except (OSError, ValueError) as cause:
        reason = getattr(cause, "strerror", None) or str(cause)
    raise SettingInvalid(f"{path}: cannot be read as a configuration file: {reason}", option="--config")


def _hint(text: str, message: str) -> str:
    """Returns advice if the invalid line seems to be a text without quotes, such as none; else ""."""
    lines = ["", *text.split("\n")]
    number = int(at[1]) if (at := re.search(r"at line (\d+)", message)) else -1
    bare = re.fullmatch(r"\s*([\w.-]+)\s*=\s*([A-Za-z/.~*][^\s\"'#]*)\s*(#.*)?", "".join(lines[number:][:1]).rstrip())
    return "" if bare is None else f'; text has to be quoted: {bare[1]} = "{bare[2]}"'


def sort_config(name: str, document: dict[str, Any]) -> Given:
    """Separates the sources and the options in a TOML document."""
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    sources: Any = document.get("source", [])
    top = {key: value for key, value in document.items() if key not in ("source", *TABLES)}
    for table, inner in (("", top), *((key, document[key]) for key in document if key in TABLES)):
        if isinstance(inner, dict):
            problems += _unknown(f"{name}: {table}{'.' if table else ''}", inner, table)
            values |= {key: value for key, value in inner.items() if key in _names(table)}
        else:
            problems.append(Problem(f"{name}: {table}", f"expected a table [{table}], got {inner!r}"))
    if not isinstance(sources, list) or not all(isinstance(source, dict) for source in sources):
        problems.append(Problem(f"{name}: source", "expected tables [[source]], with two brackets on each side"))
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
"""The place of each name in a configuration file, in words."""


def _unknown(where: str, names: Iterable[str], table: str) -> Iterator[Problem]:
    here = _names(table)
    for name in names:
        if name not in here:
            plain = name.replace("-", "_").lower()
            near = (difflib.get_close_matches(plain, among, 1) for among in (here, _PLACES))
            meant = next((one for some in ([plain], *near) for one in some if one in _PLACES), None)
            text = f"expected one of {', '.join([*here, *([] if table else _HEADINGS.values())])}"
            if meant is not None:
                text = f"did you mean {meant}{'' if meant in here else f', {_PLACES[meant]}'}?"
            yield Problem(where + name, f"unknown here; {text}")


_FOLLOWS_FROM: Final = {
    "max_bad_rows": "on_bad_row",
    "consumers": "retain",
    "marker": "finished_by",
    "idle_seconds": "finished_by",
    **{option.name: option.needs for option in OPTIONS if option.needs},
}
"""For each option, the options that, if one could not be read, may be the only reason why this one seems wrong."""


def assemble(flags: Given, file: Given | None = None) -> Settings:
    """Returns the settings. Of the files given, it only matches patterns and reads blend files."""
    return _Assembly(flags, file or Given()).settings()


class _Assembly:
    """The state of `assemble`, with the problems found so far."""

    def __init__(self, flags: Given, file: Given) -> None:
        self._problems = [*flags.problems, *file.problems]
        self._flags, self._file = flags, file
        self._given = flags if flags.sources else file  # where the sources come from
        self._unread: set[tuple[int | None, str]] = set()  # unreadable options, each with its source number, from 0
        self._fits: set[str] = set()  # flags about sources that apply to at least one source

    def settings(self) -> Settings:
        """Returns the settings, or raises SettingsInvalid with all problems. Placeholders replace invalid values."""
        sources = [(number, one) for number in range(len(self._given.sources)) for one in self._source(number)]
        for option in SOURCE_OPTIONS:
            if sources and option.name in self._flags.values and option.name not in self._fits:
                kind = "standard input and pipes" if option.name == "resume" else "directories given with --follow"
                self._problems.append(Problem(option.flag, f"applies to {kind}, and there are none; remove it"))
        values: dict[str, Any] = {}
        for option in OPTIONS:
            given = self._from(option.name)
            if option.name in given.values:
                values |= self._read(option, given.values[option.name], given, None)
        names = frozenset(values)
        for name, stand_in in (("out", "out"), ("samples_per_chunk", 1)):
            if name not in values and (None, name) not in self._unread:
                option, place = BY_NAME[name], f", or {name} in {self._file.file}" if self._file.file else ""
                self._add(f"required, found none; give {option.flag} {option.metavar}{place}", name)
                self._unread.add((None, name))
            values.setdefault(name, stand_in)
        if values.get("on_bad_row", "fail") != "fail":
            # So that a broken transform cannot refuse a whole data set.
            values.setdefault("max_bad_rows", 1000)
        limits = known.Limits(**_fields(values, known.Limits))
        settings = Settings(sources=tuple(one for _, one in sources), limits=limits, **_fields(values, Settings))
        for name, text, source in find_problems(settings, names):
            # Problems of invalid sources are reported already.
            if name != "path" or source is not None or sources or not self._given.sources:
                self._add(text, name, None if source is None else sources[source][0])
        if found := tuple(dict.fromkeys(self._problems)):
            message = "; ".join(f"{problem.option}: {problem.text}" for problem in found)
            raise SettingsInvalid(message, option=found[0].option, problems=found)
        return settings

    def _from(self, name: str) -> Given:
        return self._file if name in self._file.values and name not in self._flags.values else self._flags

    def _add(self, text: str, name: str, source: int | None = None) -> None:
        """Adds a problem unless it may follow from another, under the user's name; once for all files of a pattern."""
        if self._unread.isdisjoint((source, one) for one in (name, *_FOLLOWS_FROM.get(name, "").split())):
            if source is not None:
                self._unread.add((source, name))
            given = self._from(name) if source is None else self._given
            self._problems.append(Problem(given.where(name, source), text))

    def _read(self, option: Option, value: Any, given: Given, source: int | None) -> dict[str, Any]:
        """Returns a parsed value by name, nothing if it is invalid. Values from TOML must have the right type."""
        try:
            return {option.name: _reader(option).validate_python(value, strict=bool(given.file))}
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
        self._unread.add((source, option.name))
        # A check of the library says in a sentence of its own what it has found.
        cause = str(first.get("ctx", {}).get("error", ""))
        why = cause if ", got " in cause else f"should be {cause}" if cause else first["msg"].removeprefix("Input ")
        shown = reprlib.repr(value[-1] if isinstance(value, list | tuple) and value else value)
        text = f"expected {option.metavar}, got {shown}: {why}"
        self._problems.append(Problem(given.where(option.name, source), text))
        return {}

    def _source(self, number: int) -> list[SourceSettings]:
        """Returns the sources of one --source, --follow or ``[[source]]``, with the flags that apply to them."""
        source = self._given.sources[number]
        keys = [key for key in _PATHS.values() if key in source]
        if len(keys) != 1:
            self._add(f"expected either path or follow, got {' and '.join(keys) or 'neither'}", "", number)
            return []
        key, paths = keys[0], source[keys[0]] if isinstance(source[keys[0]], list) else [source[keys[0]]]
        if not paths or not all(isinstance(path, str) for path in paths):
            self._add(f"expected a path or a list of paths, got {paths!r}", key, number)
            return []
        values: dict[str, Any] = {}
        for option in SOURCE_OPTIONS:
            about = key == "follow" if option.name != "resume" else key == "path" and any(map(is_pipe, paths))
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
    """Returns the sources for some paths; their weight is divided evenly, or by the weights of a blend file."""
    found = [one for path in paths for one in ([(path, None)] if follow else expand_source(path))]
    weight = values.pop("weight", None)
    if weight is not None and len(paths) > 1 and any(own is not None for _, own in found):
        raise ValueError("a blend file with weights cannot share a --weight; give it a separate --source")
    total = sum(own or 1.0 for _, own in found)
    shares = [own if weight is None else weight * (own or 1.0) / total for _, own in found]
    return [
        SourceSettings(path=path, weight=share, follow=follow, **values)
        for (path, _), share in zip(found, shares, strict=True)
    ]


def _fields(values: Mapping[str, Any], owner: type) -> dict[str, Any]:
    """Returns the options of one class of settings, from values by name to values by field."""
    return {BY_NAME[name].field: value for name, value in values.items() if BY_NAME[name].owner is owner}


@cache
def _reader(option: Option) -> TypeAdapter[Any]:
    """Returns the pydantic adapter for the type of an option's field."""
    hint = get_type_hints(option.owner, include_extras=True)[option.field]
    return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False))


_START: Final = """\
# Configuration of `lazyshard-producer run --config FILE`. Preview it with `lazyshard-producer check FILE`.
# Each key is a flag with underscores; a flag on the command line overrides it. Remove the "#" to use a setting.
# Paths are relative to the working directory of the command. Trust a configuration file only as you would trust a
# program: transform, where, encode, measure and "python:" sources name code that is run.
"""


def example() -> str:
    """Returns the text of the example configuration."""
    text = _START
    for table in ("", "source", *TABLES):
        if table:
            order = "A source of rows. Repeat this table for more. Without weights, sources are read in this order."
            text += f"\n# {order if table == 'source' else known.PANELS[table]}\n{_HEADINGS[table]}\n"
        for option in BY_NAME.values():
            if option.table == table:
                lines = textwrap.wrap(option.help, 100, break_on_hyphens=False)
                # Only the required options are not commented out.
                mark = "" if option.name in ("path", "out", "samples_per_chunk") else "# "
                text += "\n# " + "\n# ".join(lines) + f"\n{mark}{option.name} = {option.example}\n"
    return text
