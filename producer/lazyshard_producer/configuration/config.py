"""The configuration file: TOML with the names of the flags, read into values that are not yet settings; its example.

    out = "/shared/stream"           flags of the panel "Stream", with underscores
    samples_per_chunk = 1000

    [[source]]                       one for each --source (path) or --follow (follow), in order
    path = "a.jsonl"                 several files in a list, as after one --source
    weight = 0.7

    [rows]                           flags of the panel "Rows"
    [encoding]                       flags of the panel "Encoding"
    [limits]                         flags of the panel "Limits"

What nobody knows is refused, with the nearest name that is known: a limit that was misspelt must not be no limit.
`lazyshard-producer init` writes an example, made of the same options.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lazyshard.store.durable import NEW_FILE_MODE
from lazyshard_producer.configuration.settings import BY_NAME, OPTIONS, PANELS, SOURCE_OPTIONS, Described
from lazyshard_producer.errors import ExtraMissing, Problem, SettingInvalid

SOURCE: Final = "source"
PATH_KEYS: Final = ("path", "follow")
"""What a ``[[source]]`` is: a --source or a --follow."""

TABLES: Final = ("rows", "encoding", "limits")

_AT_LINE: Final = re.compile(r"at line (\d+)")
_BARE_TEXT: Final = re.compile(r"\s*([\w.-]+)\s*=\s*([A-Za-z/.~*][^\s\"'#]*)\s*(#.*)?")


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What a configuration file says.

    Attributes:
        name: path of the file, for messages.
        values: by name of option.
        sources: by name of option of a source, one for each ``[[source]]``.
        problems: names in it that nobody knows, and tables that are none.
    """

    name: str
    values: dict[str, Any]
    sources: tuple[dict[str, Any], ...]
    problems: tuple[Problem, ...]

    def where(self, option: str) -> str:
        """Returns how messages call an option of this file."""
        table = BY_NAME[option].about.table
        return f"{self.name}: {table}.{option}" if table else f"{self.name}: {option}"

    def where_in_source(self, number: int, key: str) -> str:
        """Returns how messages call a key of the source of this number, from 0."""
        return f"{self.name}: [[source]] {number + 1}: {key}" if key else f"{self.name}: [[source]] {number + 1}"


def read_config(path: str) -> ConfigFile:
    """Reads a configuration file.

    Raises:
        SettingInvalid: it cannot be read, or is no TOML.
        ExtraMissing: this is Python 3.10, and tomli is not installed.
    """
    try:
        with open(path, "rb") as file:
            text = file.read().decode("utf-8-sig")
    except (OSError, ValueError) as cause:
        raise _refuse(path, getattr(cause, "strerror", None) or str(cause)) from None
    return sort_config(path, _parse(path, text))


def sort_config(name: str, document: dict[str, Any]) -> ConfigFile:
    """Sorts what stands in a TOML document."""
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    sources: Any = []
    for key, value in document.items():
        if key == SOURCE:
            sources = value
        elif key in TABLES:
            if isinstance(value, dict):
                values |= {inner: item for inner, item in value.items() if _is_known(inner, key)}
                problems += _unknown(name, value, key)
            else:
                problems.append(Problem(f"{name}: {key}", f"a table [{key}] is needed, got {value!r}"))
        elif _is_known(key, ""):
            values[key] = value
        else:
            problems += _unknown(name, [key], "")
    if not isinstance(sources, list) or not all(isinstance(source, dict) for source in sources):
        problems.append(Problem(f"{name}: source", "tables [[source]] are needed, with two brackets on each side"))
        sources = []
    for number, source in enumerate(sources, 1):
        problems += _unknown(f"{name}: [[source]] {number}", source, SOURCE)
    return ConfigFile(name, values, tuple(sources), tuple(problems))


