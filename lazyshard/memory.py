"""Memory of large rows, to be used again; and a shortage of memory, which is never blamed on a row: `MemoryError`.

orjson reports a shortage as an error in the JSON (it allocates a buffer of twelve times the text first); if memory
runs out later, it dereferences a null pointer: SIGSEGV. So large texts are passed to orjson only after a check that
enough memory is available. On Linux, allocations fail if the process has a limit (`ulimit -v`, RLIMIT_AS) or memory is
not overcommitted; otherwise the system kills a process instead, so nothing is checked.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import resource
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

_LARGE_BYTES: Final = 64 << 10  # Of a text or its values; smaller ones are passed to orjson unchecked

LEAST_BYTES: Final = 128 << 10  # the C library keeps smaller blocks already (glibc's M_MMAP_THRESHOLD)
_PROBE: Final = [np.empty(0, np.uint8)]
ALONE: Final = sys.getrefcount(_PROBE[0])  # reference count of a value that only a list holds, as seen in `take`

# Prefixes of orjson's messages: of its parser, and of releases before 3.11.
_SHORT: Final = ("Not enough memory", "memory allocation failed")


def _is_limited() -> bool:
    if any(resource.getrlimit(one)[0] != resource.RLIM_INFINITY for one in (resource.RLIMIT_AS, resource.RLIMIT_DATA)):
        return True
    with contextlib.suppress(OSError):
        return Path("/proc/sys/vm/overcommit_memory").read_bytes().strip() == b"2"
    return False


# Whether allocations of this process can fail; a limit that the process sets later is not noticed.
LIMITED: Final = _is_limited()


def is_short(error: BaseException) -> bool:
    """Returns whether an error, or an error in its chain of causes, is a shortage of memory."""
    link: BaseException | None = error
    for _ in range(100):
        if link is not None and not _is_shortage(link):
            link = link.__cause__ or link.__context__
    return link is not None and _is_shortage(link)


def raise_if_short(error: BaseException) -> None:
    """Raises MemoryError if an error that would be blamed on a row or a file is a shortage of memory."""
    if isinstance(error, MemoryError):
        raise error
    if is_short(error):
        raise MemoryError(f"{type(error).__name__}: {error}") from error


def loads(text: bytes | bytearray | memoryview | str) -> Any:
    """Calls `orjson.loads`. Raises MemoryError if memory is short."""
    if LIMITED:
        _check_room(text)
    try:
        return orjson.loads(text)
    except (orjson.JSONDecodeError, SystemError) as error:
        raise_if_short(error)
        raise


# For hot paths. If it raises a JSONDecodeError, call `loads`, which distinguishes bad input from a shortage of memory.
quick_loads: Final[Callable[[bytes | memoryview], Any]] = loads if LIMITED else orjson.loads


def dumps(value: Any, default: Callable[[Any], Any] | None = None, option: int | None = None) -> bytes:
    """Calls `orjson.dumps`. Raises MemoryError if memory is short."""
    check_room_to_write(value)
    try:
        return orjson.dumps(value, default, option)
    except (orjson.JSONEncodeError, SystemError) as error:
        raise_if_short(error)
        raise


quick_dumps: Final[Callable[..., bytes]] = dumps if LIMITED else orjson.dumps  # As `quick_loads`


def _check_room(text: bytes | bytearray | memoryview | str) -> None:
    size = len(text)
    # `{},{},{},...` is the densest JSON and takes less than this, so few texts need the closer estimate.
    if size <= _LARGE_BYTES or _can_allocate(128 * size):
        return
    data = text.encode() if isinstance(text, str) else bytes(text)
    wide = 1 if data.isascii() and b"\\u" not in data else 4
    items, strings, keys = data.count(b","), data.count(b'"') // 2, data.count(b":")
    values = wide * size + 40 * items + 64 * strings + 72 * keys + 96 * data.count(b"[") + 256 * data.count(b"{")
    _need(12 * size + values, f"parse {size} bytes of JSON")


def check_room_to_write(value: Any) -> None:
    """Raises MemoryError if there is not enough memory to write a value as JSON; checks nothing without a limit."""
    if not LIMITED:
        return
    text = room = checked = 0
    level: Iterable[Any] = (value,)
    # orjson's maximum depth.
    for _ in range(254):
        below: list[Any] = []
        for item in level:
            kind = type(item)
            text += 24
            if kind is str:
                size = len(item) * (1 if item.isascii() else 4)
                text, room = text + size, max(room, 8 * size)
            elif kind in (dict, list, tuple):
                room = max(room, 128 * len(item))
                below += item
                below += item.values() if kind is dict else ()
            elif kind is np.ndarray:
                text, room = text + 24 * item.size, max(room, 128 * item.size)
        # The buffer doubles until the next item is sure to fit; it is copied to a larger one, so both exist at once.
        needed = 3 * text + 2 * room
        if needed > max(_LARGE_BYTES, checked):
            _need(needed, f"write a row of {text} bytes or more as JSON")
            checked = needed
        if not below:
            return
        level = below


def _is_shortage(error: BaseException) -> bool:
    if isinstance(error, orjson.JSONDecodeError):
        return error.msg.startswith(_SHORT)
    if isinstance(error, zlib.error):
        return str(error).startswith("Error -4 ")
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # Classes of packages that may not be installed, or must not be imported here.
    name = type(error).__name__
    if isinstance(error, RuntimeError):
        return name == "OutOfMemoryError" or "DefaultCPUAllocator: can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or (name == "ZstdError" and "Allocation error" in str(error))


def _can_allocate(size: int) -> bool:
    """Whether the system can allocate `size` bytes. No page is touched, so the check takes microseconds."""
    with contextlib.suppress(OSError, OverflowError, ValueError, MemoryError):
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        return True
    return False


def _need(size: int, what: str) -> None:
    if not _can_allocate(size):
        needed = f"may take {(size >> 20) + 1:,} MiB"
        raise MemoryError(f"to {what} {needed}, more than the limits of this process (`ulimit -v`) leave")


class RowMemory:
    """Reusable memory for the arrays of rows: touching new memory costs more than reading bytes into it.

    The reference count shows whether a buffer is in use: every array that shares it holds a reference, and so does
    everything made from such an array, like a tensor, a memoryview or a DLPack capsule. Threads may share it. If more
    than `limit` bytes are kept (a batch of 8 rows of 8 MiB), including those in use, the oldest buffer is dropped.
    """

    def __init__(self, limit: int = 64 << 20) -> None:
        self.size = 0  # bytes that are kept, in use or not
        self._limit = limit
        self._lock = Lock()
        self._buffers: deque[npt.NDArray[np.uint8]] = deque()

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        """Returns u8 of shape (size,) that nothing else refers to, uninitialized."""
        # Never waits: a lock that a thread holds while its process forks stays locked in the child.
        if not LEAST_BYTES <= size <= self._limit or not self._lock.acquire(blocking=False):
            return np.empty(size, np.uint8)
        buffers = self._buffers
        try:
            # At most 24 take at most 3 microseconds. The most recently used is first: it is still in the CPU's caches.
            for _ in range(min(len(buffers), 24)):
                if size <= buffers[-1].size <= size + size // 4 and sys.getrefcount(buffers[-1]) == ALONE:
                    return buffers[-1][:size]
                buffers.rotate(1)
            # Rounded up by at most an eighth, so that rows of nearly the same size fit into each other's buffers.
            step = 1 << (size.bit_length() - 4)
            made = np.empty(-(-size // step) * step, np.uint8)
            buffers.append(made)
            self.size += made.size
            while self.size > self._limit:
                self.size -= buffers.popleft().size
            return made[:size]
        finally:
            self._lock.release()


ROW_MEMORY: Final = RowMemory()
