"""Settings from flags and a configuration file; flags come first. All that is wrong is said at once.

A problem is called by what the user wrote: a flag, or a key with its file. Where sources are given as flags, those of
the file are left aside, all of them. Their paths may be patterns, Megatron's prefixes, and its blend files:

    0.7 data/web 0.3 data/code       a text or a list in JSON; weights may be left out. Which words are weights is the
                                     rule of `get_blend_from_list` in megatron/core/datasets/utils.py
    {"train": [...], "valid": ...}   what --per-split-data-args-path names: "train" counts
"""

from __future__ import annotations

import glob
import math
import os
import reprlib
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final, NamedTuple, get_type_hints

from lazyshard.conversion.indexed import INDEX_SUFFIX
from lazyshard.memory import loads
from lazyshard_producer.configuration.given import PATH_KEYS, Given
from lazyshard_producer.configuration.problems import find_problems
from lazyshard_producer.configuration.settings import (
    BY_NAME,
    DEFAULT_MAX_BAD_ROWS,
    OPTIONS,
    SOURCE_OPTIONS,
    Limits,
    Option,
    Settings,
    SourceSettings,
)
from lazyshard_producer.errors import Problem, SettingsInvalid

MEGATRON: Final = "megatron:"  # begins the prefix of an IndexedDataset's two files
MEGATRON_BLEND: Final = "megatron-blend:"  # begins the path of a file of such prefixes
MAX_BLEND_BYTES: Final = 16 << 20  # a file of data that was named by mistake is not read whole
_STAND_INS: Final[dict[str, Any]] = {"out": "out", "samples_per_chunk": 1}
"""In the place of what is needed and missing, so that the rest can be looked at."""

_FOLLOWS_FROM: Final = {
    "max_bad_rows": "on_bad_row",
    "consumers": "retain",
    "marker": "finished_by",
    "idle_seconds": "finished_by",
    **{option.name: option.needs for option in OPTIONS if option.needs is not None},
}
"""What may be wrong only because something else could not be read."""


def assemble(flags: Given, file: Given | None) -> Settings:
    """Returns the settings. Looks for the files that match patterns, reads blend files, and looks at nothing else."""
    assembly = _Assembly(flags, file or Given())
    settings = assembly.settings()
    if found := tuple(assembly.problems):
        message = "; ".join(f"{problem.option}: {problem.text}" for problem in found)
        raise SettingsInvalid(message, option=found[0].option, problems=found)
    return settings


@dataclass(slots=True)
class _Group:
    """Sources that were given together; `where` returns how messages call an option of them."""

    paths: tuple[str, ...]
    where: Callable[[str], str]
    follow: bool
    values: dict[str, Any] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)


