"""The processes of a data set: data-parallel rank, the parent of a DataLoader worker, and shared numbers.

A torch worker itself checks whether its training process is alive, but records its parent only some time after the fork
(`ManagerWatchdog` of `torch/utils/data/_utils/worker.py`); if the training process is killed before that, the worker
never notices. Also, a loader abandoned in mid-stream gives its workers five seconds each, one after the other
(`_shutdown_workers` of `torch/utils/data/dataloader.py`). So our workers end soon after their process or loader.
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

# Samplers that a DataLoader of torch or torchdata creates if none is passed.
_DEALS_ALL: Final = frozenset({"SequentialSampler", "RandomSampler", "_StatefulRandomSamplerIterator"})


class Rank(NamedTuple):
    """A data-parallel rank in the half-open range [0, dp_size)."""

    dp_rank: int
    dp_size: int


def resolve_rank(dp_rank: int | None = None, dp_size: int | None = None) -> Rank:
    """Returns the given rank and size, else Megatron's, else torch.distributed's, else 0 of 1.

    With Megatron all tensor-, pipeline- and context-parallel peers of a data-parallel rank get the same result.

    Raises:
        ConfigInvalid: only one of the two is given, they are invalid, or this is one of several processes of `torchrun`
            and nothing is initialised yet: as rank 0 of 1, each process would train on all the data.
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
        raise ConfigInvalid(f"{text} would train on all the data: initialise one, or pass dp_rank and dp_size")
    else:
        return Rank(0, 1)
    if type(dp_rank) is not int or type(dp_size) is not int or not 0 <= dp_rank < dp_size:
        both = "dp_rank and dp_size must be passed together, " if None in (dp_rank, dp_size) else ""
        text = f"{both}expected 0 <= dp_rank < dp_size, got dp_rank={dp_rank!r} and dp_size={dp_size!r}"
        raise ConfigInvalid(text, dp_rank=dp_rank, dp_size=dp_size)
    return Rank(dp_rank, dp_size)


def check_dealt(rank: Rank, name: str, where: object) -> None:
    """Raises ConfigInvalid if the length is read for a DataLoader without a sampler, which draws all on every rank.

    Reading the length is the only call that every rank makes in its main process before the first batch: the first
    indices are those of rank 0 even without a sampler. Only torch's own loaders are refused: accelerate's distribute
    the batches themselves.
    """
    # Skips this function and `__len__` of the data set.
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


# The process that looked up its parent last, and the parent.
_found: tuple[int, Parent] | None = None


def parent_of_worker(pid: int | None = None) -> Parent:
    """Returns the training process of this DataLoader worker, by `pid` if given, and ends this process after it."""
    global _found
    if _found is None or _found[0] != os.getpid():
        names = () if (loop := _worker_loop()) is None else inspect.signature(loop).parameters
        arguments = dict(zip(names, getattr(multiprocessing.current_process(), "_args", ()), strict=False))
        # `done_event` is set once the loader of this worker has ended.
        _found = (os.getpid(), Parent(pid, getattr(arguments.get("done_event"), "is_set", None)))
        _found[1].follow()
    return _found[1]


def _worker_loop() -> Callable[..., object] | None:
    """Returns the main function of this process if it is a worker; other processes may outlive their parents."""
    loop = getattr(multiprocessing.current_process(), "_target", None)
    # That of torch or torchdata.
    return loop if getattr(loop, "__name__", "") == "_worker_loop" else None


def _follow(_: object) -> None:
    # Runs before the worker's own loop, for every start method.
    started_by = multiprocessing.parent_process()
    if started_by is None or _worker_loop() is None:
        return
    # A child of the fork server is not a child of the training process.
    parent_of_worker(None if multiprocessing.get_start_method(allow_none=True) == "forkserver" else started_by.pid)


