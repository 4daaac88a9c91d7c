"""The ranks of `scripts/bench_scatter`: one process each, which times how long it takes to get each step's batch.

All ranks begin a step together, as after the gradients of the step before were summed. That barrier is not timed.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import orjson
import torch
import torch.distributed as dist
from swift.dataloader import DataLoaderDispatcher
from torch.multiprocessing.spawn import start_processes
from torch.utils.data import DataLoader, IterableDataset

from lazyshard import LazyShardedDataset
from scripts.benchmarks.bench_scatter_figures import OURS, VARIANTS, Data, Found, Pass

_PATIENCE: Final = timedelta(minutes=5)
"""Until the ranks give up waiting for one that is gone."""

_READ_BYTES: Final = 1 << 20


class Lines(IterableDataset[Any]):
    """Reads the first rows of the chunk files one after the other: no digest, no index, no order of its own."""

    def __init__(self, directory: Path, rows: int) -> None:
        self._directory = directory
        self._rows = rows

    def _lines(self) -> Iterator[bytes]:
        for path in sorted(self._directory.glob("chunk_*.jsonl")):
            with path.open("rb", buffering=_READ_BYTES) as file:
                yield from file

    def __iter__(self) -> Iterator[Any]:
        """Yields parsed rows."""
        return map(orjson.loads, itertools.islice(self._lines(), self._rows))


class Timed:
    """A loader that counts the seconds until its batches are there."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self.seconds = 0.0

    def __iter__(self) -> Iterator[Any]:
        """Yields the loader's batches."""
        batches = iter(self._loader)
        while True:
            start = time.perf_counter()
            try:
                batch = next(batches, None)
            except StopIteration:
                return
            finally:
                self.seconds += time.perf_counter() - start
            yield batch


class GroupDispatcher(DataLoaderDispatcher):  # type: ignore[misc]  # untyped
    """ms-swift's dispatcher among some of the ranks, as `MegatronDataLoaderDispatcher` does it."""

    def __init__(self, loader: Timed, group: dist.ProcessGroup) -> None:
        super().__init__(loader)
        self._group = group

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that take part."""
        return self._group


def run_ranks(place: Path, data: list[Data], ranks: list[int], rounds: int) -> Found:
    """Runs as many processes as the highest number of ranks, and returns what they found.

    With fewer ranks, the other processes wait idle. All variants take turns in each round; a first round to warm the
    caches is left out.

    Raises:
        ProcessRaisedException, ProcessExitedException: a rank failed.
    """
    # Forked, so that ms-swift is imported once.
    arguments = max(ranks), place, data, ranks, rounds
    start_processes(_rank, arguments, nprocs=max(ranks), start_method="fork")  # type: ignore[no-untyped-call]
    found: Found = {}
    for rank in range(max(ranks)):
        for *case, one in json.loads(_record(place, rank).read_bytes()):
            found.setdefault((case[0], case[1], case[2], case[3]), []).append(Pass(**one))
    return found


def _record(place: Path, rank: int) -> Path:
    return place / f"rank_{rank}.json"


def _rank(rank: int, size: int, place: Path, data: list[Data], ranks: list[int], rounds: int) -> None:
    # What gloo says goes to the same place on every machine: this one.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    # That a stream goes on after what is drawn of it is meant so.
    logging.getLogger("lazyshard").setLevel(logging.ERROR)
    dist.init_process_group(
        "gloo", init_method=f"file://{place / 'rendezvous'}", rank=rank, world_size=size, timeout=_PATIENCE
    )
    groups = {some: dist.new_group(list(range(some))) for some in ranks}
    found = []
    for number in range(rounds + 1):
        for one, some in itertools.product(data, ranks):
            # Each goes first every other time.
            for variant in VARIANTS if number % 2 else VARIANTS[::-1]:
                dist.barrier()
                if rank < some:
                    passed = _pass(one, rank, some, variant, groups[some])
                    if number:
                        found.append((number, one.name, some, variant, vars(passed)))
    dist.barrier()
    dist.destroy_process_group()
    _record(place, rank).write_text(json.dumps(found))


def _as_it_is(batch: list[Any]) -> list[Any]:
    return batch


def _pass(data: Data, rank: int, ranks: int, variant: str, group: dist.ProcessGroup) -> Pass:
    """Takes all batches of a rank, and makes sure that none follows."""
    total = ranks * data.batch * data.steps
    loader: DataLoader[Any]
    if variant == OURS:
        dataset = LazyShardedDataset(
            data.directory, dp_rank=rank, dp_size=ranks, batch_size=data.batch, max_total_samples=total
        )
        loader = DataLoader(dataset, data.batch, sampler=dataset.rank_indices, num_workers=0, collate_fn=_as_it_is)
        timed = Timed(loader)
        batches = iter(timed)
    else:
        loader = DataLoader(Lines(data.directory, total), data.batch, num_workers=0, collate_fn=_as_it_is)
        timed = Timed(loader)
        batches = iter(GroupDispatcher(timed, group))
    found = Pass([], [], [], [], [])
    who = f"data {data.name}, {variant}, rank {rank} of {ranks}"
    for step in range(data.steps):
        dist.barrier(group)
        loaded = timed.seconds
        processor, clock = time.process_time(), time.perf_counter()
        batch = next(batches, None)
        found.ms.append((time.perf_counter() - clock) * 1e3)
        found.begun.append(clock * 1e3)
        found.processor_ms.append((time.process_time() - processor) * 1e3)
        found.loading_ms.append((timed.seconds - loaded) * 1e3)
        if batch is None:
            raise RuntimeError(f"{who}: no batch came for step {step} of {data.steps}")
        found.ids.extend(row["id"] for row in batch)
    if next(batches, None) is not None:
        raise RuntimeError(f"{who}: a batch follows the last one")
    return found
