"""A configuration as plain values that know their places: of a YAML file, with lines, or of a dict.

Only plain values are made of YAML, as by its safe loader; nothing in a file can run code. Version 0, which is flat as
torchtune's recipes are, becomes version 1; its values keep the paths and lines where they stand::

    dataset:                              one, or a list of them
      - source: /shared/chat
        weight: 0.8
        filter_fn: my_rows:is_long        applied first
        message_transform: my_rows:to_messages
    batch_size: 8
    drop_last: true                       false is at_end: loop
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

__all__ = [
    "Document",
    "Location",
    "Mistake",
    "before_upgrade",
    "is_version_0",
    "read_dict",
    "read_yaml",
    "unknown_key",
    "upgraded",
]

Location = tuple[str | int, ...]
"""Names and numbers on the way to a value: ("datasets", 1, "weight")."""

_MOST: Final = 10_000
"""Values of a configuration at the most. A few lines of aliases can stand for more than memory holds."""

_MOST_LEVELS: Final = 100
"""Brackets within each other at the most."""


_MEANT: Final = {
    "drop_last": "dataloader.at_end",
    "shuffle": "shuffle_window",
    "source": "path",
    "directory": "path",
    "filter": "filter_fn",
    "filter_kwargs": "with_indices",
    "workers": "num_workers",
    "on_bad_sample": "max_error_count",
    "max_bad_samples": "max_error_count",
}
"""Keys of other libraries, and of ours elsewhere, and what they are here."""


class Mistake(NamedTuple):
    """One mistake in a configuration.

    Attributes:
        path: of the key or value, such as ``datasets[1].weight``; empty for the whole.
        line: in the file, from 1; None where that is not known, as in a dict.
        text: what was expected and what was found.
    """

    path: str
    line: int | None
    text: str

    def __str__(self) -> str:
        """Returns all three.

        >>> str(Mistake("datasets[1].weight", 12, "expected a number above 0, found -1"))
        'datasets[1].weight (line 12): expected a number above 0, found -1'
        """
        line = "" if self.line is None else f"line {self.line}"
        where = f"{self.path} ({line})" if self.path and line else self.path or line
        return f"{where}: {self.text}" if where else self.text


class ValuePlace(NamedTuple):
    """Where a value stands: its path as the user wrote it, and its line."""

    path: str
    line: int | None

    def under(self, name: str | int, line: int | None) -> ValuePlace:
        """Returns the place of a value in this one."""
        step = f"[{name}]" if isinstance(name, int) else f".{name}" if self.path else name
        return ValuePlace(f"{self.path}{step}", line)


@dataclass
class Document:
    """A configuration that was read.

    Attributes:
        data: plain values; None where one cannot be read.
        places: of each value.
        mistakes: what cannot be read.
        noted: the locations of those; what else is wrong there follows from it.
    """

    data: Any = None
    places: dict[Location, ValuePlace] = field(default_factory=lambda: {(): ValuePlace("", None)})
    mistakes: list[Mistake] = field(default_factory=list)
    noted: set[Location] = field(default_factory=set)

    def put(self, location: Location, line: int | None) -> None:
        """Keeps the place of a value, before those of what is in it. Raises OverflowError where there are too many."""
        if location:
            self.places[location] = self.places[location[:-1]].under(location[-1], line)
        else:
            self.places[()] = ValuePlace("", line)
        if len(self.places) > _MOST:
            raise OverflowError(f"more than {_MOST} entries; do aliases repeat each other?")

    def note(self, location: Location, text: str) -> None:
        """Takes note of a value that cannot be read."""
        self.mistakes.append(Mistake(*self.places[location], text))
        self.noted.add(location)


def _nothing(text: str, line: int | None = None) -> Document:
    return Document(mistakes=[Mistake("", line, text)])


def read_dict(config: Mapping[Any, Any]) -> Document:
    """Returns the values of a dict; paths as text."""
    document = Document()

    def plain(value: Any, location: Location) -> Any:
        document.put(location, None)
        if isinstance(value, Mapping):
            for key in [key for key in value if not isinstance(key, str)]:
                document.mistakes.append(Mistake(str(key), None, f"expected a name as the key, found {key!r:.100}"))
            return {key: plain(item, (*location, key)) for key, item in value.items() if isinstance(key, str)}
        if isinstance(value, list | tuple):
            return [plain(item, (*location, number)) for number, item in enumerate(value)]
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    try:
        document.data = plain(config, ())
    except OverflowError as cause:
        return _nothing(str(cause))
    except RecursionError:
        return _nothing("it is nested too deeply, or holds itself")
    return document


def read_yaml(text: str) -> Document:
    """Returns the values of YAML.

    Raises:
        ImportError: PyYAML is not installed.
    """
    try:
        import yaml
    except ModuleNotFoundError as cause:
        raise ImportError("reading a YAML file needs PyYAML: pip install 'lazyshard[config]'") from cause
    loader = yaml.SafeLoader(text)
    _bound_levels(loader, yaml)
    try:
        node = loader.get_single_node()
        if node is None:
            return _nothing("it is empty; `version: 1` and `datasets:` are needed")
        nodes = _Nodes(loader, yaml)
        nodes.document.data = nodes.plain(node, (), node.start_mark.line + 1)
        return nodes.document
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or str(error)
        return _nothing(f"no YAML: {reason}", None if mark is None else mark.line + 1)
    except OverflowError as cause:
        return _nothing(str(cause))
    except RecursionError:
        return _nothing("it is nested too deeply")
    finally:
        loader.dispose()


def _bound_levels(loader: Any, yaml: Any) -> None:
    """Has deep brackets refused at once: for each token PyYAML goes through all the brackets that are open."""
    begin = loader.fetch_flow_collection_start

    def begin_if_shallow(token: Any) -> None:
        if loader.flow_level >= _MOST_LEVELS:
            problem = f"more than {_MOST_LEVELS} brackets within each other"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=loader.get_mark())
        begin(token)

    loader.fetch_flow_collection_start = begin_if_shallow


class _Nodes:
    """Makes plain values of YAML's nodes."""

    def __init__(self, loader: Any, yaml: Any) -> None:
        self.document = Document()
        self._loader = loader
        self._yaml = yaml
        self._parents: list[Any] = []

    def plain(self, node: Any, location: Location, line: int) -> Any:
        self.document.put(location, line)
        if any(node is parent for parent in self._parents):
            self.document.note(location, "it holds itself, by an alias")
            return None
        self._parents.append(node)
        try:
            if isinstance(node, self._yaml.MappingNode):
                return self._mapping(node, location)
            if isinstance(node, self._yaml.SequenceNode):
                lines = [(item, item.start_mark.line + 1) for item in node.value]
                return [self.plain(item, (*location, number), at) for number, (item, at) in enumerate(lines)]
            return self._loader.construct_object(node, deep=True)
        except (self._yaml.YAMLError, ValueError) as error:
            # A tag that is not of plain values, or a date that has the form of one and is none.
            self.document.note(location, f"expected a plain value: {getattr(error, 'problem', None) or error}")
            return None
        finally:
            self._parents.pop()

    def _mapping(self, node: Any, location: Location) -> dict[str, Any]:
        own = {id(key) for key, _ in node.value}
        # What a merge key (<<) brings along comes first; the mapping's own names take its place.
        self._loader.flatten_mapping(node)
        found: dict[str, Any] = {}
        given: dict[str, int] = {}
        for key, value in node.value:
            name, line = self._loader.construct_object(key, deep=True), key.start_mark.line + 1
            place = self.document.places[location].under(str(name), line)
            if not isinstance(name, str):
                self.document.mistakes.append(Mistake(*place, f"expected a name as the key, found {name!r:.100}"))
            elif name in given:
                text = f"given twice, first on line {given[name]}; take one of them out"
                self.document.mistakes.append(Mistake(*place, text))
            else:
                if id(key) in own:
                    given[name] = line
                found[name] = self.plain(value, (*location, name), line)
        return found


