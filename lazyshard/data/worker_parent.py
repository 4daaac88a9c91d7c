"""The training process of a DataLoader worker: a worker ends soon after it, however early that ends.

A worker looks itself, but remembers whose child it is a little after it was forked (`ManagerWatchdog` of
`torch/utils/data/_utils/worker.py`): killed within that time, its training process is never missed, and the worker
waits for its first batch for ever.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os

from lazyshard.storage.watch import Parent

__all__ = ["parent_of_worker", "watch_forks"]

# The process that has looked last, and its parent.
_found: tuple[int, Parent] | None = None


def parent_of_worker(pid: int | None = None) -> Parent:
    """Returns the process for which this DataLoader worker works, and ends this one soon after it.

    Args:
        pid: its process id, None if it is not known.
    """
    global _found
    if _found is None or _found[0] != os.getpid():
        _found = (os.getpid(), Parent(pid))
        _found[1].follow()
    return _found[1]


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
    if started_by is None or getattr(loop, "__name__", "") != "_worker_loop":
        return
    # The child of a fork server is no child of the process that it works for.
    served = multiprocessing.get_start_method(allow_none=True) == "forkserver"
    parent_of_worker(None if served else started_by.pid)
