"""When a waiting reader finds what it waits for: the looks at `head.json`, paced by the product's own rule.

`lazyshard.storage.pacing` decides the pauses; here only a clock is moved on. All ranks begin to wait at the same
moment, at the end of a step, and read the same facts, so they would look at the same moments too: one is simulated for
all. The processes of a node share what they see (`lazyshard.storage.shared_looks`): each looks once when it begins to
wait, then one of them looks for all, and the others know a little later.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from lazyshard.format import Head
from lazyshard.simulation.setting import Setting
from lazyshard.storage import Published
from lazyshard.storage.pacing import expected_wait, next_poll
from lazyshard.storage.shared_looks import LATER_S

LOOK_OPERATIONS: Final = 2
"""Of a look at the head, one after the other: an open and a read."""

WAKES_A_CHUNK: Final = 2
"""Where readers are woken: by the seal, which comes first, and by the head, which then tells of it."""

_WATCHES_AFTER_S: Final = 0.02
"""Shorter waits are slept through, see `lazyshard.storage.reader`."""

_ASIDE_S: Final = 1.0
"""How long a waiting reader that has chunks open lets pass between two looks which of them were deleted."""

_SAME_S: Final = 1e-6
"""Moments that are no further apart are one."""

_STEPS: Final = 1000
"""A chunk's time is divided into so many: waits that differ by less are taken as alike."""


class Found(NamedTuple):
    """How a wait ended.

    Attributes:
        late_s: seconds from when it could be seen until it was.
        own: looks that each process makes.
        shared: looks that one process of a node makes for all.
        asides: likewise, besides: which chunks were deleted, to close those.
    """

    late_s: float
    own: int
    shared: int
    asides: int


class Polls:
    """The waits of a setting.

    Args:
        setting: whose producer is waited for.
    """

    def __init__(self, setting: Setting) -> None:
        self.look_s = LOOK_OPERATIONS * setting.latency_s
        self._setting = setting
        self._period = setting.chunk_seconds
        self._shares = min(setting.ranks, setting.ranks_a_node) * max(1, setting.workers) > 1
        self._known = lru_cache(maxsize=None)(self._find)

    def wait(self, missing: int, next_s: float, blind_s: float = 0.0) -> Found:
        """Returns how a wait ends.

        Args:
            missing: chunks that are waited for, at least 1.
            next_s: seconds until the first of them can be seen, > 0; the others follow one by one as they are produced.
            blind_s: seconds in which the producer tells no rate yet.
        """
        return self._known(missing, max(1, round(next_s / self._period * _STEPS)), round(blind_s, 3))

    def _find(self, missing: int, phase: int, blind_s: float) -> Found:
        setting, period = self._setting, self._period
        size, first = setting.samples_per_chunk, phase * period / _STEPS
        arrival = first + (missing - 1) * period
        time = age = 0.0
        own, shared, asides, aside_at = 0, 0, 0, -_ASIDE_S
        watched = not setting.woken
        while True:
            there = 0 if time < first else min(missing, int((time - first) / period + 1 + 1e-9))
            own, shared = (own, shared + 1) if age else (own + 1, shared)
            done = there >= missing or time >= arrival
            time += self.look_s
            if done:
                return Found(
                    max(0.0, time - arrival) + (min(LATER_S, age / 4) if self._shares else 0.0), own, shared, asides
                )
            if time - aside_at >= _ASIDE_S:
                asides, aside_at = asides + 1, time
            rate = 0.0 if time < blind_s else setting.producer_rate
            head = Head(there, there * size, False, "running", rate, "", 0, 0.0)
            age = next_poll(time, expected_wait(missing * size, Published(there, there * size, False, head)))
            event = max(time, first + there * period)
            if not watched and time >= _WATCHES_AFTER_S:
                # Who begins to watch looks once more.
                watched, age = True, 0.0
            elif watched and setting.woken and event <= time + age + _SAME_S:
                own += WAKES_A_CHUNK - 1
                time, age = event, 0.0
            else:
                time += age