def enter_process(reader: StreamReader, rank: Rank) -> None:
    """Sets up a reader for this process, a DataLoader worker or the main process."""
    worker, label = get_worker_info(), f"rank {rank.dp_rank} of {rank.dp_size}"
    reader.label = label if worker is None else f"{label}, worker {worker.id}"
    # Newer releases of torch have thread workers, which end with their process.
    apart = worker is not None and getattr(worker, "worker_method", "multiprocessing") == "multiprocessing"
    reader.parent = parent_of_worker() if apart else None


# The main process and 255 workers. The tensor stays below 32 KiB: torch copies a larger one with several threads when
# it is shared (`GRAIN_SIZE` in aten/src/ATen/TensorIterator.h), and in a fork of a process that had such threads the
# copy waits for them forever.
_ROWS: Final = 256
_COLUMNS: Final = 9

# Indices into the view. The first column of a row is not a statistic. In the first row it holds the epoch, at index 0;
# in the second, whether a process has checked that the order keeps the dealing of the stream; in the third, whether a
# process has called `in_epoch`; in the fourth, how many workers return the samples of an iterable, which the main
# process cannot see.
EPOCH: Final = 0
ORDER_CHECKED: Final = _COLUMNS
IN_EPOCH_CALLED: Final = 2 * _COLUMNS
WORKERS_READ: Final = 3 * _COLUMNS


@contextmanager
def carrying() -> Iterator[None]:
    """Makes errors that leave a DataLoader worker keep their fields."""
    try:
        yield
    except LazyShardError as error:
        if get_worker_info() is not None:
            error.carry_fields()
        raise


class Stats(NamedTuple):
    """Statistics of a data set so far, over this process and its DataLoader workers.

    Attributes:
        bad_samples: samples that could not be read or encoded, counted once by each process that drew them.
        chunks_opened: number of times a chunk was opened; each worker opens its own.
        waited_s: seconds spent waiting for the producer, summed over the workers.
        dropped: drawn samples whose rows were dropped, by a filter or `SkipSample`.
        filled: drawn samples that were replaced by other rows, because their own were dropped or bad.
        encoded: with an `EncodeCache` in a directory: rows that were encoded.
        from_cache: rows whose sample was taken from the cache.
        not_cached: encoded rows whose sample was not cached, because it holds values that cannot be restored exactly,
            or there was no room.
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
    """The epoch, and the statistics of each process, in a tensor that torch shares with forked and spawned workers.

    `view` is the flat tensor: `view[EPOCH]` is the epoch. Each worker adds to its own row, so nothing is locked. If two
    DataLoaders use one data set at the same time, or one has more than 255 workers, the statistics may miss some.
    """

    def __init__(self) -> None:
        self.__setstate__({"_tensor": torch.zeros((_ROWS, _COLUMNS), dtype=torch.int64)})

    def __getstate__(self) -> dict[str, Any]:
        """Returns the tensor alone; torch's own pickler shares it, an ordinary pickler copies it."""
        return {"_tensor": self._tensor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # No effect on a shared tensor; a copy has to be shared with the workers to come.
        self._tensor: torch.Tensor = state["_tensor"].share_memory_()
        # Workers forked while a data set exists follow this process from the start. A worker that was spawned, and has
        # just received its data set, follows its parent.
        multiprocessing.util.register_after_fork(self, _follow)
        # Reading a flat memoryview takes 30 ns, a tensor 500 ns.
        self.view = memoryview(self._tensor.numpy().data).cast("B").cast("q")

    def report(self, now: Stats, before: Stats) -> None:
        """Adds this process's statistics since its last report; both arguments are its totals."""
        worker = get_worker_info()
        start = 0 if worker is None else (1 + worker.id % (_ROWS - 1)) * _COLUMNS
        for column, (new, old) in enumerate(zip(now, before, strict=True), 1):
            # Seconds are stored as milliseconds.
            self.view[start + column] += round(new * 1000) - round(old * 1000) if column == 3 else int(new - old)

    def stats(self) -> Stats:
        """Returns the sum over all processes."""
        _, bad, opened, waited_ms, *others = self._tensor.sum(dim=0).tolist()
        return Stats(bad, opened, waited_ms / 1000, *others)
