"""Which data-parallel rank this process is, what all ranks agree upon, and what is told once for all of them.

Lines go through ms-swift's logger, which is silent on all but the first rank of a node.
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeVar

import torch.distributed as dist

from lazyshard.data import resolve_rank
from lazyshard.data.rank import Rank
from lazyshard.errors import redact
from lazyshard.store.urls import stream_name
from lazyshard_swift.ms_swift import is_megatron

_T = TypeVar("_T")
_COMING_S: Final = 30.0
"""Ranks that wait for the same samples give up within seconds of each other."""
_POLL_S: Final = 0.5

FOREIGN: Final = "first-row-"
"""Begins the identity of a stream that has no id: a digest of its first row follows."""


def stream_id_of(stream: str) -> str | None:
    """Returns the id in the manifest of the stream of this identity, None where it has none."""
    return None if stream.startswith(FOREIGN) else stream


class Facts(NamedTuple):
    """What is known of a stream, or of the positions of a blend, when the ranks start; the same on all of them.

    `stream` is the id of its manifest, or a digest of its first row; rows that were `dealt` by cost are read in order.
    """

    stream: str
    samples_per_chunk: int
    samples: int
    ended: bool
    dealt: bool = False

    @property
    def total(self) -> int | None:
        """Samples of the stream, None if it was still being produced when the run started."""
        return self.samples if self.ended else None


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams that a run trains, one or several in a blend; the same on every rank.

    `units` are how many samples of each a rank is dealt in a row; empty before that is decided.
    """

    directories: tuple[str, ...]
    facts: tuple[Facts, ...]
    weights: tuple[float, ...] = (1.0,)
    stopping: Literal["first_exhausted", "all_exhausted"] = "first_exhausted"
    units: tuple[int, ...] = ()

    @property
    def blended(self) -> bool:
        """Whether there are several."""
        return len(self.directories) > 1

    @property
    def where(self) -> str:
        """The directories, for messages."""
        return ", ".join(self.directories)

    @property
    def names(self) -> tuple[str, ...]:
        """How the state of a blend calls them."""
        pairs = zip(self.directories, self.facts, strict=True)
        return tuple(stream_id_of(facts.stream) or stream_name(directory) for directory, facts in pairs)


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


def barrier() -> None:
    """Waits for all ranks, where there are several."""
    if _several():
        dist.barrier()


def is_first() -> bool:
    """Returns whether this is the one process that writes for all."""
    return not _several() or dist.get_rank() == 0


def notice(text: str) -> None:
    """Tells something once for the whole job."""
    _swift_logger().info("lazyshard: %s", redact(text))


def caution(text: str) -> None:
    """Tells something once for the whole job that goes wrong unless somebody acts."""
    _swift_logger().warning("lazyshard: %s", redact(text))


def attend() -> None:
    """Makes the lines of the library itself visible on every rank, unless the program has set up logging."""
    logger = logging.getLogger("lazyshard")
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(levelname)s:lazyshard] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


def _swift_logger() -> Any:
    try:
        from swift.utils import get_logger
    except ImportError:
        return logging.getLogger("lazyshard")
    return get_logger()
