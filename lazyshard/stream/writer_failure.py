"""What has ended a writer's work: remembered, and told again by every later call."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from lazyshard.errors import LazyShardError, ProducerFenced, WriterFailed
from lazyshard.stream.lock import WriterLock


class WriterFailure:
    """Whether a writer has failed, and by what."""

    def __init__(self, directory: Path, lock: WriterLock) -> None:
        self._directory = directory
        self._lock = lock
        self._cause: BaseException | None = None

    def __bool__(self) -> bool:
        """Whether it has failed."""
        return self._cause is not None

    def check(self, published_samples: int) -> None:
        """Raises what the writer has failed by, if it has.

        Raises:
            LazyShardError: what it was; a `WriterFailed` where it was something else.
        """
        if isinstance(self._cause, LazyShardError):
            raise self._cause
        if self._cause is not None:
            reason = f"an earlier call was ended by {type(self._cause).__name__}"
            raise self._told(reason, "open", published_samples) from self._cause

    def fail(self, cause: BaseException, published_samples: int) -> NoReturn:
        """Remembers what has left an open chunk of unknown content, and raises it, or in its place what tells more.

        Raises:
            WriterFailed: the filesystem refused.
            ProducerFenced: another producer has taken the stream over, of which this was a consequence.
            BaseException: the cause itself, if it is something else.
        """
        self._cause = cause
        if not isinstance(cause, OSError) or isinstance(cause, LazyShardError):
            raise cause
        remedy = "make room or mend the filesystem, then open"
        told: LazyShardError = self._told(cause.strerror or str(cause), remedy, published_samples)
        self._cause = told
        try:
            # A producer that takes over removes this one's directory, which is no fault of the filesystem.
            self._lock.check(closely=True)
        except ProducerFenced as fenced:
            self._cause = told = fenced
        except OSError:
            pass
        raise told from cause

    def _told(self, reason: str, remedy: str, published_samples: int) -> WriterFailed:
        return WriterFailed(
            f"{self._directory}: {reason}. {published_samples:,} samples are published and safe, the rows after them "
            f"are not; {remedy} the stream again, or start its producer again: it goes on from there",
            directory=str(self._directory),
            published_samples=published_samples,
        )
