"""One file that says what is trained: read, and all that is wrong with it found at once, each with its path and line.

Only plain values are made of YAML, as by its safe loader; nothing in a file can run code. `config` is the model of what
a file says; neither imports torch.
"""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lazyshard.errors import ConfigInvalid, redact

if TYPE_CHECKING:
    from lazyshard.config.config import Config

__all__ = ["Examined", "Mistake", "check_config", "examine", "read_config", "unknown_key"]

Source = str | os.PathLike[str] | Mapping[str, Any]
"""A configuration: the path of a YAML file, or a dict."""

Location = tuple[str | int, ...]
"""Names and numbers on the way to a value: ("datasets", 1, "weight")."""

_MOST_BYTES: Final = 1 << 20
# A few lines of aliases can stand for more than memory holds.
_MOST_VALUES: Final = 10_000

# Keys of other libraries, and of ours elsewhere, and what they are here.
_MEANT = {"drop_last": "dataloader.at_end", "shuffle": "shuffle_window", "workers": "num_workers"}
_MEANT |= {"source": "path", "directory": "path", "filter": "filter_fn", "filter_kwargs": "with_indices"}
_MEANT |= {"on_bad_sample": "max_error_count", "max_bad_samples": "max_error_count"}


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


class Examined(NamedTuple):
    """A configuration that was looked at; `config` is None where there are mistakes."""

    name: str
    config: Config | None
    mistakes: tuple[Mistake, ...]


def check_config(config: Source, *, imports: bool = True) -> list[Mistake]:
    """Returns all mistakes of a configuration, each with its path and, of a file, its line; none if it is in order.

    Args:
        config: the path of a YAML file, or a dict.
        imports: whether to look for the functions that it names, which imports their modules.

    Raises:
        OSError: the file cannot be read.
        ImportError: pydantic or, for a file, PyYAML is not installed.
    """
    return list(examine(config, imports=imports).mistakes)


def read_config(config: Source) -> Examined:
    """Returns a configuration without mistakes. Raises as `check_config`, and ConfigInvalid with a line for each."""
    checked = examine(config, imports=True)
    if count := len(checked.mistakes):
        lines = [f"{checked.name}: {count} mistake{'' if count == 1 else 's'}", *map(str, checked.mistakes)]
        file = None if isinstance(config, Mapping) else checked.name
        raise ConfigInvalid("\n  ".join(lines), file=file, count=count)
    return checked


def examine(config: Source, *, imports: bool) -> Examined:
    """Looks at a configuration. Arguments and errors as of `check_config`."""
    document, found = _Document(), None
    name = "the configuration" if isinstance(config, Mapping) else os.fspath(config)
    try:
        data = document.plain(config) if isinstance(config, Mapping) else document.plain_yaml(Path(name))
        found = _validated(document, data, imports)
    except _UnreadableError as error:
        document.mistakes = [Mistake("", *error.args)]
    except RecursionError:
        document.mistakes = [Mistake("", None, "it is nested too deeply, or holds itself")]
    # In the order of the file, as an editor goes through it; of a dict, in that in which they were found.
    mistakes = tuple(sorted(document.mistakes, key=lambda mistake: mistake.line or 0))
    return Examined(name, None if mistakes else found, mistakes)


class _UnreadableError(Exception):
    """There is no configuration, as a whole: line, and why."""


def _text(path: Path) -> str:
    if path.is_dir():
        raise _UnreadableError(None, "expected a YAML file, found a directory; LazyShardedDataset opens a stream")
    # Without O_NONBLOCK a pipe that nobody writes to is waited for.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise _UnreadableError(None, "expected a YAML file, found a pipe or a device: write what it gives to one")
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise _UnreadableError(None, f"larger than {_MOST_BYTES} bytes, which no configuration is")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _UnreadableError(None, f"no UTF-8: {error}") from error


