"""Whether each call that changes a file is counted, by strace: it is between looks for `MARK/begin` and `MARK/end`."""

import contextlib
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.harness.processes.commands import call_first
from tests.harness.processes.environment import environment
from tests.harness.processes.kill_points import KillPoint

_LINE: Final = re.compile(r"(?:\d+ +)?(\w+)\((.*)\) += (.+)")

_CHANGES_NOTHING: Final = frozenset(
    (
        *("read", "readv", "pread64", "preadv", "preadv2", "lseek", "close", "close_range", "dup", "dup2", "dup3"),
        *("stat", "lstat", "fstat", "newfstatat", "statx", "access", "faccessat", "faccessat2", "readlink"),
        *("readlinkat", "statfs", "fstatfs", "getdents", "getdents64", "getxattr", "lgetxattr", "fgetxattr"),
        *("fcntl", "ioctl", "flock", "poll", "ppoll", "select", "pselect6", "epoll_ctl", "epoll_wait"),
        *("fadvise64", "readahead", "getcwd", "chdir", "fchdir", "execve", "inotify_add_watch"),
        "sync_file_range",  # Brings onto the device what was written
    )
)
"""System calls that change no file. Any other is taken for one that does: a new one is asked about."""

_MAKES: Final = ("O_CREAT", "O_TRUNC", "O_TMPFILE", "creat")


@dataclass(slots=True)
class Traced:
    counted: Counter[str] = field(default_factory=Counter)  # those out of a counted call, by name
    uncounted: list[str] = field(default_factory=list)  # those that did not, as strace prints them
    refused: str = ""  # why nothing could be traced; empty where something was
    status: int = 0  # the command's exit status
    said: str = ""  # what it said

    def add(self, lines: Iterable[str], directory: Path, mark: Path) -> None:
        inside = False
        for line in lines:
            if str(mark) in line:
                inside = f"{mark}/begin/" in line
                continue
            found = _LINE.fullmatch(line.rstrip("\n"))
            if found is None or str(directory) not in line:
                continue
            call, arguments, result = found.groups()
            if result.startswith("-1") or not _changes(call, arguments):
                continue
            if inside:
                self.counted[call] += 1
            else:
                self.uncounted.append(line.strip())


def _changes(call: str, arguments: str) -> bool:
    if call in ("open", "openat", "openat2", "creat"):
        return any(flag in f"{call} {arguments}" for flag in _MAKES)
    if call in ("mmap", "mprotect"):
        return "PROT_WRITE" in arguments and "MAP_SHARED" in arguments
    return call not in _CHANGES_NOTHING


def trace(strace: str, out: Path, folder: Path, arguments: Sequence[object], prepare: Sequence[str] = ()) -> Traced:
    """Runs the command under strace. `out`: absolute and without links. `folder`: made, for what strace says."""
    folder.mkdir()
    mark = folder / "counted"
    # One file a thread, in which calls stand whole and in order; -y gives the path of each descriptor.
    tracer = [strace, "-ff", "-y", "-s", "0", "-e", "trace=%file,%desc", "-o", str(folder / "calls")]
    command = [sys.executable, "-m", "tests.harness.points.traced", str(mark), ",".join(prepare)]
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([*tracer, *command, *map(str, arguments)], env=environment(), **quiet)
    traced = Traced(status=done.returncode, said=done.stderr)
    if done.returncode and "ptrace" in done.stderr:
        traced.refused = done.stderr.strip()
    for path in folder.glob("calls.*"):
        with path.open() as lines:
            traced.add(lines, out, mark)
    return traced


def main() -> int:
    from lazyshard_producer.cli import main as command

    mark, prepare, *arguments = sys.argv[1:]

    def tell(number: int, name: str, begins: bool) -> None:
        with contextlib.suppress(OSError):
            os.stat(f"{mark}/{'begin' if begins else 'end'}/{name}")

    call_first(list(filter(None, prepare.split(","))))
    KillPoint(0, tell=tell).install()
    return command(arguments)


if __name__ == "__main__":
    sys.exit(main())
