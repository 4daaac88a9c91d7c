"""The streams of `--dataset A B`, and what is decided of them: their shares, their units, the length of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from lazyshard import BlendedDataset, LazyShardedDataset
from lazyshard.data.rank import Rank
from lazyshard.format.state import PartState, RunState
from lazyshard.storage.urls import stream_name
from lazyshard_swift import parallel
from lazyshard_swift.encoded import Encode, for_stream
from lazyshard_swift.errors import SettingsRefused, StreamTooShort, each_of
from lazyshard_swift.parallel import Facts, notice, stream_id_of
from lazyshard_swift.planning import batch_sizes, stream_unit
from lazyshard_swift.position import Position
from lazyshard_swift.run_plan import RunPlan

__all__ = ["SHOWN", "Streams", "length_of", "member_of", "units_of", "weights_of"]

Stopping = Literal["first_exhausted", "all_exhausted"]

SHOWN: Final = 20
"""Streams of which the log tells the share."""


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of a blend; the same on every rank.

    Attributes:
        directories: of the streams.
        facts: what all ranks know of each.
        weights: of each, in samples.
        stopping: where the blend ends.
        units: how many samples of each a rank is dealt in a row; empty where that makes no difference.
    """

    directories: tuple[str, ...]
    facts: tuple[Facts, ...]
    weights: tuple[float, ...]
    stopping: Stopping
    units: tuple[int, ...] = ()

    @property
    def where(self) -> str:
        """The directories, for messages."""
        return ", ".join(self.directories)

    def total(self, number: int) -> int | None:
        """Returns how many samples a stream has, None if it was still being produced when the run started."""
        facts = self.facts[number]
        return facts.samples if facts.ended else None

    def open(
        self, rank: Rank, encode: Sequence[Encode] | None, own: dict[str, Any], of_blend: dict[str, Any]
    ) -> BlendedDataset:
        """Opens the blend for a rank.

        Args:
            rank: whose.
            encode: makes samples of rows, one for each stream; None gives the rows.
            own: options of each stream's data set; those of a cache are for streams of raw rows.
            of_blend: options of the blend.
        """
        place: dict[str, Any] = {"dp_rank": rank.dp_rank, "dp_size": rank.dp_size}
        units: list[dict[str, Any]] = [{"unit": unit} for unit in self.units] or [{} for _ in self.directories]
        each: Sequence[Encode | None] = encode or [None] * len(self.directories)
        parts = [
            (LazyShardedDataset(directory, one, **place, **unit, **for_stream(own, one)), weight)
            for directory, one, weight, unit in zip(self.directories, each, self.weights, units, strict=True)
        ]
        return BlendedDataset(parts, stopping=self.stopping, **of_blend)


def member_of(position: Position, name: str) -> RunState | None:
    """Returns where a stream stood at a position; None if it was not blended yet."""
    blend = position.blend
    return None if blend is None or name not in blend.names else blend.members[blend.names.index(name)]


def weights_of(args: Any, directories: tuple[str, ...], facts: tuple[Facts, ...]) -> tuple[float, ...]:
    """Returns what was given, or the samples of each stream.

    Raises:
        SettingsRefused: nothing was given, and a stream is still being produced; or a weight is not above 0.
    """
    given = args.interleave_prob
    if given:
        if not all(weight > 0 for weight in given):
            raise SettingsRefused(
                f"--interleave_prob {' '.join(map(str, given))}: weights are numbers above 0",
                argument="interleave_prob",
            )
        return tuple(map(float, given))
    live = [directory for directory, one in zip(directories, facts, strict=True) if not one.ended or not one.samples]
    if live:
        raise SettingsRefused(
            f"--dataset has {len(directories)} streams, and {live[0]} is still being produced or empty, so their sizes "
            f"do not say how to blend them: give the share of each with --interleave_prob",
            argument="interleave_prob",
        )
    weights = tuple(float(one.samples) for one in facts)
    shares = ", ".join(f"{weight / sum(weights):.3g}" for weight in weights[:SHOWN])
    notice(f"the streams of --dataset are blended by their sizes, {shares}; --interleave_prob gives other shares")
    return weights


def units_of(args: Any, streams: Streams, plan: RunPlan) -> tuple[int, ...]:
    """Returns how many samples of each stream a rank is dealt in a row: those with which it began, if it did."""
    units, dp_size = [], plan.rank.dp_size
    batch_size, global_batch = batch_sizes(args, dp_size)
    part = PartState(dp_size, batch_size, draws_per_step=global_batch // dp_size)
    for directory, facts in zip(streams.directories, streams.facts, strict=True):
        name = stream_id_of(facts.stream) or stream_name(directory)
        begun = None if plan.saved is None else member_of(plan.saved, name)
        units.append(stream_unit(args, facts, part, plan.progress, plan.window, begun))
    return tuple(units)


def length_of(args: Any, streams: Streams, rank: Rank) -> int:
    """Returns how many samples an epoch of the blend has, over all ranks. A collective.

    Raises:
        StreamTooShort: less than a micro batch of every rank.
    """
    found = 0
    if parallel.is_first():
        batch_size, _ = batch_sizes(args, rank.dp_size)
        own = {"samples_per_chunk": args.sharded_lazy_samples_per_chunk, "max_wait": args.sharded_lazy_max_wait}
        try:
            found = len(streams.open(rank, None, own, {"batch_size": batch_size}))
        except ValueError:
            found = 0
    found = parallel.agree(found)
    if not found:
        raise StreamTooShort(
            f"{streams.where}: an epoch of the blend has less than one micro batch for {each_of(rank.dp_size)}: "
            f"one of the streams is too short for its share",
            directory=streams.where,
            samples=sum(one.samples for one in streams.facts),
        )
    return found
