"""Arguments, plans and streams of small runs, that the tests share."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from lazyshard import StreamReader
from lazyshard.data.index_lengths import lengths_by_sample
from lazyshard.data.rank import Rank
from lazyshard.format.state import PartState, RunState
from lazyshard_swift.opening import GroupedStream, read_lengths
from lazyshard_swift.parallel import Facts
from lazyshard_swift.planning import decide
from lazyshard_swift.position import Position
from lazyshard_swift.rows import RowEncoder
from lazyshard_swift.run_plan import RunPlan
from lazyshard_swift.settings import groups_by_length, is_megatron
from lazyshard_swift.stream import TrainStream
from tests.data import swift_samplers
from tests.swift.defaults import DEFAULTS

_load = functools.cache(swift_samplers.load)


class TrainArguments(SimpleNamespace):
    """Stands for ms-swift's class of this name, by which arguments of training are known."""


_OURS = DEFAULTS | {"sharded_lazy": True}
_BOTH = {
    "dataset": ["/one"],
    "output_dir": "/runs/one",
    "data_seed": 42,
    "train_dataloader_shuffle": True,
    "ddp_timeout": 18_000_000,
    "num_train_epochs": None,
    "save_strategy": "steps",
    "eval_strategy": "steps",
    "group_by_length": False,
}


def megatron(**changes: Any) -> Any:
    """Returns arguments as of `megatron sft`, with ms-swift's defaults."""
    own: dict[str, Any] = {
        "micro_batch_size": 1,
        "global_batch_size": 16,
        "train_iters": None,
        "data_sharding": False,
        "finetune": True,
        "mcore_model": None,
        "mcore_adapter": None,
        "adapters": [],
        "model": None,
    }
    return TrainArguments(**{**_OURS, **_BOTH, **own, **changes})


def hugging_face(n_gpu: int = 1, **changes: Any) -> Any:
    """Returns arguments as of `swift sft`, with ms-swift's defaults."""
    trainer = SimpleNamespace(
        n_gpu=n_gpu,
        per_device_train_batch_size=changes.get("per_device_train_batch_size", 1),
        gradient_accumulation_steps=changes.pop("gradient_accumulation_steps", 1),
    )
    own: dict[str, Any] = {
        "per_device_train_batch_size": 1,
        # ms-swift leaves it so where it chooses the accumulation itself; the trainer's own arguments have the number.
        "gradient_accumulation_steps": None,
        "training_args": trainer,
        "max_steps": -1,
        "num_train_epochs": 3.0,
        "resume_from_checkpoint": None,
        "resume_only_model": False,
        "ignore_data_skip": False,
    }
    return TrainArguments(**{**_OURS, **_BOTH, **own, **changes})


def facts(samples: int = 100, ended: bool = True, samples_per_chunk: int = 4) -> Facts:
    return Facts("0123456789abcdef" * 2, samples_per_chunk, samples, ended)


def position(**changes: Any) -> Position:
    """Returns what a run that had the same ranks all the time has saved."""
    values: dict[str, Any] = {
        "stream": "0123456789abcdef" * 2,
        "directory": "/streams/one",
        "samples_per_chunk": 4,
        "consumed": 48,
        "step": 3,
        "dp_size": 2,
        "batch_size": 1,
        "layout": "strided",
        "window": 8,
        "seed": 42,
        "epoch_samples": 100,
        "by_steps": False,
        "consumer": "one-1234",
        "saved_at": 1795000000.5,
    }
    found = Position(**{**values, **changes})
    if found.layout != "strided" or "state" in changes:
        return found
    size, draws = found.samples_per_chunk, found.consumed // found.dp_size
    per_step = 0 if not found.step or draws % found.step else draws // found.step
    part = PartState(found.dp_size, found.batch_size, draws, draws_per_step=per_step)
    state = RunState(found.stream, size, size, found.window * size, found.seed, None, (part,), draws * found.dp_size)
    return replace(found, state=state)


def facts_of(directory: Path, samples_per_chunk: int | None = None) -> Facts:
    """Returns what a reader finds of a stream, as `open_train_stream` does."""
    reader = StreamReader(directory, samples_per_chunk, max_wait=0)
    published = reader.refresh()
    assert reader.stream_id is not None
    return Facts(reader.stream_id, reader.samples_per_chunk, published.samples, published.ended)


def plan(args: Any, directory: Path, rank: int, dp: int) -> RunPlan:
    facts = facts_of(directory)
    lengths = None
    if groups_by_length(args):
        lengths = read_lengths(args, str(directory), facts, sampler_of(is_megatron(args))).digest
    return decide(args, str(directory), facts, Rank(rank, dp), lengths)


def sampler_of(megatron: bool) -> type[Any]:
    """Returns ms-swift's real sampler, without ms-swift around it."""
    if megatron:
        found: type[Any] = _load("megatron/trainers/batch_sampler.py").MegatronPretrainingRandomSampler
    else:
        found = _load("dataloader/shard.py").BatchSamplerShard
    return found


def open_stream(run: RunPlan, *, max_wait: float = 0.0) -> TrainStream:
    """Opens the stream of a plan. Its samples are the ids of the rows. What is not there yet is an error at once."""
    encoder = cast("RowEncoder", lambda row: row["id"])
    options: dict[str, Any] = {"max_wait": max_wait, "on_bad_sample": "raise", "samples_per_chunk": None}
    if run.grouping is not None:
        tokens = lengths_by_sample(StreamReader(run.directory, max_wait=max_wait), run.total)
        return GroupedStream(run, encoder, tokens, **options)
    return TrainStream(run, encoder, **options)
