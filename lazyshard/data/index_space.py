"""What the indices of a data set mean: which sample each draws, and from when on that is known.

Every number here follows from the stream's published total and the settings, so all ranks agree without a word.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import Literal, get_args

from lazyshard.data.rank import Rank
from lazyshard.data.reading_marks import ReadingMarks
from lazyshard.errors import LengthUnknown
from lazyshard.plan import Deal, Draw, Layout, Plan, Run, make_layout
from lazyshard.storage import Published, StreamReader

LayoutName = Literal["block", "strided"]
UnitName = Literal["chunk", "sample", "batch"]

_log = logging.getLogger("lazyshard")


@dataclass(frozen=True, slots=True)
class Order:
    """The settings that decide which sample is drawn when.

    Attributes:
        batch_size: samples of one rank in a micro batch.
        unit: what is dealt to the ranks in turn: "chunk", "sample", "batch", or a number of samples.
        layout: "block" (rank r has the indices [r * B, (r + 1) * B)) or "strided" (r, r + dp_size, ...).
        shuffle_window: how many chunks' worth of samples each rank shuffles among; 0 keeps the order.
        seed: of the shuffle.
        max_total_samples: the stream is taken to end there at the latest; None for no bound.
        num_samples: indices over all ranks, however long an epoch is; None for those of one epoch.
    """

    batch_size: int
    unit: UnitName | int
    layout: LayoutName
    shuffle_window: int
    seed: int
    max_total_samples: int | None
    num_samples: int | None = None

    def __post_init__(self) -> None:
        """Checks what the plan cannot check."""
        if self.layout not in get_args(LayoutName):
            raise ValueError(f"layout is one of {', '.join(get_args(LayoutName))}, got {self.layout!r}")
        if self.unit not in get_args(UnitName) and (type(self.unit) is not int or self.unit < 1):
            raise ValueError(f"unit is one of {', '.join(get_args(UnitName))} or a number from 1, got {self.unit!r}")
        if type(self.shuffle_window) is not int or self.shuffle_window < 0:
            raise ValueError(f"shuffle_window is a number of chunks, 0 or more, got {self.shuffle_window!r}")
        limit = self.max_total_samples
        if limit is not None and (type(limit) is not int or limit < 1):
            raise ValueError(f"max_total_samples is an integer from 1, got {limit!r}")
        count = self.num_samples
        # More than that `len` cannot say.
        if count is not None and (type(count) is not int or not 1 <= count <= sys.maxsize):
            raise ValueError(f"num_samples is an integer from 1 to {sys.maxsize}, got {count!r}")
        # The plan's own checks, before a stream is waited for.
        self.plan(1, 1)

    def plan(self, dp_size: int, samples_per_chunk: int) -> Plan:
        """Returns the plan for so many ranks."""
        units = {"chunk": samples_per_chunk, "sample": 1, "batch": self.batch_size}
        unit = self.unit if isinstance(self.unit, int) else units[self.unit]
        # A window is made of whole units, so that it is known to be published when its stripes are.
        window = -(-self.shuffle_window * samples_per_chunk // unit) * unit
        return Plan(Deal(dp_size, unit), batch_size=self.batch_size, window=window, seed=self.seed)

    def known_total(self, published: Published) -> int | None:
        """Returns how many samples there are to draw, None as long as that is open."""
        limit = self.max_total_samples
        if published.ended:
            return published.samples if limit is None else min(published.samples, limit)
        return limit if limit is not None and published.samples >= limit else None

    def block(self, plan: Plan, total: int | None) -> int | None:
        """Returns how many indices each rank has, given the total to count with; None as long as that is open.

        Raises:
            ValueError: num_samples is less than one batch of every rank.
        """
        if self.num_samples is None:
            return None if total is None else plan.epoch_length(total)
        step = plan.deal.dp * plan.batch_size
        if self.num_samples < step:
            raise ValueError(
                f"num_samples is at least dp_size * batch_size = {plan.deal.dp} * {plan.batch_size} = {step}, got "
                f"{self.num_samples}"
            )
        return self.num_samples // step * plan.batch_size


class IndexSpace:
    """The indices of one data set. Fixed once made, whatever the stream does afterwards.

    Args:
        order: the settings.
        rank: whose data set it is.
        reader: the stream.
        consumer: for whom rank 0 keeps a reading mark; None for nobody.

    Attributes:
        layout: how the ranks' positions lie among the indices.
        wraps: later indices may draw a later epoch than the first ones.
        marks: the reading mark that this rank keeps, None if it keeps none.

    Raises:
        LengthUnknown: the stream is live and there is neither max_total_samples nor num_samples.
        ValueError: num_samples is less than one batch of every rank.
    """

    def __init__(self, order: Order, rank: Rank, reader: StreamReader, consumer: str | None = None) -> None:
        self.order = order
        self.rank = rank
        self.plan = order.plan(rank.dp_size, reader.samples_per_chunk)
        published = reader.refresh()
        known = order.known_total(published)
        self._told: set[str] = set()
        total = order.max_total_samples if known is None else known
        block = order.block(self.plan, total)
        if block is None:
            raise LengthUnknown(
                f"{reader.directory}: the stream is still being produced ({published.samples} samples so far), so the "
                f"data set has no length yet; pass max_total_samples, the most samples that you want to train an epoch "
                f"on, or num_samples, how many to train on however many epochs that takes",
                directory=str(reader.directory),
            )
        self.layout: Layout = make_layout(order.layout, rank.dp_size, block)
        self.wraps = known is None or block > self.plan.epoch_length(known)
        # With num_samples the caller decides where to stop, and `leftover` tells the rest.
        if order.num_samples is None and known is not None and self.plan.leftover(known) and rank.dp_rank == 0:
            _log.warning(
                "%s: %d samples; left over in each epoch: %d, fewer than dp_size * batch_size = %d * %d",
                reader.directory,
                known,
                self.plan.leftover(known),
                rank.dp_size,
                order.batch_size,
            )
        self._tell_cut(published, reader)
        self.marks: ReadingMarks | None = None
        if consumer is not None and rank.dp_rank == 0:
            self.marks = ReadingMarks(consumer, self.plan, reader)
        # Positions up to this one are certain, given this total: what needs fewer published samples than something
        # that was waited for needs no look. One value that is only ever replaced: a position must not meet the total
        # of another thread's.
        self._certain: tuple[int, int | None] = (-1, None)

    def draw(self, index: int, epoch: int, reader: StreamReader) -> Draw:
        """Returns epoch and sample of an index, waiting until they are certain.

        Raises:
            IndexError: outside the index space, or the stream has ended with less than one batch a rank.
            WaitTimeout: what decides it was not published in time.
        """
        lane, position = self.layout.locate(index)
        return self.plan.draw(lane, position, self._total(position, reader), epoch)

    def run(self, lane: int, position: int, epoch: int, reader: StreamReader) -> Run:
        """Returns the neighbours of a position that draw consecutive samples. Raises as `draw` does."""
        run = self.plan.run(lane, position, self._total(position, reader), epoch)
        # The plan goes on for ever, the indices of a lane do not.
        return run if run.stop <= self.layout.block else run._replace(stop=self.layout.block)

    def _total(self, position: int, reader: StreamReader) -> int | None:
        certain, total = self._certain
        limit = self.order.max_total_samples
        if self.marks is not None and position >= self.marks.stop:
            seen = reader.seen
            known = self.order.known_total(seen)
            self.marks.enter(position, limit if known is None else known, seen.samples)
        if position > certain:
            needed = self.plan.needed(position)
            published = reader.wait_for(needed if limit is None else min(needed, limit))
            total = self.order.known_total(published)
            self._certain = (position if total is None else self.layout.block, total)
            self._tell_cut(published, reader)
        # Who gives num_samples has asked for it.
        asked = self.order.num_samples is not None
        if self.wraps and not asked and total is not None and position >= self.plan.epoch_length(total):
            self.tell(
                "wrapped",
                f"{reader.directory}: the stream has ended with {total} samples; what is read from here on is the next "
                f"epoch. To stop instead, ask `dataset.in_epoch(index)` before each step",
            )
        return total

    def tell(self, what: str, text: str) -> None:
        """Logs a warning, once in each process for each kind; on the first two ranks, since all would say the same.

        Two, because a rank that is given another one's indices need not be the first.
        """
        if what not in self._told and self.rank.dp_rank < 2:
            self._told.add(what)
            _log.warning("%s", text)

    def _tell_cut(self, published: Published, reader: StreamReader) -> None:
        limit = self.order.max_total_samples
        if limit is not None and published.samples > limit:
            self.tell(
                "cut",
                f"{reader.directory}: {published.samples} samples are published, but max_total_samples is {limit}: "
                f"those past it are not drawn",
            )
