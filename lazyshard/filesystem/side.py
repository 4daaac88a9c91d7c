"""One side of `lazyshard verify-filesystem`: does to the files below one mount what it is asked for.

As a program, `python -m lazyshard.filesystem.side FOLDER`, it reads questions from standard input, a JSON list
`[operation, argument, ...]` a line, and answers each with a line: `{"done": result}` or `{"error": what}`.
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

_CLOSING_S: Final = 60.0  # Until a folder can be removed: sshfs shows for 20 s what it has listed before


def content(version: int) -> bytes:
    """Returns what a file of this version holds; no two versions below 4,001 have the same size."""
    return b"%d %s %d\n" % (version, b"x" * (37 * version % 4001), version)


def version_of(data: bytes) -> int | None:
    """Returns the version that a file's bytes are of, None if they are no whole version."""
    head = data.partition(b" ")[0]
    version = int(head) if head.isdigit() and len(head) < 10 else 0
    return version if data == content(version) else None


class Side:
    """The files below one mount. Each public method is an operation; names are those of files in the folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._made: list[str] = []

    def answer(self, operation: str, *arguments: Any) -> Any:
        """Does what is asked for and returns what it gives. Raises ValueError where there is no such operation."""
        if operation.startswith("_") or operation == "answer" or not hasattr(type(self), operation):
            raise ValueError(f"there is no operation {operation!r}")
        return getattr(self, operation)(*arguments)

    def hello(self) -> str:
        """Tells of which filesystem the folder is, as the system calls it."""
        return type_of(self._folder)

    def make(self, name: str) -> None:
        """Makes a folder."""
        os.mkdir(self._new(name))

    def enter(self, name: str, longest: float) -> bool:
        """Goes into a folder, which all that follows is in; returns whether it showed in time."""
        folder = self._path(name)
        shows = _wait(lambda: os.path.isdir(folder), longest)
        self._folder = folder if shows else self._folder
        return shows

    def put(self, name: str, version: int) -> None:
        """Publishes a file as lazyshard does: written under another name, synced, renamed over what is there."""
        temporary, path = self._new(f"{name}.part"), self._new(name)
        with open(temporary, "wb") as file:
            file.write(content(version))
            file.flush()
            # Whether that can be done is asked for by itself.
            with contextlib.suppress(OSError):
                os.fsync(file.fileno())
        os.replace(temporary, path)
        with contextlib.suppress(OSError):
            self.sync(os.path.dirname(name))

    def look(self, kind: str, name: str) -> int | None:
        """Looks once: returns the version found by "open", -1 for a file that is cut or mixed, 1 if there by "list"."""
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
        """Looks again and again until each of these has come: by label its kind, name and version.

        Returns by label `seconds`, None if it did not come, how many looks were `torn`, and by name other `errors`.
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
        """Reads a file that is being replaced until it is of this version; returns counts of what was found."""
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
        """Gives a file a second name, which must not be there."""
        os.link(self._path(source), self._new(name))

    def lock(self, name: str) -> int | None:
        """Locks a file; returns its descriptor, None where somebody else has it."""
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
        """Brings a file onto the device, or with "" the names in the folder."""
        fd = os.open(self._path(name) if name else self._folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def clear(self) -> list[str]:
        """Removes what this side has made, by name: a listing may not show it yet. Returns folders that stay behind."""
        left = []
        for path in reversed(dict.fromkeys(self._made)):
            with contextlib.suppress(OSError):
                os.unlink(path)
            # FUSE closes files a moment later, and until then keeps those that are removed under another name.
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
    """Returns what the system calls an error: ESTALE."""
    return errno.errorcode.get(error.errno or 0, str(error))


def serve(folder: str) -> int:
    """Answers questions until there are none any more; returns the exit code."""
    side = Side(folder)
    for line in sys.stdin:
        try:
            answer = {"done": side.answer(*json.loads(line))}
        except OSError as error:
            answer = {"error": error_name(error), "text": str(error)}
        print(json.dumps(answer), flush=True)
    return 0


class Untried(Exception):
    """It could not be tried: the far side did not answer, the two folders are not the same one, or the disk is full."""


class Far:
    """The far side: a process that serves `Side`, here or elsewhere. Raises Untried where there is no such command."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command, pipe = " ".join(command), subprocess.PIPE
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)  # noqa: S603 - as asked
        except OSError as cause:
            raise Untried(f"the command of the other side cannot be started ({command[0]}): {cause}") from cause
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def __enter__(self) -> Far:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends it: a far side whose input ends has nothing left to do."""
        # Of one that has died something may be left to write.
        with contextlib.suppress(OSError):
            self._stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        self._process.wait()
        self._stdout.close()

    def ask(self, *question: Any) -> None:
        """Asks for an operation; `answer` waits for it, and raises Untried where nobody has heard it."""
        with contextlib.suppress(OSError):
            self._stdin.write(json.dumps(question) + "\n")
            self._stdin.flush()

    def answer(self) -> Any:
        """Returns what the last question gave. Raises OSError where the filesystem refused there, Untried for none."""
        line = self._stdout.readline().strip()
        with contextlib.suppress(ValueError, TypeError, KeyError):
            answer = json.loads(line)
            if "error" not in answer:
                return answer["done"]
            raise OSError(0, answer["error"])
        raise Untried(f"no answer from the other side ({self._command}){f': it said {line}' if line else ''}")

    def do(self, *question: Any) -> Any:
        """Asks and waits."""
        self.ask(*question)
        return self.answer()


def _wait(look: Callable[[], bool], longest: float) -> bool:
    """Looks again and again, ever less often; returns False once it takes too long."""
    started = time.monotonic()
    while not look():
        passed = time.monotonic() - started
        if passed >= longest:
            return False
        time.sleep(min(0.1, max(0.005, passed / 20)))
    return True


def _remove_folder(path: str) -> bool:
    with contextlib.suppress(OSError):
        # What the other side has made and could not remove; a cached listing also names what it has removed.
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
