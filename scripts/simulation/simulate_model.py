"""The run: when each step begins, for all ranks at once.

Steps follow each other without a pause as long as their data is there, so only those are looked at that need more than
was seen before: from one of them to the next is arithmetic. A thousand ranks or one make no difference.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lazyshard.storage.writer import HEARTBEAT_S
from scripts.simulation.simulate_polling import Polls
from scripts.simulation.simulate_producer import Producer
from scripts.simulation.simulate_reading import loaded_step_s, reading_s
from scripts.simulation.simulate_setting import PREFETCH, Setting

_NOTHING_S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """What came out, in seconds since the training began.

    Attributes:
        setting: what was simulated.
        step_s: how long a step takes, reading included.
        published: when each chunk was published.
        begun: when each chunk was allowed.
        after_wait: steps that began after a wait, the first one included.
        began: when each of these began.
        waits: how long each of them was waited for.
        asked: how often a reading process came to rows that it had not seen published.
        looks: looks at the head that each such process made.
        shared: looks at the head that one process of each node made.
        asides: its looks which chunks were deleted.
        looking_s: seconds in which it waited, ahead of the training or not.
    """

    setting: Setting
    step_s: float
    published: npt.NDArray[np.float64]
    begun: npt.NDArray[np.float64]
    after_wait: npt.NDArray[np.int64]
    began: npt.NDArray[np.float64]
    waits: npt.NDArray[np.float64]
    asked: int
    looks: int
    shared: int
    asides: int
    looking_s: float

    @property
    def first_step_s(self) -> float:
        """When the first step began."""
        return float(self.began[0])

    @property
    def end_s(self) -> float:
        """When the last step ended."""
        return self.step_ends(self.setting.steps - 1)

    @property
    def stalled_s(self) -> float:
        """Seconds in which no step was computed: before the first one, waiting, or reading too slowly."""
        return max(0.0, self.end_s - self.setting.steps * self.setting.step_seconds)

    @property
    def stall_share(self) -> float:
        """The same as a share of the time until the end."""
        return self.stalled_s / self.end_s

    def step_ends(self, step: int) -> float:
        """Returns when a step ended."""
        return float(self.ends(np.array([step], dtype=np.int64))[0])

    def ends(self, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Returns when steps ended."""
        after = np.searchsorted(self.after_wait, steps, side="right") - 1
        return self.began[after] + (steps - self.after_wait[after] + 1) * self.step_s

    def trained(self, times: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Returns how many rows were trained by these moments."""
        after = np.searchsorted(self.began, times, side="right") - 1
        known = np.maximum(after, 0)
        done = self.after_wait[known] + ((times - self.began[known]) / self.step_s + 1e-9).astype(np.int64)
        limits = np.append(self.after_wait[1:], self.setting.steps)[known]
        return np.where(after < 0, 0, np.minimum(done, limits)) * self.setting.step_rows

    def published_rows(self, times: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Returns how many rows were published by these moments."""
        chunks = np.searchsorted(self.published, times, side="right")
        return np.minimum(chunks * self.setting.samples_per_chunk, self.setting.rows)


def simulate(setting: Setting) -> Timeline:
    """Simulates a run from the beginning of the training to its last step."""
    producer, polls = Producer(setting), Polls(setting)
    step_s, lag = loaded_step_s(setting), setting.visibility_s
    # Workers ask for a step while earlier ones are trained, and need a moment to read it.
    early = PREFETCH * setting.workers // setting.micro_batches
    fill_s = reading_s(setting) if setting.workers else 0.0
    after_wait, began, waits = [0], [0.0], [0.0]
    step = asked = looks = shared = asides = 0
    found = looking = 0.0

    def begins(step: int) -> float:
        """Returns when a step begins if nothing more is waited for."""
        at = len(after_wait) - 1
        while at and after_wait[at] > step:
            at -= 1
        return began[at] + max(0, step - after_wait[at]) * step_s

    seen = 0
    while step < setting.steps:
        needed = setting.needed_chunks(step)
        ask = max(found, begins(step - early)) if step > early else found
        producer.tell(needed, ask)
        if seen < needed:
            asked += 1
            visible = producer.published[needed - 1] + lag
            there = bisect_right(producer.published, ask - lag + _NOTHING_S)
            if there >= needed:
                found = ask + polls.look_s
                looks += 1
            else:
                first = producer.published[there] + lag - ask
                # Before the first chunk, only a heartbeat tells how fast rows come.
                blind = max(0.0, min(HEARTBEAT_S, first + ask) - ask) if not there else 0.0
                wait = polls.wait(needed - there, max(first, _NOTHING_S), blind)
                found = visible + wait.late_s
                looks += wait.own
                shared += wait.shared
                # Before the first step no chunk is open.
                asides += wait.asides if step else 0
                looking += found - ask
            seen = max(needed, bisect_right(producer.published, found - polls.look_s - lag))
        else:
            found = ask
        ready, due = found + fill_s, begins(step)
        if not step:
            began[0] = waits[0] = ready
        elif ready - due > _NOTHING_S:
            after_wait.append(step)
            began.append(ready)
            waits.append(ready - due)
        # With a limit the producer is told of each window; without, nothing happens until more is needed.
        step = setting.first_step_after(needed if setting.max_ahead is not None else seen)
    return Timeline(
        setting=setting,
        step_s=step_s,
        published=np.array(producer.published),
        begun=np.array(producer.begun),
        after_wait=np.array(after_wait, dtype=np.int64),
        began=np.array(began),
        waits=np.array(waits),
        asked=asked,
        looks=looks,
        shared=shared,
        asides=asides,
        looking_s=looking,
    )
