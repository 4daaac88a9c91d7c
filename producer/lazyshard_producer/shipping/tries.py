"""Repeats what an object store fails to do, until it does it or patience is over.

`ObjectStore` could repeat by itself. Here others want to know meanwhile since when and why, and to break it off.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from lazyshard.errors import StoreUnavailable
from lazyshard.store.objects_failures import FIRST_PAUSE_S, next_pause, why_failed

_T = TypeVar("_T")

SHOWN_S: Final = 2.0
"""A failure that passes sooner is nobody's concern."""


class GivenUp(Exception):
    """A call was broken off by whoever wanted it."""


class Tries:
    """Calls a store that repeats nothing by itself (patience 0).

    Args:
        url: of the stream, for messages.
        patience_s: for how long what fails is repeated.
        left_in: where what was not put yet is kept, in words.
        pause: waits for so many seconds; returns True where it is to be given up.
        clock: returns seconds of a monotonic clock.
    """

    def __init__(
        self,
        url: str,
        patience_s: float,
        left_in: str,
        *,
        pause: Callable[[float], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url
        self._patience_s = patience_s
        self._left_in = left_in
        self._pause = pause
        self._clock = clock
        self._since: float | None = None
        self._words = ""

    @property
    def trouble(self) -> str | None:
        """Why nothing comes through, for how long, in words; None where it does, and in the first moments."""
        since = self._since
        if since is None or (lasted := self._clock() - since) < SHOWN_S:
            return None
        return f"the store has not answered for {lasted:.0f} s ({self._words})"

    def __call__(self, call: Callable[[], _T]) -> _T:
        """Returns what the call returns.

        Raises:
            StoreUnavailable: it has failed for as long as patience lasts.
            GivenUp: the pause was broken off.
            StoreRefused, OSError: as the call raises it; not repeated.
        """
        started = self._clock()
        length = FIRST_PAUSE_S
        while True:
            try:
                result = call()
            except StoreUnavailable as error:
                cause = error
            else:
                self._since = None
                return result
            if self._since is None:
                self._since = started
            self._words = why_failed(cause.__cause__ or cause).words
            waited = self._clock() - started
            if waited + length > self._patience_s:
                raise StoreUnavailable(
                    f"{self._url}: the store has failed for {waited:.0f} s (--store-patience-seconds "
                    f"{self._patience_s:g}): {self._words}. Is it reachable from this machine, and its endpoint right "
                    f"(AWS_ENDPOINT_URL for S3)? {self._left_in}",
                    url=self._url,
                    waited=waited,
                ) from cause
            if self._pause(length):
                raise GivenUp
            length = next_pause(length)
