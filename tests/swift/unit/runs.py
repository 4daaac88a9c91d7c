"""Arguments, plans, checkpoints and streams of small runs, that the tests share."""

import functools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

from lazyshard import BadRows, EncodeCache, StreamReader
from lazyshard.data.index_space import lengths_by_sample
from lazyshard.data.rank import Rank
from lazyshard.format.state import RunState
from lazyshard.part import Part
from lazyshard_swift import checkpoints
from lazyshard_swift.checkpoints import Position, save_position
from lazyshard_swift.ms_swift import is_megatron
from lazyshard_swift.opening import _packed, decide, open_train_stream
from lazyshard_swift.run_plan import RunPlan, Stream
from lazyshard_swift.stream import TrainStream, read_lengths
from tests.data import swift_samplers

_NAMES = (
    "samples_per_chunk max_wait shuffle_window shuffle_distance unit consumer on_bad_sample on_end skip encode_cache "
    "encode_cache_size take_over"
)
DEFAULTS: Final[dict[str, Any]] = {
    **{"sharded_lazy": False, **dict.fromkeys(f"sharded_lazy_{name}" for name in _NAMES.split())},
    **{"sharded_lazy_max_wait": 600.0, "sharded_lazy_on_end": "stop", "sharded_lazy_take_over": False},
}
"""Our arguments and what they are if nobody gives them, in the order in which help shows them."""

load = functools.cache(swift_samplers.load)
DIRECTORY = "/streams/one"
MARKS = {"megatron": "latest_checkpointed_iteration.txt", "swift": "trainer_state.json"}
"""What each trainer writes last into a checkpoint."""


class TrainArguments(SimpleNamespace):
    """Stands for ms-swift's class of this name, by which arguments of training are known."""


_BOTH = DEFAULTS | {
    **{"sharded_lazy": True, "dataset": ["/one"], "output_dir": "/runs/one", "data_seed": 42, "max_length": 512},
    **{"train_dataloader_shuffle": True, "ddp_timeout": 18_000_000, "remove_unused_columns": True},
    **dict.fromkeys(("save_strategy", "eval_strategy"), "steps"),
    **dict.fromkeys(("group_by_length", "strict", "packing"), False),
    **dict.fromkeys(("num_train_epochs", "columns")),
}


def megatron(**changes: Any) -> Any:
    """Returns arguments as of `megatron sft`, with ms-swift's defaults."""
    own: dict[str, Any] = {"micro_batch_size": 1, "global_batch_size": 16, "data_sharding": False, "finetune": True}
    nothing = dict.fromkeys(("train_iters", "mcore_model", "mcore_adapter", "model"))
    return TrainArguments(**{**_BOTH, **own, **nothing, "adapters": [], **changes})


def hugging_face(n_gpu: int = 1, **changes: Any) -> Any:
    """Returns arguments as of `swift sft`, with ms-swift's defaults."""
    batch = changes.get("per_device_train_batch_size", 1)
    accumulation = changes.pop("gradient_accumulation_steps", 1)
    trainer = SimpleNamespace(n_gpu=n_gpu, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation)
    # ms-swift leaves the accumulation so where it chooses it itself; the trainer's own arguments have the number.
    nothing = dict.fromkeys(("gradient_accumulation_steps", "resume_from_checkpoint"))
    own = {"per_device_train_batch_size": 1, "training_args": trainer, "max_steps": -1, "num_train_epochs": 3.0}
    off = dict.fromkeys(("resume_only_model", "ignore_data_skip"), False)
    return TrainArguments(**{**_BOTH, **nothing, **own, **off, **changes})


def facts(samples: int = 100, ended: bool = True, samples_per_chunk: int = 4) -> Stream:
    return Stream(DIRECTORY, "0123456789abcdef" * 2, samples_per_chunk, samples, ended)


SAVED: Final[dict[str, Any]] = {
    **{"stream": "0123456789abcdef" * 2, "directory": DIRECTORY, "samples_per_chunk": 4, "consumed": 48, "step": 3},
    **{"dp_size": 2, "batch_size": 1, "layout": "strided", "window": 8, "seed": 42, "epoch_samples": 100},
    **{"by_steps": False, "consumer": "one-1234", "saved_at": 1795000000.5},
}
"""What a position of format 1 has."""


