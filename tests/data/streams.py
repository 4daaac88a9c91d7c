"""Passes over small streams, and what they are to draw, as lists."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from torch.utils.data import DataLoader

from lazyshard import LazyShardedDataset, LazyShardedStream
from lazyshard.plan.course import AtEnd
from tests.data.options import grouped
from tests.data.workers import DEADLINE_S, ids
from tests.plan import oracle

Stream = LazyShardedStream[LazyShardedDataset]


def open_stream(
    directory: Path, rank: int = 0, dp: int = 1, *, at_end: AtEnd = "drop", state: Any = None, **options: Any
) -> Stream:
    dataset = LazyShardedDataset(directory, dp_rank=rank, dp_size=dp, **grouped({"max_wait": DEADLINE_S, **options}))
    stream = LazyShardedStream(dataset, at_end=at_end)
    if state is not None:
        stream.load_state_dict(state)
    return stream


def loader_of(stream: Any, workers: int = 0, batch_size: int = 2, **options: Any) -> DataLoader[Any]:
    waiting: dict[str, Any] = {"timeout": DEADLINE_S, "multiprocessing_context": "fork"} if workers else {}
    arguments = {"batch_size": batch_size, "num_workers": workers, "collate_fn": ids, **waiting, **options}
    return DataLoader(stream, **arguments)


def batches(stream: Any, workers: int = 0, batch_size: int = 2, **options: Any) -> list[list[int]]:
    return list(loader_of(stream, workers, batch_size, **options))


def in_step(streams: Iterable[Any], workers: int) -> list[list[list[int]]]:
    """Returns the batches of all ranks, read step by step as they train; none has one more than another."""
    steps = list(zip(*(loader_of(stream, workers) for stream in streams), strict=True))
    return [list(rank) for rank in zip(*steps, strict=True)]


def expected(
    total: int, dp: int, batch_size: int, *, unit: int = 4, window: int = 0, epoch: int = 0, at_end: AtEnd = "drop"
) -> list[list[int]]:
    """Returns what each rank draws of an epoch, by the oracle; of a stream in chunks of four, if not said otherwise."""
    lanes = [
        oracle.shuffled(lane, window, 0, epoch, number) for number, lane in enumerate(oracle.dealt(dp, unit, 0, total))
    ]
    return oracle.ended(lanes, batch_size, at_end)


def in_batches(samples: list[int], size: int) -> list[list[int]]:
    return [samples[first : first + size] for first in range(0, len(samples), size)]


HOLDING_BACK: Final = """
import sys, time
from pathlib import Path
from lazyshard import ChunkWriter
from lazyshard.stream import list_consumers
from lazyshard.stream.listing import retire

directory, total = Path(sys.argv[1]), int(sys.argv[2])
deadline = time.monotonic() + float(sys.argv[3])
with ChunkWriter(directory, 4) as writer:
    for number in range(total):
        while writer.published_samples == number:
            # Not one chunk further than the consumer needs.
            consumers = list_consumers(directory, writer.published_chunks)
            needs = max((one.reading.needs_chunks for one in consumers if one.reading), default=0)
            before = min((one.chunks_before for one in consumers), default=0)
            retire(directory, before, writer.published_chunks)
            if needs > writer.published_chunks:
                break
            assert time.monotonic() < deadline, f"held back for ever: {consumers}"
            time.sleep(0.002)
        writer.write({"id": number, "input_ids": [number] * (1 + number % 5)}, tokens=1 + number % 5)
    most = len(list(directory.glob("chunk_*.jsonl")))
print(most)
"""
"""A producer, of a directory, rows and seconds: it holds back to what is needed, deletes what is done with, and prints
how many chunks are there at the end."""
