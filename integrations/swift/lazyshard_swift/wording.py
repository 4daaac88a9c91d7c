"""What is said in the same words at several places: the end of a stream, and for how many ranks something is."""

from __future__ import annotations


def stopped(
    samples: int, *, step: int, planned: int, trained: int, left_over: int, step_samples: int, checkpoint: str | None
) -> str:
    """Returns the line of a run that stops where its stream ends.

    Args:
        samples: of the stream.
        step: the last one that was trained.
        planned: steps that were asked for.
        trained: samples that were trained since the run began.
        left_over: samples that were not, fewer than a step takes.
        step_samples: samples of a step, over all ranks.
        checkpoint: the one of the last step; None where none is saved yet, or none is asked for.
    """
    saved = "" if checkpoint is None else f". Checkpoint: {checkpoint}"
    return (
        f"the stream has ended with {samples} samples: training stops after step {step} of {planned}, on all ranks "
        f"alike, with {trained} samples trained and {left_over} left over, fewer than the {step_samples} of a step"
        f"{saved}"
    )


def ranks(number: int) -> str:
    """Returns so many ranks in words.

    >>> ranks(1), ranks(4)
    ('1 data-parallel rank', '4 data-parallel ranks')
    """
    return f"{number} data-parallel rank{'' if number == 1 else 's'}"


def each_of(number: int) -> str:
    """Returns in words for whom something is that each rank has.

    >>> each_of(1), each_of(4)
    ('the only data-parallel rank', 'each of 4 data-parallel ranks')
    """
    return "the only data-parallel rank" if number == 1 else f"each of {ranks(number)}"
