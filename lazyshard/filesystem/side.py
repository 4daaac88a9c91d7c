"""One side of `lazyshard verify-filesystem`: performs operations on the files of one mount.

As a program, `python -m lazyshard.filesystem.side FOLDER`, it reads requests from standard input, one JSON list
`[operation, argument, ...]` per line, and writes one line per response: `{"done": result}` or `{"error": what}`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

_CLOSING_S: Final = 60.0  # Timeout to remove a folder: sshfs caches listings for 20 s


def content(version: int) -> bytes:
    """Returns the content of a file of this version; no two versions below 4,001 have the same size."""
    return b"%d %s %d\n" % (version, b"x" * (37 * version % 4001), version)


def version_of(data: bytes) -> int | None:
    """Returns the version of a file's bytes, None if they are not the whole content of a version."""
    head = data.partition(b" ")[0]
    version = int(head) if head.isdigit() and len(head) < 10 else 0
    return version if data == content(version) else None


class Side:
    """The files of one mount. Each public method is an operation; file names are relative to the folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._made: list[str] = []

    def answer(self, operation: str, *arguments: Any) -> Any:
        """Performs an operation and returns its result. Raises ValueError: there is no such operation."""
        if operation.startswith("_") or operation == "answer" or not hasattr(type(self), operation):
            raise ValueError(f"there is no operation {operation!r}")
        return getattr(self, operation)(*arguments)

    def hello(self) -> str:
        """Returns the type of the folder's filesystem, as the system names it."""
        return type_of(self._folder)

    def make(self, name: str) -> None:
        """Creates a folder."""
        os.mkdir(self._new(name))

    def enter(self, name: str, longest: float) -> bool:
        """Changes to a folder for all later operations; returns whether it became visible within `longest` seconds."""
        folder = self._path(name)
        shows = _wait(lambda: os.path.isdir(folder), longest)
        self._folder = folder if shows else self._folder
        return shows

    def put(self, name: str, version: int) -> None:
        """Publishes a file as lazyshard does: writes a temporary file, syncs it, renames it over the target."""
        temporary, path = self._new(f"{name}.part"), self._new(name)
        with open(temporary, "wb") as file:
            file.write(content(version))
            file.flush()
            # Whether fsync works is checked separately.
            with contextlib.suppress(OSError):
                os.fsync(file.fileno())
        os.replace(temporary, path)
        with contextlib.suppress(OSError):
            self.sync(os.path.dirname(name))

    def look(self, kind: str, name: str) -> int | None:
        """Checks once. "open": the version found, -1 if truncated or mixed; "list": 1 if listed; None if missing."""
        path = self._path(name)
        if kind == "list":
            return 1 if os.path.basename(name) in os.listdir(os.path.dirname(path)) else None
        try:
            with open(path, "rb", buffering=0) as file:
                found = version_of(file.readall())
        except FileNotFoundError:
            return None
        return -1 if found is None else found

    def watch(self, looks: dict[str, list[Any]], longest: float) -> dict[str, dict[str, Any]]:
        """Polls until each expected file was seen; `looks` has its kind, name and version by label.

        Returns by label: `seconds`, None if it was not seen; the number of `torn` reads; other `errors` by name.
        """
        started = time.monotonic()
        found: dict[str, dict[str, Any]] = {label: {"seconds": None, "torn": 0, "errors": {}} for label in looks}

        def seen(state: dict[str, Any], kind: str, name: str, version: int) -> bool:
            with _counted(state["errors"]):
                if state["seconds"] is None and (at := self.look(kind, name)) is not None:
                    state["torn"] += at == -1
                    if at == (1 if kind == "list" else version):
                        state["seconds"] = time.monotonic() - started
            return state["seconds"] is not None

        _wait(lambda: sum(seen(found[label], *look) for label, look in looks.items()) == len(looks), longest)
        return found

    def storm(self, name: str, last: int, longest: float) -> dict[str, Any]:
        """Reads a file that is being replaced until it has the version `last`; returns counts of the results."""
        started, newest = time.monotonic(), 0
        counts: dict[str, Any] = {"reads": 0, "missing": 0, "torn": 0, "back": 0, "errors": {}}
        while newest != last and time.monotonic() - started < longest:
            counts["reads"] += 1
            with _counted(counts["errors"]):
                seen = self.look("open", name)
                counts["missing"] += seen is None
                counts["torn"] += seen == -1
                counts["back"] += seen is not None and 0 <= seen < newest
                newest = max(newest, seen or 0)
        return counts

    def link(self, source: str, name: str) -> None:
        """Creates a hard link; the name must not exist yet."""
        os.link(self._path(source), self._new(name))

    def lock(self, name: str) -> int | None:
        """Locks a file; returns its descriptor, None if another process holds the lock."""
        fd = os.open(self._new(name), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if isinstance(error, (BlockingIOError, PermissionError)):
                return None
            raise
        return fd

    def sync(self, name: str) -> None:
        """Syncs a file to the device, or with "" the names in the folder."""
        fd = os.open(self._path(name) if name else self._folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def clear(self) -> list[str]:
        """Removes this side's files by name: listings may be stale. Returns the folders that could not be removed."""
        left = []
        for path in reversed(dict.fromkeys(self._made)):
            with contextlib.suppress(OSError):
                os.unlink(path)
            # FUSE closes files with a delay; until then removed files remain under another name.
            if os.path.isdir(path) and not _wait(functools.partial(_remove_folder, path), _CLOSING_S):
                left.append(path)
        return left

    def _new(self, name: str) -> str:
        self._made.append(self._path(name))
        return self._made[-1]

    def _path(self, name: str) -> str:
        parts = name.split("/")
        if "" in parts or "." in parts or ".." in parts:
            raise ValueError(f"not a name within the folder: {name!r}")
        return os.path.join(self._folder, *parts)


def error_name(error: OSError) -> str:
    """Returns the system's name of an error, such as ESTALE."""
    return errno.errorcode.get(error.errno or 0, str(error))


def serve(folder: str) -> int:
    """Responds to requests until standard input ends; returns the exit code."""
    side = Side(folder)
    for line in sys.stdin:
        try:
            answer = {"done": side.answer(*json.loads(line))}
        except OSError as error:
            answer = {"error": error_name(error), "text": str(error)}
        print(json.dumps(answer), flush=True)
    return 0


class Untried(Exception):
    """The check could not be performed: the far side did not respond, the folders differ, or the disk is full."""


class Far(contextlib.AbstractContextManager["Far"]):
    """The far side: a process that serves `Side`, local or remote. Raises Untried: the command cannot be started."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command, pipe = " ".join(command), subprocess.PIPE
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)  # noqa: S603 - as asked
        except OSError as cause:
            raise Untried(f"the command of the other side cannot be started ({command[0]}): {cause}") from cause
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def __exit__(self, *_: object) -> None:
        """Ends the process: it exits when its input ends."""
        # If it has died, closing may fail to flush the last request.
        with contextlib.suppress(OSError):
            self._stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        self._process.wait()
        self._stdout.close()

    def ask(self, *question: Any) -> None:
        """Sends a request. `answer` waits for the response, and raises Untried if the request was not received."""
        with contextlib.suppress(OSError):
            self._stdin.write(json.dumps(question) + "\n")
            self._stdin.flush()

    def answer(self) -> Any:
        """Returns the result of the last request. Raises OSError: the operation failed; Untried: no response."""
        line = self._stdout.readline().strip()
        with contextlib.suppress(ValueError, TypeError, KeyError):
            answer = json.loads(line)
            if "error" not in answer:
                return answer["done"]
            raise OSError(0, answer["error"])
        raise Untried(f"no answer from the other side ({self._command}){f': it said {line}' if line else ''}")

    def do(self, *question: Any) -> Any:
        """Sends a request and waits for the response."""
        self.ask(*question)
        return self.answer()


def _wait(look: Callable[[], bool], longest: float) -> bool:
    """Polls with increasing intervals; returns False after `longest` seconds."""
    started = time.monotonic()
    while not look():
        passed = time.monotonic() - started
        if passed >= longest:
            return False
        time.sleep(min(0.1, max(0.005, passed / 20)))
    return True


def _remove_folder(path: str) -> bool:
    with contextlib.suppress(OSError):
        # The other side could not remove its files; a cached listing may also name files already removed.
        for name in os.listdir(path):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(path, name))
    with contextlib.suppress(OSError):
        os.rmdir(path)
    return not os.path.isdir(path)


@contextlib.contextmanager
def _counted(errors: dict[str, int]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        errors[error_name(error)] = errors.get(error_name(error), 0) + 1


def type_of(folder: str) -> str:
    """Returns the type of a folder's filesystem, from the list of mounts; empty if unknown."""
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
