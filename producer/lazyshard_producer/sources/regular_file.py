"""Opening files that hold data and nothing else, without ever blocking."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

from lazyshard.store.files import open_inside
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.sources.source_file import refuse_os_error

_READ_BYTES: Final = 1 << 20


def open_regular(path: str, buffer_bytes: int = _READ_BYTES, *, links_out: bool = True) -> BinaryIO:
    """Opens a plain file for reading.

    Args:
        path: the file.
        buffer_bytes: size of its buffer, 0 for none.
        links_out: whether a link may lead out of the file's directory: to wherever the user wants it to, but not where
            somebody else makes the names.

    Raises:
        SourceRefused: there is no such file, it is something else, or this process may not read it.
    """
    try:
        # O_NONBLOCK: opening a named pipe that nobody writes to would block for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK) if links_out else open_inside(Path(path))
    except OSError as cause:
        raise refuse_os_error(path, cause) from cause
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        expected, actual = "a plain file", "something else (a directory, pipe or device)"
        raise SourceRefused(f"{path}: expected {expected}, found {actual}", file=path, expected=expected, actual=actual)
    return os.fdopen(fd, "rb", buffering=buffer_bytes)
