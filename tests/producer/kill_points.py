"""Counts the calls by which a process changes files, and kills it at one of them.

The process has to be a fork that ends with it: nothing is put back.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, Final, Literal

When = Literal["before", "half", "after"]
"""Where in the call it comes; half is meant for writes, and is before for others."""

WHENS: Final[tuple[When, ...]] = ("before", "half", "after")

_CALLS: Final = ("write", "fsync", "ftruncate", "replace", "rename", "unlink", "mkdir", "rmdir")


def die_at(number: int, when: When, at_last: Callable[[], object] = lambda: None) -> None:
    """Has this process killed at its `number`-th call from now on, counted from 1.

    Args:
        number: see above.
        when: where in that call.
        at_last: is called before.
    """
    _Counter(number, when, at_last).install()


class _Counter:
    def __init__(self, number: int, when: When, at_last: Callable[[], object]) -> None:
        self._left = number
        self._when = when
        self._at_last = at_last

    def install(self) -> None:
        for name in _CALLS:
            setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            self._left -= 1
            if self._left:
                return call(*arguments, **named)
            if self._when == "half" and name == "write":
                fd, data = arguments
                call(fd, bytes(data)[: len(data) // 2])
            elif self._when == "after":
                call(*arguments, **named)
            self._at_last()
            os.kill(os.getpid(), signal.SIGKILL)

        return counted
