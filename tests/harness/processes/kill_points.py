"""Counts the calls by which a fork changes files, and kills or stops it at one, or has it fail; nothing is put back."""

import errno
import itertools
import os
import signal
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

When = Literal["before", "half", "after"]  # in the call; half is meant for writes, and is before for others
WHENS: Final[tuple[When, ...]] = ("before", "half", "after")

CALLS: Final = tuple(  # Functions of `os` that change a file or a name; `open` only where it makes or empties a file
    name
    for name in (
        *("open", "write", "fsync", "ftruncate", "replace", "rename", "unlink", "mkdir", "rmdir"),
        *("remove", "link", "symlink", "truncate", "fdatasync", "pwrite", "writev", "pwritev"),
        *("copy_file_range", "sendfile", "splice", "posix_fallocate", "mkfifo", "mknod"),
        *("chmod", "fchmod", "chown", "fchown", "utime", "setxattr", "removexattr"),
    )
    if hasattr(os, name)
)

_MAKES: Final = os.O_CREAT | os.O_TRUNC


class KillPoint:
    """One of this process's calls. `by`: what it is sent, or None. `tell`: of each call number, name, if it begins."""

    def __init__(
        self,
        number: int,  # which one, counted from 1; 0 for none
        when: When = "before",
        by: signal.Signals | None = signal.SIGKILL,
        at_last: Callable[[], object] = lambda: None,  # is called before that; what it raises is raised by the call
        *,
        among: Collection[str] = CALLS,  # only the calls of these names are counted
        always: bool = False,  # whether it comes at every later call as well
        tell: Callable[[int, str, bool], object] = lambda number, name, begins: None,
    ) -> None:
        self._calls = itertools.count(1)  # Threads call at once: each gets a number of its own
        self._number, self._when, self._by, self._at_last = number, when, by, at_last
        self._among, self._always, self._tell = among, always, tell

    def install(self) -> None:
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
                # The caller continues with what is left; of nothing at all it would never get to the end.
                done = call(fd, bytes(data)[: max(1, len(data) // 2)], *rest)
            elif self._when == "after":
                return call(*arguments, **named)
        finally:
            self._at_last()
            if self._by is not None:
                os.kill(os.getpid(), self._by)
        return call(*arguments, **named) if done is None else done


_MAKE_ROOM: Final = ("unlink", "remove", "rmdir")
_WRITES: Final = ("write", "pwrite")
_GROW: Final = (*_WRITES, "writev", "pwritev", "ftruncate", "truncate", "posix_fallocate", "copy_file_range")

ERRORS: Final[dict[str, tuple[int, tuple[str, ...]]]] = {
    "EIO": (errno.EIO, CALLS),
    "ENOSPC": (errno.ENOSPC, tuple(name for name in CALLS if name not in _MAKE_ROOM)),
    "EFBIG": (errno.EFBIG, tuple(name for name in CALLS if name in _GROW)),
    "EROFS": (errno.EROFS, CALLS),
    "short": (0, _WRITES),  # writes less than it was to, and says so
}
"""Each error's number, and the calls that can have it: these are counted, and no others."""

KINDS: Final = ("kill", *ERRORS)


@dataclass(frozen=True, slots=True)
class Fault:  # A fault in one run of the command. As text: `kind@number/when`, with `+` behind the number for `always`.
    kind: str  # one of `KINDS`
    number: int  # the call at which it comes, from 1, of those that can have it; half way, writes only
    when: When = "before"  # where in that call
    always: bool = False  # whether it stays, at every later call that can have it, until the run is over

    def options(self) -> dict[str, Any]:
        found: dict[str, Any] = {"kill_at": self.number, "when": self.when, "always": self.always}
        if self.kind == "kill":
            return found | {"by": signal.SIGKILL, "among": _WRITES if self.when == "half" else CALLS}
        number, among = ERRORS[self.kind]
        return found | {"error": number, "among": _WRITES if self.when == "half" else among}

    def __str__(self) -> str:
        return f"{self.kind}@{self.number}{'+' * self.always}/{self.when}"


def ways(kind: str) -> Sequence[When]:
    """Returns where in a call a fault of this kind can come: an error after a call is one whose answer was lost."""
    return {"kill": WHENS, "short": ("half",), "EIO": WHENS, "EROFS": ("before",)}.get(kind, ("before", "half"))
