"""What happens to a sample that cannot be read or encoded, and the error that says where it stands."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal, get_args

from lazyshard.data.steps import StepFailed
from lazyshard.errors import BadSample, ChunkCorrupt, RowInvalid, TooManyBadSamples
from lazyshard.stream import StreamReader

OnBadSample = Literal["substitute", "raise"]

ErrorCount = int | None | Literal["max_bad_samples"]
"""An error budget: how many bad samples are replaced, None for as many as like."""

_log = logging.getLogger("lazyshard")


class BadSamples:
    """Counts bad samples and decides whether to go on; counts those that are dropped, too.

    Args:
        action: "substitute" or "raise".
        limit: how many different bad samples this process accepts; None for any number.
        name: how the user calls that limit.
        instead: what is done in the place of a bad or dropped sample, for the log; None for what data sets do.

    Raises:
        ValueError: the action is neither, or the limit negative.
    """

    def __init__(
        self, action: OnBadSample, limit: int | None, name: str = "max_bad_samples", instead: str | None = None
    ) -> None:
        if action not in get_args(OnBadSample):
            raise ValueError(f"on_bad_sample is one of {', '.join(get_args(OnBadSample))}, got {action!r}")
        if limit is not None and limit < 0:
            raise ValueError(f"max_bad_samples is 0 or more, got {limit}")
        self._action = action
        self._limit = limit
        self._name = name
        self._instead = instead
        self._seen: set[int] = set()
        self._skipped = 0

    @classmethod
    def within(cls, action: OnBadSample, limit: int | None, error_count: ErrorCount) -> BadSamples:
        """Returns one with an error budget, which says both: 0 raises the first error, None none.

        Raises:
            ValueError: as the constructor; or the budget is none, or says something else than the action.
        """
        if error_count == "max_bad_samples":
            return cls(action, limit)
        if error_count is not None and (type(error_count) is not int or error_count < 0):
            raise ValueError(f"max_error_count is 0 or more, or None for no limit, got {error_count!r}")
        if action == "raise" and error_count != 0:
            raise ValueError(
                f"on_bad_sample='raise' raises the first error, max_error_count={error_count} does not: give one"
            )
        return cls(action if error_count != 0 else "raise", error_count, "max_error_count")

    @property
    def skipped(self) -> int:
        """How often a drawn sample was dropped, by a filter or `SkipSample`, in this process."""
        return self._skipped

    def __len__(self) -> int:
        """Different bad samples met by this process."""
        return len(self._seen)

    def fresh(self) -> BadSamples:
        """Returns one with the same settings that has met none."""
        return BadSamples(self._action, self._limit, self._name, self._instead)

    def skip(self, where: Callable[[], BadSample]) -> None:
        """Takes note of a drawn sample that is dropped; speaks of the first, tenth, hundredth and so on.

        Args:
            where: returns the error that says which sample it is.
        """
        self._skipped += 1
        if str(self._skipped).strip("0") == "1":
            instead = self._instead or "another row is used instead"
            _log.warning("%s; %s (skipped by this process: %d)", where(), instead, self._skipped)

    def meet(self, sample: int, where: BadSample, cause: Exception) -> None:
        """Takes note of a bad sample and returns if a substitute is to be trained instead.

        Args:
            sample: its number.
            where: the error that says which sample it is.
            cause: what reading or encoding it raised.

        Raises:
            ChunkCorrupt, RowInvalid: the cause, where bad samples are to be raised and it says by itself where it
                happened.
            BadSample: `where`, where the encoder failed.
            TooManyBadSamples: the limit is passed.
        """
        if self._action == "raise":
            if isinstance(cause, (ChunkCorrupt, RowInvalid)):
                raise cause
            raise where from cause
        known = sample in self._seen
        self._seen.add(sample)
        # A known one too: who goes on after the error must not get what it refused.
        if self._limit is not None and len(self._seen) > self._limit:
            raise TooManyBadSamples(
                f"{len(self._seen)} bad samples in this process, {self._name} is {self._limit}; the last one: {where}",
                file=where.file,
                step=where.step,
                sample=sample,
                chunk=where.chunk,
                row=where.row,
                byte=where.byte,
                count=len(self._seen),
            ) from cause
        if known:
            return
        most = "" if self._limit is None else f" of at most {self._limit}"
        instead = self._instead or "another row of its chunk is used instead"
        _log.warning("%s; %s (bad sample %d%s)", where, instead, len(self), most)


def where_bad(reader: StreamReader, sample: int, cause: Exception) -> BadSample:
    """Returns the error that says which sample is bad or dropped, where it stands, and why.

    Args:
        reader: the stream.
        sample: its number; it is published.
        cause: what reading, encoding or a step has raised.
    """
    number, row = divmod(sample, reader.samples_per_chunk)
    chunk = reader.chunk(number)
    step, raised = (cause.step, cause.__cause__) if isinstance(cause, StepFailed) else (None, cause)
    byte, line, reason = chunk.offset(row), row + 1, f"{type(raised).__name__}: {raised}"
    if step is not None:
        reason = f"{step}: {reason}"
    if isinstance(cause, RowInvalid):
        # It knows of blank lines in foreign files, and where in the row it was.
        byte, line, reason = cause.byte or byte, cause.line or line, cause.reason or reason
    return BadSample(
        f"{chunk.path}: row {row} (line {line}, byte {byte}, sample {sample}): {reason}",
        file=str(chunk.path),
        step=step,
        sample=sample,
        chunk=number,
        row=row,
        byte=byte,
    )
