"""Memory that was freed is kept for the next rows, instead of given back and asked for again."""

from __future__ import annotations

from typing import Final

_FREED_BYTES: Final = 16 << 20
"""Several times what a batch of rows takes while it is read, checked and written."""


def keep_freed_memory() -> None:
    """Makes the C library keep freed memory of a few batches of rows. Call it once, before rows come.

    glibc gives the end of the heap back whenever more than 128 KiB of it are free, and fetches pages again for the next
    batch, each of which the kernel has to clear: a third of the time of a run. When a block that came straight from the
    kernel is freed, glibc takes twice its size as the new limit (mallopt(3), M_MMAP_THRESHOLD). The block is never
    touched, so it costs nothing; other C libraries take no notice.
    """
    bytes(_FREED_BYTES)