class _Document:
    """The places of plain values: the line of each, and which cannot be read; what else is wrong there follows."""

    def __init__(self) -> None:
        self.lines: dict[Location, int | None] = {}
        self.mistakes: list[Mistake] = []
        self.noted: set[Location] = set()

    def add(self, location: Location, line: int | None, text: str) -> None:
        """Adds a mistake."""
        path = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in location)
        self.mistakes.append(Mistake(path.removeprefix("."), line, text))

    def note(self, location: Location, text: str) -> None:
        """Takes note that a value cannot be read."""
        self.add(location, self.lines[location], text)
        self.noted.add(location)

    def _put(self, location: Location, line: int | None) -> None:
        self.lines[location] = line
        if len(self.lines) > _MOST_VALUES:
            raise _UnreadableError(None, f"more than {_MOST_VALUES} entries; do aliases repeat each other?")

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
        try:
            import yaml
        except ModuleNotFoundError as cause:
            raise ImportError("reading a YAML file needs PyYAML: pip install 'lazyshard[config]'") from cause
        loader: Any = yaml.SafeLoader(text)
        begin = loader.fetch_flow_collection_start

        def begin_if_shallow(token: Any) -> None:
            # For each token PyYAML goes through all the brackets that are open.
            if loader.flow_level >= 100:
                raise yaml.MarkedYAMLError(problem="more than 100 nested brackets", problem_mark=loader.get_mark())
            begin(token)

        loader.fetch_flow_collection_start = begin_if_shallow
        try:
            if (node := loader.get_single_node()) is None:
                raise _UnreadableError(None, "it is empty; `version: 1` and `datasets:` are needed")
            return self._of_node(loader, node, (), node.start_mark.line + 1, [])
        except yaml.YAMLError as error:
            mark, reason = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
            raise _UnreadableError(None if mark is None else mark.line + 1, f"no YAML: {reason}") from error
        finally:
            loader.dispose()

    def _of_node(self, loader: Any, node: Any, location: Location, line: int, parents: list[Any]) -> Any:
        import yaml

        self._put(location, line)
        if any(node is parent for parent in parents):
            self.note(location, "it holds itself, by an alias")
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
            # A tag that is not of plain values, or a date that has the form of one and is none.
            self.note(location, f"expected a plain value: {getattr(error, 'problem', None) or error}")
            return None

    def _mapping(self, loader: Any, node: Any, location: Location, parents: list[Any]) -> dict[str, Any]:
        own = {id(key) for key, _ in node.value}
        # What a merge key (<<) brings along comes first; the mapping's own names take its place.
        loader.flatten_mapping(node)
        found: dict[str, Any] = {}
        given: dict[str, int] = {}
        for key, value in node.value:
            name, line = loader.construct_object(key, deep=True), key.start_mark.line + 1
            if not isinstance(name, str):
                self.add((*location, str(name)), line, f"expected a name as the key, found {name!r:.100}")
            elif name in given:
                self.add((*location, name), line, f"given twice, first on line {given[name]}; take one of them out")
            else:
                if id(key) in own:
                    given[name] = line
                found[name] = self._of_node(loader, value, (*location, name), line, parents)
        return found


def _validated(document: _Document, data: Any, imports: bool) -> Config | None:
    """Returns what it says; where that cannot be, None, with the mistakes in the document."""
    try:
        from pydantic import ValidationError

        from lazyshard.config.config import VERSION, Config
    except ModuleNotFoundError as cause:
        if (cause.name or "").partition(".")[0] != "pydantic":
            raise
        raise ImportError("a configuration needs pydantic: pip install 'lazyshard[config]'") from cause
    version = data.get("version", 0 if "dataset" in data else None) if isinstance(data, dict) else None
    if type(version) is int and version != VERSION:
        # Its keys are others.
        text = f"this lazyshard reads version {VERSION}, found {version}, which another one reads: install that"
        if not version:
            text = "version 0 is no longer read: now `version: 1` stands at the top, `datasets:` is a list, `source:` "
            text += "is `path:`, filter_fn and message_transform are entries of `steps:`, and what is the "
            text += "loader's stands under `dataloader:`, drop_last as `at_end:`"
        document.note(("version",) if "version" in data else ("dataset",), text)
        return None
    try:
        return Config.model_validate(data, context={"imports": imports})
    except ValidationError as error:
        texts: dict[Location, list[str]] = {}
        for one in error.errors(include_url=False):
            location = one["loc"]
            # What is not in the document is in the model, such as one of the types of a value.
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
    # Its text speaks of classes of ours, for these two.
    ours = {"model_type": "expected a mapping", "tuple_type": "expected a list"}
    expected = ours.get(error["type"]) or error["msg"].replace("Input should be", "expected")
    value = error["input"]
    kinds = {dict: "a mapping", list: "a list", type(None): "nothing", bool: str(value).lower()}
    return f"{expected}, found {kinds.get(type(value), repr(value)[:100])}"


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
