"""Shortage of memory, told apart from bad input. It is a `MemoryError`, and never the fault of a row.

orjson reports it as an error in the JSON (it needs a buffer of twelve times a text, all at once), and where it runs out
later it reads through a null pointer: SIGSEGV. So a large text is not given to it before so much memory was seen to be
there. On Linux an allocation fails where a process has a limit (`ulimit -v`, RLIMIT_AS) or memory is not overcommitted;
everywhere else the system ends a process instead, so nothing is looked at there.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import resource
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

_LARGE_BYTES: Final = 64 << 10  # Of a text or its values: what is smaller is given to orjson as it is

# How messages begin: of orjson from its parser, and of releases before 3.11 the second.
_SHORT: Final = ("Not enough memory", "memory allocation failed")


def _is_limited() -> bool:
    if any(resource.getrlimit(one)[0] != resource.RLIM_INFINITY for one in (resource.RLIMIT_AS, resource.RLIMIT_DATA)):
        return True
    with contextlib.suppress(OSError):
        return Path("/proc/sys/vm/overcommit_memory").read_bytes().strip() == b"2"
    return False


# Whether an allocation of this process can fail; a limit that it gives itself later is not known here.
LIMITED: Final = _is_limited()


def is_short(error: BaseException) -> bool:
    """Returns whether an error, or what led to it, came of a shortage of memory."""
    link: BaseException | None = error
    for _ in range(100):
        if link is not None and not _says_short(link):
            link = link.__cause__ or link.__context__
    return link is not None and _says_short(link)


def raise_if_short(error: BaseException) -> None:
    """Raises MemoryError if an error, about to be taken for the fault of a row or a file, is a shortage of memory."""
    if isinstance(error, MemoryError):
        raise error
    if is_short(error):
        raise MemoryError(f"{type(error).__name__}: {error}") from error


def loads(text: bytes | bytearray | memoryview | str) -> Any:
    """Returns what `orjson.loads` does, or raises MemoryError."""
    if LIMITED:
        _check_room(text)
    try:
        return orjson.loads(text)
    except (orjson.JSONDecodeError, SystemError) as error:
        raise_if_short(error)
        raise


# For where every fraction of a microsecond counts, and `loads` decides once this has raised a JSONDecodeError.
quick_loads: Final[Callable[[bytes], Any]] = loads if LIMITED else orjson.loads


def dumps(value: Any, default: Callable[[Any], Any] | None = None, option: int | None = None) -> bytes:
    """Returns what `orjson.dumps` does, or raises MemoryError."""
    check_room_to_write(value)
    try:
        return orjson.dumps(value, default, option)
    except (orjson.JSONEncodeError, SystemError) as error:
        raise_if_short(error)
        raise


def _check_room(text: bytes | bytearray | memoryview | str) -> None:
    size = len(text)
    # `{},{},{},...` is the densest there is and takes less than this, so that few texts have to be looked into.
    if size <= _LARGE_BYTES or _is_there(128 * size):
        return
    data = text.encode() if isinstance(text, str) else bytes(text)
    wide = 1 if data.isascii() and b"\\u" not in data else 4
    items, strings, keys = data.count(b","), data.count(b'"') // 2, data.count(b":")
    values = wide * size + 40 * items + 64 * strings + 72 * keys + 96 * data.count(b"[") + 256 * data.count(b"{")
    _need(12 * size + values, f"parse {size} bytes of JSON")


def check_room_to_write(value: Any) -> None:
    """Raises MemoryError if there is no memory to write a value as JSON; without a limit nothing is looked at."""
    if not LIMITED:
        return
    text = room = checked = 0
    level: Iterable[Any] = (value,)
    # So deep orjson writes.
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
        # The buffer doubles until what comes next surely fits, and is copied to where there is room for it.
        needed = 3 * text + 2 * room
        if needed > max(_LARGE_BYTES, checked):
            _need(needed, f"write a row of {text} bytes or more as JSON")
            checked = needed
        if not below:
            return
        level = below


def _says_short(error: BaseException) -> bool:
    if isinstance(error, orjson.JSONDecodeError):
        return error.msg.startswith(_SHORT)
    if isinstance(error, zlib.error):
        return str(error).startswith("Error -4 ")
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # The classes of packages that need not be installed, or not be imported here.
    name = type(error).__name__
    if isinstance(error, RuntimeError):
        return name == "OutOfMemoryError" or "DefaultCPUAllocator: can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or (name == "ZstdError" and "Allocation error" in str(error))


def _is_there(size: int) -> bool:
    """Whether the system gives so much memory. Nothing of it is touched, so asking takes microseconds."""
    try:
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, OverflowError, ValueError, MemoryError):
        return False
    return True


def _need(size: int, what: str) -> None:
    if not _is_there(size):
        most = "more than the limits of this process (`ulimit -v`) leave"
        raise MemoryError(f"to {what} may take {(size >> 20) + 1:,} MiB, {most}")
