"""Paths in --source: patterns and the files that match them now, pipes, and Megatron's prefixes and blend files."""

from __future__ import annotations

import glob
import os
import stat
from typing import Final, NamedTuple

from lazyshard.conversion.indexed import INDEX_SUFFIX
from lazyshard_producer.configuration.megatron_blend import read_blend

MEGATRON: Final = "megatron:"
"""Begins the prefix of an IndexedDataset's two files."""

MEGATRON_BLEND: Final = "megatron-blend:"
"""Begins the path of a file of such prefixes."""


class Found(NamedTuple):
    """A source that a path stands for.

    Attributes:
        path: of the file.
        weight: its share among those of one blend file, above 0; None where no blend file gives one.
    """

    path: str
    weight: float | None = None


def expand_source(path: str) -> list[Found]:
    """Returns the sources that a path of --source stands for: those of a pattern, a prefix or a blend file.

    Raises:
        ValueError: it is a blend file that cannot be read.
    """
    if path.startswith(MEGATRON_BLEND):
        entries = read_blend(path[len(MEGATRON_BLEND) :])
        return [Found(_index(entry.prefix), entry.weight) for entry in entries]
    if path.startswith(MEGATRON):
        path = _index(path[len(MEGATRON) :])
    return [Found(found) for found in expand_path(path)]


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
