"""Settings from flags and a configuration file; flags come first. All that is wrong is said at once.

A problem is called by what the user wrote: a flag, or a key with its file. Where sources are given as flags, those of
the file are left aside, all of them.

SIGHUP has a run read the file again. The rate, the limits, max_bad_rows (not where on_bad_row changes) and
log_every_seconds may change; everything else decides which rows there are, in which order, and where. A file that
cannot be read, or says what cannot be, changes nothing.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, Final, Protocol, get_type_hints

from lazyshard.errors import LazyShardError
from lazyshard_producer.configuration.command_line import Flags, SourceArgument
from lazyshard_producer.configuration.config import PATH_KEYS, ConfigFile
from lazyshard_producer.configuration.problems import find_problems, flag
from lazyshard_producer.configuration.quantities import Amount, show_amount, show_bytes
from lazyshard_producer.configuration.row_settings import DEFAULT_MAX_BAD_ROWS
from lazyshard_producer.configuration.settings import (
    BY_NAME,
    OPTIONS,
    SOURCE_OPTIONS,
    Described,
    Limits,
    Settings,
    SourceSettings,
)
from lazyshard_producer.configuration.source_paths import FoundSource, expand_source, is_indexed, is_pipe
from lazyshard_producer.errors import Problem, SettingsInvalid

_STAND_INS: Final[dict[str, Any]] = {"out": "out", "samples_per_chunk": 1}
"""In the place of what is needed and missing, so that the rest can be looked at."""

_FOLLOWS_FROM: Final = {
    "max_bad_rows": "on_bad_row",
    "consumers": "retain",
    "marker": "finished_by",
    "idle_seconds": "finished_by",
    **{option.name: option.about.needs for option in OPTIONS if option.about.needs is not None},
}
"""What may be wrong only because something else could not be read."""

_ABOUT: Final = {"resume": "standard input and pipes", "indexed_rows": "Megatron's .idx files"}
"""What a flag about sources is about that is not about followed directories."""


def assemble(flags: Flags, config: ConfigFile | None) -> Settings:
    """Returns the settings. Looks for the files that match patterns, reads blend files, and looks at nothing else.

    Raises:
        SettingsInvalid: with every problem.
    """
    assembly = _Assembly(flags, config)
    settings = assembly.settings()
    if assembly.problems:
        raise SettingsInvalid.of(assembly.problems)
    return settings


@dataclass(slots=True)
class _Group:
    """Sources that were given together.

    Attributes:
        paths: of the sources, as given.
        values: what else was given, by name of option.
        where: returns how messages call an option of it.
        follow: whether they are directories to be followed.
        unread: names of options that could not be read.
    """

    paths: tuple[str, ...]
    values: dict[str, Any]
    where: Callable[[str], str]
    follow: bool
    unread: set[str] = field(default_factory=set)


class _Assembly:
    """The work of `assemble`, with the problems found so far."""

    def __init__(self, flags: Flags, config: ConfigFile | None) -> None:
        self.problems = [*flags.problems, *(config.problems if config is not None else ())]
        self._flags = flags
        self._config = config
        self._unread: set[str] = set()
        self._where: dict[str, str] = {}
        self._sources_given = bool(flags.sources or (config is not None and config.sources))

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
        values = {option.name: self._given(option) for option in OPTIONS if self._is_given(option)}
        values = {name: value for name, value in values.items() if name not in self._unread}
        given = frozenset(values)
        for name, stand_in in _STAND_INS.items():
            if not self._is_given(BY_NAME[name]):
                self._miss(BY_NAME[name])
            values.setdefault(name, stand_in)
        if values.get("on_bad_row", "fail") != "fail":
            values.setdefault("max_bad_rows", DEFAULT_MAX_BAD_ROWS)
        limits = Limits(**_fields(values, Limits))
        settings = Settings(sources=tuple(sources), limits=limits, **_fields(values, Settings))
        self._take_over(find_problems(settings, given), owners)
        return settings

    def _is_given(self, option: Described) -> bool:
        return option.name in self._flags.values or (self._config is not None and option.name in self._config.values)

    def _given(self, option: Described) -> Any:
        """Returns the value of an option that was given, whatever where it cannot be read."""
        if option.name in self._flags.values:
            return self._read(option, _of_flag(option, self._flags.values[option.name]), option.flag, self._unread)
        assert self._config is not None
        where = self._where[option.name] = self._config.where(option.name)
        return self._read(option, self._config.values[option.name], where, self._unread, strict=True)

    def _read(self, option: Described, value: Any, where: str, unread: set[str], *, strict: bool = False) -> Any:
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
            self.problems.append(Problem(where, f"{option.about.metavar} is needed, got {shown}: {why}"))
            return None

    def _miss(self, option: Described) -> None:
        self._unread.add(option.name)
        file = f", or {option.name} in {self._config.name}" if self._config is not None else ""
        self.problems.append(
            Problem(option.flag, f"needed, found none; give {option.flag} {option.about.metavar}{file}")
        )

    def _groups(self) -> Iterator[_Group]:
        if self._flags.sources or self._config is None:
            for argument in self._flags.sources:
                yield self._group_of_flags(argument)
            return
        for number, source in enumerate(self._config.sources):
            group = self._group_of_table(number, source, self._config)
            if group is not None:
                yield group

    def _group_of_flags(self, argument: SourceArgument) -> _Group:
        group = _Group(tuple(argument.paths), {}, flag, follow=argument.flag == "--follow")
        if argument.weights:
            weight = BY_NAME["weight"]
            value = self._read(weight, argument.weights[-1], weight.flag, group.unread)
            group.values["weight"] = 1.0 if "weight" in group.unread else value
        return group

    def _group_of_table(self, number: int, source: dict[str, Any], config: ConfigFile) -> _Group | None:
        def where(name: str) -> str:
            return config.where_in_source(number, {"source": "path"}.get(name, name))

        given = [key for key in PATH_KEYS if key in source]
        if len(given) != 1:
            found = " and ".join(given) or "neither"
            self.problems.append(Problem(where(""), f"either path or follow is needed, got {found}"))
            return None
        paths = source[given[0]] if isinstance(source[given[0]], list) else [source[given[0]]]
        if not paths or not all(isinstance(path, str) for path in paths):
            self.problems.append(Problem(where(given[0]), f"a path or a list of paths is needed, got {paths!r}"))
            return None
        group = _Group(tuple(paths), {}, where, follow=given[0] == "follow")
        for option in SOURCE_OPTIONS:
            if option.name in source:
                value = self._read(option, source[option.name], where(option.name), group.unread, strict=True)
                if option.name not in group.unread:
                    group.values[option.name] = value
        if "weight" in group.unread:
            group.values["weight"] = 1.0
        return group

    def _share_flags(self, groups: Sequence[_Group]) -> None:
        """Puts the flags about sources into every one that they can be about."""
        for option in SOURCE_OPTIONS:
            if option.name not in self._flags.values:
                continue
            unread = set[str]()
            value = self._read(option, _of_flag(option, self._flags.values[option.name]), option.flag, unread)
            about = [group for group in groups if _can_be_about(option, group)]
            for group in about:
                group.unread |= unread
                if not unread:
                    group.values[option.name] = value
            if groups and not about:
                kind = _ABOUT.get(option.name, "directories given with --follow")
                self.problems.append(Problem(option.flag, f"it is for {kind}, and there are none; leave it out"))

    def _take_over(self, found: Sequence[Problem], owners: Sequence[_Group]) -> None:
        """Adds the problems that do not follow from others, as the user calls them."""
        seen: set[tuple[int, str]] = set()
        for problem in found:
            name = problem.option.removeprefix("--").replace("-", "_")
            if problem.source is None:
                unread, where = self._unread, self._where.get(name, problem.option)
                if name == "source" and not owners and self._sources_given:
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


def _sources_of(group: _Group) -> list[SourceSettings]:
    """Returns the sources of a group, its weight divided among them: evenly, or as a blend file says.

    Raises:
        ValueError: a blend file cannot be read, or is to share a weight with other sources.
    """
    found = [one for path in group.paths for one in ([FoundSource(path)] if group.follow else expand_source(path))]
    values = _fields(group.values, SourceSettings)
    weight = values.pop("weight", None)
    if weight is not None and len(group.paths) > 1 and any(one.weight is not None for one in found):
        raise ValueError("a blend file with weights shares a --weight with nothing else; give it a --source of its own")
    sources = []
    for one, share in zip(found, _shares(weight, found), strict=True):
        about = _of_format(values, one.path) if any(map(is_indexed, group.paths)) else values
        sources.append(SourceSettings(path=one.path, weight=share, follow=group.follow, **about))
    return sources


def _shares(weight: float | None, found: Sequence[FoundSource]) -> list[float | None]:
    if weight is None:
        return [one.weight for one in found]
    if not (weight > 0 and math.isfinite(weight)):
        return [weight] * len(found)
    parts = [1.0 if one.weight is None else one.weight for one in found]
    return [weight * part / sum(parts) for part in parts]


def _of_format(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Returns what is about a file, where other files beside it are IndexedDatasets."""
    return {name: value for name, value in values.items() if name != "indexed_rows" or is_indexed(path)}


