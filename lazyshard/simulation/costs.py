"""What a run takes on disk, and what it asks of the filesystem: opens, stats and renames, as its code makes them.

On disk are the chunks that are published, less those that the checkpoints let go, by the rules of docs/retention.md:
the cursor is moved on by a checkpoint, to the beginning of the windows that were open at the oldest checkpoint that is
kept, and the producer deletes before and after it publishes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshard.simulation.run import Timeline, retry_s
from lazyshard.simulation.setting import CHUNK_OPENS, CHUNK_STATS, Setting

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
        cursor_writes: commits of the cursor.
        deleted: chunks deleted by the end.
    """

    peak_chunks: int
    peak_bytes: int
    peak_at_s: float
    cursor_writes: int
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


class Files(NamedTuple):
    """Operations on the filesystem: all of a run's, reads and syncs not counted.

    Attributes:
        processes: reading processes of all ranks.
        nodes: machines of ranks.
        head_opens: opens of the head by the readers.
        chunk_opens: opens of chunks by them, data and seals.
        metadata_operations: all of a run's, with the stats, the marks and cursors, the publishing and deleting.
        metadata_a_second: those, a second.
        metadata_a_second_and_node: those of the readers of one machine, a second.
        polls_a_second: opens a second by all processes together while they wait; 0 where none waits.
        stripe_operations: of all processes at the moment in which a stripe is there that they have waited for.
    """

    processes: int
    nodes: int
    head_opens: int
    chunk_opens: int
    metadata_operations: int
    metadata_a_second: float
    metadata_a_second_and_node: float
    polls_a_second: float
    stripe_operations: int


def count_files(timeline: Timeline, disk: Disk) -> Files:
    """Counts the operations of a run.

    The main process looks when it begins and at each commit; with workers also at each stripe that is new to it, as
    `dataset.in_epoch` does in the training loop.
    """
    setting, seconds = timeline.setting, timeline.end_s
    loaders, nodes = setting.ranks * max(1, setting.workers), -(-setting.ranks // setting.ranks_a_node)
    opened, asides = setting.all_openings, timeline.asides * nodes
    polls = timeline.looks * loaders + timeline.shared * nodes
    looks = polls + setting.ranks * (1 + (timeline.asked if setting.workers else 0)) + disk.cursor_writes
    reading = looks + opened * (CHUNK_OPENS + CHUNK_STATS) + asides
    spans = -(-setting.steps * setting.draws // setting.span)
    marks = min(spans, int(seconds / MARK_S) + timeline.asked) + disk.cursor_writes
    total = reading + _REPLACE * marks + setting.chunks * (PUBLISH_OPENS + _PUBLISH_OTHERS) + 2 * disk.deleted
    return Files(
        processes=loaders,
        nodes=nodes,
        head_opens=looks,
        chunk_opens=opened * CHUNK_OPENS,
        metadata_operations=total,
        metadata_a_second=total / seconds,
        metadata_a_second_and_node=reading / seconds / nodes,
        polls_a_second=(polls + asides) / timeline.looking_s if timeline.looking_s else 0.0,
        stripe_operations=nodes + loaders * (CHUNK_OPENS + CHUNK_STATS),
    )
