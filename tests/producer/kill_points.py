"""Counts the calls by which a process changes files, and at one of them kills or stops it, or has the call fail.

The process has to be a fork that ends with it: nothing is put back.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from typing import Any, Final, Literal

When = Literal["before", "half", "after"]
"""Where in the call it comes; half is meant for writes, and is before for others."""

WHENS: Final[tuple[When, ...]] = ("before", "half", "after")

_CALLS: Final = ("write", "fsync", "ftruncate", "replace", "rename", "unlink", "mkdir", "rmdir")


class KillPoint:
    """One of the calls that this process makes from now on.

    Args:
        number: which one, counted from 1.
        when: where in it.
        by: what is sent to the process; after one that only stops it, it goes on there; None for nothing.
        at_last: is called before that; what it raises is raised by the call.
    """

    def __init__(
        self,
        number: int,
        when: When = "before",
        by: signal.Signals | None = signal.SIGKILL,
        at_last: Callable[[], object] = lambda: None,
    ) -> None:
        self._number = number
        # Threads call at once: each gets a number of its own, which `-= 1` and a look would not give them.
        self._calls = itertools.count(1)
        self._when = when
        self._by = by
        self._at_last = at_last

    def install(self) -> None:
        """Begins to count."""
        for name in _CALLS:
            setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            if next(self._calls) != self._number:
                return call(*arguments, **named)
            done = None
            try:
                if self._when == "half" and name == "write":
                    fd, data = arguments
                    # The caller goes on with what is left.
                    done = call(fd, bytes(data)[: len(data) // 2])
                elif self._when == "after":
                    return call(*arguments, **named)
            finally:
                self._at_last()
                if self._by is not None:
                    os.kill(os.getpid(), self._by)
            return call(*arguments, **named) if done is None else done

        return counted
