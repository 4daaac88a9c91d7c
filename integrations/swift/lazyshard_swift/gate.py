"""Before each step: is its data there, and does the run go on?

Every rank asks this in its main process, from the same published numbers, so all of them go on, stop or give up at the
same step without a word between them, pipeline stages that never see data included. The DataLoader's workers, which
read ahead, have no deadline of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from lazyshard import LazyShardedDataset, StreamReader
from lazyshard.errors import ChunkMissing, ChunkRetired
from lazyshard_swift.errors import ResumeRefused, StreamTooShort

_LOOK_S: Final = 5.0
"""How long a chunk that a checkpoint goes on with may stay invisible."""


class Gate:
    """Decides step by step.

    Args:
        dataset: this rank's samples in order, strided, without an end (`num_samples`), with the deadline that counts.
        stop_at_end: whether a step that reaches past the end of the stream is not trained.
        begun: whether the run has trained a step in an earlier start.

    Attributes:
        stopped: whether a step was refused.
    """

    def __init__(self, dataset: LazyShardedDataset, stop_at_end: bool, *, begun: bool = False) -> None:
        self._dataset = dataset
        self._stop_at_end = stop_at_end
        self._begun = begun
        self.stopped = False

    def allows(self, first: int, stop: int) -> bool:
        """Returns whether a step is to be trained, waiting until that is certain.

        Args:
            first: the step's first position in this rank's lane, in the current part of the run.
            stop: the position after its last.

        Raises:
            WaitTimeout: its data were not published in time.
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
        if self._stop_at_end and past:
            if not first and not self._begun:
                raise self._too_short()
            self.stopped = True
        return not self.stopped

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