def _parse(path: str, text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ModuleNotFoundError:
            raise ExtraMissing(
                "a configuration file needs tomli on this Python, which is not installed: "
                "pip install 'lazyshard[producer]'",
                package="tomli",
                extra="producer",
            ) from None
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as cause:
        raise _refuse(path, f"no TOML: {cause}{_hint(text, str(cause))}") from None


def _hint(text: str, message: str) -> str:
    """Returns what may be wrong in the line that is no TOML: mostly a text without quotes, such as none."""
    at = _AT_LINE.search(message)
    lines = text.split("\n")
    number = int(at[1]) if at is not None else len(lines)
    bare = _BARE_TEXT.fullmatch(lines[number - 1].rstrip()) if 0 < number <= len(lines) else None
    return "" if bare is None else f'; text has to be quoted: {bare[1]} = "{bare[2]}"'


def _refuse(path: str, reason: str) -> SettingInvalid:
    return SettingInvalid(f"{path}: cannot be read as a configuration file: {reason}", option="--config")


def _is_known(name: str, table: str) -> bool:
    return name in _names(table)


def _names(table: str) -> tuple[str, ...]:
    if table == SOURCE:
        return (*PATH_KEYS, *(option.name for option in SOURCE_OPTIONS))
    return tuple(option.name for option in OPTIONS if option.about.table == table)


def _unknown(where: str, names: Sequence[str] | dict[str, Any], table: str) -> Iterator[Problem]:
    dot = f"{where}: {table}." if table in TABLES else f"{where}: "
    for name in names:
        if not _is_known(name, table):
            yield Problem(dot + name, f"unknown here; {_nearest(name, table)}")


def _nearest(name: str, table: str) -> str:
    """Returns in words what may have been meant."""
    name = name.replace("-", "_").lower()
    here = _names(table)
    if name in _everywhere() and name not in here:
        return f"it belongs {_place(name)}"
    for meant in (name, *difflib.get_close_matches(name, here, 1), *difflib.get_close_matches(name, _everywhere(), 1)):
        if meant in here:
            return f"is {meant} meant?"
        if meant in _everywhere():
            return f"is {meant} meant, {_place(meant)}?"
    known = [*here, *([f"[{other}]" for other in TABLES] + ["[[source]]"] if not table else [])]
    return f"known are {', '.join(known)}"


def _everywhere() -> tuple[str, ...]:
    return (*BY_NAME, *PATH_KEYS, *TABLES, SOURCE)


def _place(name: str) -> str:
    """Returns in words where a name belongs."""
    if name in TABLES:
        return f"as a table [{name}]"
    if name == SOURCE:
        return "as a table [[source]]"
    table = SOURCE if name in PATH_KEYS else BY_NAME[name].about.table
    if not table:
        return "at the top of the file, before the first table"
    return f"in [[{SOURCE}]]" if table == SOURCE else f"in [{table}]"


DEFAULT_FILE: Final = "lazyshard-producer.toml"

_WIDTH: Final = 100

_GIVEN: Final = ("out", "samples_per_chunk")
"""What every run needs; the rest of the example is commented out."""

_START: Final = """\
# What `lazyshard-producer run --config FILE` is to do. `lazyshard-producer check FILE` shows what that means.
#
# Each key is a flag with underscores, and the flag counts where both are given. Lines that begin with "#" are
# examples: take the "#" away to use one. Paths are relative to the directory in which the command is started.
#
# A file like this one is to be trusted like a program: transform, where, encode and "python:" sources name code
# that is run.
"""

_SOURCES: Final = """\

# Where rows come from: a [[source]] for each. Without weights they are read one after another, in this order.
[[source]]
# JSON lines (.gz and .zst too), a pattern such as "data/*.jsonl", or a list of these; Parquet or Arrow files; a
# directory of a Hugging Face data set; "-" for standard input, or a named pipe; "python:MODULE:FUNCTION".
path = "data.jsonl"

# Or a directory into which other programs write, for as long as they do:
# [[source]]
# follow = "incoming"
"""


def example() -> str:
    """Returns the text of the example."""
    top = (option for option in OPTIONS if not option.about.table)
    parts = [_START, *map(_entry, top), _SOURCES, *map(_entry, SOURCE_OPTIONS)]
    for table in TABLES:
        parts.append(f"\n# {PANELS[table]}\n[{table}]\n")
        parts += [_entry(option) for option in OPTIONS if option.about.table == table]
    return "".join(parts)


def write_example(path: str) -> None:
    """Writes the example to a file that is not there yet.

    Raises:
        SettingInvalid: there is something of this name.
        OSError: the filesystem refused.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, NEW_FILE_MODE)
    except FileExistsError:
        raise SettingInvalid(
            f"{path}: there is a file of this name already, and it is left as it is; give another name", option="FILE"
        ) from None
    with open(fd, "w", encoding="utf-8") as file:
        file.write(example())


def _entry(option: Described) -> str:
    lines = "".join(f"# {line}\n" for line in textwrap.wrap(option.about.help, _WIDTH, break_on_hyphens=False))
    mark = "" if option.name in _GIVEN else "# "
    return f"\n{lines}{mark}{option.name} = {option.about.example}\n"