class _Assembly:
    """The work of `assemble`, with the problems found so far."""

    def __init__(self, flags: Given, file: Given) -> None:
        self.problems = [*flags.problems, *file.problems]
        self._flags = flags
        self._file = file
        self._unread: set[str] = set()
        self._where: dict[str, str] = {}

    def settings(self) -> Settings:
        """Returns the settings, with stand-ins for what cannot be."""
        groups = list(self._groups())
        self._share_flags(groups)
        owners: list[_Group] = []
        sources: list[SourceSettings] = []
        for group in groups:
            try:
                found = _sources_of(group)
            except ValueError as cause:
                self.problems.append(Problem(group.where("source"), str(cause)))
                continue
            sources += found
            owners += [group] * len(found)
        values = self._values()
        given = frozenset(values)
        for name, stand_in in _STAND_INS.items():
            if name not in values and name not in self._unread:
                self._unread.add(name)
                option, file = BY_NAME[name], f", or {name} in {self._file.file}" if self._file.file else ""
                text = f"needed, found none; give {option.flag} {option.metavar}{file}"
                self.problems.append(Problem(option.flag, text))
            values.setdefault(name, stand_in)
        if values.get("on_bad_row", "fail") != "fail":
            values.setdefault("max_bad_rows", DEFAULT_MAX_BAD_ROWS)
        limits = Limits(**_fields(values, Limits))
        settings = Settings(sources=tuple(sources), limits=limits, **_fields(values, Settings))
        self._take_over(find_problems(settings, given), owners)
        return settings

    def _values(self) -> dict[str, Any]:
        """Returns the values that were given and can be read, by name of option."""
        values = {}
        for option in OPTIONS:
            name = option.name
            if name in self._flags.values:
                values[name] = self._read_flag(option, self._unread)
            elif name in self._file.values:
                where = self._where[name] = self._file.where(name)
                values[name] = self._read(option, self._file.values[name], where, self._unread, strict=True)
        return {name: value for name, value in values.items() if name not in self._unread}

    def _read_flag(self, option: Option, unread: set[str]) -> Any:
        texts = self._flags.values[option.name]
        return self._read(option, tuple(texts) if option.repeat else texts[-1], option.flag, unread)

    def _read(self, option: Option, value: Any, where: str, unread: set[str], *, strict: bool = False) -> Any:
        """Returns what a value means; takes note where it cannot be. `strict` is for TOML, which has types."""
        from pydantic import ValidationError

        try:
            return _reader(option).validate_python(value, strict=strict)
        except ValidationError as error:
            unread.add(option.name)
            first = error.errors(include_url=False)[0]
            cause = first.get("ctx", {}).get("error")
            why = f"should be {cause}" if cause is not None else first["msg"].removeprefix("Input ")
            shown = reprlib.repr(value[-1] if isinstance(value, list | tuple) and value else value)
            self.problems.append(Problem(where, f"{option.metavar} is needed, got {shown}: {why}"))
            return None

    def _groups(self) -> Iterator[_Group]:
        given = self._flags if self._flags.sources else self._file
        for number, source in enumerate(given.sources):
            # Of a flag without a path that was told already.
            if given.file or any(map(source.get, PATH_KEYS)):
                yield from self._group(source, partial(given.where_in_source, number), bool(given.file))

    def _group(self, source: Mapping[str, Any], where: Callable[[str], str], strict: bool) -> Iterator[_Group]:
        given = [key for key in PATH_KEYS if key in source]
        if len(given) != 1:
            found = " and ".join(given) or "neither"
            self.problems.append(Problem(where(""), f"either path or follow is needed, got {found}"))
            return
        paths = source[given[0]] if isinstance(source[given[0]], list) else [source[given[0]]]
        if not paths or not all(isinstance(path, str) for path in paths):
            self.problems.append(Problem(where(given[0]), f"a path or a list of paths is needed, got {paths!r}"))
            return
        group = _Group(tuple(paths), where, follow=given[0] == "follow")
        for option in SOURCE_OPTIONS:
            if option.name in source:
                value = self._read(option, source[option.name], where(option.name), group.unread, strict=strict)
                if option.name not in group.unread:
                    group.values[option.name] = value
        if "weight" in group.unread:
            group.values["weight"] = 1.0
        yield group

    def _share_flags(self, groups: Sequence[_Group]) -> None:
        """Puts the flags about sources into every one that they can be about."""
        for option in SOURCE_OPTIONS:
            if option.name not in self._flags.values:
                continue
            unread = set[str]()
            value = self._read_flag(option, unread)
            kind, about = _can_be_about(option, groups)
            for group in about:
                group.unread |= unread
                if not unread:
                    group.values[option.name] = value
            if groups and not about:
                self.problems.append(Problem(option.flag, f"it is for {kind}, and there are none; leave it out"))

    def _take_over(self, found: Sequence[Problem], owners: Sequence[_Group]) -> None:
        """Adds the problems that do not follow from others, as the user calls them."""
        seen: set[tuple[int, str]] = set()
        for problem in found:
            name = problem.option.removeprefix("--").replace("-", "_")
            if problem.source is None:
                unread, where = self._unread, self._where.get(name, problem.option)
                if name == "source" and not owners and (self._flags.sources or self._file.sources):
                    continue
            else:
                group = owners[problem.source]
                # Once for all files of a pattern.
                if (id(group), name) in seen:
                    continue
                seen.add((id(group), name))
                unread, where = group.unread, group.where(name)
            if name not in unread and _FOLLOWS_FROM.get(name) not in unread:
                self.problems.append(Problem(where, problem.text))


def _can_be_about(option: Option, groups: Sequence[_Group]) -> tuple[str, list[_Group]]:
    """Returns in words what an option of sources is for, and those that it can be about."""
    if option.name == "resume":
        return "standard input and pipes", [one for one in groups if not one.follow and any(map(is_pipe, one.paths))]
    if option.name == "indexed_rows":
        return "Megatron's .idx files", [one for one in groups if not one.follow and any(map(is_indexed, one.paths))]
    return "directories given with --follow", [one for one in groups if one.follow]


def _sources_of(group: _Group) -> list[SourceSettings]:
    """Returns the sources of a group, its weight divided among them: evenly, or as a blend file says."""
    found = [one for path in group.paths for one in ([FoundSource(path)] if group.follow else expand_source(path))]
    values = _fields(group.values, SourceSettings)
    weight = values.pop("weight", None)
    if weight is not None and len(group.paths) > 1 and any(one.weight is not None for one in found):
        raise ValueError("a blend file with weights shares a --weight with nothing else; give it a --source of its own")
    sources = []
    for one, share in zip(found, _shares(weight, found), strict=True):
        about = dict(values)
        if any(map(is_indexed, group.paths)) and not is_indexed(one.path):
            # A file beside IndexedDatasets.
            about.pop("indexed_rows", None)
        sources.append(SourceSettings(path=one.path, weight=share, follow=group.follow, **about))
    return sources


