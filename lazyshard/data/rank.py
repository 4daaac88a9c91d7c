"""Which data-parallel rank this process is, and of how many."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

import torch.distributed

from lazyshard.errors import RankInvalid


class Rank(NamedTuple):
    """A data-parallel rank of the half-open range [0, dp_size)."""

    dp_rank: int
    dp_size: int


def resolve_rank(dp_rank: int | None = None, dp_size: int | None = None) -> Rank:
    """Returns the rank and size to read for.

    What is given counts; else Megatron's `mpu` if model parallelism is initialised; else `torch.distributed` if it
    is; else 0 of 1. With Megatron all tensor-, pipeline- and context-parallel peers of a data-parallel rank get the
    same answer.

    Raises:
        RankInvalid: only one of the two is given, they are impossible, or this is one of several processes of
            `torchrun` in which nothing is initialised yet: as 0 of 1 each would train on everything.
    """
    if (dp_rank is None) != (dp_size is None):
        raise RankInvalid(
            f"dp_rank and dp_size belong together, got dp_rank={dp_rank} and dp_size={dp_size}",
            dp_rank=dp_rank,
            dp_size=dp_size,
        )
    if dp_rank is not None and dp_size is not None:
        return _check(dp_rank, dp_size)
    mpu = sys.modules.get("megatron.core.parallel_state")
    if mpu is not None and mpu.model_parallel_is_initialized():
        return _check(mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size())
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return _check(torch.distributed.get_rank(), torch.distributed.get_world_size())
    world = os.environ.get("WORLD_SIZE", "1")
    if world not in ("", "1"):
        raise RankInvalid(
            f"WORLD_SIZE is {world}, but neither Megatron nor torch.distributed is initialised, so every process would "
            f"train on all the data; initialise one of them before the data set is used, or pass dp_rank and dp_size"
        )
    return Rank(0, 1)


def _check(dp_rank: int, dp_size: int) -> Rank:
    if type(dp_rank) is not int or type(dp_size) is not int or not 0 <= dp_rank < dp_size:
        raise RankInvalid(
            f"expected 0 <= dp_rank < dp_size, got dp_rank={dp_rank!r} and dp_size={dp_size!r}",
            dp_rank=dp_rank,
            dp_size=dp_size,
        )
    return Rank(dp_rank, dp_size)
