"""The processes of a data set: their data-parallel rank, the process that a worker works for, and shared numbers.

A worker of torch looks itself whether its training process is there, but remembers whose child it is a little after it
was forked (`ManagerWatchdog` of `torch/utils/data/_utils/worker.py`): killed within that time, its training process is
never missed. And a loader that is left in mid-stream gives each of its workers five seconds, one after the other
(`_shutdown_workers` of `torch/utils/data/dataloader.py`). So ours end soon after their process, and with their loader.
"""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import multiprocessing.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch.distributed
from torch.utils.data import get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lazyshard.errors import ConfigInvalid, LazyShardError
from lazyshard.stream import StreamReader
from lazyshard.stream.waiting import Parent

log: Final = logging.getLogger("lazyshard")

# What a DataLoader of torch or torchdata goes by where it is given no sampler.
_DEALS_ALL: Final = frozenset({"SequentialSampler", "RandomSampler", "_StatefulRandomSamplerIterator"})


class Rank(NamedTuple):
    """A data-parallel rank of the half-open range [0, dp_size)."""

    dp_rank: int
    dp_size: int


def resolve_rank(dp_rank: int | None = None, dp_size: int | None = None) -> Rank:
    """Returns the rank and size to read for: those given, else Megatron's, else torch.distributed's, else 0 of 1.

    With Megatron all tensor-, pipeline- and context-parallel peers of a data-parallel rank get the same answer.

    Raises:
        ConfigInvalid: only one of the two is given, they are impossible, or this is one of several processes of
            `torchrun` in which nothing is initialised yet: as 0 of 1 each would train on everything.
    """
    mpu = sys.modules.get("megatron.core.parallel_state")
    if dp_rank is not None or dp_size is not None:
        pass
    elif mpu is not None and mpu.model_parallel_is_initialized():
        dp_rank, dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    elif torch.distributed.is_available() and torch.distributed.is_initialized():
        dp_rank, dp_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    elif (world := os.environ.get("WORLD_SIZE", "1")) not in ("", "1"):
        text = f"WORLD_SIZE is {world}, but neither Megatron nor torch.distributed is initialised, so every process"
        raise ConfigInvalid(f"{text} would train on all the data: initialise one, or pass dp_rank, dp_size")
    else:
        return Rank(0, 1)
    if type(dp_rank) is not int or type(dp_size) is not int or not 0 <= dp_rank < dp_size:
        both = "dp_rank and dp_size belong together, " if None in (dp_rank, dp_size) else ""
        text = f"{both}expected 0 <= dp_rank < dp_size, got dp_rank={dp_rank!r} and dp_size={dp_size!r}"
        raise ConfigInvalid(text, dp_rank=dp_rank, dp_size=dp_size)
    return Rank(dp_rank, dp_size)


def check_dealt(rank: Rank, name: str, where: object) -> None:
    """Raises ConfigInvalid where a DataLoader without a sampler, which draws all on every rank, asks for a length.

    That alone is asked for in the main process of every rank before the first batch: the first indices are those of
    rank 0 also without a sampler. Only torch's own loaders are refused: accelerate's deal batches out behind it.
    """
    # Behind this function and `__len__`, of the data set.
    frame = sys._getframe(2)
    if rank.dp_size == 1 or type(frame.f_locals.get("self")).__name__ not in _DEALS_ALL:
        return
    begins, module = False, ""
    for caller, _ in traceback.walk_stack(frame):
        module = str(caller.f_globals.get("__name__")).partition(".")[0]
        if module not in ("torch", "torchdata"):
            break
        begins = begins or isinstance(caller.f_locals.get("self"), _BaseDataLoaderIter)
    if begins and module != "accelerate":
        text = f"{where}: a DataLoader without a sampler draws all samples on each of {rank.dp_size} ranks: give it"
        raise ConfigInvalid(f"{text} sampler={name}.rank_indices, or iterate over {name}.batches()", **rank._asdict())


# The process that has looked last, and its parent.
_found: tuple[int, Parent] | None = None


def parent_of_worker(pid: int | None = None) -> Parent:
    """Returns the process for which this DataLoader worker works, of this id if it is known; ends this one after it."""
    global _found
    if _found is None or _found[0] != os.getpid():
        names = () if (loop := _worker_loop()) is None else inspect.signature(loop).parameters
        arguments = dict(zip(names, getattr(multiprocessing.current_process(), "_args", ()), strict=False))
        # Tells whether the loader of this worker has ended.
        _found = (os.getpid(), Parent(pid, getattr(arguments.get("done_event"), "is_set", None)))
        _found[1].follow()
    return _found[1]


def _worker_loop() -> Callable[..., object] | None:
    """Returns what this process runs if it is a worker; other processes may be meant to outlive their parents."""
    loop = getattr(multiprocessing.current_process(), "_target", None)
    # Of torch, and of torchdata.
    return loop if getattr(loop, "__name__", "") == "_worker_loop" else None


