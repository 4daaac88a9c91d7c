"""The configuration file of a training run: reading it, and reporting all its mistakes at once with path and line.

YAML is loaded as plain values only, as by PyYAML's safe loader: a file cannot run code. `config` holds the model of
the file. Neither module imports torch.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lazyshard.errors import ConfigInvalid, FileRefused, redact
from lazyshard.store.files import read_given_file

if TYPE_CHECKING:
    from lazyshard.config.config import Config

__all__ = ["Examined", "Mistake", "check_config", "examine", "read_config", "unknown_key"]

Source = str | os.PathLike[str] | Mapping[str, Any]
"""A configuration: the path of a YAML file, or a dict."""

Location = tuple[str | int, ...]
"""Names and indices that lead to a value: ("datasets", 1, "weight")."""

_MOST_BYTES: Final = 1 << 20
# A few lines of aliases can expand to more values than memory holds.
_MOST_VALUES: Final = 10_000

# Keys of other libraries and of other parts of lazyshard, with their names here.
_MEANT = {"drop_last": "dataloader.at_end", "shuffle": "shuffle_window", "workers": "num_workers"}
_MEANT |= {"source": "path", "directory": "path", "filter": "filter_fn", "filter_kwargs": "with_indices"}
_MEANT |= {"on_bad_sample": "max_error_count", "max_bad_samples": "max_error_count"}


class Mistake(NamedTuple):
    """One mistake in a configuration.

    Attributes:
        path: of the key or value, such as ``datasets[1].weight``; empty for the whole configuration.
        line: in the file, from 1; None if unknown, as for a dict.
        text: what was expected and what was found.
    """

    path: str
    line: int | None
    text: str

    def __str__(self) -> str:
        """Returns path, line and text.

        >>> str(Mistake("datasets[1].weight", 12, "expected a number above 0, found -1"))
        'datasets[1].weight (line 12): expected a number above 0, found -1'
        """
        line = "" if self.line is None else f"line {self.line}"
        where = f"{self.path} ({line})" if self.path and line else self.path or line
        return f"{where}: {self.text}" if where else self.text


class Examined(NamedTuple):
    """A checked configuration; `config` is None if there are mistakes."""

    name: str
    config: Config | None
    mistakes: tuple[Mistake, ...]


def check_config(config: Source, *, imports: bool = True) -> list[Mistake]:
    """Returns all mistakes of a configuration, each with its path and, for a file, its line; empty if it is valid.

    Args:
        config: the path of a YAML file, or a dict.
        imports: whether to look up the functions that it names, which imports their modules.

    Raises:
        OSError: the file cannot be read.
        ImportError: pydantic or, for a file, PyYAML is not installed.
    """
    return list(examine(config, imports=imports).mistakes)


def read_config(config: Source) -> Examined:
    """Returns a valid configuration. Raises as `check_config`, and ConfigInvalid with one line per mistake."""
    checked = examine(config, imports=True)
    if count := len(checked.mistakes):
        lines = [f"{checked.name}: {count} mistake{'' if count == 1 else 's'}", *map(str, checked.mistakes)]
        file = None if isinstance(config, Mapping) else checked.name
        raise ConfigInvalid("\n  ".join(lines), file=file, count=count)
    return checked


def examine(config: Source, *, imports: bool) -> Examined:
    """Checks a configuration. Arguments and errors as of `check_config`."""
    document, found = _Document(), None
    name = "the configuration" if isinstance(config, Mapping) else os.fspath(config)
    try:
        data = document.plain(config) if isinstance(config, Mapping) else document.plain_yaml(Path(name))
        found = _validated(document, data, imports)
    except _UnreadableError as error:
        document.mistakes = [Mistake("", *error.args)]
    except RecursionError:
        document.mistakes = [Mistake("", None, "it is nested too deeply, or contains itself")]
    # In the order of the file; for a dict, in the order in which they were found.
    mistakes = tuple(sorted(document.mistakes, key=lambda mistake: mistake.line or 0))
    return Examined(name, None if mistakes else found, mistakes)


class _UnreadableError(Exception):
    """The configuration cannot be read at all: the line, and why."""


def _text(path: Path) -> str:
    try:
        return read_given_file(path, _MOST_BYTES).decode("utf-8-sig")
    except FileRefused as error:
        is_folder, expected = error.kind == "a directory", f"expected a YAML file of at most {_MOST_BYTES} bytes"
        way = "LazyShardedDataset opens a stream" if is_folder else "write what the run needs to such a file"
        raise _UnreadableError(None, f"{expected}, found {error.kind}; {way}") from error
    except UnicodeDecodeError as error:
        raise _UnreadableError(None, f"not UTF-8: {error}") from error


class _Document:
    """The line of each plain value by its location, the values that cannot be read, and all mistakes."""

    def __init__(self) -> None:
        self.lines: dict[Location, int | None] = {}
        self.mistakes: list[Mistake] = []
        self.noted: set[Location] = set()

    def add(self, location: Location, line: int | None, text: str) -> None:
        """Adds a mistake."""
        path = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in location)
        self.mistakes.append(Mistake(path.removeprefix("."), line, text))

    def note(self, location: Location, text: str) -> None:
        """Records that a value cannot be read; mistakes that follow from it are not reported."""
        self.add(location, self.lines[location], text)
        self.noted.add(location)

    def _put(self, location: Location, line: int | None) -> None:
        self.lines[location] = line
        if len(self.lines) > _MOST_VALUES:
            raise _UnreadableError(None, f"more than {_MOST_VALUES} entries; do aliases refer to aliases?")

    def plain(self, value: Any, location: Location = ()) -> Any:
        """Returns the plain values of a dict."""
        self._put(location, None)
        if isinstance(value, Mapping):
            for key in [key for key in value if not isinstance(key, str)]:
                self.add((*location, str(key)), None, f"expected a name as the key, found {key!r:.100}")
            return {key: self.plain(item, (*location, key)) for key, item in value.items() if isinstance(key, str)}
        if isinstance(value, list | tuple):
            return [self.plain(item, (*location, number)) for number, item in enumerate(value)]
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    def plain_yaml(self, path: Path) -> Any:
        """Returns the plain values of a YAML file. Raises ImportError: PyYAML is not installed."""
        text = _text(path)
        if find_spec("yaml") is None:
            raise ImportError("reading a YAML file needs PyYAML: pip install 'lazyshard[config]'")
        import yaml

        loader: Any = yaml.SafeLoader(text)
        begin = loader.fetch_flow_collection_start

        def begin_if_shallow(token: Any) -> None:
            # For each token PyYAML iterates over all open brackets.
            if loader.flow_level >= 100:
                raise yaml.MarkedYAMLError(problem="more than 100 nested brackets", problem_mark=loader.get_mark())
            begin(token)

        loader.fetch_flow_collection_start = begin_if_shallow
        try:
            if (node := loader.get_single_node()) is None:
                raise _UnreadableError(None, "the file is empty; `version: 1` and `datasets:` are required")
            return self._of_node(loader, node, (), node.start_mark.line + 1, [])
        except yaml.YAMLError as error:
            mark, reason = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
            raise _UnreadableError(None if mark is None else mark.line + 1, f"not YAML: {reason}") from error
        finally:
            loader.dispose()

    def _of_node(self, loader: Any, node: Any, location: Location, line: int, parents: list[Any]) -> Any:
        import yaml

        self._put(location, line)
        if any(node is parent for parent in parents):
            self.note(location, "it contains itself, by an alias")
            return None
        parents = [*parents, node]
        try:
            if node.id == "mapping":
                return self._mapping(loader, node, location, parents)
            if node.id == "sequence":
                items = [(item, (*location, number)) for number, item in enumerate(node.value)]
                return [self._of_node(loader, item, at, item.start_mark.line + 1, parents) for item, at in items]
            return loader.construct_object(node, deep=True)
        except (ValueError, yaml.YAMLError) as error:
            # For example a tag that is not a plain type, or a date that does not exist.
            self.note(location, f"expected a plain value: {getattr(error, 'problem', None) or error}")
            return None

    def _mapping(self, loader: Any, node: Any, location: Location, parents: list[Any]) -> dict[str, Any]:
        own = {id(key) for key, _ in node.value}
        # flatten_mapping puts the entries of merge keys (<<) first; the mapping's own entries override them.
        loader.flatten_mapping(node)
        found: dict[str, Any] = {}
        given: dict[str, int] = {}
        for key, value in node.value:
            name, line = loader.construct_object(key, deep=True), key.start_mark.line + 1
            if not isinstance(name, str):
                self.add((*location, str(name)), line, f"expected a name as the key, found {name!r:.100}")
            elif name in given:
                self.add((*location, name), line, f"given twice, first on line {given[name]}; remove one of them")
            else:
                if id(key) in own:
                    given[name] = line
                found[name] = self._of_node(loader, value, (*location, name), line, parents)
        return found


def _validated(document: _Document, data: Any, imports: bool) -> Config | None:
    """Returns the configuration; None, with the mistakes in the document, if it is invalid."""
    if find_spec("pydantic") is None:
        raise ImportError("a configuration needs pydantic: pip install 'lazyshard[config]'")
    from pydantic import ValidationError

    from lazyshard.config.config import VERSION, Config

    version = data.get("version") if isinstance(data, dict) else None
    if type(version) is int and version != VERSION:
        # Other versions have other keys.
        text = f"this release reads version {VERSION}, found {version}; install a release that reads it"
        document.note(("version",), text)
        return None
    try:
        return Config.model_validate(data, context={"imports": imports})
    except ValidationError as error:
        texts: dict[Location, list[str]] = {}
        for one in error.errors(include_url=False):
            location = one["loc"]
            # Location parts that are not in the document are of the model, such as one type of a union.
            while location not in document.lines and one["type"] != "missing":
                location = location[:-1]
            if document.noted.isdisjoint(location[:length] for length in range(len(location) + 1)):
                texts.setdefault(location, []).append(_text_of(one))
        for location, found in texts.items():
            line = document.lines.get(location, document.lines.get(location[:-1]))
            document.add(location, line, redact(", or ".join(found)))
        return None


def _text_of(error: Any) -> str:
    if error["type"] == "missing":
        return "missing"
    if error["type"] == "extra_forbidden":
        from lazyshard.config.config import known_keys

        *section, name = error["loc"]
        return unknown_key(name, known_keys(section))
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    # pydantic's texts for these two name internal classes.
    ours = {"model_type": "expected a mapping", "tuple_type": "expected a list"}
    expected = ours.get(error["type"]) or error["msg"].replace("Input should be", "expected")
    value = error["input"]
    kinds = {dict: "a mapping", list: "a list", type(None): "nothing", bool: str(value).lower()}
    return f"{expected}, found {kinds.get(type(value), repr(value)[:100])}"


def unknown_key(name: str, known: Sequence[str]) -> str:
    """Returns the message for an unknown key of a section, with the known key that was probably meant.

    >>> unknown_key("wieght", ["path", "weight"]), unknown_key("colour", ["path", "weight"])
    ('unknown key; did you mean weight?', 'unknown key; known are path, weight')
    """
    plain = name.replace("-", "_").lower()
    close = difflib.get_close_matches(plain, known, 1)
    meant = _MEANT.get(plain, "")
    if not close and meant.rpartition(".")[2] in known:
        close = [meant]
    return f"unknown key; did you mean {close[0]}?" if close else f"unknown key; known are {', '.join(known)}"
