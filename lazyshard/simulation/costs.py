"""What a run takes on disk, and what it asks of the filesystem: opens, stats and renames, as its code makes them.

On disk are the chunks that are published, less those that the checkpoints let go, by the rules of docs/retention.md:
the cursor is moved on by a checkpoint, to the beginning of the windows that were open at the oldest checkpoint that is
kept, and the producer deletes before and after it publishes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshard.simulation.reading import CHUNK_OPENS, CHUNK_STATS, all_openings
from lazyshard.simulation.run import Timeline, retry_s
from lazyshard.simulation.setting import Setting

LOOK_S: Final = 0.5
DELETED_AT_ONCE: Final = 100
"""How often the producer looks what it may delete, and how many chunks it then deletes in one go
(`lazyshard_producer.holding.holdback`)."""

MARK_S: Final = 0.2
"""The least time between two reading marks (`lazyshard.data.reading_marks`)."""

PUBLISH_OPENS: Final = 7
"""Of a producer, for a chunk: data, seal and head made, the owner looked at twice, the directory synced twice."""

_PUBLISH_OTHERS: Final = 7
"""Likewise: three renames with a stat each, and a look whether the seal is there."""

_REPLACE: Final = 4
"""To replace a small file durably: one made, a stat, a rename, the directory synced."""


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
    deleted = np.zeros(len(published), dtype=np.int64)
    if setting.retain == "consumed" and commits >= setting.keep_checkpoints:
        # The checkpoint that moves the cursor, and the one that it is moved to.
        newest = np.arange(setting.keep_checkpoints, commits + 1) * every
        oldest = newest - (setting.keep_checkpoints - 1) * every
        committed = timeline.ends(newest - 1) + setting.visibility_s
        done = np.concatenate(([0], done_chunks(setting, oldest * setting.draws)))
        # At its last look before each chunk the producer deletes what is committed, but never the newest chunk.
        target = np.minimum(done[np.searchsorted(committed, timeline.begun, side="right")], np.maximum(0, count - 2))
        deleted = _in_time(target, published, timeline.begun)
    on_disk = count - deleted
    at = int(np.argmax(on_disk))
    peak = int(on_disk[at])
    return Disk(peak, peak * setting.chunk_bytes, float(published[at]), commits, int(deleted[-1]))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Operations on the filesystem: all of a run's, reads and syncs not counted.

    Attributes:
        processes: reading processes of all ranks.
        looks: opens of the head by them.
        chunk_opens: opens of chunks by them, data and seals.
        other_reads: their stats, and looks whether chunks were deleted.
        marks: reading marks and cursors written.
        publishing: of the producer, deleting included.
        seconds: how long the run took.
        waiting: opens a second by all processes together while they wait; 0 where none waits.
        stripe: operations of all processes at the moment in which a stripe is there that they have waited for.
        nodes: machines of ranks.
    """

    processes: int
    looks: int
    chunk_opens: int
    other_reads: int
    marks: int
    publishing: int
    seconds: float
    waiting: float
    stripe: int
    nodes: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.looks + self.chunk_opens + self.other_reads + _REPLACE * self.marks + self.publishing

    @property
    def a_second(self) -> float:
        """All of them, a second."""
        return self.total / self.seconds

    @property
    def a_second_and_node(self) -> float:
        """Those of the readers of one machine, a second."""
        return (self.looks + self.chunk_opens + self.other_reads) / self.seconds / self.nodes


def count_files(timeline: Timeline, disk: Disk) -> Files:
    """Counts the operations of a run.

    The main process looks when it begins and at each commit; with workers also at each stripe that is new to it, as
    `dataset.in_epoch` does in the training loop.
    """
    setting = timeline.setting
    loaders, nodes = setting.ranks * max(1, setting.workers), -(-setting.ranks // setting.ranks_a_node)
    main = setting.ranks * (1 + (timeline.asked if setting.workers else 0)) + disk.commits
    opened = all_openings(setting)
    polls = timeline.looks * loaders + timeline.shared * nodes
    spans = -(-setting.steps * setting.draws // setting.span)
    return Files(
        processes=loaders,
        looks=polls + main,
        chunk_opens=opened * CHUNK_OPENS,
        other_reads=opened * CHUNK_STATS + timeline.asides * nodes,
        marks=min(spans, int(timeline.end_s / MARK_S) + timeline.asked) + disk.commits,
        publishing=setting.chunks * (PUBLISH_OPENS + _PUBLISH_OTHERS) + 2 * disk.deleted,
        seconds=timeline.end_s,
        waiting=(polls + timeline.asides * nodes) / timeline.looking_s if timeline.looking_s else 0.0,
        stripe=nodes + loaders * (CHUNK_OPENS + CHUNK_STATS),
        nodes=nodes,
    )
