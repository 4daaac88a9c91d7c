"""Which names in a followed directory are data, and which say something about data."""

from __future__ import annotations

import fnmatch
import re
from typing import Final

PACKED: Final = (".gz", ".zst")
"""Endings of compressed files."""

_TEMPORARY: Final = (".tmp", ".temp", ".part", ".partial", ".crdownload", ".filepart", ".swp", "~")
"""Endings that programs give to files that they are still writing."""


class NameRules:
    """What a name in a followed directory means.

    Hidden names (those that begin with a dot) and names that programs give to unfinished files are nothing, whatever
    the pattern says; `rsync` and others write `.NAME.x7Yq2` and rename it.

    Args:
        pattern: of data files, with `*`, `?` and `[...]`; names with .gz or .zst behind it belong too.
        marker: name of the file that says that one is complete, with {name} for that one's.
        end_marker: name of the file that says that no other comes.
    """

    def __init__(self, pattern: str, marker: str, end_marker: str) -> None:
        self.end_marker: Final = end_marker
        self._marker = marker
        self._data = re.compile(fnmatch.translate(pattern))
        self._before, self._named, self._behind = marker.partition("{name}")

    def is_data(self, name: str) -> bool:
        """Returns whether a file of this name holds rows."""
        plain = name
        for ending in PACKED:
            plain = plain.removesuffix(ending)
        return (
            (self._data.match(name) is not None or self._data.match(plain) is not None)
            and not name.startswith(".")
            and not name.endswith(_TEMPORARY)
            and name != self.end_marker
            and self.data_of(name) is None
        )

    def marker_of(self, name: str) -> str:
        """Returns the name of the file that says that this one is complete."""
        return self._marker.replace("{name}", name)

    def data_of(self, name: str) -> str | None:
        """Returns which file a marker of this name says to be complete, "" if all; None if it is no marker."""
        if not self._named:
            return "" if name == self._marker else None
        if not (name.startswith(self._before) and name.endswith(self._behind)):
            return None
        return name[len(self._before) : len(name) - len(self._behind)] or None


def is_packed(name: str) -> bool:
    """Returns whether a file of this name is compressed."""
    return name.endswith(PACKED)
