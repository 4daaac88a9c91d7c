"""What a soak takes: processes may not hold more while they do the same, and the stream has a small disk of its own."""

import contextlib
import ctypes
import errno
import os
import statistics
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from tests.harness.disks import find_tool

_PROC: Final = Path("/proc")
_CHUNKS_MOST: Final = 256  # So many chunks a reader may hold open: how many it does depends on how fast it reads
_DOUBLED_MOST: Final = 2  # So many may be open twice at a time: while one is opened
_MORE: Final = {"descriptors": 8, "threads": 2, "memory": 24 << 20}  # So much more than early a process may have late
_LEAST_LOOKS: Final = 24  # Fewer tell nothing


class Look(NamedTuple):
    descriptors: int  # open files, sockets and so on, but for chunks
    chunks: int  # chunks that are open
    doubled: int  # of these, how many are open once more
    threads: int  # its threads
    memory: int  # bytes that it alone has, written to
    children: int  # its processes


@dataclass
class _Life:
    kind: str  # what it is
    looks: list[Look] = field(default_factory=list)  # of a long life every second, fourth, ... look is kept
    every: int = 1
    seen: int = 0

    def add(self, look: Look) -> None:
        self.seen += 1
        if self.seen % self.every == 0:
            self.looks.append(look)
        if len(self.looks) >= 128:
            self.looks = self.looks[1::2]
            self.every *= 2

    def leaks(self) -> list[str]:
        count = len(self.looks)
        if count < _LEAST_LOOKS:
            return []
        early, late = self.looks[count // 4 : count // 2], self.looks[-count // 4 :]
        found = []
        for name, more in _MORE.items():
            before, after = (statistics.median(getattr(look, name) for look in looks) for looks in (early, late))
            if after - before > more + (before / 5 if name == "memory" else 0):
                found.append(f"{self.kind}: {name} went from {before:,.0f} to {after:,.0f} in {count} looks")
        return found


class Watch:
    def __init__(self) -> None:
        self.peaks: dict[str, Look] = {}  # by kind of process: the most of each that one was seen to hold
        self.compared = 0  # lives that were long enough to tell
        self._lives: dict[int, _Life] = {}

    def look(self, processes: Iterable[tuple[int, str]]) -> list[str]:
        """Looks at these processes, (id, kind) each; returns what is wrong at once, and what those gone have leaked."""
        found = []
        present = set()
        for pid, kind in processes:
            look = look_at(pid)
            if look is None:
                continue
            present.add(pid)
            self._lives.setdefault(pid, _Life(kind)).add(look)
            self.peaks[kind] = Look(*map(max, self.peaks.get(kind, look), look))
            if look.chunks > _CHUNKS_MOST + _DOUBLED_MOST or look.doubled > _DOUBLED_MOST:
                found.append(f"{kind}: {look.chunks} chunks are open, {look.doubled} of them once more")
            if look.descriptors > 128 or look.threads > 64:
                found.append(f"{kind}: {look.descriptors} descriptors and {look.threads} threads")
        return found + self.end(set(self._lives) - present)

    def end(self, pids: Iterable[int] | None = None) -> list[str]:
        found = []
        for pid in list(self._lives if pids is None else pids):
            life = self._lives.pop(pid)
            self.compared += len(life.looks) >= _LEAST_LOOKS
            found += life.leaks()
        return found


def look_at(pid: int) -> Look | None:
    """Returns what a process holds; None if it is gone, or only waits to be reaped."""
    home = _PROC / str(pid)
    try:
        memory = 0
        for line in (home / "smaps_rollup").read_text().splitlines():
            if line.startswith(("Private_Dirty:", "Swap:")):
                memory += int(line.split()[1]) * 1024
        files = []
        for descriptor in os.listdir(home / "fd"):
            with contextlib.suppress(FileNotFoundError):
                files.append(os.readlink(home / "fd" / descriptor))
        chunks = [name for name in files if "/chunk_" in name]
        doubled = len(chunks) - len(set(chunks))
        threads = len(os.listdir(home / "task"))
        return Look(len(files) - len(chunks), len(chunks), doubled, threads, memory, len(children(pid)))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(_PROC / str(pid) / "task"):
            found += map(int, (_PROC / str(pid) / "task" / thread / "children").read_text().split())
    return found


def describe(pid: int) -> str:
    told = []
    for name in ("comm", "wchan", "syscall", "stack"):
        try:
            told.append(f"{name} {' '.join((_PROC / str(pid) / name).read_text().split())[:300]}")
        except OSError as error:
            told.append(f"{name} {error.strerror}")
    return f"process {pid}: {', '.join(told)}"


_CLONE_NEWNS: Final = 0x00020000
SHARED_MEMORY: Final = Path("/dev/shm")


def own_namespace(small: Path, size: int) -> str | None:
    """Mounts a small disk, and an empty /dev/shm, for this process and its children; returns why it could not."""
    if os.geteuid() != 0:
        return "needs root, to mount a small disk"
    mount = find_tool("mount")
    if mount is None:
        return "needs mount(8)"
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        return f"cannot have a mount namespace: {os.strerror(ctypes.get_errno())}"
    wanted = [["--make-rprivate", "/"], ["-t", "tmpfs", "-o", f"size={size}", "lazyshard-soak", str(small)]]
    if SHARED_MEMORY not in small.resolve().parents:
        wanted.append(["-t", "tmpfs", "-o", "size=1g", "lazyshard-soak", str(SHARED_MEMORY)])
    for arguments in wanted:
        done = subprocess.run([mount, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            return f"mount {' '.join(arguments)}: {done.stderr.strip()}"
    return None


def leave(small: Path) -> None:
    if os.path.ismount(small):
        subprocess.run([find_tool("umount") or "umount", "--lazy", str(small)], check=False)


def left_in_memory(small: Path) -> list[str]:
    if not os.path.ismount(small) or SHARED_MEMORY in small.resolve().parents:
        return []
    # Python makes a semaphore by a name that it takes away at once, the C library by a temporary one before: both stay
    # where the process is killed in between. Those of a DataLoader's queues are all that there are.
    found = {name for name in os.listdir(SHARED_MEMORY) if not name.startswith("sem.")}
    # torch too takes the name of what it shares away at once (`shm_open`, then `shm_unlink`), and leaves it where the
    # process is killed in between. That is rare: what leaks by itself leaks with every kill.
    tensors = {name for name in found if name.startswith("torch_")}
    if len(tensors) <= 2:  # So many may have been left by kills between two steps of torch
        found -= tensors
    looks = SHARED_MEMORY / f"lazyshard-{os.geteuid()}"  # The polls per node stay: one file of the stream
    if looks.is_dir() and len(os.listdir(looks)) <= 1:
        found.discard(looks.name)
    return sorted(found)


class Ballast:
    def __init__(self, disk: Path) -> None:
        self._path = disk / "ballast"

    def fill(self) -> None:
        """Takes what is free now, to the last byte; again and again, as long as the disk is to be full."""
        with self._path.open("ab", buffering=0) as file:
            piece = 1 << 20
            while piece:
                try:
                    if not file.write(bytes(piece)):
                        return
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    piece //= 4

    def drop(self) -> None:
        self._path.unlink(missing_ok=True)


def used_bytes(disk: Path) -> int:
    found = os.statvfs(disk)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


class Use(NamedTuple):
    chunks: int  # bytes of chunks and seals, as `ls -l` shows them
    largest: int  # of these, bytes of the largest chunk with its seal
    unpublished: int  # bytes under `.tmp`
    temporary: int  # files under `.tmp`


def measure(stream: Path) -> Use:
    """What a stream takes, never more than at some moment: a file counts if it was there at two looks."""
    first, second = _chunk_files(stream), _chunk_files(stream)
    chunks: Counter[str] = Counter()
    for name in first.keys() & second.keys():
        chunks[name.removesuffix(".completed")] += first[name]
    unpublished = []
    for folder, _, names in os.walk(stream / ".tmp"):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                unpublished.append(os.stat(os.path.join(folder, name)).st_size)
    return Use(chunks.total(), max(chunks.values(), default=0), sum(unpublished), len(unpublished))


def _chunk_files(stream: Path) -> dict[str, int]:
    sizes = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(stream) as entries:
        for entry in entries:
            if entry.name.startswith("chunk_"):
                with contextlib.suppress(FileNotFoundError):
                    sizes[entry.name] = entry.stat().st_size
    return sizes
