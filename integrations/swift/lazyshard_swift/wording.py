"""What is said in the same words at several places: the end of a stream, and for how many ranks something is."""

from __future__ import annotations


def stopped(why: str, left: str = "", *, step: int, planned: int, trained: int, checkpoint: str | None) -> str:
    """Returns the line of a run that stops before the steps that were asked for.

    Args:
        why: what has ended, or what did not come.
        left: what of the streams was not trained; empty where more may come.
        step: the last one that was trained.
        planned: steps that were asked for.
        trained: samples that were trained since the run began.
        checkpoint: the one of the last step; None where none is saved yet, or none is asked for.
    """
    saved = "" if checkpoint is None else f". Checkpoint: {checkpoint}"
    return (
        f"{why}: training stops after step {step} of {planned}, on all ranks alike, with {trained} samples trained"
        f"{left}{saved}"
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
