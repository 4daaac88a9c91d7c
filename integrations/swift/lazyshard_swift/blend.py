"""`--dataset A B --interleave_prob 0.8 0.2`: a blend of streams as ms-swift's training data set.

To ms-swift and its trainers it is one stream, whose samples are the positions of the blend: what they count by
(`RunPlan`) is that of such a stream. Which stream and sample each position is, and where each of them stands, is the
blend's own state, which the checkpoints hold beside it. What is decided of the streams are their shares, their units,
and the length of an epoch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from lazyshard import BadRows, BlendedDataset, EncodeCache, LazyShardedDataset, Order
from lazyshard.data.rank import Rank
from lazyshard.data.shared import Stats
from lazyshard.errors import ChunkRetired
from lazyshard.format.blend_state import BlendShare, BlendState, blend_shares
from lazyshard.format.cursor import Cursor
from lazyshard.format.state import RunState
from lazyshard.part import Part
from lazyshard.store.urls import stream_name
from lazyshard_swift import parallel, settings
from lazyshard_swift.encoded import Encode, for_stream
from lazyshard_swift.errors import SettingsRefused, StreamTooShort, each_of
from lazyshard_swift.parallel import Facts, notice, stream_id_of
from lazyshard_swift.planning import batch_sizes, stream_unit
from lazyshard_swift.position import Position
from lazyshard_swift.run_plan import RunPlan, chunks_before, make_cursor
from lazyshard_swift.stream import ENDLESS, Gate, TrainStream, check_present, load_state, open_samples

Stopping = Literal["first_exhausted", "all_exhausted"]

SHOWN: Final = 20
"""Streams of which the log tells the share."""


class BlendStream(TrainStream):
    """A blend as ms-swift's training data set.

    Args:
        plan: what was decided, as of a stream of the blend's positions.
        streams: the streams.
        encode: makes samples of rows, one for each stream.
        max_wait: how many seconds a step may wait for its data.
        on_bad_sample: "substitute" or "raise".
        samples_per_chunk: for foreign directories.
        cache: of encoded samples.

    Raises:
        ResumeRefused: the checkpoint's state does not fit one of the streams.
    """

    def __init__(
        self,
        plan: RunPlan,
        streams: Streams,
        encode: Sequence[Encode],
        *,
        max_wait: float,
        on_bad_sample: settings.OnBadSample,
        samples_per_chunk: int | None,
        cache: EncodeCache = EncodeCache(),
    ) -> None:
        self.gate: _Gate
        self._told_at = time.monotonic()
        self._cache = cache.directory
        own: dict[str, Any] = {
            "samples_per_chunk": samples_per_chunk,
            "order": Order(shuffle_window=plan.window, seed=plan.seed),
            "bad_rows": BadRows(on_bad_sample),
        }
        of_blend: dict[str, Any] = {
            "num_samples": ENDLESS,
            "batch_size": plan.batch_size,
            "order": Order(
                layout="strided",
                micro_batches_per_step=plan.state.parts[-1].draws_per_step // plan.batch_size or None,
            ),
        }
        # Workers read ahead of the training, for as long as it takes: the gate is what gives up.
        waiting = own | {"max_wait": float("inf"), "consumer": plan.consumer, "cache": cache}
        self._dataset: BlendedDataset = streams.open(plan.rank, encode, waiting, of_blend)  # type: ignore[assignment]
        for dataset in self._dataset.datasets:
            dataset.reader.quiet = True
        self._asked = streams.open(plan.rank, None, own | {"max_wait": max_wait}, of_blend)
        if plan.saved is not None and plan.saved.blend is not None:
            for blend in (self._dataset, self._asked):
                load_state(blend, plan.saved.blend.to_dict(), str(plan.checkpoint))
        # Positions count from where the plan's current part begins; the blend's own part may have begun elsewhere.
        shift = (plan.consumed_before - self._asked.consumed_before) // plan.rank.dp_size
        self._offset = plan.index_offset + shift * plan.rank.dp_size
        self._streams = streams
        self.plan = replace(plan, blend=_Kept(plan, streams, self._asked))
        self.gate = _Gate(self._asked, streams, plan.stop_at_end, shift, begun=plan.state.consumed > 0)

    @property
    def names(self) -> tuple[str, ...]:
        """How the blend's state calls the streams."""
        return self._asked.names

    def __getstate__(self) -> dict[str, Any]:
        """Leaves behind what is the main process's."""
        state = {name: value for name, value in self.__dict__.items() if name not in ("gate", "_asked")}
        return state | {"plan": replace(self.plan, blend=None)}

    def __getitem__(self, index: int) -> Any:
        """Returns an encoded sample. Raises as `LazyShardedDataset` does."""
        return self._dataset[index + self._offset]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Returns the encoded samples of a batch."""
        return self._dataset.__getitems__([index + self._offset for index in indices])

    def __repr__(self) -> str:
        """Says what is read, for the log."""
        plan, shares = self.plan, self._dataset.shares
        shown = [
            f"{share:.4g} of {directory} ({facts.samples} samples{'' if facts.ended else ', still being produced'})"
            for directory, facts, share in zip(self._streams.directories, self._streams.facts, shares, strict=True)
        ]
        some = ", ".join(shown[:SHOWN]) + (f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else "")
        order = f"shuffled in windows of {plan.window} chunks a rank" if plan.window else "in the order of the streams"
        return f"BlendStream({some}; rank {plan.rank.dp_rank} of {plan.rank.dp_size}, {order})"

    def stats(self) -> Sequence[Stats]:
        """Returns what this rank and its workers have met so far, of each stream."""
        return self._dataset.stats()

    def first_sample(self) -> Any | None:
        """Returns the first sample that the first rank trains if it is there already, without waiting."""
        index = (self.plan.draws + self.gate.shift) * self.plan.rank.dp_size
        try:
            return self._dataset[index] if self._asked.ready(index) else None
        except ChunkRetired:
            # Trained to the end: no sample follows, and the first one was deleted.
            return None

    def _check_present(self, draws: int) -> None:
        for number, dataset in enumerate(self._asked.datasets):
            course = dataset._draws.indices().course
            position, lane = course.current.draws, self.plan.rank.dp_rank
            total = self._streams.total(number)
            check_present(dataset.reader, open_samples(course, lane, position, total, self.plan.stop_at_end))


class _Gate(Gate):
    """The gate of a blend: its end is where the blend's is.

    Attributes:
        shift: how many positions the blend's own part has behind it where the plan's begins.
    """

    def __init__(self, blend: BlendedDataset, streams: Streams, stop_at_end: bool, shift: int, *, begun: bool) -> None:
        super().__init__(blend.datasets[0], stop_at_end, begun=begun)
        self._blend = blend
        self._streams = streams
        self.shift = shift

    @property
    def where(self) -> str:
        """What is read, for messages."""
        return self._streams.where

    def published_samples(self) -> int:
        """Returns how many samples are published now, of all streams."""
        return sum(dataset.published().samples for dataset in self._blend.datasets)

    def _past(self, position: int) -> bool:
        rank = self._blend.rank
        return not self._blend.in_epoch((position + self.shift) * rank.dp_size + rank.dp_rank)


class _Kept:
    """What checkpoints and cursors keep of a blend: `lazyshard_swift.run_plan.Blended`."""

    def __init__(self, plan: RunPlan, streams: Streams, blend: BlendedDataset) -> None:
        self._plan = plan
        self._streams = streams
        self._blend = blend

    def state_after(self, consumed: int) -> BlendState:
        """Returns the state of the blend after so many samples of the run."""
        return BlendState.from_dict(self._blend.state_dict(consumed), self._streams.where)

    def end(self, consumed: int, step_samples: int) -> tuple[str, str]:
        """Returns which stream has ended, and what was not trained of all of them; see `RunPlan.end`."""
        now, then = self._trained(consumed), self._trained(consumed + step_samples)
        seen = [dataset.published() for dataset in self._blend.datasets]
        left = [max(0, one.samples - count) for one, count in zip(seen, now, strict=True)]
        shown = list(zip(self._streams.directories, seen, left, strict=True))[:SHOWN]
        parts = [f"{number} of the {one.samples} of {directory}" for directory, one, number in shown if number]
        untrained = f"; not trained: {', '.join(parts)}" if parts else ""
        if self._streams.stopping != "first_exhausted":
            return "every stream of the blend has ended", untrained
        # The first that the next step would draw past its end; samples that are no whole micro batch are no help.
        spare = [
            number - (after - before) if one.ended else float("inf")
            for one, number, before, after in zip(seen, left, now, then, strict=True)
        ]
        first = min(range(len(spare)), key=spare.__getitem__)
        return f"{self._streams.directories[first]} has ended with {seen[first].samples} samples", untrained

    def _trained(self, consumed: int) -> list[int]:
        """Returns how many samples of each stream were trained after so many of the run."""
        state = self.state_after(consumed)
        counts = dict(zip(state.names, (member.consumed for member in state.members), strict=True))
        return [counts[name] for name in self._blend.names]

    def cursors(self, newest: Position, others: Sequence[Position]) -> list[tuple[str, Cursor]]:
        """Returns the cursors of all streams; see `RunPlan.cursors`."""
        plan, streams, found = self._plan, self._streams, []
        blend: tuple[BlendShare, ...] = ()
        if newest.blend is not None:
            blend = blend_shares(newest.blend, dict(zip(self._blend.names, streams.directories, strict=True)))
        ends = plan.stop_at_end and streams.stopping == "first_exhausted"
        for number, (directory, name) in enumerate(zip(streams.directories, self._blend.names, strict=True)):
            facts, total = streams.facts[number], streams.total(number)
            states = [member_of(position, name) for position in (newest, *others)]
            done = [chunks_before(state, total) if state is not None and ends else 0 for state in states]
            cursor = make_cursor(
                plan, stream_id_of(facts.stream), facts.samples_per_chunk, states[0], min(done), blend=blend
            )
            found.append((directory, cursor))
        return found


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
            own: options of each stream's data set, with its `order`; a `cache` is for streams of raw rows.
            of_blend: options of the blend.
        """
        order, cache = own.get("order", Order()), own.get("cache", EncodeCache())
        orders = [replace(order, unit=unit) for unit in self.units] or [order for _ in self.directories]
        each: Sequence[Encode | None] = encode or [None] * len(self.directories)
        parts = []
        for directory, one, weight, order in zip(self.directories, each, self.weights, orders, strict=True):
            options = own | {"dp_rank": rank.dp_rank, "dp_size": rank.dp_size, "order": order}
            dataset = LazyShardedDataset(directory, one, **options | {"cache": for_stream(cache, one)})
            parts.append((dataset, weight))
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
    part = Part(dp_size, batch_size, draws_per_step=global_batch // dp_size)
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
