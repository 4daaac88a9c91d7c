"""A stream whose samples ms-swift's sampler groups by length: `lazyshard_swift.grouping` says what that means."""

from __future__ import annotations

import inspect
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from lazyshard import StreamReader
from lazyshard.data.index_lengths import lengths_by_sample
from lazyshard.errors import LengthsMissing, StreamMismatch
from lazyshard.storage import read_retired
from lazyshard.storage.urls import stream_path
from lazyshard_swift import parallel
from lazyshard_swift.encoded import Encode
from lazyshard_swift.errors import ResumeRefused
from lazyshard_swift.parallel import Facts
from lazyshard_swift.run_plan import RunPlan
from lazyshard_swift.settings import grouping_refused
from lazyshard_swift.stream import TrainStream

_FEW: Final = tuple(7 * number % 23 for number in range(400))
"""Lengths that are put in order to see whether what is installed does it as what a checkpoint was trained with."""

GROUPING_TOLD: Final = (
    "--group_by_length true: ms-swift's sampler goes through the whole stream in an order of its own. Every rank reads "
    "rows of all chunks, a checkpoint can be gone on from with the same ranks, micro batch and lengths alone, "
    "`lazyshard trace` and `audit` cannot tell what was trained, and the run keeps all chunks"
)
"""What is given up, for the log."""


class Lengths(NamedTuple):
    """How long the samples of a stream are.

    Attributes:
        tokens: u32 of shape (samples,): tokens of each sample, in the order of the stream.
        digest: of what the sampler's order follows from and no argument says: the lengths, and the order in which
            ms-swift, transformers and torch put a few.
    """

    tokens: npt.NDArray[np.uint32]
    digest: str


class GroupedStream(TrainStream):
    """A stream as ms-swift's training data set, with the lengths that its samplers ask for.

    Args:
        plan: what was decided.
        encoder: makes samples of rows.
        tokens: of each sample; as many are handed out as an epoch has.
        options: as of `TrainStream`.
    """

    def __init__(self, plan: RunPlan, encoder: Encode, tokens: npt.NDArray[np.uint32], **options: Any) -> None:
        super().__init__(plan, encoder, **options)
        self._tokens = tokens[: plan.epoch_samples]

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the lengths behind too: samplers are in the main process."""
        return {name: value for name, value in super().__getstate__().items() if name != "_tokens"}

    def __getitem__(self, index: int | Literal["lengths"]) -> Any:
        """Returns an encoded sample, or by "lengths" a list of the tokens of all."""
        if isinstance(index, str):
            if index != "lengths":
                raise KeyError(index)
            return self._tokens.tolist()
        return super().__getitem__(index)

    def _check_present(self, draws: int) -> None:
        """Refuses to go on where a chunk is gone, since the sampler may draw any."""
        plan = self.plan
        assert plan.stream_id is not None
        retired = read_retired(stream_path(plan.directory), plan.stream_id)
        if retired:
            raise ResumeRefused(
                f"{plan.directory}: its producer has deleted the chunks below {retired}, and a run with "
                f"--group_by_length true may need all of them: start on the stream anew from the weights alone, "
                f"without it, or produce the stream anew with --retain all",
                checkpoint=plan.checkpoint,
                expected="all chunks",
                actual=f"those from {retired} on",
            )


def sampler_of(megatron: bool) -> type[Any]:
    """Returns the sampler of ms-swift's trainer, which is imported already.

    Raises:
        SettingsRefused: it does not group by length.
    """
    try:
        if megatron:
            from swift.megatron.trainers.base import MegatronPretrainingRandomSampler as Sampler
        else:
            from swift.trainers.mixin import BatchSamplerShard as Sampler
    except ImportError:
        Sampler = None
    check_sampler(Sampler)
    found: type[Any] = Sampler
    return found


def check_sampler(sampler: type[Any] | None) -> None:
    """Refuses a sampler of ms-swift; see `sampler_of`."""
    if sampler is None or "group_by_length" not in inspect.signature(sampler).parameters:
        raise grouping_refused("not with the sampler of this ms-swift: leave it out, or upgrade to a later ms-swift 4")


def read_lengths(args: Any, directory: str, facts: Facts, sampler: type[Any]) -> Lengths:
    """Reads what the sampler sorts by, and makes sure that all ranks sort by the same. A collective.

    Args:
        args: ms-swift's arguments.
        directory: of the stream.
        facts: what all ranks know of it.
        sampler: ms-swift's.

    Raises:
        SettingsRefused: the stream is live, was dealt by cost, or its lengths are not known; with the way out.
        StreamMismatch: rank 0 sees other lengths.
        WaitTimeout, LazyShardError: the stream cannot be read.
    """
    check_groupable(directory, facts.ended, facts.dealt)
    reader = StreamReader(directory, args.sharded_lazy_samples_per_chunk, max_wait=args.sharded_lazy_max_wait)
    try:
        tokens = lengths_by_sample(reader, facts.samples)
    except LengthsMissing as cause:
        raise grouping_refused(str(cause)) from cause
    digest = xxhash.xxh3_128(np.ascontiguousarray(tokens, "<u4").tobytes())
    digest.update(np.array(_few_in_order(sampler), "<i8").tobytes())
    mine = digest.hexdigest()
    first = parallel.agree(mine)
    if first != mine:
        raise StreamMismatch(
            f"{directory}: rank 0 sees other lengths of its samples than this rank: was it measured anew just now, or "
            f"do the nodes have different versions of ms-swift, transformers or torch? Start again with one of each",
            directory=directory,
            expected=first,
            actual=mine,
        )
    return Lengths(tokens, mine)


def _few_in_order(sampler: type[Any]) -> list[list[int]]:
    """Returns the batches that ms-swift's sampler makes of a few samples in their second epoch."""
    total, parameters = len(_FEW), inspect.signature(sampler).parameters
    if "data_sharding" in parameters:
        # Megatron's, which has not always taken a seed.
        seed = {"seed": 42} if "seed" in parameters else {}
        made = sampler(
            dataset={"lengths": list(_FEW)},
            total_samples=total,
            consumed_samples=total,
            micro_batch_size=4,
            data_parallel_rank=0,
            data_parallel_size=2,
            data_sharding=False,
            shuffle=True,
            group_by_length=True,
            **seed,
        )
    else:
        # As if there were no other rank, so that it is the same on all of them.
        alone = type("Alone", (sampler,), {"rank": 0, "world_size": 1})
        made = alone(
            total_samples=total,
            batch_size=4,
            shuffle=True,
            drop_last=False,
            data_seed=42,
            group_by_length=True,
            lengths=list(_FEW),
        )
        made.set_epoch(1)
    return list(made)


def check_groupable(directory: str, ended: bool, dealt: bool) -> None:
    """Refuses a stream that cannot be grouped.

    Args:
        directory: of the stream.
        ended: whether it has ended.
        dealt: whether its rows were dealt by cost.

    Raises:
        SettingsRefused: with the way out.
    """
    if not ended:
        raise grouping_refused(
            f"{directory}: the stream is still being produced, and how long samples are that are not there yet is not "
            f"known. Start once it has ended and `lazyshard measure` has measured it; or leave it out, and have the "
            f"producer deal rows by cost, with `lazyshard-producer run --balance`"
        )
    if dealt:
        raise grouping_refused(
            f"{directory}: its rows were dealt by cost, so that all ranks have as much to do in a step, and this would "
            f"put them into other steps: leave it out"
        )
