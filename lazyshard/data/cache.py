"""Encoded samples kept for runs that come back to them: later epochs, validation."""

from __future__ import annotations

import pickle
from typing import Any


class SampleCache:
    """Samples by number, bounded in bytes. The first to come stay; nothing is evicted.

    Epochs go round and round over the data. Where the data is larger than the cache, evicting the least recently
    used sample would evict each one just before it is asked for again; keeping the first ones gives a hit rate of
    cache over data.

    Samples are kept pickled, so their size is exact, and what a caller does to a sample that it got cannot change
    the cached one.

    Args:
        limit: bytes of pickled samples to keep; 0 keeps none.

    Raises:
        ValueError: the limit is negative.
    """

    def __init__(self, limit: int) -> None:
        if limit < 0:
            raise ValueError(f"cache_bytes is 0 or more, got {limit}")
        self._limit = limit
        self._size = 0
        self._samples: dict[int, bytes] = {}

    def __len__(self) -> int:
        """Samples kept."""
        return len(self._samples)

    @property
    def size(self) -> int:
        """Bytes kept."""
        return self._size

    def fresh(self) -> SampleCache:
        """Returns an empty one of the same size."""
        return SampleCache(self._limit)

    def get(self, number: int) -> Any:
        """Returns a copy of a sample, None if it is not kept."""
        data = self._samples.get(number)
        return None if data is None else pickle.loads(data)  # noqa: S301 - what `put` of this process has pickled

    def put(self, number: int, sample: Any) -> None:
        """Keeps a sample if there is room and it can be pickled."""
        if self._size >= self._limit or number in self._samples:
            return
        try:
            data = pickle.dumps(sample, protocol=pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, TypeError, AttributeError):
            # A sample that holds a function or an open file, say: what pickle raises differs from one to the next.
            return
        if self._size + len(data) <= self._limit:
            self._samples[number] = data
            self._size += len(data)
