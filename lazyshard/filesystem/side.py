"""One side of `lazyshard verify-filesystem`: does to the files below one mount what it is asked for.

As a program, `python -m lazyshard.filesystem.side FOLDER` reads questions from standard input, a JSON list
`[operation, argument, ...]` a line, and answers each with a line: `{"done": result}` or `{"error": what}`. It touches
nothing but the files in FOLDER that it is asked about.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

FIRST_PAUSE_S: Final = 0.005
LAST_PAUSE_S: Final = 0.1  # Between two looks at what is waited for
_CLOSING_S: Final = 60.0  # Until a folder can be removed: sshfs shows for 20 s what it has listed before
_READ_BYTES: Final = 1 << 20


def content(version: int) -> bytes:
    """Returns what a file of this version holds; no two versions below 4,001 have the same size."""
    return b"%d %s %d\n" % (version, b"x" * (37 * version % 4001), version)


def version_of(data: bytes) -> int | None:
    """Returns the version that a file's bytes are of, None if they are no whole version."""
    head = data.partition(b" ")[0]
    if not head.isdigit() or len(head) > 9:
        return None
    version = int(head)
    return version if data == content(version) else None


class Side:
    """The files below one mount. Each public method is an operation; names are those of files in the folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._open: dict[str, int] = {}
        self._made: list[str] = []

    def answer(self, operation: str, arguments: Sequence[Any]) -> Any:
        """Does what is asked for and returns what it gives. Raises ValueError where there is no such operation."""
        if operation.startswith("_") or operation == "answer" or not hasattr(type(self), operation):
            raise ValueError(f"there is no operation {operation!r}")
        return getattr(self, operation)(*arguments)

    def hello(self) -> str:
        """Tells of which filesystem the folder is, as the system calls it."""
        return type_of(self._folder)

    def make_folder(self, name: str) -> None:
        """Makes a folder, which all that follows is in."""
        self.make_sub_folder(name)
        self._folder = self._path(name)

    def enter(self, name: str, longest: float) -> bool:
        """Goes into a folder that the other side has made; returns whether it showed in time."""
        folder = self._path(name)
        if _wait(lambda: os.path.isdir(folder), longest) is None:
            return False
        self._folder = folder
        return True

    def make_sub_folder(self, name: str) -> None:
        """Makes a folder."""
        os.mkdir(self._path(name))
        self._made.append(self._path(name))

    def put(self, name: str, version: int) -> None:
        """Publishes a file as lazyshard does: written under another name, synced, renamed over what is there."""
        target, temporary = self._path(name), self._path(f"{name}.part")
        self._write(temporary, content(version))
        os.replace(temporary, target)
        self._made.append(target)
        _sync_directory(os.path.dirname(temporary))

    def begin(self, name: str, version: int) -> None:
        """Writes the first half of a file of this version."""
        self._write(self._path(name), content(version)[: len(content(version)) // 2])

    def grow(self, name: str, version: int) -> None:
        """Adds the rest of a file that was begun."""
        self._write(self._path(name), content(version)[len(content(version)) // 2 :], "ab")

    def look(self, kind: str, name: str) -> int | None:
        """Looks once: returns the version found by "open", -1 for a file that is cut or mixed, 1 if there by "list"."""
        path = self._path(name)
        if kind == "list":
            return 1 if os.path.basename(name) in os.listdir(os.path.dirname(path)) else None
        try:
            found = version_of(self._read(path))
        except FileNotFoundError:
            return None
        return -1 if found is None else found

    def watch(self, looks: dict[str, list[Any]], longest: float) -> dict[str, dict[str, Any]]:
        """Looks again and again until each of these has come: by label its kind, name and version.

        Returns by label `seconds`, None if it did not come, how many looks were `torn`, and by name other `errors`.
        """
        started = time.monotonic()
        found: dict[str, dict[str, Any]] = {label: {"seconds": None, "torn": 0, "errors": {}} for label in looks}

        def all_seen() -> bool:
            for label, (kind, name, version) in looks.items():
                state = found[label]
                if state["seconds"] is not None:
                    continue
                with _counted(state["errors"]):
                    seen = self.look(kind, name)
                    state["torn"] += seen == -1
                    if seen == (1 if kind == "list" else version):
                        state["seconds"] = time.monotonic() - started
            return all(state["seconds"] is not None for state in found.values())

        _wait(all_seen, longest)
        return found

    def storm(self, name: str, last: int, longest: float) -> dict[str, Any]:
        """Reads a file that is being replaced, as fast as it can, until it is of this version.

        Returns `reads`; how many were `missing`, `torn`, or went `back` to an older version; `errors`; `seconds`.
        """
        started = time.monotonic()
        counts: dict[str, Any] = {"reads": 0, "missing": 0, "torn": 0, "back": 0, "errors": {}, "seconds": None}
        newest = 0
        while counts["seconds"] is None and time.monotonic() - started < longest:
            counts["reads"] += 1
            with _counted(counts["errors"]):
                seen = self.look("open", name)
                if seen is None or seen < 0:
                    counts["missing" if seen is None else "torn"] += 1
                    continue
                counts["back"] += seen < newest
                newest = max(newest, seen)
                if seen == last:
                    counts["seconds"] = time.monotonic() - started
        return counts

    def link(self, source: str, name: str) -> None:
        """Gives a file a second name, which must not be there."""
        os.link(self._path(source), self._path(name))
        self._made.append(self._path(name))

    def lock(self, name: str) -> bool:
        """Locks a file; returns whether nobody else has it."""
        fd = os.open(self._path(name), os.O_RDWR | os.O_CREAT, 0o644)
        self._made.append(self._path(name))
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        self._open[name] = fd
        return True

    def hold(self, name: str) -> None:
        """Opens a file."""
        self._open[name] = os.open(self._path(name), os.O_RDONLY)

    def read_held(self, name: str) -> int | None:
        """Reads the file that is held open; returns its version, None for none."""
        return version_of(_read_all(self._open[name]))

    def let_go(self, name: str) -> None:
        """Closes a file that is held or locked."""
        if name in self._open:
            os.close(self._open.pop(name))

    def remove(self, name: str) -> None:
        """Removes a file."""
        os.unlink(self._path(name))

    def sync_file(self, name: str) -> None:
        """Brings a file onto the device."""
        self._write(self._path(name), b"x")

    def sync_folder(self) -> None:
        """Brings the names in the folder onto the device."""
        _sync_directory(self._folder)

    def longest_name(self, lengths: Sequence[int]) -> int:
        """Returns the largest of some lengths, in bytes, that a file's name can have; 0 for none of them."""
        for length in sorted(lengths, reverse=True):
            with contextlib.suppress(OSError):
                path = self._path("n" * length)
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644))
                os.unlink(path)
                return length
        return 0

    def clear(self) -> list[str]:
        """Removes what this side has made, by name: a listing may not show it yet. Returns folders that stay behind."""
        for name in list(self._open):
            self.let_go(name)
        left = []
        for path in reversed(dict.fromkeys(self._made)):
            with contextlib.suppress(OSError):
                os.unlink(path)
                continue
            # FUSE closes files a moment later, and until then keeps those that are removed under another name.
            if os.path.isdir(path) and _wait(functools.partial(_remove_folder, path), _CLOSING_S) is None:
                left.append(path)
        return left

    def _path(self, name: str) -> str:
        parts = name.split("/")
        if "" in parts or "." in parts or ".." in parts:
            raise ValueError(f"not a name within the folder: {name!r}")
        return os.path.join(self._folder, *parts)

    def _read(self, path: str) -> bytes:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            os.fstat(fd)
            return _read_all(fd)
        finally:
            os.close(fd)

    def _write(self, path: str, data: bytes, mode: Literal["wb", "ab"] = "wb") -> None:
        with open(path, mode) as file:
            self._made.append(path)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def error_name(error: OSError) -> str:
    """Returns what the system calls an error: ESTALE."""
    return errno.errorcode.get(error.errno or 0, str(error))


