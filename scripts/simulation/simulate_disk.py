"""What the stream takes on disk: chunks published, less those that the checkpoints let go.

The rules are those of docs/retention.md: the cursor is moved on by a checkpoint, to the beginning of the windows that
were open at the oldest checkpoint that is kept, and the producer deletes before and after it publishes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshard_producer.holding.hold import retry_s
from lazyshard_producer.holding.holdback import DELETED_AT_ONCE, LOOK_S
from scripts.simulation.simulate_model import Timeline
from scripts.simulation.simulate_setting import Setting


class Disk(NamedTuple):
    """What was on disk.

    Attributes:
        peak_chunks: the most chunks at a time.
        peak_bytes: what they took, seals included.
        peak_at_s: when that was.
        commits: how often the cursor was written.
        deleted: chunks deleted by the end.
    """

    peak_chunks: int
    peak_bytes: int
    peak_at_s: float
    commits: int
    deleted: int


def done_chunks(setting: Setting, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns how many chunks are done with once every rank has drawn so many positions, the end not known yet.

    `Course.done_before` in closed form: whole windows, or stripes, of all ranks.
    """
    return positions // setting.span * setting.span_rows // setting.samples_per_chunk


def disk_use(timeline: Timeline) -> Disk:
    """Returns what a run took on disk."""
    setting, published = timeline.setting, timeline.published
    count = np.arange(1, len(published) + 1)
    every = setting.checkpoint_steps
    commits = setting.steps // every if every else 0
    if setting.retain == "all" or commits < setting.keep_checkpoints:
        return _disk(setting, len(published), float(published[-1]), commits, 0)
    # The checkpoint that moves the cursor, and the one that it is moved to.
    newest = np.arange(setting.keep_checkpoints, commits + 1) * every
    oldest = newest - (setting.keep_checkpoints - 1) * every
    committed = timeline.ends(newest - 1) + setting.visibility_s
    done = np.concatenate(([0], done_chunks(setting, oldest * setting.draws)))
    # At its last look before each chunk the producer deletes what is committed, but never the newest chunk.
    target = np.minimum(done[np.searchsorted(committed, timeline.begun, side="right")], np.maximum(0, count - 2))
    deleted = _in_time(target, published, timeline.begun)
    on_disk = count - deleted
    peak = int(np.argmax(on_disk))
    return _disk(setting, int(on_disk[peak]), float(published[peak]), commits, int(deleted[-1]))


def _disk(setting: Setting, peak: int, at: float, commits: int, deleted: int) -> Disk:
    return Disk(peak, peak * setting.chunk_bytes, at, commits, deleted)


def _in_time(
    target: npt.NDArray[np.int64], published: npt.NDArray[np.float64], begun: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Returns how many chunks are deleted by the time each is begun: so many at a look, and so many looks a second."""
    turns = (begun // LOOK_S).astype(np.int64)
    looks = np.concatenate(([True], turns[1:] > turns[:-1]))
    held = begun - np.concatenate(([0.0], published[:-1]))
    allowed = np.cumsum(np.where(looks, 1 + np.maximum(held, 0.0) // retry_s(np.inf), 0)).astype(np.int64)
    budget = allowed * DELETED_AT_ONCE
    deleted = np.minimum.accumulate(target - budget) + budget
    # Between two looks nothing changes.
    newest = np.maximum.accumulate(np.where(looks, np.arange(len(looks)), 0))
    return np.minimum(deleted, target)[newest]
