"""The temporary files of an IndexedDataset that is being written: they grow, and are read once at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lazyshard.store import durable

_BUFFER_BYTES: Final = 1 << 20

_COPY_ITEMS: Final = 1 << 16
"""Numbers that are read at a time."""


class GrowingFile:
    """A new file that grows at its end; what had the name loses it.

    Attributes:
        path: its name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = durable.create(path)
        self._buffer = bytearray()

    def add(self, data: bytes) -> None:
        """Adds bytes at the end."""
        self._buffer += data
        if len(self._buffer) >= _BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Gives all bytes to the system."""
        durable.write_all(self._fd, self._buffer)
        self._buffer.clear()

    def sync(self) -> None:
        """Waits until all bytes are on the device."""
        self.flush()
        durable.sync(self._fd)

    def close(self) -> None:
        """Closes the file; what is not flushed is dropped."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def read_numbers(path: Path, kind: np.dtype[Any]) -> Iterator[npt.NDArray[Any]]:
    """Yields the numbers of a file, some at a time."""
    with path.open("rb") as file:
        while data := file.read(_COPY_ITEMS * kind.itemsize):
            yield np.frombuffer(data, kind)
