"""Minimal readers of chunk files, for comparison: rows by position, or all in order.

No digests, no shuffling, no growing streams. Does not import lazyshard, for the environments of other packages.
"""

from __future__ import annotations

import importlib
import mmap
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.benchmarks.bench_formats import Row


def chunk_files(data: str) -> list[str]:
    """Returns the files with the rows, in order."""
    return sorted(str(path) for path in Path(data).glob("chunk_*.jsonl"))


class MapRows:
    """The least that a map-style data set of JSON lines is: the rows' places, and the files mapped."""

    def __init__(self, data: str, offsets: str) -> None:
        self._files = chunk_files(data)
        self._offsets = array("Q", Path(offsets).read_bytes())
        self._rows = len(self._offsets) // len(self._files) - 1
        self._maps: dict[int, mmap.mmap] = {}
        self._parse = importlib.import_module("orjson").loads

    def __len__(self) -> int:
        """Rows."""
        return self._rows * len(self._files)

    def __getitem__(self, index: int) -> Row:
        """Parses a row."""
        number, row = divmod(index, self._rows)
        mapped = self._maps.get(number)
        if mapped is None:
            with open(self._files[number], "rb") as file:
                mapped = self._maps[number] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        at = number * (self._rows + 1) + row
        found: Row = self._parse(mapped[self._offsets[at] : self._offsets[at + 1]])
        return found


class RowsInTurn:
    """Iterates over the rows of files, with a position: file and byte."""

    def __init__(self, data: str) -> None:
        self.files = chunk_files(data)
        self.place = (0, 0)

    def __iter__(self) -> Iterator[Row]:
        """Parses rows from the position on."""
        parse = importlib.import_module("orjson").loads
        first, byte = self.place
        for number in range(first, len(self.files)):
            with open(self.files[number], "rb", buffering=1 << 20) as file:
                file.seek(byte)
                for line in file:
                    byte += len(line)
                    self.place = (number, byte)
                    yield parse(line)
            byte = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the position."""
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the position."""
        self.place = tuple(state["place"])
