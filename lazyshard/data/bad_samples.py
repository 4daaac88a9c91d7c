"""What happens to a sample that cannot be read or encoded."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final, Literal, get_args

from lazyshard.errors import BadSample, ChunkCorrupt, RowInvalid, TooManyBadSamples
from lazyshard.plan import mix64

OnBadSample = Literal["substitute", "raise"]

_TRIES: Final = 16
"""Substitutes tried before a chunk is given up: with half of its rows bad, all fail once in 65,536 times."""

_log = logging.getLogger("lazyshard")


def substitutes(sample: int, rows: int, samples_per_chunk: int) -> Iterator[int]:
    """Yields the samples to try instead of a bad one: others of its chunk.

    Their order depends on its number alone, so every rank, worker and restart that meets it takes the same substitute.

    Args:
        sample: number of the bad sample.
        rows: rows in its chunk.
        samples_per_chunk: of the stream.
    """
    first = sample - sample % samples_per_chunk
    row = sample - first
    seen = {row}
    for attempt in range(min(_TRIES, rows - 1)):
        other = mix64(sample, attempt) % rows
        # On to the next one not tried yet, so that a small chunk is tried whole.
        while other in seen:
            other = (other + 1) % rows
        seen.add(other)
        yield first + other


class BadSamples:
    """Counts bad samples and decides whether to go on.

    Args:
        action: "substitute" or "raise".
        limit: how many different bad samples this process accepts.

    Raises:
        ValueError: the action is neither, or the limit negative.
    """

    def __init__(self, action: OnBadSample, limit: int) -> None:
        if action not in get_args(OnBadSample):
            raise ValueError(f"on_bad_sample is one of {', '.join(get_args(OnBadSample))}, got {action!r}")
        if limit < 0:
            raise ValueError(f"max_bad_samples is 0 or more, got {limit}")
        self._action = action
        self._limit = limit
        self._seen: set[int] = set()
        self._skipped = 0

    @property
    def skipped(self) -> int:
        """How often a sample was skipped (`SkipSample`) by this process."""
        return self._skipped

    def __len__(self) -> int:
        """Different bad samples met by this process."""
        return len(self._seen)

    def fresh(self) -> BadSamples:
        """Returns one with the same settings that has met none."""
        return BadSamples(self._action, self._limit)

    def skip(self, sample: int, where: BadSample) -> None:
        """Takes note of a sample that the encoder skips; speaks of the first, tenth, hundredth and so on."""
        self._skipped += 1
        if str(self._skipped).strip("0") == "1":
            _log.warning(
                "%s; another row of its chunk is used instead (skipped by this process: %d)", where, self._skipped
            )

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
        if len(self._seen) > self._limit:
            raise TooManyBadSamples(
                f"{len(self._seen)} bad samples in this process, max_bad_samples is {self._limit}; the last one: "
                f"{where}",
                file=where.file,
                sample=sample,
                chunk=where.chunk,
                row=where.row,
                byte=where.byte,
                count=len(self._seen),
            ) from cause
        if known:
            return
        _log.warning(
            "%s; another row of its chunk is used instead (bad sample %d of at most %d)", where, len(self), self._limit
        )
