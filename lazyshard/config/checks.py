"""Reads a configuration, and finds all that is wrong with it at once."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lazyshard.config.document import (
    Document,
    Location,
    Mistake,
    before_upgrade,
    is_version_0,
    read_dict,
    read_yaml,
    unknown_key,
    upgraded,
)
from lazyshard.errors import ConfigInvalid, redact

if TYPE_CHECKING:
    from lazyshard.config.config import Config

__all__ = ["Checked", "Source", "check_config", "examine", "read_config"]

Source = str | os.PathLike[str] | Mapping[str, Any]
"""A configuration: the path of a YAML file, or a dict."""

_MOST_BYTES: Final = 1 << 20

_NOTICE: Final = (
    "this is the flat form of version 0, which later releases will not read any more. In version 1 `version: 1` stands "
    "at the top; `dataset:` is a list `datasets:`; its `source:` is `path:`; its `filter_fn:` and `message_transform:` "
    "are entries of a list `steps:`; batch_size, num_workers, collate_fn and pin_memory stand under `dataloader:`, "
    "and drop_last is `at_end:` there"
)

_EXPECTED: Final = {"model_type": "expected a mapping", "tuple_type": "expected a list"}
"""For errors whose text speaks of classes of ours."""


class Checked(NamedTuple):
    """A configuration that was looked at.

    Attributes:
        name: of the file, for messages; "the configuration" of a dict.
        config: what it says; None where there are mistakes.
        mistakes: in the order of the file.
        notice: that it is of an older version, and what is new; None where it is not.
    """

    name: str
    config: Config | None
    mistakes: tuple[Mistake, ...]
    notice: str | None


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


def read_config(config: Source) -> Checked:
    """Returns a configuration without mistakes.

    Raises:
        ConfigInvalid: there are some; the message has a line for each.
        OSError, ImportError: as `check_config`.
    """
    checked = examine(config, imports=True)
    if checked.mistakes:
        count = len(checked.mistakes)
        lines = [f"{checked.name}: {count} mistake{'' if count == 1 else 's'}", *map(str, checked.mistakes)]
        file = None if isinstance(config, Mapping) else checked.name
        raise ConfigInvalid("\n  ".join(lines), file=file, count=count)
    return checked


def examine(config: Source, *, imports: bool) -> Checked:
    """Looks at a configuration. Arguments and errors as of `check_config`."""
    if isinstance(config, Mapping):
        name, document = "the configuration", read_dict(config)
    else:
        name = os.fspath(config)
        text, wrong = _text(Path(name))
        document = Document(mistakes=[Mistake("", None, wrong)]) if wrong else read_yaml(text)
    if document.data is None:
        return Checked(name, None, tuple(document.mistakes), None)
    older = is_version_0(document.data)
    found = _validated(document, older, imports)
    # In the order of the file, as an editor goes through it; of a dict, in that in which they were found.
    mistakes = tuple(sorted(document.mistakes, key=lambda mistake: mistake.line or 0))
    return Checked(name, None if mistakes else found, mistakes, _NOTICE if older else None)


def _text(path: Path) -> tuple[str, str]:
    """Returns the text of a file, or why there is none."""
    # Without O_NONBLOCK a pipe that nobody writes to is waited for.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            return "", "expected a YAML file, found a directory; a stream is opened by LazyShardedDataset, not by load"
        if not stat.S_ISREG(mode):
            return "", "expected a YAML file, found a pipe or a device; write what it gives to a file"
        with open(fd, "rb", closefd=False) as file:
            data = file.read(_MOST_BYTES + 1)
    finally:
        os.close(fd)
    if len(data) > _MOST_BYTES:
        return "", f"larger than {_MOST_BYTES} bytes, which no configuration is"
    try:
        return data.decode("utf-8-sig"), ""
    except UnicodeDecodeError as error:
        return "", f"no UTF-8: {error}"


def _validated(document: Document, older: bool, imports: bool) -> Config | None:
    """Returns what it says; where that cannot be, None, with the mistakes in the document."""
    try:
        from pydantic import ValidationError

        from lazyshard.config.config import VERSION, Config
    except ModuleNotFoundError as cause:
        if (cause.name or "").partition(".")[0] != "pydantic":
            raise
        raise ImportError("a configuration needs pydantic: pip install 'lazyshard[config]'") from cause
    version = document.data.get("version") if isinstance(document.data, dict) else None
    if type(version) is int and version > VERSION:
        # Its keys are others.
        text = f"this lazyshard reads versions 0 and {VERSION}, found {version}, which a later one reads: install that"
        document.note(("version",), text)
        return None
    try:
        data = upgraded(document) if older else document.data
        return Config.model_validate(data, context={"imports": imports})
    except ValidationError as error:
        texts: dict[Location, list[str]] = {}
        for one in error.errors(include_url=False):
            location = before_upgrade(one["loc"], document.data) if older else one["loc"]
            # What is not in the document is in the model, such as one of the types of a value.
            while location not in document.places and one["type"] != "missing":
                location = location[:-1]
            if document.noted.isdisjoint(location[:length] for length in range(len(location) + 1)):
                texts.setdefault(location, []).append(_text_of(one))
        for location, found in texts.items():
            parent = document.places[location[:-1]]
            place = document.places.get(location) or parent.under(location[-1], parent.line)
            document.mistakes.append(Mistake(*place, redact(", or ".join(found))))
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
    expected = _EXPECTED.get(error["type"]) or error["msg"].replace("Input should be", "expected")
    return f"{expected}, found {_shown(error['input'])}"


def _shown(value: Any) -> str:
    """Returns a value as a configuration says it."""
    if value is None:
        return "nothing"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)[:100]
