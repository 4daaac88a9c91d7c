"""Counts the samples of a run over sequences: each must be in one that was trained, is to come, or is left over.

A row that is cut counts by its last token. What comes once more by design does not count twice: tokens of an overlap,
and what completes an epoch's last micro batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from lazyshard.inspection.auditing_counts import (
    LEFT_OUT,
    LEFT_OVER,
    SKIPPED,
    TO_COME,
    TRAINED,
    AuditedState,
    Counts,
    EpochAudit,
    audit_of,
    ranges_where,
)
from lazyshard.inspection.tracing_sequences import Numbered, SequenceTracing
from lazyshard.plan.sequences import Split, SplitSequence
from lazyshard.stream.sequences import PlannedWindow, RowDraws

_KINDS: Final = {"trained": TRAINED, "skipped": SKIPPED, "to come": TO_COME, "left over": LEFT_OVER}


def count_sequences(
    tracing: SequenceTracing, branches: Sequence[AuditedState], report: Callable[[str, int, int], None]
) -> list[EpochAudit]:
    """Counts the samples of the sequences of a run, by the epochs of the stream; and those of branches that left it."""
    counting = _Counting(tracing, report)
    for one in tracing.sequences(counting.see):
        counting.count(one)
    counting.finish()
    for branch in branches:
        if isinstance(branch.tracing, SequenceTracing):
            _count_branch(branch, branch.tracing, counting.counts)
    return [audit_of(counts) for _, counts in sorted(counting.counts.items())]


class _Counting:
    """Counts by epoch of the stream: a run over sequences may pass over several in one of its own."""

    def __init__(self, tracing: SequenceTracing, report: Callable[[str, int, int], None]) -> None:
        self._tracing, self._report, self._epoch = tracing, report, tracing.of.epoch
        # The first one also before the rows of a window are known.
        self.counts = {self._epoch: Counts(tracing.end, self._epoch)}
        self._seen = {self._epoch: np.zeros(tracing.end, np.bool_)}
        # Rows that are to be counted, by kind; the sequences of the micro batch at hand, and the row that ended last.
        self._rows: dict[int, list[int]] = {}
        self._known: set[SplitSequence] = set()
        self._last = -1 if (row := tracing.row_ended()) is None else row
        # Where what is left over begins, and the windows from there on.
        self._behind = tracing.first.position
        self._windows: list[tuple[int, RowDraws]] = []
        for drawn in tracing.before():
            self._add(drawn, TRAINED)

    def see(self, window: PlannedWindow) -> None:
        """Takes note of the rows of a window."""
        self._flush()
        tracing, size = self._tracing, self._tracing.rows.rows
        for number in tracing.windows_met(window):
            names, drawn = tracing.in_order(number)
            lengths = tracing.rows.lengths(number, self._epoch)[names - number * size]
            fresh = np.arange(len(lengths)) + number * size >= tracing.first.position
            none = lengths == 0 if isinstance(tracing.form, Split) else (lengths == 0) | (lengths > tracing.form.size)
            self._add(_of(drawn, fresh & none), LEFT_OUT)
            self._add(_of(drawn, fresh), None)
            self._windows.append((number * size, drawn))
        self._behind = number * size + len(lengths) if window.after is None else window.after.position
        self._windows = [one for one in self._windows if one[0] + size > self._behind]
        self._report("counting samples", min(number * size, tracing.facts.samples), tracing.facts.samples)

    def count(self, one: Numbered) -> None:
        """Counts the rows that end in a sequence."""
        tracing, (number, sequence) = self._tracing, one
        if tracing.begins_batch(number):
            self._known.clear()
        if sequence not in self._known:
            self._known.add(sequence)
            ended = [row for row in tracing.ends_in(sequence) if row != self._last]
            self._rows.setdefault(_KINDS[tracing.fate_of(number, 0).became], []).extend(ended)
            self._last = ended[-1] if ended else self._last

    def finish(self) -> None:
        """Counts what is in no sequence so far."""
        self._flush()
        rest = TO_COME if self._tracing.count is None else LEFT_OVER
        gaps = [one for part in self._tracing.of.parts for one in part.skip]
        gaps += self._tracing.rows.gaps[self._tracing.stream].ranges
        for counts in self.counts.values():
            for start, stop in gaps:
                counts.leave_out(start, stop)
        for first, drawn in self._windows:
            left = _of(drawn, np.arange(len(drawn.samples)) + first >= self._behind)
            self._add(left, rest, unknown=True)
        for epoch, counts in self.counts.items():
            counts.add(np.flatnonzero(~self._seen[epoch] & (counts.kinds == 0)), rest)

    def _flush(self) -> None:
        size = self._tracing.rows.rows
        for kind, rows in self._rows.items():
            numbers = np.array(rows, np.int64)
            for window in np.unique(numbers // size).tolist():
                drawn = self._tracing.rows.of_window(window, self._epoch)
                self._add(_of(drawn, numbers[numbers // size == window] - window * size), kind)
        self._rows.clear()

    def _add(self, drawn: RowDraws, kind: int | None, *, unknown: bool = False) -> None:
        """Counts those of this stream as of a kind, None for having been seen; if `unknown` those of no kind so far."""
        own = drawn.streams == self._tracing.stream
        for epoch in np.unique(drawn.epochs[own]).tolist():
            if epoch not in self.counts:
                self.counts[epoch] = Counts(self._tracing.end, epoch)
                self._seen[epoch] = np.zeros(self._tracing.end, np.bool_)
            samples, counts = drawn.samples[own & (drawn.epochs == epoch)], self.counts[epoch]
            self._seen[epoch][samples] = True
            if unknown:
                samples = samples[(counts.kinds[samples] == 0) & (counts.trained[samples] == 0)]
            if kind is not None:
                counts.add(samples, kind)


def _of(drawn: RowDraws, which: npt.NDArray[np.generic]) -> RowDraws:
    return RowDraws(*(one[which] for one in drawn))


def _count_branch(branch: AuditedState, own: SequenceTracing, counted: dict[int, Counts]) -> None:
    """Counts what a state has trained that has left the course."""
    draws = zip(own.state.parts, branch.shared, own.begins, strict=True)
    beyond = [range(begin + one.dp * shared, begin + one.dp * one.draws) for one, shared, begin in draws if one.trained]
    samples = {
        sample
        for number, sequence in own.sequences()
        if any(number in numbers for numbers in beyond)
        for sample in own.samples_of(sequence)
    }
    branch.trained = sum(map(len, beyond))
    for epoch, counts in counted.items():
        again = np.zeros(counts.total, np.bool_)
        again[[sample for sample in samples if counts.trained[sample]]] = True
        if again.any():
            branch.again[epoch] = ranges_where(counts.total, partial(_between, again))


def _between(marks: npt.NDArray[np.bool_], start: int, stop: int) -> npt.NDArray[np.bool_]:
    return marks[start:stop]
