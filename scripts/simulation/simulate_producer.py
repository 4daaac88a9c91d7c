"""When chunks are published: by the producer's rate, its head start, and `--max-ahead`.

The rules are those of `lazyshard-producer run`: a chunk is not begun before it is allowed, a held producer looks again
after pauses that grow from 0.2 to 2 s, and rows of at most a second are made up for afterwards, as with `--rate`.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from functools import lru_cache

import numpy as np

from lazyshard_producer.holding.hold import retry_s
from lazyshard_producer.pace import BURST_S
from scripts.simulation.simulate_setting import Setting


class Producer:
    """The chunks of a stream, with the second at which each is published; 0 is when the training begins.

    Args:
        setting: of the run.

    Attributes:
        published: seconds, one for each chunk published so far; 0 for what was there before.
        begun: the second at which each of them was allowed.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        ahead = setting.ahead_chunks
        self._ahead = setting.chunks if ahead is None else ahead
        allowed = min(setting.chunks, self._ahead)
        rows = np.minimum(np.arange(allowed + 1) * setting.samples_per_chunk, setting.rows)
        due = (rows - setting.head_start) / setting.producer_rate
        self.published = array("d", np.maximum(0.0, due[1:]))
        self.begun = array("d", np.maximum(0.0, due[:-1]))
        # When the last row was due, and since when the producer is held.
        self._due = self._held_since = float(due[-1])

    def tell(self, mark: int, at: float) -> None:
        """Takes notice of a reading mark: a reader told at a moment that it needs so many chunks."""
        setting, there = self._setting, len(self.published)
        allowed = min(setting.chunks, mark + self._ahead)
        if allowed <= there:
            return
        at += setting.visibility_s
        begin = self._held_since + (first_look(at - self._held_since) if at > self._held_since else 0.0)
        self._due = max(self._due, begin - BURST_S)
        for chunk in range(there, allowed):
            self.begun.append(max(0.0, begin))
            rows = min(setting.samples_per_chunk, setting.rows - chunk * setting.samples_per_chunk)
            self._due += rows / setting.producer_rate
            begin = max(begin, self._due)
            self.published.append(max(0.0, begin))
        self._held_since = begin


@lru_cache(maxsize=1)
def _looks() -> tuple[float, ...]:
    """Returns when a held producer looks, in seconds since it is held, up to where the pauses grow no more."""
    times, longest = [0.0], retry_s(math.inf)
    while retry_s(times[-1]) < longest:
        times.append(times[-1] + retry_s(times[-1]))
    return tuple(times)


def first_look(held_s: float) -> float:
    """Returns when a producer looks that is held: its first look after so many seconds or just then."""
    times = _looks()
    if held_s > times[-1]:
        longest = retry_s(math.inf)
        return times[-1] + math.ceil((held_s - times[-1]) / longest) * longest
    return times[bisect_left(times, held_s)]
