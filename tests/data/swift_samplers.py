"""The two sampler modules of the ms-swift that is installed, loaded by path without its gigabytes of dependencies."""

import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Iterable, Sized
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock


@cache
def load(file: str) -> ModuleType:
    """Loads a file of the package `swift`, which finds stand-ins for the two light names that it imports from it."""
    try:
        root = importlib.metadata.distribution("ms-swift")
    except importlib.metadata.PackageNotFoundError:
        raise AssertionError("ms-swift is not installed; run `scripts/environment full`") from None
    path = Path(str(root.locate_file("swift"))) / file
    spec = importlib.util.spec_from_file_location(f"real_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    swift, utils = ModuleType("swift"), ModuleType("swift.utils")
    vars(utils).update(get_logger=logging.getLogger, to_device=lambda data, device: data)
    with mock.patch.dict(sys.modules, {"swift": swift, "swift.utils": utils}):
        spec.loader.exec_module(module)
    return module


def megatron_batches(
    dataset: Sized, rank: int, dp: int, batch: int, *, sharding: bool, shuffle: bool, consumed: int = 0
) -> list[list[int]]:
    """Returns what `MegatronPretrainingRandomSampler` yields on a rank, behind `consumed` samples."""
    where = {"data_parallel_rank": rank, "data_parallel_size": dp, "data_sharding": sharding}
    sampler = load("megatron/trainers/batch_sampler.py").MegatronPretrainingRandomSampler(
        dataset=dataset, total_samples=len(dataset), consumed_samples=consumed, micro_batch_size=batch,
        shuffle=shuffle, **where,
    )  # fmt: skip
    return list(sampler)


def shard_batches(total: int, rank: int, dp: int, batch: int, *, shuffle: bool, epoch: int = 0) -> list[list[int]]:
    real = load("dataloader/shard.py").BatchSamplerShard
    placed = type("Placed", (real,), {"rank": rank, "world_size": dp})
    sampler: Any = placed(total_samples=total, batch_size=batch, shuffle=shuffle, drop_last=True, data_seed=7)
    sampler.set_epoch(epoch)
    batches: Iterable[list[int]] = sampler
    return list(batches)
