"""Paths in --source: patterns and the files that match them now, and pipes."""

from __future__ import annotations

import glob
import os
import stat


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
