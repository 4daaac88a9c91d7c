"""Signals that ask the command to stop: SIGINT and SIGTERM set a mark that is looked at between rows.

So a publish that has begun is finished. The second signal of a kind ends the process at once, which loses nothing
that is published (the stream's files are safe against `kill -9`). Imports nothing slow: it is in force before the rest.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """A context manager in which SIGINT and SIGTERM are noted. For the main thread only.

    Attributes:
        requested: the first signal that came, None if there was none.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        """Begins to note signals."""
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Puts back what was in force before."""
        for number, before in self._before.items():
            signal.signal(number, before if before is not None else signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested = signal.Signals(number)
        signal.signal(number, signal.SIG_DFL)
