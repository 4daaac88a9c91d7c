"""Faults at numbered calls: which there are, how a run of the command is told of one, and how it is written down."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tests.harness.processes.kill_points import CALLS, WHENS, When

__all__ = ["ERRORS", "KINDS", "Fault", "parse_faults", "ways"]

_MAKE_ROOM: Final = ("unlink", "remove", "rmdir")
_WRITES: Final = ("write", "pwrite")
_GROW: Final = (*_WRITES, "writev", "pwritev", "ftruncate", "truncate", "posix_fallocate", "copy_file_range")

ERRORS: Final[dict[str, tuple[int, tuple[str, ...]]]] = {
    "EIO": (errno.EIO, CALLS),
    "ENOSPC": (errno.ENOSPC, tuple(name for name in CALLS if name not in _MAKE_ROOM)),
    "EFBIG": (errno.EFBIG, tuple(name for name in CALLS if name in _GROW)),
    "EROFS": (errno.EROFS, CALLS),
    # A write that writes less than it was to, and says so: no error at all for who looks.
    "short": (0, _WRITES),
}
"""Each error's number, and the calls that can have it: these are counted, and no others."""

KINDS: Final = ("kill", *ERRORS)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault in one run of the command. As text: `kind@number/when`, with `+` behind the number for `always`.

    Attributes:
        kind: one of `KINDS`.
        number: the call at which it comes, from 1, of those that can have it; half way through, these are writes only.
        when: where in that call.
        always: whether it stays, at every later call that can have it, until the run is over.
    """

    kind: str
    number: int
    when: When = "before"
    always: bool = False

    @property
    def is_error(self) -> bool:
        """Whether a call fails, so that the command has something to say."""
        return self.kind not in ("kill", "short")

    @property
    def text(self) -> str:
        """What the system says for its error."""
        return os.strerror(ERRORS[self.kind][0])

    def options(self) -> dict[str, Any]:
        """Returns what `Nursery.start` is to be told."""
        found: dict[str, Any] = {"kill_at": self.number, "when": self.when, "always": self.always}
        if self.kind == "kill":
            return found | {"by": signal.SIGKILL, "among": _WRITES if self.when == "half" else CALLS}
        number, among = ERRORS[self.kind]
        return found | {"error": number, "among": _WRITES if self.when == "half" else among}

    def __str__(self) -> str:
        return f"{self.kind}@{self.number}{'+' * self.always}/{self.when}"


def parse_faults(text: str) -> list[Fault]:
    """Returns faults from their texts, separated by blanks.

    Raises:
        ValueError: they are none.

    >>> [str(fault) for fault in parse_faults("kill@17/half EIO@3+/before")]
    ['kill@17/half', 'EIO@3+/before']
    """
    found = []
    for word in text.split():
        kind, _, rest = word.partition("@")
        number, _, when = rest.partition("/")
        if kind not in KINDS or when not in WHENS:
            raise ValueError(f"a fault is KIND@NUMBER/WHEN, such as kill@17/half or EIO@3+/before, got {word!r}")
        found.append(Fault(kind, int(number.removesuffix("+")), when, number.endswith("+")))
    return found


def ways(kind: str) -> Sequence[When]:
    """Returns where in a call a fault of this kind can come: an error after a call is one whose answer was lost."""
    return {"kill": WHENS, "short": ("half",), "EIO": WHENS, "EROFS": ("before",)}.get(kind, ("before", "half"))
