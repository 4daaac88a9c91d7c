"""The files of a followed directory that were read to their end: 32 bytes each, however many there have been.

A name is remembered for ever by its XXH3 (64 bits): a file that was deleted may come back, for instance with its
filesystem, and must not be read twice. Two names of a million share a digest with a probability of 3 in 10^8; the
second would be taken for the first, and be refused unless it had the same size.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import compress
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pybase64
import xxhash

_OPEN_END: Final = 1 << 63
"""The bit of the number of lines that says that the last line had no newline."""

_MERGE: Final = 4096
"""So many are kept apart before they are sorted in."""

_COLUMNS: Final = ("size", "line", "tail")


class Finished(NamedTuple):
    """A file that was read to its end.

    Attributes:
        size: its size in bytes then.
        line: lines read.
        tail: XXH3 (64 bits) of its last bytes, 4 KiB at the most; 0 for a compressed file.
        open_end: the last line had no newline.
    """

    size: int
    line: int
    tail: int
    open_end: bool


class FinishedFiles:
    """Files by name. Adding one again replaces what was known of it."""

    def __init__(self) -> None:
        self._keys: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
        self._values: npt.NDArray[np.uint64] = np.empty((0, len(_COLUMNS)), np.uint64)
        self._recent: dict[int, tuple[int, int, int]] = {}

    def __len__(self) -> int:
        """Files."""
        self._merge()
        return len(self._keys)

    def add(self, name: str, file: Finished) -> None:
        """Adds a file."""
        self._recent[_key(name)] = (file.size, file.line | (_OPEN_END if file.open_end else 0), file.tail)
        if len(self._recent) >= _MERGE:
            self._merge()

    def get(self, name: str) -> Finished | None:
        """Returns what is known of a file, None if it is not among them."""
        key = _key(name)
        row = self._recent.get(key)
        if row is None:
            at = int(np.searchsorted(self._keys, np.uint64(key)))
            if at == len(self._keys) or int(self._keys[at]) != key:
                return None
            row = tuple(self._values[at].tolist())
        size, line, tail = row
        return Finished(size, line & ~_OPEN_END, tail, bool(line & _OPEN_END))

    def compare(self, sizes: Mapping[str, int]) -> tuple[list[str], list[str]]:
        """Returns which of some files are not among them, and which are and were smaller then.

        Args:
            sizes: their sizes in bytes, by name.
        """
        self._merge()
        keys = np.fromiter(map(_key, sizes), np.uint64, len(sizes))
        if not len(self._keys):
            return list(sizes), []
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        known = self._keys[at] == keys
        grown = known & (np.fromiter(sizes.values(), np.uint64, len(sizes)) > self._values[at, 0])
        return list(compress(sizes, ~known)), list(compress(sizes, grown))

    def copy(self) -> FinishedFiles:
        """Returns an independent copy, which shares what was sorted in."""
        copy = FinishedFiles()
        copy._keys, copy._values, copy._recent = self._keys, self._values, dict(self._recent)
        return copy

    def encode(self) -> dict[str, Any]:
        """Returns all of them as JSON: packed columns, as in seals."""
        self._merge()
        columns = dict(zip(_COLUMNS, self._values.T, strict=True))
        return {name: _pack(column) for name, column in ({"name": self._keys} | columns).items()}

    @classmethod
    def decode(cls, value: Any) -> FinishedFiles:
        """Reads what `encode` returned.

        Raises:
            ValueError: it is something else.
        """
        files = cls()
        try:
            columns = [np.frombuffer(pybase64.b64decode(value[name], validate=True), "<u8") for name in _COLUMNS]
            keys = np.frombuffer(pybase64.b64decode(value["name"], validate=True), "<u8")
        except (TypeError, KeyError) as cause:
            raise ValueError(f"not packed columns: {cause!r}") from cause
        if any(len(column) != len(keys) for column in columns) or np.any(keys[1:] <= keys[:-1]):
            raise ValueError("columns of unequal length, or not sorted")
        files._keys = keys.astype(np.uint64)
        files._values = np.stack(columns, axis=1).astype(np.uint64)
        return files

    def _merge(self) -> None:
        if not self._recent:
            return
        keys = np.fromiter(self._recent, np.uint64, len(self._recent))
        values = np.array(list(self._recent.values()), np.uint64)
        kept = ~np.isin(self._keys, keys)
        keys, values = np.concatenate([self._keys[kept], keys]), np.concatenate([self._values[kept], values])
        order = np.argsort(keys)
        self._keys, self._values = keys[order], values[order]
        self._recent = {}


def _key(name: str) -> int:
    return xxhash.xxh3_64_intdigest(os.fsencode(name))


def _pack(column: npt.NDArray[np.uint64]) -> str:
    return pybase64.b64encode(np.ascontiguousarray(column, "<u8").tobytes()).decode()
