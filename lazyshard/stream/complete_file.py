"""A complete file of a stream, open for reading at any place: one that the server forgets is opened again.

What is complete never changes, so it is the same file whenever it is opened; and it is read with `pread`, so nothing
but the descriptor is lost with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lazyshard.store.files import FORGOTTEN, STALE_TRIES, OpenFile, open_file

_T = TypeVar("_T")
_Given = TypeVar("_Given")


class CompleteFile:
    """A file that is complete. Threads may share it.

    Args:
        file: the file, as it was opened.

    Attributes:
        path: its name.
        size: its bytes when it was opened first.
    """

    __slots__ = ("_file", "path", "size")

    def __init__(self, file: OpenFile) -> None:
        self._file = file
        self.path: Path = file.path
        self.size: int = file.size

    def read(self, start: int, size: int) -> bytes:
        """Reads bytes from a place on, in one system call as a rule.

        Returns:
            So many bytes; fewer where the file ends before.

        Raises:
            OSError: the filesystem failed, or has forgotten the file time and again.
            FileNotFoundError, FileRefused, FileUnreadable: it was forgotten, and cannot be opened again.
        """
        data = self._ask(os.pread, size, start)
        while len(data) < size:
            part = self._ask(os.pread, size - len(data), start + len(data))
            if not part:
                return data
            data += part
        return data

    def read_into(self, memory: memoryview, start: int) -> int:
        """Reads bytes from a place on into all of the memory. Raises as `read` does.

        Returns:
            How many bytes were read: fewer than the memory has where the file ends before.
        """
        done = 0
        while done < len(memory):
            read = self._ask(os.preadv, [memory[done:]], start + done)
            if not read:
                return done
            done += read
        return done

    def _ask(self, call: Callable[[int, _Given, int], _T], given: _Given, start: int) -> _T:
        """Calls `os.pread` or `os.preadv`, and again where the server has forgotten the file."""
        tries = 0
        while True:
            # This reference keeps the descriptor open while another thread replaces a stale one.
            file = self._file
            try:
                return call(file.fd, given, start)
            except OSError as error:
                tries += 1
                if error.errno not in FORGOTTEN or tries > STALE_TRIES:
                    raise
                # This descriptor is of no use any more; a complete file is the same whenever it is opened.
                self._file = open_file(file.path)
