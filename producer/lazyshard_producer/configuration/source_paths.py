"""Paths in --source: patterns and the files that match them now, pipes, Megatron's prefixes and its blend files.

Blend files hold weights and prefixes of IndexedDatasets, as training takes them:

    0.7 data/web 0.3 data/code       a text, split at white space: what --data-args-path names; weights may be left out
    ["0.7", "data/web", "0.3", ...]  the same as a list in JSON; weights may be numbers
    {"train": [...], "valid": ...}   what --per-split-data-args-path names, a list or such a text each: "train" counts

How weights are told from prefixes is megatron-core's rule (`get_blend_from_list` in megatron/core/datasets/utils.py):
of an even number of words the first, third, ... are weights if they are numbers.
"""

from __future__ import annotations

import glob
import math
import os
import stat
from typing import Final, NamedTuple

from lazyshard.conversion.indexed import INDEX_SUFFIX
from lazyshard.memory import loads

MEGATRON: Final = "megatron:"
"""Begins the prefix of an IndexedDataset's two files."""

MEGATRON_BLEND: Final = "megatron-blend:"
"""Begins the path of a file of such prefixes."""


class FoundSource(NamedTuple):
    """A source that a path stands for.

    Attributes:
        path: of the file.
        weight: its share among those of one blend file, above 0; None where no blend file gives one.
    """

    path: str
    weight: float | None = None


def expand_source(path: str) -> list[FoundSource]:
    """Returns the sources that a path of --source stands for: those of a pattern, a prefix or a blend file.

    Raises:
        ValueError: it is a blend file that cannot be read.
    """
    if path.startswith(MEGATRON_BLEND):
        entries = read_blend(path[len(MEGATRON_BLEND) :])
        return [FoundSource(_index(entry.prefix), entry.weight) for entry in entries]
    if path.startswith(MEGATRON):
        path = _index(path[len(MEGATRON) :])
    return [FoundSource(found) for found in expand_path(path)]


def is_indexed(path: str) -> bool:
    """Whether a path stands for IndexedDatasets of Megatron's, by its name."""
    return path.startswith((MEGATRON, MEGATRON_BLEND)) or path.endswith(INDEX_SUFFIX)


def _index(prefix: str) -> str:
    return prefix if not prefix or prefix.endswith(INDEX_SUFFIX) else prefix + INDEX_SUFFIX


def expand_path(path: str) -> list[str]:
    """Returns the files that match a pattern, sorted; the path itself if it is none, exists as it is, or matches none.

    "*", "?", "[...]" match within a name, "**" over folders; directories and hidden files are left out. A shell does
    the same with a pattern that is not quoted, but for the number of files that fit on a command line.
    """
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


MAX_BLEND_BYTES: Final = 16 << 20
"""Some hundred thousand prefixes: a file of data that was named by mistake is not read whole."""

_SPLIT: Final = "train"


class BlendEntry(NamedTuple):
    """One data set of a blend.

    Attributes:
        prefix: path of its files without `.idx` and `.bin`.
        weight: its share, above 0; None in a blend without weights.
    """

    prefix: str
    weight: float | None


def read_blend(path: str) -> list[BlendEntry]:
    """Reads a blend file.

    Raises:
        ValueError: it cannot be read, or is none; with what was expected and found.
    """
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


def parse_blend(data: bytes) -> list[BlendEntry]:
    """Returns the data sets of a blend file, in its order.

    >>> parse_blend(b"30 a 70 b")
    [BlendEntry(prefix='a', weight=30.0), BlendEntry(prefix='b', weight=70.0)]

    Raises:
        ValueError: it is no text, lists nothing, a weight is no number above 0, or only some have one.
    """
    words = _words(data)
    if not words:
        raise ValueError("weights and prefixes are needed, such as 0.7 data/web 0.3 data/code, got none")
    weights = [_number(word) for word in words[::2]]
    if len(words) % 2 or all(weight is None for weight in weights):
        entries = [BlendEntry(word, None) for word in words]
    else:
        entries = [BlendEntry(*pair) for pair in zip(words[1::2], map(_weight, words[::2]), strict=True)]
    if not all(entry.prefix for entry in entries):
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
        if _SPLIT not in value:
            raise ValueError(
                f'a blend under "{_SPLIT}" is needed, got {", ".join(map(repr, list(value)[:5])) or "none"}'
            )
        value = value[_SPLIT]
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
