"""Whole chunks in memory that is used over and over.

Chunks of a window come and go every few thousand rows. Where each has memory of its own, what one leaves behind does
not fit the next one, whose size differs a little, and with several streams in turns memory spreads out until most of
it is cold in the processor's caches: 2 to 4 % of what a row of a blend costs.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection
from typing import Final

__all__ = ["HeldChunks"]

_GRAIN: Final = 256 << 10
"""Memory is had in multiples of it, so that chunks of about the same size fit into each other's."""

_FLAGS: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
"""A forked process has its own copy."""


class HeldChunks:
    """The chunks that one thread reads from.

    Attributes:
        data: by chunk number; the file's bytes come first, what follows them is of no meaning. A slice is bytes.
    """

    def __init__(self) -> None:
        self.data: dict[int, mmap.mmap] = {}
        self._spare: list[mmap.mmap] = []

    def read(self, number: int, size: int, wanted: Collection[int], read_into: Callable[[memoryview], None]) -> None:
        """Reads a chunk, over one that is not wanted any more if there is one.

        Args:
            number: the chunk.
            size: bytes of it.
            wanted: numbers of the chunks that are to stay.
            read_into: fills so many bytes. What it raises is raised, and the chunk is not held.
        """
        for done in [held for held in self.data if held not in wanted]:
            self._spare.append(self.data.pop(done))
        memory = self._memory(size)
        try:
            with memoryview(memory) as whole, whole[:size] as view:
                read_into(view)
        except BaseException:
            self._spare.append(memory)
            raise
        self.data[number] = memory

    def _memory(self, size: int) -> mmap.mmap:
        asked = max(-(-size // _GRAIN), 1) * _GRAIN
        for place, memory in enumerate(self._spare):
            if size <= len(memory) <= 2 * asked:
                return self._spare.pop(place)
        # One is given up for each that is had, so that there is never more than is held of one window.
        del self._spare[-1:]
        return mmap.mmap(-1, asked, _FLAGS)
