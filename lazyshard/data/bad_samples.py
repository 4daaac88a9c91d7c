"""What happens to a sample that cannot be read or encoded, and which rows may take its place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Final, Literal, get_args

from lazyshard.errors import BadSample, ChunkCorrupt, RowInvalid, TooManyBadSamples
from lazyshard.plan import mix64

OnBadSample = Literal["substitute", "raise"]

ErrorCount = int | None | Literal["max_bad_samples"]
"""An error budget: how many bad samples are replaced, None for as many as like."""

MOST_BAD: Final = 16
"""Bad substitutes after which a chunk is given up: with half of its rows bad, all fail once in 65,536 times."""

_log = logging.getLogger("lazyshard")


def substitutes(sample: int, rows: int, samples_per_chunk: int) -> Iterator[int]:
    """Yields the samples to try instead of one that is bad or dropped: all others of its chunk.

    Their order depends on its number alone, so every rank, worker and restart that meets it takes the same substitute.

    Args:
        sample: number of the sample.
        rows: rows in its chunk.
        samples_per_chunk: of the stream.
    """
    first = sample - sample % samples_per_chunk
    row = sample - first
    seen = {row}
    for attempt in range(min(MOST_BAD, rows - 1)):
        other = mix64(sample, attempt) % rows
        # On to the next one not tried yet, so that a small chunk is tried whole.
        while other in seen:
            other = (other + 1) % rows
        seen.add(other)
        yield first + other
    yield from (first + other for other in _around(mix64(sample, MOST_BAD), rows) if other not in seen)


def of_another_chunk(sample: int, chunk: int, rows: int, samples_per_chunk: int) -> Iterator[int]:
    """Yields the samples of another chunk to try instead of one of whose own chunk every row is dropped.

    Args:
        sample: number of the sample.
        chunk: the other chunk.
        rows: rows in that one.
        samples_per_chunk: of the stream.
    """
    yield from (chunk * samples_per_chunk + row for row in _around(mix64(sample, chunk), rows))


def _around(start: int, rows: int) -> Iterator[int]:
    yield from ((start + row) % rows for row in range(rows))


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
