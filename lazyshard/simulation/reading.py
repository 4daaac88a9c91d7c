"""What reading costs: how often chunks are opened, and what the filesystem's latency adds to a step."""

from __future__ import annotations

import math
from typing import Final

from lazyshard.simulation.setting import Setting
from lazyshard.storage.open_chunks import OPEN_CHUNKS, OPEN_ROWS

CHUNK_OPENS: Final = 2
"""Of a reader, to open a chunk: seal and data."""

CHUNK_STATS: Final = 1
"""Likewise: of `stream.json`, whether it is still the same stream."""

_CHUNK_OPERATIONS: Final = CHUNK_OPENS + CHUNK_STATS + 1
"""One after the other; the last one reads the seal."""

_AHEAD_BYTES: Final = 512 << 10
"""What is read at once in order."""


def openings(setting: Setting) -> float:
    """Returns how often a chunk is opened on average: once by each worker that a batch with its rows comes to.

    In order a chunk's rows lie in a few batches, which go round the workers. In a window they lie anywhere; a worker
    that cannot hold all its chunks open opens them again and again, each row finding its chunk open by chance.
    """
    size, workers = setting.samples_per_chunk, max(1, setting.workers)
    if not setting.window:
        batches = (size + setting.batch - math.gcd(size, setting.batch)) / setting.batch
        return min(workers, batches)
    held = min(OPEN_CHUNKS, max(1, OPEN_ROWS // size))
    rows = size / workers
    once = workers * (1 - (1 - 1 / workers) ** size)
    if setting.window <= held:
        return once
    return once + workers * max(0.0, rows - 1) * (1 - held / setting.window)


def tail_chunks(setting: Setting) -> int:
    """Returns how many chunks at the end of the stream fill no stripe of all ranks."""
    return setting.chunks - setting.rows // (setting.ranks * setting.samples_per_chunk) * setting.ranks


def tail_openings(setting: Setting) -> int:
    """Returns how often those are opened at the most.

    Their rows are dealt one by one, so each of them is opened by as many ranks as it has rows for.
    """
    size, ranks = setting.samples_per_chunk, setting.ranks
    batches = -(-max(1, size // ranks) // setting.batch)
    return tail_chunks(setting) * min(size, ranks * min(max(1, setting.workers), batches))


def all_openings(setting: Setting) -> int:
    """Returns how often chunks are opened in a run, those of the tail included."""
    return round((setting.chunks - tail_chunks(setting)) * openings(setting)) + tail_openings(setting)


def reading_s(setting: Setting) -> float:
    """Returns how long one process reads at a micro batch on average: operations one after the other.

    In order half a megabyte is read at once. In windows each row counts as a read of its own, which is the worst case.
    """
    size, batch = setting.samples_per_chunk, setting.batch
    reads = batch if setting.window else max(batch * setting.row_bytes / _AHEAD_BYTES, batch / size)
    return (reads + openings(setting) * _CHUNK_OPERATIONS * batch / size) * setting.latency_s


def loaded_step_s(setting: Setting) -> float:
    """Returns how long a step takes, reading included: beside it with workers, before it without."""
    reading = setting.micro_batches * reading_s(setting)
    if not setting.workers:
        return setting.step_seconds + reading
    return max(setting.step_seconds, reading / setting.workers)
