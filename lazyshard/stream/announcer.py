"""What a writer tells its readers in `head.json`: how far it is, what it is doing, how fast."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lazyshard.format import STATES, Head, ProducerState
from lazyshard.format.names import HEAD
from lazyshard.store.durable import publish_bytes, publish_reserved, remove, reserve
from lazyshard.stream.producer_process import own_process
from lazyshard.stream.rate import RateMeter

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)

_RESERVED_BYTES: Final = 4096
"""A head with a note has some hundred. Filesystems give room by pages of this size."""


class Announcer:
    """Writes `head.json`, on a full disk too: room for one head is reserved as long as there is some.

    Of a disk that copies what is overwritten, or whose server gives no room in advance, that is no promise.

    Args:
        directory: the stream's directory.
        temporary: a name on the same filesystem to write under.
        reserve: another one, of the file that keeps room for one head.
        samples_per_chunk: rows in a chunk.
        samples: rows that were published before.
        clock: returns seconds since 1970.

    Attributes:
        told_at: when the head was last written, by the monotonic clock.
    """

    def __init__(
        self,
        directory: Path,
        temporary: Path,
        reserve: Path,
        samples_per_chunk: int,
        samples: int,
        clock: Callable[[], float],
    ) -> None:
        self._path = directory / HEAD
        self._temporary = temporary
        self._reserve = reserve
        self._reserved = False
        self._samples_per_chunk = samples_per_chunk
        self._clock = clock
        self._host = socket.gethostname() or "unknown"
        self._process = own_process()
        self.told_at = time.monotonic()
        self._meter = RateMeter(self.told_at, samples)
        self._taken = samples
        self._row_at = 0.0

    def tell(self, chunks: int, samples: int, taken: int, state: ProducerState, note: str = "") -> None:
        """Replaces the head. That of a stream which has ended is durable: nobody starts again to tell it anew.

        Args:
            chunks: published chunks.
            samples: rows in them.
            taken: rows so far, those that are not published included: what the rate is told from.
            state: what the producer is doing; "finished" says that the stream has ended.
            note: what it waits for, in words.

        Raises:
            OSError: the filesystem refused. The head is a hint, so that says nothing about what is published.
        """
        self.told_at, now = time.monotonic(), self._clock()
        if taken != self._taken:
            self._taken, self._row_at = taken, now
        ended, working = state == "finished", state in ("running", "waiting")
        # A partial chunk is the last one: no head names it before `stream.end` is there.
        partial = 0 if ended else samples % self._samples_per_chunk
        head = Head(
            chunks=chunks - (1 if partial else 0),
            samples=samples - partial,
            ended=ended,
            state=state,
            rate=self._meter.update(self.told_at, taken),
            host=self._host,
            pid=os.getpid(),
            updated_at=now,
            note=note,
            process=self._process,
            # One that stops drops them.
            open=taken - samples if working else 0,
            row_at=self._row_at if working else 0.0,
        )
        try:
            publish_bytes(head.encode(), self._path, self._temporary, durable=ended)
        except OSError as cause:
            if cause.errno not in _NO_ROOM or not self._reserved:
                raise
            self._reserved = False
            publish_reserved(head.encode(), self._path, self._reserve, durable=ended)
            remove(self._temporary)
        if not self._reserved and not ended:
            # After a publish: where the reserve was used, the room of the head before is free now.
            try:
                reserve(self._reserve, _RESERVED_BYTES)
                self._reserved = True
            except OSError as cause:
                if cause.errno not in _NO_ROOM:
                    raise

    def close(self) -> None:
        """Gives the reserved room back."""
        self._reserved = False
        with contextlib.suppress(OSError):
            remove(self._reserve)


def check_state(state: ProducerState) -> ProducerState:
    """Returns a state that a producer may claim.

    Raises:
        ValueError: there is no such state, or only the end of the stream can make it true.
    """
    if state not in STATES or state == "finished":
        raise ValueError(f"state is one of {', '.join(s for s in STATES if s != 'finished')}, got {state!r}")
    return state