def position(**changes: Any) -> Position:
    """Returns what a run that had the same ranks all the time has saved."""
    found = Position(**{**SAVED, **changes})
    if found.layout != "strided" or "state" in changes:
        return found
    size, draws = found.samples_per_chunk, found.consumed // found.dp_size
    per_step = 0 if not found.step or draws % found.step else draws // found.step
    part = Part(found.dp_size, found.batch_size, draws, draws_per_step=per_step)
    state = RunState(found.stream, size, size, found.window * size, found.seed, None, (part,), draws * found.dp_size)
    return replace(found, state=state)


def checkpoint(folder: Path, saved: Position | None = None) -> str:
    """Makes a checkpoint that is whole for both trainers, as far as it is looked at."""
    folder.mkdir(parents=True, exist_ok=True)
    for mark in MARKS.values():
        (folder / mark).touch()
    if saved is not None:
        save_position(saved, folder)
    return str(folder)


def facts_of(directory: Path) -> Stream:
    reader = StreamReader(directory, max_wait=0)
    published = reader.refresh()
    assert reader.stream_id is not None
    return Stream(str(directory), reader.stream_id, reader.samples_per_chunk, published.samples, published.ended)


def decide_one(args: Any, found: Stream, rank: Rank, lengths: str | None = None) -> RunPlan:
    return decide(args, (found,), found, rank, lengths)


def decided(args: Any, samples: int = 100, ended: bool = True, dp: int = 2, per_chunk: int = 4) -> RunPlan:
    return decide_one(args, facts(samples, ended, per_chunk), Rank(0, dp))


def plan(args: Any, directory: Path, rank: int, dp: int) -> RunPlan:
    found, lengths = facts_of(directory), None
    if args.group_by_length:
        _, lengths = read_lengths(found, {}, sampler_of(is_megatron(args)))
    samples = _packed(args, (found,), 1, found) if args.packing else found
    return decide(args, (found,), samples, Rank(rank, dp), lengths)


def sampler_of(megatron: bool) -> Any:
    """Returns ms-swift's real sampler, without ms-swift around it."""
    if megatron:
        return load("megatron/trainers/batch_sampler.py").MegatronPretrainingRandomSampler
    return load("dataloader/shard.py").BatchSamplerShard


def open_stream(run: RunPlan, *, max_wait: float = 0.0) -> TrainStream:
    """Opens the stream of a plan. Its samples are the ids of the rows. What is not there yet is an error at once."""
    lengths = None
    if run.grouping is not None:
        lengths = lengths_by_sample(StreamReader(run.directory, max_wait=max_wait), run.total)
    own = {"max_wait": max_wait, "bad_rows": BadRows("raise"), "cache": EncodeCache()}
    return TrainStream(run, (lambda row: row["id"],), own, lengths)


class Template:
    """Stands for ms-swift's: encodes to what it was given."""

    packing = padding_free = False

    def encode(self, row: dict[str, Any], return_length: bool = False) -> dict[str, Any]:
        return row


def opened(directory: Path, make: Any = megatron, template: Any = None, **changes: Any) -> TrainStream:
    """Opens a stream by the arguments alone, as ms-swift's pipeline does. Nothing is waited for."""
    common: dict[str, Any] = {"dataset": [str(directory)], "sharded_lazy_max_wait": 0.01}
    if make is megatron:
        common |= {"train_iters": 7, "global_batch_size": 1}
    return open_train_stream(make(**{**common, **changes}), template or Template())


def tells(error: BaseException, *words: str, **fields: Any) -> None:
    """Checks that an error has these fields, and its message these words."""
    assert {name: getattr(error, name) for name in fields} == fields
    assert all(word in str(error) for word in words), str(error)


def as_rank(rank: int) -> Any:
    """Has this process pass for one rank: the first one alone writes."""
    return mock.patch.object(checkpoints, "is_first", lambda: rank == 0)


def let_go_of_cursors() -> None:
    """Lets other runs in, as the end of this process would."""
    while checkpoints._held:
        checkpoints._held.popitem()[1].close()
