"""What a `LazyShardedStream` adds to the state of its data set: places that a data set cannot stand at.

Of a DataLoader worker, which worker it is and how many samples it has handed out of the pass; within a micro batch, how
many samples of it; behind a micro batch that completed the epoch, how many samples that had, over all ranks.
"""

from __future__ import annotations

from typing import Any, Final

from lazyshard.errors import StateInvalid

__all__ = ["HANDED_OUT", "OVER", "WORKER", "WORKERS", "check_ranks", "of_worker", "only_of_a_stream", "take_apart"]

WORKER: Final = "worker"
WORKERS: Final = "workers"
HANDED_OUT: Final = "handed_out"
OVER: Final = "over"


def only_of_a_stream(value: object) -> str | None:
    """Returns why a state is none for a data set, and what to give instead, in words; None where it may be one."""
    if not isinstance(value, dict):
        return None
    if WORKER in value:
        return (
            "it is that of one DataLoader worker of a LazyShardedStream or LazyShardedIterable, which only the same "
            "number of workers can go on from; save `dataset.state_dict(consumed)` too: any ranks and workers can go "
            "on from that"
        )
    if value.get("kind") == "sequences":
        return "it is that of LazyShardedSequences, of the same form as there, which alone goes on from it"
    if HANDED_OUT in value:
        return (
            "it stands within a micro batch, where only a LazyShardedStream or LazyShardedIterable of as many ranks "
            "goes on; give one that was saved at the end of a micro batch"
        )
    return None


def take_apart(state: Any, size: int, where: str) -> tuple[Any, int, int]:
    """Returns the state of the data set, samples handed out within a micro batch, and those of the one that ended all.

    Args:
        state: as loaded. What is no state at all, or that of a worker, is left for the data set to refuse.
        size: samples of a rank in a micro batch.
        where: the stream, for messages.

    Raises:
        StateInvalid: what was added is not as it should be.
    """
    if not isinstance(state, dict) or WORKER in state:
        return state, 0, 0
    within, last = state.get(HANDED_OUT, 0), state.get(OVER, 0)
    if type(within) is not int or not 0 <= within < size:
        raise StateInvalid(
            f"{where}: the state stands within a micro batch, behind {within!r:.100} samples of {size}: go on from one "
            f"that was saved at the end of a micro batch",
            field=HANDED_OUT,
            expected=f"an integer from 0 to {size - 1}",
            actual=f"{within!r:.100}",
        )
    if type(last) is not int or last < 0:
        raise StateInvalid(
            f"{where}: the state to go on from: expected a number of samples as {OVER!r}, found {last!r:.100}; go on "
            f"from an older checkpoint",
            field=OVER,
            expected="an integer from 0",
            actual=f"{last!r:.100}",
        )
    return {name: value for name, value in state.items() if name not in (HANDED_OUT, OVER)}, within, last


def check_ranks(state: dict[str, Any], dp: int, size: int, where: str) -> None:
    """Refuses a state within a micro batch of other ranks, or of another size. It is one that its data set has read.

    Raises:
        StateInvalid: naming both.
    """
    last = state["parts"][-1]
    if (last["dp"], last["batch_size"]) != (dp, size):
        raise StateInvalid(
            f"{where}: the state stands within a micro batch of {last['batch_size']} of {last['dp']} ranks, here it is "
            f"{size} of {dp}: go on from one that was saved at the end of a micro batch",
            field=HANDED_OUT,
            expected=f"{dp} ranks, batch_size {size}",
            actual=f"{last['dp']} ranks, batch_size {last['batch_size']}",
        )


def of_worker(state: Any, here: tuple[int, int], where: str) -> tuple[dict[str, Any], int]:
    """Returns the state of the data set with which a worker's pass began, and the samples that it has handed out since.

    Args:
        state: as loaded in a worker.
        here: which worker this is, of how many.
        where: the stream, for messages.

    Raises:
        StateInvalid: it is no state of this worker.
    """
    given = dict(state) if isinstance(state, dict) else {}
    there = given.pop(WORKER, None), given.pop(WORKERS, None)
    behind = given.pop(HANDED_OUT, None)
    if there != here or type(behind) is not int or behind < 0:
        raise StateInvalid(
            f"{where}: expected the state of DataLoader worker {here[0]} of {here[1]}, found that of {there[0]} of "
            f"{there[1]}; with another number of workers go on from what `dataset.state_dict(consumed)` gave",
            field=WORKERS,
            expected=str(here),
            actual=str(there),
        )
    return given, behind