def unknown_key(name: str, known: Sequence[str]) -> str:
    """Returns in words that a section has no such key, and which of those that it has may be meant.

    >>> unknown_key("wieght", ["path", "weight"]), unknown_key("colour", ["path", "weight"])
    ('unknown key; is weight meant?', 'unknown key; known are path, weight')
    """
    plain = name.replace("-", "_").lower()
    close = difflib.get_close_matches(plain, known, 1)
    meant = _MEANT.get(plain, "")
    if not close and meant.rpartition(".")[2] in known:
        close = [meant]
    return f"unknown key; is {close[0]} meant?" if close else f"unknown key; known are {', '.join(known)}"


_SAME: Final = ("tokenizer", "num_samples", "stopping", "micro_batches_per_step", "seed", "max_wait", "consumer")
_LOADER: Final = ("batch_size", "num_workers", "collate_fn", "pin_memory")
# torchtune filters what it has read, and transforms what is left.
_STEPS: Final = ("filter_fn", "message_transform")


def is_version_0(data: Any) -> bool:
    """Returns whether a configuration is of version 0: it says so, or says none and has a ``dataset``."""
    if not isinstance(data, dict):
        return False
    return "dataset" in data if "version" not in data else type(data["version"]) is int and data["version"] == 0


def upgraded(document: Document) -> dict[str, Any]:
    """Returns the values of version 1 for those of version 0, and takes note of keys that it does not know."""
    old = document.data
    known = ("version", "dataset", *_SAME, *_LOADER, "drop_last")
    for name in old:
        if name not in known:
            document.note((name,), unknown_key(name, known))
    data: dict[str, Any] = {"version": 1} | {name: old[name] for name in _SAME if name in old}
    if "dataset" in old:
        given = old["dataset"]
        data["datasets"] = [_upgraded_dataset(one) for one in (given if isinstance(given, list) else [given])]
    data["dataloader"] = {name: old[name] for name in _LOADER if name in old}
    if "drop_last" in old:
        drop = old["drop_last"]
        if type(drop) is bool:
            data["dataloader"]["at_end"] = "drop" if drop else "loop"
        else:
            document.note(("drop_last",), f"expected true or false, found {drop!r:.100}")
    return data


def _upgraded_dataset(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    made = {"path" if name == "source" else name: item for name, item in value.items() if name not in _STEPS}
    steps = [{name: value[name]} for name in _STEPS if name in value]
    return made | {"steps": steps} if steps else made


def before_upgrade(location: Location, old: Any) -> Location:
    """Returns where in version 0 a value stands.

    >>> before_upgrade(("datasets", 1, "steps", 0, "filter_fn"), {"dataset": [{}, {}]})
    ('dataset', 1, 'filter_fn')
    """
    if location[:1] == ("dataloader",):
        return ("drop_last",) if location[1:] == ("at_end",) else location[1:]
    if location[:1] != ("datasets",):
        return location
    head: Location = ("dataset", *location[1:2]) if isinstance(old.get("dataset"), list) else ("dataset",)
    rest = location[2:]
    if rest[:1] == ("steps",):
        return (*head, *rest[2:])
    return (*head, "source") if rest == ("path",) else (*head, *rest)
