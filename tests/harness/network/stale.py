"""ESTALE, or another error, from the N-th call by which this process asks something of one directory.

A server that has forgotten a file, since it was replaced or the server was restarted, says so in whatever call comes
next, and only once: the name then leads to the new file.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final

READING: Final = ("open", "stat", "lstat", "fstat", "pread", "listdir", "scandir", "readlink")
WRITING: Final = ("write", "fsync", "replace", "rename", "link", "unlink", "mkdir", "rmdir", "ftruncate")


class StaleCall:
    """A context manager: while it is entered, one of the calls fails.

    Args:
        directory: calls about a path in it, or a descriptor of one, are counted.
        number: which one fails, from 1; 0 for none.
        names: functions of `os` that are counted.
        error: the number of the error.

    Attributes:
        calls: the functions that were called, in order, each with what it was asked for.
    """

    def __init__(
        self, directory: Path, number: int, names: tuple[str, ...] = READING, error: int = errno.ESTALE
    ) -> None:
        self.calls: list[str] = []
        self._prefix = os.path.realpath(directory)
        self._number = number
        self._error = error
        self._real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in (*names, "open")}
        self._names = names

    def __enter__(self) -> StaleCall:
        for name in self._real:
            setattr(os, name, self._counted(name))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, call in self._real.items():
            setattr(os, name, call)

    def _counted(self, name: str) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            what = self._what(arguments[0]) if arguments else None
            if what is not None and name in self._names:
                self.calls.append(f"{name} {what}")
                if len(self.calls) == self._number:
                    path = arguments[0] if not isinstance(arguments[0], int) else None
                    raise OSError(self._error, os.strerror(self._error), path)
            return self._real[name](*arguments, **named)

        return counted

    def _what(self, asked: Any) -> str | None:
        """Returns the path within the directory that a call is about, None if it is about another one."""
        if isinstance(asked, int):
            try:
                path = os.path.realpath(f"/proc/self/fd/{asked}") if "readlink" not in self._real else None
                path = path or self._real["readlink"](f"/proc/self/fd/{asked}")
            except OSError:
                return None
        else:
            path = os.path.abspath(os.fspath(asked))
        path = path.removesuffix(" (deleted)")
        if path != self._prefix and not path.startswith(self._prefix + "/"):
            return None
        return path[len(self._prefix) + 1 :] or "."
