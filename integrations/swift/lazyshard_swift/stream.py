"""`TrainStream`: what ms-swift gets as its training data set, and the gate before each step of it.

The data set has the length that ms-swift plans with: that of an epoch once the stream has ended, that of the run while
it is live. Its indices go on past that length, strided over the ranks, into the epochs that follow: samplers hand out
``epoch * len + i``.

The gate says before each step whether its data is there, and whether the run goes on. Every rank asks it in its main
process, from the same published numbers, so all of them go on, stop or give up at the same step without a word between
them, pipeline stages that never see data included. The DataLoader's workers, which read ahead, have no deadline of
their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from torch.utils.data import Dataset

from lazyshard import BadRows, EncodeCache, LazyShardedDataset, LazyShardError, Order, StreamReader
from lazyshard.data.shared import Stats
from lazyshard.errors import ChunkMissing, ChunkRetired, StateMismatch, StoreUnavailable, WaitTimeout, redact
from lazyshard.format.state import RunState
from lazyshard.plan.course import Course
from lazyshard_swift import encoded, errors, parallel, settings
from lazyshard_swift.encoded import Encode
from lazyshard_swift.errors import ResumeRefused, StreamTooShort
from lazyshard_swift.parallel import notice
from lazyshard_swift.position import GROUPED
from lazyshard_swift.run_plan import RunPlan

ENDLESS: Final = 2**50
"""Indices of a data set that goes on from epoch to epoch."""

TOLD_EVERY_S: Final = 60.0
"""How often the log tells how much of what is published was trained."""

_LOOK_S: Final = 5.0
"""How long a chunk that a checkpoint goes on with may stay invisible."""

_SAVE_S: Final = 1800.0
"""How long a rank that has given up may take to save what was trained, with all others."""


class TrainStream(Dataset[Any]):
    """A stream as ms-swift's training data set.

    Args:
        plan: what was decided.
        encoder: makes samples of rows, raw or encoded ones.
        max_wait: how many seconds a step may wait for its data.
        on_bad_sample: "substitute" or "raise".
        samples_per_chunk: for foreign directories.
        cache: of encoded samples.
    """

    def __init__(
        self,
        plan: RunPlan,
        encoder: Encode,
        *,
        max_wait: float,
        on_bad_sample: settings.OnBadSample,
        samples_per_chunk: int | None,
        cache: EncodeCache = EncodeCache(),
    ) -> None:
        self.plan = plan
        self._told_at = time.monotonic()
        self._cache = cache.directory
        common: dict[str, Any] = {
            "dp_rank": plan.rank.dp_rank,
            "dp_size": plan.rank.dp_size,
            "samples_per_chunk": samples_per_chunk,
            "batch_size": plan.batch_size,
        }
        # Workers read ahead of the training, for as long as it takes: the gate is what gives up.
        own: dict[str, Any] = {"consumer": plan.consumer}
        if plan.layout == GROUPED:
            # The sampler's indices are samples, of which it takes some for each rank: there are no lanes.
            own = {"dp_rank": 0, "dp_size": 1}
        order = Order(unit=plan.state.unit, layout="strided", shuffle_window=plan.window, seed=plan.seed)
        self._dataset = LazyShardedDataset(
            plan.directory,
            encoder,
            order=order if plan.layout == "strided" else replace(order, layout="block"),
            num_samples=ENDLESS if plan.layout == "strided" else plan.epoch_samples,
            max_wait=float("inf"),
            bad_rows=BadRows(on_bad_sample),
            cache=encoded.for_stream(cache, encoder),
            **{**common, **own},
        )
        self._dataset.reader.quiet = True
        asked = LazyShardedDataset(plan.directory, order=order, num_samples=ENDLESS, max_wait=max_wait, **common)
        self.gate = Gate(asked, plan.stop_at_end, begun=plan.state.consumed > 0)
        if plan.layout == "strided" and plan.state != _begun_now(plan.state):
            for dataset in (self._dataset, asked):
                load_state(dataset, plan.state.to_dict(), plan.checkpoint or plan.directory)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the gate behind: it is the main process's."""
        return {name: value for name, value in self.__dict__.items() if name != "gate"}

    def __len__(self) -> int:
        """What ms-swift takes for the length of an epoch, over all ranks."""
        return self.plan.epoch_samples

    def __getitem__(self, index: int) -> Any:
        """Returns an encoded sample. Raises as `LazyShardedDataset` does."""
        return self._dataset[index + self.plan.index_offset]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Returns the encoded samples of a batch."""
        offset = self.plan.index_offset
        return self._dataset.__getitems__([index + offset for index in indices] if offset else indices)

    def __repr__(self) -> str:
        """Says what is read, for the log."""
        facts, plan = self.plan.facts, self.plan
        state = "ended" if facts.ended else "still being produced"
        order = f"shuffled in windows of {plan.window} chunks a rank" if plan.window else "in the order of the stream"
        if plan.state.unit != facts.samples_per_chunk:
            order = f"dealt in units of {plan.state.unit} samples, {order}"
        if plan.layout != "strided":
            order = f"{'grouped by length' if plan.layout == GROUPED else 'shuffled'} by ms-swift's sampler"
        return (
            f"TrainStream({redact(plan.directory)}, {state}, {facts.samples} samples published, "
            f"{facts.samples_per_chunk} per chunk, rank {plan.rank.dp_rank} of {plan.rank.dp_size}, {order})"
        )

    def stats(self) -> Sequence[Stats]:
        """Returns what this rank and its workers have met so far, of each stream."""
        return [self._dataset.stats()]

    def why_it_stops(self, consumed: int, step_samples: int) -> tuple[str, str]:
        """Returns why the gate allows no further step, and what was not trained, for `parallel.stopped`.

        Args:
            consumed: samples that were trained since the run began.
            step_samples: samples of a step, over all ranks.
        """
        if self.gate.gave_up is not None:
            return "no data came in time", ""
        return self.plan.end(consumed, self.gate.published_samples(), step_samples)

    def tell_progress(self, consumed: int, *, at_once: bool = False) -> None:
        """Tells how much of what is published was trained: now and then, or at once.

        Args:
            consumed: samples that were trained since the run began.
            at_once: whether it is told however short ago it was told before.
        """
        now = time.monotonic()
        if not parallel.is_first() or not (at_once or now - self._told_at >= TOLD_EVERY_S):
            return
        self._told_at = now
        try:
            published = self.gate.published_samples()
        except (LazyShardError, OSError):
            # The gate asks again, and knows what to do.
            return
        more = ", in several epochs" if consumed > published else ""
        notice(f"trained {consumed} of {published} published samples{more}")

    def tell_cache(self) -> None:
        """Tells, at the end of a training, how much of what this rank drew was in the cache, if there is one."""
        if self._cache is not None:
            encoded.tell_cache(self._cache, self.stats())

    def first_sample(self) -> Any | None:
        """Returns the first sample that the first rank trains if it is there already, without waiting."""
        plan = self.plan
        # A sampler in an order of its own decides by itself with which it goes on.
        draws = plan.draws if plan.layout == "strided" else 0
        ready = plan.facts.ended or plan.facts.samples >= plan.course.needed(draws)
        try:
            return self._dataset[draws * plan.rank.dp_size] if ready else None
        except ChunkRetired:
            # Trained to the end: no sample follows, and the first one was deleted.
            return None

    def check_resume(self, consumed: int, step: int) -> None:
        """Refuses to go on where the next sample would not be exactly the next one.

        Args:
            consumed: samples trained, as the trainer has restored it.
            step: steps trained, likewise.

        Raises:
            ResumeRefused: with the reason and the way out.
        """
        plan, saved = self.plan, self.plan.saved
        if consumed == 0:
            return
        if plan.checkpoint is None or saved is None:
            where = plan.checkpoint or "the checkpoint"
            raise ResumeRefused(
                f"{where}: {consumed} samples were trained, but there is no lazyshard.json beside the weights that "
                f"says which: was it trained without --sharded_lazy, or copied in part? To start on the stream from "
                f"its beginning take the weights alone (megatron: --finetune true; swift: --resume_only_model true "
                f"--ignore_data_skip true)",
                checkpoint=where,
            )
        if consumed != saved.consumed:
            raise ResumeRefused(
                f"{plan.checkpoint}: {saved.consumed} samples were trained in {saved.step} steps, and the trainer "
                f"would go on after {consumed}, in step {step + 1}: is the lazyshard.json there another checkpoint's?",
                checkpoint=plan.checkpoint,
                expected=str(saved.consumed),
                actual=str(consumed),
            )
        draws = plan.draws if plan.layout == "strided" else consumed // plan.rank.dp_size
        if plan.stop_at_end and plan.total is not None and not _in_first_epoch(plan.course, draws, plan.total):
            raise ResumeRefused(
                f"{plan.checkpoint}: it stands at sample {consumed}, the stream has ended with {plan.total}: "
                f"was it cut, or was --sharded_lazy_on_end repeat given before?",
                checkpoint=plan.checkpoint,
                expected=f"at least {consumed} samples",
                actual=str(plan.total),
            )
        self._check_present(draws)

    def _check_present(self, draws: int) -> None:
        """Refuses to go on at a position whose chunks are gone."""
        plan = self.plan
        samples = open_samples(plan.course, plan.rank.dp_rank, draws, plan.total, plan.stop_at_end)
        check_present(self.gate.reader, samples)


def open_samples(course: Course, lane: int, position: int, total: int | None, stop_at_end: bool) -> list[int]:
    """Returns the samples of the window that is open at a position of a lane, from there on."""
    stop = max(position + 1, course.drawable(course.needed(position)))
    if total is not None:
        length = course.epoch_length(total)
        if position < length:
            stop = min(stop, length)
        elif stop_at_end:
            # Trained to the end, behind which chunks may be deleted.
            return []
        else:
            full, span = course.full_epoch_length(total), course.rules.span
            within = (position - length) % full
            stop = position - within + min((within // span + 1) * span, full)
    samples: list[int] = course.draws(lane, np.arange(position, stop), total)[1].tolist()
    return samples


def _begun_now(state: RunState) -> RunState:
    """Returns the state of a run that begins anew, with the ranks and rules of this one."""
    return replace(state, parts=(replace(state.parts[-1], draws=0, epoch=None, skip=(), first_step=0),), consumed=0)


def load_state(dataset: Any, state: dict[str, Any], where: str) -> None:
    """Has a data set, of one stream or of a blend, go on from a state.

    Raises:
        ResumeRefused: the state does not fit it.
    """
    try:
        dataset.load_state_dict(state)
    except StateMismatch as cause:
        raise ResumeRefused(
            f"{where}: {cause}", checkpoint=where, expected=cause.expected, actual=cause.actual
        ) from cause


def _in_first_epoch(course: Course, draws: int, total: int) -> bool:
    """Returns whether the last of the positions drawn, or the first one if none is, lies in the run's first epoch."""
    try:
        return course.epoch(total) == 0 and draws <= course.epoch_length(total)
    except ValueError:
        return False