def _follow(_: object) -> None:
    # Runs before the worker's own loop, however the process was started.
    started_by = multiprocessing.parent_process()
    if started_by is None or _worker_loop() is None:
        return
    # The child of a fork server is no child of the process that it works for.
    parent_of_worker(None if multiprocessing.get_start_method(allow_none=True) == "forkserver" else started_by.pid)


def enter_process(reader: StreamReader, rank: Rank) -> None:
    """Makes a reader this process's own: a DataLoader worker's, or the main process's."""
    worker, label = get_worker_info(), f"rank {rank.dp_rank} of {rank.dp_size}"
    reader.label = label if worker is None else f"{label}, worker {worker.id}"
    # Newer releases of torch have workers that are threads: those end with their process.
    apart = worker is not None and getattr(worker, "worker_method", "multiprocessing") == "multiprocessing"
    reader.parent = parent_of_worker() if apart else None


# The main process and 255 workers. All of it stays below 32 KiB: what is larger torch copies by several threads when it
# is shared (`GRAIN_SIZE` in aten/src/ATen/TensorIterator.h), and in a process that was forked from one that had such
# threads it waits for them for ever.
_ROWS: Final = 256
_COLUMNS: Final = 9

# Places in the view. Only the first column of a row does not count: the first row has the epoch there, in which index 0
# lies; the second whether some process has looked if the order undoes how the stream was dealt; the third whether some
# process has asked if an index is still in the epoch; the fourth how many workers hand out what an
# iterable draws, which the main process cannot see.
EPOCH: Final = 0
ORDER_CHECKED: Final = _COLUMNS
ASKED: Final = 2 * _COLUMNS
WORKERS_READ: Final = 3 * _COLUMNS


@contextmanager
def carrying() -> Iterator[None]:
    """Has errors that leave a DataLoader worker keep their fields."""
    try:
        yield
    except LazyShardError as error:
        if get_worker_info() is not None:
            error.carry_fields()
        raise


class Stats(NamedTuple):
    """What a data set has met so far, over this process and its DataLoader workers.

    Attributes:
        bad_samples: samples that could not be read or encoded, counted once by each process that met them.
        chunks_opened: how many times a chunk was opened; each worker opens its own.
        waited_s: seconds spent waiting for the producer, added up over the workers.
        dropped: samples drawn whose rows a filter dropped, or `SkipSample`.
        filled: samples drawn in whose places other rows stand, as theirs were dropped or bad.
        encoded: with an `EncodeCache` in a directory: rows that were encoded.
        from_cache: rows that were not, as what is made of them was in the cache.
        not_cached: rows encoded of which the cache did not take what was made, as it holds values that would not come
            back as they are, or there was no room.
    """

    bad_samples: int = 0
    chunks_opened: int = 0
    waited_s: float = 0.0
    dropped: int = 0
    filled: int = 0
    encoded: int = 0
    from_cache: int = 0
    not_cached: int = 0


class SharedNumbers:
    """The epoch, and what each process has met, in a tensor that torch hands to forked and spawned workers alike.

    `view` is the same flat: `view[EPOCH]` is the epoch. Each worker adds to its own row, so nothing is locked. Where
    two DataLoaders run over one data set at a time, or one has more than 255 workers, the statistics may miss some.
    """

    def __init__(self) -> None:
        self.__setstate__({"_tensor": torch.zeros((_ROWS, _COLUMNS), dtype=torch.int64)})

    def __getstate__(self) -> dict[str, Any]:
        """Keeps the tensor alone; torch's own pickler shares it, an ordinary one copies it."""
        return {"_tensor": self._tensor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Does nothing to one that is shared; a copy has to be shared with the workers that it will have.
        self._tensor: torch.Tensor = state["_tensor"].share_memory_()
        # Workers that are forked while a data set is there follow this process from the first. One that was spawned,
        # and has just been given its data set, follows its parent.
        multiprocessing.util.register_after_fork(self, _follow)
        # A flat memoryview is read in 30 ns, a tensor in 500.
        self.view = memoryview(self._tensor.numpy().data).cast("B").cast("q")

    def report(self, now: Stats, before: Stats) -> None:
        """Adds what this process has met since it last reported; both as its own sums."""
        worker = get_worker_info()
        start = 0 if worker is None else (1 + worker.id % (_ROWS - 1)) * _COLUMNS
        for column, (new, old) in enumerate(zip(now, before, strict=True), 1):
            # Seconds as milliseconds.
            self.view[start + column] += round(new * 1000) - round(old * 1000) if column == 3 else int(new - old)

    def stats(self) -> Stats:
        """Adds up what all processes have met."""
        _, bad, opened, waited_ms, *others = self._tensor.sum(dim=0).tolist()
        return Stats(bad, opened, waited_ms / 1000, *others)
