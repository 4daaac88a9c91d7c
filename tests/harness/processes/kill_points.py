"""Counts the calls by which a process changes files, and at one of them kills or stops it, or has the call fail.

The process has to be a fork that ends with it: nothing is put back.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Collection
from typing import Any, Final, Literal

When = Literal["before", "half", "after"]
"""Where in the call it comes; half is meant for writes, and is before for others."""

WHENS: Final[tuple[When, ...]] = ("before", "half", "after")

CALLS: Final = tuple(
    name
    for name in (
        *("open", "write", "fsync", "ftruncate", "replace", "rename", "unlink", "mkdir", "rmdir"),
        *("remove", "link", "symlink", "truncate", "fdatasync", "pwrite", "writev", "pwritev"),
        *("copy_file_range", "sendfile", "splice", "posix_fallocate", "mkfifo", "mknod"),
        *("chmod", "fchmod", "chown", "fchown", "utime", "setxattr", "removexattr"),
    )
    if hasattr(os, name)
)
"""Functions of `os` that change a file or a name; `open` only where it makes or empties a file."""

_MAKES: Final = os.O_CREAT | os.O_TRUNC


class KillPoint:
    """One of the calls that this process makes from now on, or that one and all after it.

    Args:
        number: which one, counted from 1; 0 for none.
        when: where in it.
        by: what is sent to the process; after one that only stops it, it goes on there; None for nothing.
        at_last: is called before that; what it raises is raised by the call.
        among: only the calls of these names are counted.
        always: whether it comes at every later call as well.
        tell: is called with each counted call's number and name, and True before and False after it.
    """

    def __init__(
        self,
        number: int,
        when: When = "before",
        by: signal.Signals | None = signal.SIGKILL,
        at_last: Callable[[], object] = lambda: None,
        *,
        among: Collection[str] = CALLS,
        always: bool = False,
        tell: Callable[[int, str, bool], object] = lambda number, name, begins: None,
    ) -> None:
        self._number = number
        # Threads call at once: each gets a number of its own, which `-= 1` and a look would not give them.
        self._calls = itertools.count(1)
        self._when = when
        self._by = by
        self._at_last = at_last
        self._among = among
        self._always = always
        self._tell = tell

    def install(self) -> None:
        """Begins to count."""
        for name in self._among:
            setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            if name == "open" and not (arguments[1] if len(arguments) > 1 else named["flags"]) & _MAKES:
                return call(*arguments, **named)
            number = next(self._calls)
            self._tell(number, name, True)
            try:
                if number == self._number or (self._always and number > self._number > 0):
                    return self._met(name, call, *arguments, **named)
                return call(*arguments, **named)
            finally:
                self._tell(number, name, False)

        return counted

    def _met(self, name: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        done = None
        try:
            if self._when == "half" and name in ("write", "pwrite"):
                fd, data, *rest = arguments
                # The caller goes on with what is left; of nothing at all it would never get to the end.
                done = call(fd, bytes(data)[: max(1, len(data) // 2)], *rest)
            elif self._when == "after":
                return call(*arguments, **named)
        finally:
            self._at_last()
            if self._by is not None:
                os.kill(os.getpid(), self._by)
        return call(*arguments, **named) if done is None else done