class Gate:
    """Decides step by step.

    Args:
        dataset: this rank's samples in order, strided, without an end (`num_samples`), with the deadline that counts.
        stop_at_end: whether a step that reaches past the end of the stream is not trained.
        begun: whether the run has trained a step in an earlier start.

    Attributes:
        stopped: whether a step was refused.
        gave_up: why, where all ranks gave up waiting; None where the stream has ended.
    """

    def __init__(self, dataset: LazyShardedDataset, stop_at_end: bool, *, begun: bool = False) -> None:
        self._dataset = dataset
        self._stop_at_end = stop_at_end
        self._begun = begun
        self.stopped = False
        self.gave_up: WaitTimeout | StoreUnavailable | None = None
        self._timer: threading.Timer | None = None

    def allows(self, first: int, stop: int, *, saves: bool = False) -> bool:
        """Returns whether a step is to be trained, waiting until that is certain.

        Args:
            first: the step's first position in this rank's lane, in the current part of the run.
            stop: the position after its last.
            saves: whether a refused step leads to a checkpoint, the same on all ranks. Where all ranks give up, the
                step is then refused, and `end` raises the error.

        Raises:
            WaitTimeout, StoreUnavailable: its data did not come in time.
            StreamTooShort: the stream has ended before even the first step was full.
        """
        if self.stopped:
            return False
        try:
            past = self._past(stop - 1)
        except IndexError as cause:
            # Not even one micro batch for each rank.
            if not self._begun or not self._stop_at_end:
                raise self._too_short() from cause
            past = True
        except (StoreUnavailable, WaitTimeout) as error:
            if not saves or not self._all_give_up(error, stop):
                raise
            return False
        if self._stop_at_end and past:
            if not first and not self._begun:
                raise self._too_short()
            self.stopped = True
        return not self.stopped

    def _all_give_up(self, error: WaitTimeout | StoreUnavailable, stop: int) -> bool:
        """Returns whether all ranks have given up before the same step, so that they can save a checkpoint together.

        A rank that has seen the data in the last moment trains, and waits for the others in its first collective.
        """
        timer = errors.end_within(_SAVE_S, error)
        if not parallel.all_come(f"gave up before {stop}"):
            timer.cancel()
            return False
        self.stopped, self.gave_up, self._timer = True, error, timer
        return True

    def end(self) -> None:
        """Raises what made all ranks give up, once what they have trained is saved; does nothing at a stream's end."""
        if self._timer is not None:
            self._timer.cancel()
        if self.gave_up is not None:
            raise self.gave_up

    def _past(self, position: int) -> bool:
        """Returns whether a position of this rank's lane is behind the end of the stream; waits for it."""
        rank = self._dataset.rank
        return self._dataset.draw(position * rank.dp_size + rank.dp_rank).epoch > 0

    @property
    def reader(self) -> StreamReader:
        """The reader of this rank's samples, with the deadline that counts."""
        return self._dataset.reader

    def published_samples(self) -> int:
        """Returns how many samples are published now."""
        return self._dataset.published().samples

    def _too_short(self) -> StreamTooShort:
        samples = self.published_samples()
        return StreamTooShort(
            f"{self.where}: the stream has ended with {samples} samples, fewer than one step takes: "
            f"nothing can be trained. Use a smaller global batch, or --sharded_lazy_on_end repeat",
            directory=self.where,
            samples=samples,
        )

    @property
    def where(self) -> str:
        """What is read, for messages."""
        return str(self._dataset.directory)


def check_present(reader: StreamReader, samples: Iterable[int]) -> None:
    """Refuses to start where a chunk that was published is gone.

    Args:
        reader: of the stream.
        samples: numbers of samples that the run needs from here on, of which those published are looked for.

    Raises:
        ResumeRefused: naming the chunk.
    """
    published = reader.refresh().samples
    chunks = {sample // reader.samples_per_chunk for sample in samples if sample < published}
    # They were published long ago, so the grace period for those that are just appearing is not due.
    reader.max_wait, patience = min(_LOOK_S, reader.max_wait), reader.max_wait
    try:
        for number in sorted(chunks):
            reader.chunk(number)
    except (ChunkRetired, ChunkMissing) as cause:
        text = (
            f"{cause}. The checkpoint goes on with chunk {cause.chunk}"
            if isinstance(cause, ChunkRetired)
            else f"{cause} The checkpoint goes on with it; take a later checkpoint, or restore the chunk"
        )
        raise ResumeRefused(text, expected=f"chunk {cause.chunk}", actual="deleted") from cause
    finally:
        reader.max_wait = patience
