"""Where a run stands once so many sequences of an epoch were trained, found by planning the windows up to there."""

from __future__ import annotations

import operator

from lazyshard.data.sequence_planner import SequencePlanner, SequenceWalk
from lazyshard.data.sequence_settings import SequenceSettings
from lazyshard.data.sequence_states import Standing
from lazyshard.stream import StreamReader

__all__ = ["SequenceCounts", "whole_micro_batches"]


class SequenceCounts:
    """Finds what counts of sequences come to, each from the one before where that is less.

    Args:
        reader: the stream.
        planner: knows which sequences there are.
        settings: of the sequences.
    """

    def __init__(self, reader: StreamReader, planner: SequencePlanner, settings: SequenceSettings) -> None:
        self._reader = reader
        self._planner = planner
        self._settings = settings
        self._known: tuple[Standing, SequenceWalk] | None = None

    def forget(self) -> None:
        """Begins anew: lengths may have been read anew."""
        self._known = None

    def after(self, consumed: int, begun: Standing, ranks: int) -> Standing:
        """Returns where a run stands after so many sequences of an epoch, over all ranks.

        Args:
            consumed: whole micro batches, also the one that completes the epoch.
            begun: where the run began that epoch, or went on.
            ranks: of the run.

        Raises:
            ValueError, TypeError, WaitTimeout: as `LazyShardedSequences.state_dict`.
        """
        try:
            count = operator.index(consumed)
        except TypeError:
            raise TypeError(f"consumed is a number of sequences, an int, got {consumed!r}") from None
        known = self._known
        if known is None or known[0] != begun or not known[1].holds(count):
            known = self._known = begun, SequenceWalk(self._planner, begun.place, begun.epoch)
        walk = known[1]
        place = walk.place_of(max(count, begun.consumed))
        whole = count if walk.total is None else min(count, walk.total)
        micro = ranks, self._settings.batch_size
        wrong = whole_micro_batches(count, begun.consumed, walk.total, micro, self._settings.at_end)
        if wrong is not None:
            raise ValueError(f"{self._reader.directory}: {wrong}")
        walk.let_go(whole)
        return Standing(begun.epoch, whole, place, begun.within if whole == begun.consumed else 0)


def whole_micro_batches(count: int, begun: int, total: int | None, micro: tuple[int, int], at_end: str) -> str | None:
    """Returns why a number of sequences was not trained at the end of a micro batch, in words; None if it can be.

    Args:
        count: sequences of an epoch, over all ranks, what completes it included.
        begun: behind which the run began, or went on.
        total: of the epoch; None as long as its end is not known.
        micro: ranks, and batch size.
        at_end: "drop", or "complete" for one more micro batch with what is left over.
    """
    step = micro[0] * micro[1]
    batches = f"consumed counts whole micro batches of dp_size * batch_size = {micro[0]} * {micro[1]} sequences"
    if count < begun:
        known = ", what was trained when the loaded state was saved" if begun else ""
        return f"{batches} from {begun} on{known}; got {count}"
    most = None
    if total is not None:
        left = (total - begun) % step
        most = total - left + (step if left and at_end == "complete" else 0)
        if count > most:
            over = f", of which at_end='drop' leaves {left} over" if most < total else ""
            return f"{batches}, which are {most} at the most: the epoch has {total} sequences{over}; got {count}"
    below = begun + (count - begun) // step * step
    if below == count:
        return None
    other = "" if most == below else f" or {below + step}"
    return f"{batches} from {begun} on, so {below}{other}; got {count}"