def _shares(weight: float | None, found: Sequence[FoundSource]) -> list[float | None]:
    if weight is None:
        return [one.weight for one in found]
    if not (weight > 0 and math.isfinite(weight)):
        return [weight] * len(found)
    parts = [1.0 if one.weight is None else one.weight for one in found]
    return [weight * part / sum(parts) for part in parts]


def _fields(values: Mapping[str, Any], owner: type) -> dict[str, Any]:
    """Returns the values of options, by name, that belong to a class of settings, by field."""
    return {BY_NAME[name].field: value for name, value in values.items() if BY_NAME[name].owner is owner}


@cache
def _reader(option: Option) -> Any:
    """Returns what reads the value of an option: pydantic, by the type of its field."""
    from pydantic import ConfigDict, TypeAdapter

    hint = get_type_hints(option.owner, include_extras=True)[option.field]
    return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False))


class FoundSource(NamedTuple):
    """A source that a path stands for, and its share among those of one blend file, None where none gives one."""

    path: str
    weight: float | None = None


def expand_source(path: str) -> list[FoundSource]:
    """Returns the sources that a path of --source stands for: those of a pattern, a prefix or a blend file."""
    if path.startswith(MEGATRON_BLEND):
        return [FoundSource(_index(prefix), weight) for prefix, weight in _read_blend(path[len(MEGATRON_BLEND) :])]
    if path.startswith(MEGATRON):
        path = _index(path[len(MEGATRON) :])
    return [FoundSource(found) for found in expand_path(path)]


def is_indexed(path: str) -> bool:
    """Whether a path stands for IndexedDatasets of Megatron's, by its name."""
    return path.startswith((MEGATRON, MEGATRON_BLEND)) or path.endswith(INDEX_SUFFIX)


def _index(prefix: str) -> str:
    return prefix if not prefix or prefix.endswith(INDEX_SUFFIX) else prefix + INDEX_SUFFIX


def expand_path(path: str) -> list[str]:
    """Returns the files that match a pattern as in a shell, "**" over folders, or a path that matches none."""
    if not glob.has_magic(path) or "\0" in path or os.path.lexists(path):
        return [path]
    found = sorted(name for name in glob.glob(path, recursive=True) if not os.path.isdir(name))
    return found or [path]


def is_pipe(path: str) -> bool:
    """Whether a path stands for standard input or a named pipe that is there."""
    try:
        return path == "-" or stat.S_ISFIFO(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _read_blend(path: str) -> list[FoundSource]:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BLEND_BYTES + 1)
    except OSError as cause:
        raise ValueError(f"a readable blend file is needed, got {path!r}: {(cause.strerror or '').lower()}") from None
    if len(data) > MAX_BLEND_BYTES:
        raise ValueError(f"a blend file of {MAX_BLEND_BYTES} bytes at the most is needed, {path!r} has more")
    try:
        return parse_blend(data)
    except ValueError as cause:
        raise ValueError(f"{path}: {cause}") from None


def parse_blend(data: bytes) -> list[FoundSource]:
    """Returns the prefixes of a blend file, in its order, without `.idx` and `.bin`."""
    words = _words(data)
    if not words:
        raise ValueError("weights and prefixes are needed, such as 0.7 data/web 0.3 data/code, got none")
    if len(words) % 2 or all(_number(word) is None for word in words[::2]):
        entries = [FoundSource(word) for word in words]
    else:
        entries = [FoundSource(*pair) for pair in zip(words[1::2], map(_weight, words[::2]), strict=True)]
    if not all(entry.path for entry in entries):
        raise ValueError("prefixes are needed, got an empty one")
    return entries


def _words(data: bytes) -> list[str]:
    try:
        text = data.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise ValueError("a text of weights and prefixes is needed, got bytes that are no UTF-8") from None
    if not text.startswith(("[", "{")):
        return text.split()
    try:
        value = loads(text.encode())
    except ValueError as cause:
        raise ValueError(f"a blend in JSON is needed, got something that is none: {cause}") from None
    if isinstance(value, dict):
        if "train" not in value:
            raise ValueError(f'a blend under "train" is needed, got {", ".join(map(repr, list(value)[:5])) or "none"}')
        value = value["train"]
    if isinstance(value, str):
        return value.split()
    if not isinstance(value, list) or not all(type(item) in (str, int, float) for item in value):
        raise ValueError(f"a list of weights and prefixes is needed, got {repr(value)[:120]}")
    return [item.strip() if isinstance(item, str) else repr(item) for item in value]


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _weight(word: str) -> float:
    weight = _number(word)
    if weight is None or not (math.isfinite(weight) and weight > 0):
        raise ValueError(
            f"a number above 0 is needed as each weight, where others are numbers, got {word!r}; for no rows of a data "
            f"set leave it out"
        )
    return weight
