"""The training process of a DataLoader worker: a worker ends soon after it, however early that is, or with its loader.

A worker looks itself, but remembers whose child it is a little after it was forked (`ManagerWatchdog` of
`torch/utils/data/_utils/worker.py`): killed within that time, its training process is never missed, and the worker
waits for its first batch for ever. And a loader that is left in mid-stream gives each of its workers five seconds, one
after the other, before it kills them (`_shutdown_workers` of `torch/utils/data/dataloader.py`): a worker that waits for
rows that nobody will take any more is to end at once.
"""

from __future__ import annotations

import inspect
import multiprocessing
import multiprocessing.util
import os
from collections.abc import Callable
from typing import Final

from lazyshard.stream.waiting import Parent

__all__ = ["parent_of_worker", "watch_forks"]

_LOOP: Final = "_worker_loop"
"""What a worker runs, of torch and of torchdata."""

_DONE: Final = "done_event"
"""Its argument that tells that the loader has ended."""

# The process that has looked last, and its parent.
_found: tuple[int, Parent] | None = None


def parent_of_worker(pid: int | None = None) -> Parent:
    """Returns the process for which this DataLoader worker works, and ends this one soon after it.

    Args:
        pid: its process id, None if it is not known.
    """
    global _found
    if _found is None or _found[0] != os.getpid():
        _found = (os.getpid(), Parent(pid, _loader_done()))
        _found[1].follow()
    return _found[1]


def _loader_done() -> Callable[[], bool] | None:
    """Returns what tells whether the loader of this worker has ended; None where the loop is not that of a worker."""
    process = multiprocessing.current_process()
    loop, given = getattr(process, "_target", None), getattr(process, "_args", ())
    if loop is None or getattr(loop, "__name__", "") != _LOOP:
        return None
    names = list(inspect.signature(loop).parameters)
    event = given[names.index(_DONE)] if _DONE in names and names.index(_DONE) < len(given) else None
    return getattr(event, "is_set", None)


def watch_forks(dataset: object) -> None:
    """Has DataLoader workers that are forked while a data set is there follow this process from the first.

    If this process is a worker that was spawned, and has just been given its data set, it follows its parent itself.
    """
    multiprocessing.util.register_after_fork(dataset, _follow)


def _follow(_: object) -> None:
    # Runs before the worker's own loop, however the process was started.
    started_by = multiprocessing.parent_process()
    # That of torch, and of torchdata, whose name is the same; other processes may be meant to outlive this one.
    loop = getattr(multiprocessing.current_process(), "_target", None)
    if started_by is None or getattr(loop, "__name__", "") != _LOOP:
        return
    # The child of a fork server is no child of the process that it works for.
    served = multiprocessing.get_start_method(allow_none=True) == "forkserver"
    parent_of_worker(None if served else started_by.pid)
