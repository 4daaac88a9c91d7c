"""Which data-parallel rank this process is, and what all ranks agree upon."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any, Final, TypeVar

import torch.distributed as dist

from lazyshard.data import resolve_rank
from lazyshard.data.rank import Rank
from lazyshard_swift.ms_swift import is_megatron

_T = TypeVar("_T")
_COMING_S: Final = 30.0
"""Ranks that wait for the same samples give up within seconds of each other."""
_POLL_S: Final = 0.5


def data_parallel_rank(args: Any) -> Rank:
    """Returns the rank for which this process reads, the same for all model-parallel peers (DeepSpeed's included)."""
    rank, deepspeed, size = resolve_rank(), getattr(args, "deepspeed", None), 1
    if not is_megatron(args) and isinstance(deepspeed, dict):
        size = (deepspeed.get("tensor_parallel") or {}).get("autotp_size") or 1
    return Rank(rank.dp_rank // size, rank.dp_size // size)


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def agree(value: _T) -> _T:
    """Returns the value of global rank 0 on all ranks. A collective: every rank calls it."""
    values = [value]
    if _several():
        dist.broadcast_object_list(values, src=0)
    return values[0]


def barrier() -> None:
    """Waits for all ranks, where there are several."""
    if _several():
        dist.barrier()


def is_first() -> bool:
    """Returns whether this is the one process that writes for all."""
    return not _several() or dist.get_rank() == 0


def all_come(key: str) -> bool:
    """Returns whether every rank calls this with the same key within some seconds; no collective that could hang."""
    if not _several():
        return True
    try:
        store = dist.distributed_c10d._get_default_store()
        return _all_come(store, f"lazyshard/{key}", dist.get_world_size(), _COMING_S)
    except (AttributeError, RuntimeError, ValueError):
        # The process that holds the store has ended, or there is none.
        return False


def _all_come(store: Any, key: str, ranks: int, patience: float) -> bool:
    deadline = time.monotonic() + patience
    came = store.add(f"{key}/came", 1)
    while came < ranks and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        came = store.add(f"{key}/came", 0)
    # Whoever is first decides, for those too that come in the same moment.
    return bool(store.compare_set(f"{key}/decision", "", "all" if came >= ranks else "not all") == b"all")


def attend() -> None:
    """Makes the lines of the library itself visible on every rank, unless the program has set up logging."""
    logger = logging.getLogger("lazyshard")
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(levelname)s:lazyshard] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