def serve(folder: str) -> int:
    """Answers questions until there are none any more; returns the exit code."""
    side = Side(folder)
    for line in sys.stdin:
        operation, *arguments = json.loads(line)
        answer: dict[str, Any]
        try:
            answer = {"done": side.answer(operation, arguments)}
        except OSError as error:
            answer = {"error": error_name(error), "text": str(error)}
        print(json.dumps(answer), flush=True)
    return 0


def _wait(look: Callable[[], bool], longest: float) -> float | None:
    started = time.monotonic()
    while True:
        if look():
            return time.monotonic() - started
        passed = time.monotonic() - started
        if passed >= longest:
            return None
        time.sleep(min(LAST_PAUSE_S, max(FIRST_PAUSE_S, passed / 20)))


def _read_all(fd: int) -> bytes:
    data = b""
    while part := os.pread(fd, _READ_BYTES, len(data)):
        data += part
    return data


def _remove_folder(path: str) -> bool:
    with contextlib.suppress(OSError):
        # What the other side has made and could not remove; a cached listing also names what it has removed.
        for name in os.listdir(path):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(path, name))
    with contextlib.suppress(OSError):
        os.rmdir(path)
    return not os.path.isdir(path)


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _counted(errors: dict[str, int]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        errors[error_name(error)] = errors.get(error_name(error), 0) + 1


def type_of(folder: str) -> str:
    """Returns the type of the filesystem that a folder is in, as the list of mounts has it; empty if unknown."""
    best, kind = "", ""
    real = os.path.realpath(folder)
    with contextlib.suppress(OSError), open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            point, found = line.split(" ")[1:3]
            point = point.replace("\\040", " ")
            if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
                best, kind = point, found
    return kind


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1]))
