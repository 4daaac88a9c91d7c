"""A few numbers that a data set's processes share: the epoch, and what each DataLoader worker has met.

They live in one shared tensor, which torch hands to forked and spawned workers alike. Each worker of a DataLoader adds
to its own row, so nothing is locked. Where two DataLoaders run over one data set at the same time, or one has more than
255 workers, workers share rows, and the statistics may miss some.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch.utils.data import get_worker_info

_ROWS: Final = 256
"""The main process and 255 workers. All of it stays below 32 KiB: what is larger torch copies by several threads when
it is shared (`GRAIN_SIZE` in aten/src/ATen/TensorIterator.h), and in a process that was forked from one that had such
threads it waits for them for ever."""

_COLUMNS: Final = 9

# Places in the view. Only the first column of a row does not count: the first row has the epoch there, in which index 0
# lies; the second whether some process has looked if the order undoes how the stream was dealt; the third whether some
# process has asked if an index is still in the epoch.
EPOCH: Final = 0
ORDER_CHECKED: Final = _COLUMNS
ASKED: Final = 2 * _COLUMNS


class Stats(NamedTuple):
    """What a data set has met so far, over this process and its DataLoader workers.

    Attributes:
        bad_samples: samples that could not be read or encoded, counted once by each process that met them.
        chunks_opened: how many times a chunk was opened; each worker opens its own.
        waited_s: seconds spent waiting for the producer, added up over the workers.
        dropped: samples drawn whose rows a filter dropped, or `SkipSample`.
        filled: samples drawn in whose places other rows stand, as theirs were dropped or bad.
        encoded: with an `EncodeCache` in a directory: rows that were encoded.
        from_cache: rows that were not, as what is made of them was in the cache.
        not_cached: rows encoded of which the cache did not take what was made, as it holds values that would not come
            back as they are, or there was no room.
    """

    bad_samples: int = 0
    chunks_opened: int = 0
    waited_s: float = 0.0
    dropped: int = 0
    filled: int = 0
    encoded: int = 0
    from_cache: int = 0
    not_cached: int = 0


class SharedNumbers:
    """The shared tensor, and `view`, the same numbers flat: `view[EPOCH]` is the epoch."""

    def __init__(self) -> None:
        self.__setstate__({"_tensor": torch.zeros((_ROWS, _COLUMNS), dtype=torch.int64)})

    def __getstate__(self) -> dict[str, Any]:
        """Keeps the tensor alone; torch's own pickler shares it, an ordinary one copies it."""
        return {"_tensor": self._tensor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Does nothing to one that is shared; a copy has to be shared with the workers that it will have.
        self._tensor: torch.Tensor = state["_tensor"].share_memory_()
        # A flat memoryview is read in 30 ns, a tensor in 500.
        self.view = memoryview(self._tensor.numpy().data).cast("B").cast("q")

    def report(self, now: Stats, before: Stats) -> None:
        """Adds what this process has met since it last reported; both as its own sums."""
        worker = get_worker_info()
        start = 0 if worker is None else (1 + worker.id % (_ROWS - 1)) * _COLUMNS
        for column, (new, old) in enumerate(zip(_numbers(now), _numbers(before), strict=True), 1):
            self.view[start + column] += new - old

    def stats(self) -> Stats:
        """Adds up what all processes have met."""
        _, bad, opened, waited_ms, *others = self._tensor.sum(dim=0).tolist()
        return Stats(bad, opened, waited_ms / 1000, *others)


def _numbers(stats: Stats) -> tuple[int, ...]:
    return (*stats[:2], round(stats.waited_s * 1000), *stats[3:])