def _can_be_about(option: Described, group: _Group) -> bool:
    if option.name == "resume":
        return not group.follow and any(map(is_pipe, group.paths))
    if option.name == "indexed_rows":
        return not group.follow and any(map(is_indexed, group.paths))
    return group.follow


def _fields(values: Mapping[str, Any], owner: type) -> dict[str, Any]:
    """Returns the values of options, by name, that belong to a class of settings, by field."""
    return {BY_NAME[name].field: value for name, value in values.items() if BY_NAME[name].owner is owner}


def _of_flag(option: Described, texts: Sequence[str]) -> Any:
    return tuple(texts) if option.about.repeat else texts[-1]


@cache
def _reader(option: Described) -> Any:
    """Returns what reads the value of an option: pydantic, by the type of its field."""
    from pydantic import ConfigDict, TypeAdapter

    hint = get_type_hints(option.owner, include_extras=True)[option.field]
    return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False))


_NAMES: Final = {"sources": "source"} | {option.field: option.name for option in OPTIONS}
"""What fields are called in the file."""

_MAY_CHANGE: Final = [option for option in OPTIONS if option.about.reload]


class Teller(Protocol):
    """Says things: the part of a display that is needed here."""

    def note(self, text: str) -> None:
        """Says what may be of interest."""

    def warn(self, text: str) -> None:
        """Says what is odd."""


