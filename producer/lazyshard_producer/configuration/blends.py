"""What a path of --source stands for: a file, those of a pattern, Megatron's prefixes, and its blend files.

0.7 data/web 0.3 data/code, as a text or a JSON list, weights or none: the rule of `get_blend_from_list` in
megatron/core/datasets/utils.py. {"train": [...]}: what --per-split-data-args-path names.
"""

from __future__ import annotations

import glob
import math
import os
from pathlib import Path
from typing import Final, NamedTuple

from lazyshard.conversion.indexed import INDEX_SUFFIX
from lazyshard.memory import loads

MEGATRON: Final = "megatron:"  # begins the prefix of an IndexedDataset's two files
MEGATRON_BLEND: Final = "megatron-blend:"  # begins the path of a file of such prefixes
MAX_BLEND_BYTES: Final = 16 << 20  # a file of data that was named by mistake is not read whole


class FoundSource(NamedTuple):
    """A source that a path stands for, and its share among those of one blend file, None where none gives one."""

    path: str
    weight: float | None = None


def expand_source(path: str) -> list[FoundSource]:
    """Returns the sources that a path stands for. Raises ValueError."""
    if not path.startswith(MEGATRON_BLEND):
        found = _index(path.removeprefix(MEGATRON)) if path.startswith(MEGATRON) else path
        return [FoundSource(one) for one in expand_path(found)]
    path = path.removeprefix(MEGATRON_BLEND)
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BLEND_BYTES + 1)
        if len(data) > MAX_BLEND_BYTES:
            raise ValueError(f"a blend file of {MAX_BLEND_BYTES} bytes at the most is needed, it has more")
        return [FoundSource(_index(prefix), weight) for prefix, weight in parse_blend(data)]
    except OSError as cause:
        raise ValueError(f"a readable blend file is needed, got {path!r}: {(cause.strerror or '').lower()}") from None
    except ValueError as cause:
        raise ValueError(f"{path}: {cause}") from None


def is_indexed(path: str) -> bool:
    """Whether a path stands for IndexedDatasets of Megatron's, by its name."""
    return path.startswith((MEGATRON, MEGATRON_BLEND)) or path.endswith(INDEX_SUFFIX)


def _index(prefix: str) -> str:
    return prefix if not prefix or prefix.endswith(INDEX_SUFFIX) else prefix + INDEX_SUFFIX


def expand_path(path: str) -> list[str]:
    """Returns the files that match a pattern as in a shell, "**" over folders, or a path that matches none."""
    if not glob.has_magic(path) or "\0" in path or os.path.lexists(path):
        return [path]
    return sorted(name for name in glob.glob(path, recursive=True) if not os.path.isdir(name)) or [path]


def is_pipe(path: str) -> bool:
    """Whether a path stands for standard input or a named pipe that is there."""
    try:
        return path == "-" or Path(path).is_fifo()
    except OSError:
        return False


def parse_blend(data: bytes) -> list[FoundSource]:
    """Returns the prefixes of a blend file, in its order, without `.idx` and `.bin`."""
    words = _words(data)
    if not words:
        raise ValueError("weights and prefixes are needed, such as 0.7 data/web 0.3 data/code, got none")
    weights = [_number(word) for word in words[::2]]
    if len(words) % 2 or not any(weight is not None for weight in weights):
        entries = [FoundSource(word) for word in words]
    else:
        for word, weight in zip(words[::2], weights, strict=True):
            if weight is None or not 0 < weight < math.inf:
                text = "a number above 0 is needed as each weight, where others are numbers"
                raise ValueError(f"{text}, got {word!r}; for no rows of a data set leave it out")
        entries = list(map(FoundSource, words[1::2], weights))
    if not all(entry.path for entry in entries):
        raise ValueError("prefixes are needed, got an empty one")
    return entries


def _words(data: bytes) -> list[str]:
    try:
        text = data.decode("utf-8-sig").strip()
        value = loads(text.encode()) if text.startswith(("[", "{")) else text
    except UnicodeDecodeError:
        raise ValueError("a text of weights and prefixes is needed, got bytes that are no UTF-8") from None
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
