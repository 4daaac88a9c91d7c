"""Before each step: is its data there, and does the run go on?

Every rank asks this in its main process, from the same published numbers, so all of them go on, stop or give up at the
same step without a word between them, pipeline stages that never see data included. The DataLoader's workers, which
read ahead, have no deadline of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

from lazyshard import LazyShardedDataset, StreamReader
from lazyshard.errors import ChunkMissing, ChunkRetired, StoreUnavailable, WaitTimeout
from lazyshard_swift import errors, parallel
from lazyshard_swift.errors import ResumeRefused, StreamTooShort

_LOOK_S: Final = 5.0
"""How long a chunk that a checkpoint goes on with may stay invisible."""


_SAVE_S: Final = 1800.0
"""How long a rank that has given up may take to save what was trained, with all others."""


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

    def check_present(self, samples: Iterable[int]) -> None:
        """Refuses to start where a chunk that was published is gone.

        Args:
            samples: numbers of samples that the run needs from here on, of which those published are looked for.

        Raises:
            ResumeRefused: naming the chunk.
        """
        check_present(self._dataset.reader, samples)

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
    """Refuses to start where a chunk that was published is gone; see `Gate.check_present`."""
    published = reader.refresh().samples
    chunks = {sample // reader.samples_per_chunk for sample in samples if sample < published}
    # They were published long ago, so the grace period for those that are just appearing is not due.
    reader.max_wait, patience = min(_LOOK_S, reader.max_wait), reader.max_wait
    try:
        for number in sorted(chunks):
            reader.chunk(number)
    except ChunkRetired as cause:
        raise ResumeRefused(
            f"{cause}. The checkpoint goes on with chunk {cause.chunk}",
            expected=f"chunk {cause.chunk}",
            actual="deleted",
        ) from cause
    except ChunkMissing as cause:
        raise ResumeRefused(
            f"{cause} The checkpoint goes on with it; take a later checkpoint, or restore the chunk",
            expected=f"chunk {cause.chunk}",
            actual="deleted",
        ) from cause
    finally:
        reader.max_wait = patience
