"""What a run asks of the filesystem: opens, stats and renames, counted as its code makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lazyshard.data.reading_marks import PAUSE_S
from scripts.simulation.simulate_disk import Disk
from scripts.simulation.simulate_model import Timeline
from scripts.simulation.simulate_reading import CHUNK_OPENS, CHUNK_STATS, all_openings

PUBLISH_OPENS: Final = 7
"""Of a producer, for a chunk: data, seal and head made, the owner looked at twice, the directory synced twice."""

_PUBLISH_OTHERS: Final = 7
"""Likewise: three renames with a stat each, and a look whether the seal is there."""

_REPLACE: Final = 4
"""To replace a small file durably: one made, a stat, a rename, the directory synced."""


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
        marks=min(spans, int(timeline.end_s / PAUSE_S) + timeline.asked) + disk.commits,
        publishing=setting.chunks * (PUBLISH_OPENS + _PUBLISH_OTHERS) + 2 * disk.deleted,
        seconds=timeline.end_s,
        waiting=(polls + timeline.asides * nodes) / timeline.looking_s if timeline.looking_s else 0.0,
        stripe=nodes + loaders * (CHUNK_OPENS + CHUNK_STATS),
        nodes=nodes,
    )
