"""Looks at a stream that the waiting processes of one node share, so that a metadata server meets one poller a node.

Nobody is elected. Each process keeps its own pace, but before it asks the filesystem it reads what the others of this
node were told (`NodeFile`): an answer that is no older than its own pause is as good as one of its own. So the process
that wants to know soonest asks, the others live on its answers, and who comes or goes, or is stopped or killed between
two looks, changes nothing for them. Whose answer was taken last comes a little later the next time, so that the one
that asks goes on asking, and few want to ask in the same moment. Where several do, one of them gets the right to ask,
and the others come back for its answer; one that keeps the right for long (its filesystem hangs, or it was stopped just
then) is not waited for.

What an answer says is decoded and checked like the file itself, and anything that is wrong with it makes it none. An
error is nobody's answer: each process meets it by itself.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from types import TracebackType
from typing import Final

from lazyshard.errors import FormatInvalid
from lazyshard.format import Head
from lazyshard.store.node_file import Answer, NodeFile, file_name
from lazyshard.stream.published import Published

LATER_S: Final = 0.02
"""How much later than due a process comes that lives on another's answers; what a look takes on most filesystems. Of a
short pause it is a quarter."""

ASKING_S: Final = 2.0
"""How long the answer of another process that is just asking is waited for: that of a busy server takes less."""

_SOON_S: Final = 0.001
"""No pause is shorter; what is due within it is due."""

_TRIES: Final = 3
"""How often in a wait to try whether there can be a file; what fails is a moment's bad luck, or fails again."""


class _LazyFile:
    """The file of a stream, opened when it is first asked for."""

    def __init__(self, stream_id: str | None, identify: Callable[[], os.stat_result]) -> None:
        self._stream_id = stream_id
        self._identify = identify
        self._tries = 0 if stream_id is None else _TRIES
        self.opened: NodeFile | None = None

    def get(self) -> NodeFile | None:
        """Returns the file, None where there is none to be had."""
        if self.opened is None and self._tries > 0:
            self._tries -= 1
            try:
                self.opened = NodeFile(file_name(str(self._stream_id), self._identify()))
            except OSError:
                return None
        return self.opened

    def close(self) -> None:
        """Closes the file, for good."""
        self._tries = 0
        file, self.opened = self.opened, None
        if file is not None:
            file.close()


class SharedLooks:
    """What one wait shares with others. A context manager: leaving it closes the file.

    Args:
        stream_id: the stream's identity; None shares nothing.
        identify: returns the status of the stream's directory; is called at the first look that can be shared.
        clock: returns seconds of CLOCK_MONOTONIC.

    Attributes:
        head: what is published, as the bytes of `head.json`.
        retired: which chunks were deleted, see `encode_retired`.
    """

    def __init__(
        self, stream_id: str | None, identify: Callable[[], os.stat_result], clock: Callable[[], float]
    ) -> None:
        self._file = _LazyFile(stream_id, identify)
        self.head = SharedLook(self._file, 0, clock)
        self.retired = SharedLook(self._file, 1, clock)

    def close(self) -> None:
        """Closes the file, for good."""
        self._file.close()

    def __enter__(self) -> SharedLooks:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the file."""
        self.close()


class SharedLook:
    """One thing to look for, again and again."""

    def __init__(self, file: _LazyFile, slot: int, clock: Callable[[], float]) -> None:
        self._file = file
        self._slot = slot
        self._clock = clock
        self._at = -math.inf
        self._own = True
        self._asking = False
        self._refused_at: float | None = None

    def renew(self, age: float, ask: Callable[[], bytes | None], adopt: Callable[[bytes], bool]) -> None:
        """Sees to it that what is known is not older than it may be; if another process is just asking, not yet.

        Args:
            age: how many seconds old it may be; 0 asks in any case.
            ask: asks the filesystem, and returns the answer for the others, None if it is none for them.
            adopt: takes the answer of another process and returns True, or refuses it and returns False.

        Raises:
            LazyShardError, OSError: what `ask` raises.
        """
        self._asking = False
        if age <= 0:
            self._ask(self._file.opened, ask)
            return
        file = self._file.get()
        if file is None:
            self._ask(None, ask)
            return
        if self._take(file, age, adopt):
            return
        locked = file.lock(self._slot)
        if not locked and self._has_patience():
            self._asking = True
            return
        try:
            if locked:
                self._refused_at = None
                # Somebody may have asked since.
                if self._take(file, age, adopt):
                    return
            self._ask(file, ask)
        finally:
            if locked:
                file.unlock(self._slot)

    def pause(self, age: float) -> float:
        """Returns in how many seconds to come again, if what is known may be so many seconds old."""
        now = self._clock()
        later = min(LATER_S, age / 4)
        if self._asking and self._refused_at is not None:
            return max(_SOON_S, later, (now - self._refused_at) / 10)
        return max(_SOON_S, self._at - now + age + (0.0 if self._own else later))

    def _has_patience(self) -> bool:
        now = self._clock()
        if self._refused_at is None:
            self._refused_at = now
        return now < self._refused_at + ASKING_S

    def _take(self, file: NodeFile, age: float, adopt: Callable[[bytes], bool]) -> bool:
        """Takes another's answer if there is a newer one; returns whether what is known then is young enough."""
        try:
            answer = file.read(self._slot)
        except OSError:
            answer = None
        now = self._clock()
        # One from the future was written under another clock.
        if answer is not None and self._at < answer.at <= now and adopt(answer.data):
            self._at = answer.at
            self._own = False
            self._refused_at = None
        return now < self._at + age - _SOON_S

    def _ask(self, file: NodeFile | None, ask: Callable[[], bytes | None]) -> None:
        data = ask()
        self._at = self._clock()
        self._own = True
        if file is not None and data is not None:
            # Where that fails, each of the others asks.
            with contextlib.suppress(OSError):
                file.write(self._slot, Answer(self._at, data))


def decode_head(data: bytes, samples_per_chunk: int) -> Published | None:
    """Returns what another process has found in `head.json`, None if that cannot be."""
    try:
        head = Head.decode(data)
    except FormatInvalid:
        return None
    short = head.chunks * samples_per_chunk - head.samples
    if not 0 <= short < samples_per_chunk or (short and not head.ended):
        return None
    return Published(head.chunks, head.samples, head.ended, head)


def encode_retired(retired: int) -> bytes:
    """Returns the answer which says that the chunks of the half-open range [0, retired) were deleted."""
    return b"%d" % retired


def decode_retired(data: bytes) -> int | None:
    """Reads that, None if it is no such answer."""
    return int(data) if data.isdigit() and len(data) < 20 else None
