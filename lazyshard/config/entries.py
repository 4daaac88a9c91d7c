"""A configuration as a tree whose values know where they stand: of a YAML file, with lines, or of a dict.

Only plain values are made of YAML, as by its safe loader; nothing in a file can run code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from lazyshard.config.mistakes import Mistake

__all__ = ["WRONG", "Entry", "entries_of", "read_yaml"]

WRONG: Final = object()
"""The value of an entry with which something is wrong that was noted already."""

_MOST: Final = 10_000
"""Entries of a configuration at the most. A few lines of aliases can stand for more than memory holds."""

_MOST_LEVELS: Final = 100
"""Brackets within each other at the most."""


@dataclass(frozen=True)
class Entry:
    """A value and where it stands.

    Attributes:
        value: a plain value, a list of entries, or a dict of entries by their names.
        path: such as ``datasets[1].weight``; empty for the whole.
        line: in the file, from 1; None in a dict.
    """

    value: Any
    path: str
    line: int | None

    def under(self, name: str) -> str:
        """Returns the path of a name in this one."""
        return f"{self.path}.{name}" if self.path else name


class _Tree:
    """Makes entries, and takes note of what is wrong already."""

    def __init__(self) -> None:
        self.mistakes: list[Mistake] = []
        self._count = 0

    def counted(self, path: str, line: int | None) -> bool:
        self._count += 1
        if self._count == _MOST + 1:
            self.mistakes.append(Mistake(path, line, f"more than {_MOST} entries; do aliases repeat each other?"))
        return self._count <= _MOST

    def add(self, found: dict[str, Entry], key: Any, entry: Entry) -> None:
        if not isinstance(key, str):
            self.mistakes.append(Mistake(entry.path, entry.line, f"expected a name as the key, found {key!r:.100}"))
        elif key in found:
            first = found[key].line
            where = "" if first is None else f" on line {first}"
            self.mistakes.append(Mistake(entry.path, entry.line, f"given twice, first{where}; take one of them out"))
        else:
            found[key] = entry


def entries_of(config: Mapping[str, Any]) -> tuple[Entry, list[Mistake]]:
    """Returns the entries of a dict."""
    tree = _Tree()

    def entry(value: Any, path: str) -> Entry:
        if not tree.counted(path, None):
            return Entry(WRONG, path, None)
        if isinstance(value, Mapping):
            found: dict[str, Entry] = {}
            for key, item in value.items():
                tree.add(found, key, entry(item, f"{path}.{key}" if path else str(key)))
            return Entry(found, path, None)
        if isinstance(value, (list, tuple)):
            return Entry([entry(item, f"{path}[{number}]") for number, item in enumerate(value)], path, None)
        return Entry(os.fspath(value) if isinstance(value, os.PathLike) else value, path, None)

    try:
        return entry(config, ""), tree.mistakes
    except RecursionError:
        return Entry({}, "", None), [Mistake("", None, "it is nested too deeply, or holds itself")]


def read_yaml(text: str) -> tuple[Entry, list[Mistake]]:
    """Returns the entries of YAML.

    Raises:
        ImportError: PyYAML is not installed.
    """
    try:
        import yaml
    except ModuleNotFoundError as cause:
        raise ImportError("reading a YAML file needs PyYAML: pip install 'lazyshard[config]'") from cause
    nothing = Entry({}, "", None)
    loader = yaml.SafeLoader(text)
    _bound_levels(loader, yaml)
    try:
        node = loader.get_single_node()
        if node is None:
            return nothing, [Mistake("", None, "it is empty; `version: 1` and `datasets:` are needed")]
        nodes = _Nodes(loader, yaml)
        return nodes.entry(node, "", node.start_mark.line + 1), nodes.tree.mistakes
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = None if mark is None else mark.line + 1
        reason = getattr(error, "problem", None) or str(error)
        return nothing, [Mistake("", line, f"no YAML: {reason}")]
    except RecursionError:
        return nothing, [Mistake("", None, "it is nested too deeply")]
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
    """Makes entries of YAML's nodes."""

    def __init__(self, loader: Any, yaml: Any) -> None:
        self.tree = _Tree()
        self._loader = loader
        self._yaml = yaml
        self._parents: list[Any] = []

    def entry(self, node: Any, path: str, line: int) -> Entry:
        if not self.tree.counted(path, line):
            return Entry(WRONG, path, line)
        if any(node is parent for parent in self._parents):
            self.tree.mistakes.append(Mistake(path, line, "it holds itself, by an alias"))
            return Entry(WRONG, path, line)
        self._parents.append(node)
        try:
            if isinstance(node, self._yaml.MappingNode):
                return Entry(self._mapping(node, path), path, line)
            if isinstance(node, self._yaml.SequenceNode):
                lines = [(item, item.start_mark.line + 1) for item in node.value]
                return Entry([self.entry(item, f"{path}[{n}]", at) for n, (item, at) in enumerate(lines)], path, line)
            return Entry(self._loader.construct_object(node, deep=True), path, line)
        except (self._yaml.YAMLError, ValueError) as error:
            # A tag that is not of plain values, or a date that has the form of one and is none.
            reason = getattr(error, "problem", None) or str(error)
            self.tree.mistakes.append(Mistake(path, line, f"expected a plain value: {reason}"))
            return Entry(WRONG, path, line)
        finally:
            self._parents.pop()

    def _mapping(self, node: Any, path: str) -> dict[str, Entry]:
        own = {id(key) for key, _ in node.value}
        # What a merge key (<<) brings along comes first; the mapping's own names take its place.
        self._loader.flatten_mapping(node)
        merged: dict[str, Entry] = {}
        found: dict[str, Entry] = {}
        for key, value in node.value:
            name = self._loader.construct_object(key, deep=True)
            made = self.entry(value, f"{path}.{name}" if path else str(name), key.start_mark.line + 1)
            if id(key) in own:
                self.tree.add(found, name, made)
            elif isinstance(name, str):
                merged[name] = made
        return merged | found
