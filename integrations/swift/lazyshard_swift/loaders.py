"""Small data set, sampler and loader classes between `TrainStream` and ms-swift's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

if TYPE_CHECKING:
    from lazyshard_swift.stream import TrainStream


class RunLength(Dataset[Any]):
    """A stream with the length of a whole run, for a sampler that goes through it once.

    Args:
        stream: the stream.
        samples: how many samples the run takes, over all ranks.
    """

    def __init__(self, stream: TrainStream, samples: int) -> None:
        self._stream = stream
        self._samples = samples

    def __len__(self) -> int:
        """Samples of the run, over all ranks."""
        return self._samples

    def __getitem__(self, index: int) -> Any:
        """Returns an encoded sample."""
        return self._stream[index]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Returns the encoded samples of a batch."""
        return self._stream.__getitems__(indices)


def sampler_in_epochs(original: type[Any]) -> type[Any]:
    """Returns a subclass of ms-swift's `BatchSamplerShard`, in the same order, that tells its epoch to the gate."""

    class EpochBatchSampler(original):  # type: ignore[misc]
        _epoch = 0

        def __init__(self, total_samples: int, *rest: Any, **options: Any) -> None:
            super().__init__(total_samples, *rest, **options)
            self._epoch_samples = total_samples

        def set_epoch(self, epoch: int) -> None:
            super().set_epoch(epoch)
            self._epoch = epoch

    return EpochBatchSampler


def strided_sampler(original: type[Any]) -> type[Any]:
    """Returns a subclass of ms-swift's `BatchSamplerShard` that keeps to its strided order, epoch after epoch.

    ms-swift's own shuffle goes over all indices, so it would wait for the last chunk; the stream shuffles instead.
    """

    class StridedBatchSampler(sampler_in_epochs(original)):  # type: ignore[misc]
        def __init__(self, total_samples: int, *rest: Any, **options: Any) -> None:
            options["shuffle"] = False
            super().__init__(total_samples, *rest, **options)

        def __iter__(self) -> Iterator[list[int]]:
            first = self._epoch * self._epoch_samples
            for batch in super().__iter__():
                yield [first + index for index in batch]

    return StridedBatchSampler


def gated_loader(
    original: type[Any], stream: TrainStream, accumulation_steps: int, saves: Callable[[], bool] = lambda: False
) -> type[Any]:
    """Returns a subclass of ms-swift's `DataLoaderShard` that asks the stream's gate before each step.

    Args:
        original: ms-swift's class.
        stream: the stream.
        accumulation_steps: micro batches of a step.
        saves: says whether a checkpoint is saved where the loader ends before its time.
    """

    class GatedLoader(original):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            sampler, skipped = self.batch_sampler, 0
            # After a resume accelerate's SkipBatchSampler is around ours.
            while not hasattr(sampler, "_epoch_samples"):
                skipped += sampler.skip_batches
                sampler = sampler.batch_sampler
            plan, count = stream.plan, len(sampler)
            start = (sampler._epoch * plan.epoch_samples + plan.index_offset) // plan.rank.dp_size
            batches: Iterator[Any] | None = None
            for number in range(skipped, count):
                if number % accumulation_steps == 0 or batches is None:
                    first, size = start + number * plan.batch_size, plan.batch_size
                    # In the last step of an epoch there may be fewer; where steps decide, that one is not trained.
                    whole = accumulation_steps - number % accumulation_steps
                    step = whole if plan.stop_at_end else min(whole, count - number)
                    if not stream.gate.allows(first, first + step * size, saves=saves()):
                        return
                if batches is None:
                    # Workers start reading here, so not before the gate has let the first step through.
                    batches = super().__iter__()
                yield next(batches)

    return GatedLoader