def reloaded(old: Settings, new: Settings) -> tuple[Settings, list[str]]:
    """Returns the settings to go on with, and the names of those in which `new` differs and may not."""
    changing = {option.field for option in _MAY_CHANGE if option.owner is Settings} | {"limits"}
    # With another policy its number means something else.
    taken = changing if new.on_bad_row == old.on_bad_row else changing - {"max_bad_rows"}
    kept = [one.name for one in fields(Settings) if one.name not in changing]
    refused = [_NAMES[name] for name in kept if getattr(old, name) != getattr(new, name)]
    return replace(old, **{name: getattr(new, name) for name in taken}), refused


class Reload:
    """Reads the settings again.

    Args:
        load: reads flags and file as at the start; None where there is no configuration file.
        name: how to call the file.
    """

    def __init__(self, load: Callable[[], Settings] | None, name: str) -> None:
        self._load = load
        self._name = name

    def take(self, old: Settings, teller: Teller) -> Settings:
        """Returns the settings to go on with, and says what has changed and what cannot. Raises nothing.

        Args:
            old: those of now.
            teller: is told.
        """
        if self._load is None:
            teller.note("SIGHUP has come, and there is no configuration file to be read again: nothing changes")
            return old
        try:
            new = self._load()
        except (LazyShardError, OSError) as error:
            teller.warn(f"nothing is reloaded: {error}")
            return old
        settings, refused = reloaded(old, new)
        for name in refused:
            teller.warn(f"{self._name}: {name} cannot change while it runs; stop it and start it again for that")
        changed = ", ".join(_changes(old, settings))
        teller.note(f"reloaded {self._name}: {changed or 'nothing has changed'}")
        return settings


def _changes(old: Settings, new: Settings) -> Iterator[str]:
    for option in _MAY_CHANGE:
        before, after = (getattr(one.limits if option.owner is Limits else one, option.field) for one in (old, new))
        if before != after:
            yield f"{option.name} from {_shown(option.name, before)} to {_shown(option.name, after)}"


def _shown(name: str, value: Any) -> str:
    if isinstance(value, Amount):
        return show_amount(value)
    if value is not None and name.endswith("_disk"):
        return show_bytes(value)
    return "none" if value is None or value == () else str(value)
