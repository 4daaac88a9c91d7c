"""Bounds for what reads damaged files: seconds and bytes of memory. Files of some hundred bytes need little of both."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

__all__ = ["DEADLINE_S", "MEMORY_BYTES", "Hangs", "bounded"]

DEADLINE_S: Final = 30.0
"""A look takes milliseconds; one that takes so long hangs."""

MEMORY_BYTES: Final = 1 << 30
"""Above what the process has already. What asks for more gets a MemoryError, which is none of lazyshard's own."""


class Hangs(BaseException):
    """Raised by the timer, out of whatever hangs; nothing that catches errors catches it."""


@contextmanager
def bounded() -> Iterator[None]:
    """Within, a call that takes too long ends with `Hangs`, and one that takes too much memory with a MemoryError."""

    def stop(number: int, frame: Any) -> None:
        raise Hangs(f"no end within {DEADLINE_S:.0f} s")

    limits = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
    resource.setrlimit(resource.RLIMIT_AS, (_most(limits), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _most(limits: tuple[int, int]) -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    return most if limits[0] == resource.RLIM_INFINITY else min(most, limits[0])
