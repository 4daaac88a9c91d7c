"""What processes hold: descriptors, threads, memory, children; and whether that grows while they do the same work. A
process is looked at again and again. Once it has been at work for long enough, the looks of an early stretch of its
life are compared with those of its last one. What a process holds in its first seconds is not counted: caches fill."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
DESCRIPTORS_MORE: Final = 8  # So many descriptors more may be open late, those of chunks not counted
CHUNKS_MOST: Final = 256  # So many chunks a reader may hold open: how many it does depends on how fast it reads
DOUBLED_MOST: Final = 2  # So many may be open twice at a time: while one is opened
THREADS_MORE: Final = 2
MEMORY_MORE: Final = 24 << 20
"""Of memory that is a process's own: so much more may it have late, besides a fifth of what it had early."""

MOST_DESCRIPTORS: Final = 128
MOST_THREADS: Final = 64
MOST_LOOKS: Final = 128
LEAST_LOOKS: Final = 24  # Fewer tell nothing


@dataclass(frozen=True, slots=True)
class Look:
    descriptors: int  # open files, sockets and so on, but for chunks
    chunks: int  # chunks that are open
    doubled: int  # of these, how many are open once more
    threads: int  # its threads
    memory: int  # bytes that it alone has, written to
    children: int  # its processes


@dataclass
class Life:
    kind: str  # what it is
    # what it held, evenly spread over its life: of a long one every second, fourth, ... look is kept.
    looks: list[Look] = field(default_factory=list)
    _every: int = 1
    _skipped: int = 0

    def add(self, look: Look) -> None:
        self._skipped += 1
        if self._skipped < self._every:
            return
        self._skipped = 0
        self.looks.append(look)
        if len(self.looks) >= MOST_LOOKS:
            self.looks = self.looks[1::2]
            self._every *= 2

    def leaks(self) -> list[str]:
        """Returns what it held more of late than early, a line each; nothing for a life that was too short."""
        count = len(self.looks)
        if count < LEAST_LOOKS:
            return []
        early, late = self.looks[count // 4 : count // 2], self.looks[-count // 4 :]
        found = []
        for name, more in (("descriptors", DESCRIPTORS_MORE), ("threads", THREADS_MORE), ("memory", MEMORY_MORE)):
            before, after = (statistics.median(getattr(look, name) for look in looks) for looks in (early, late))
            allowed = more + (before / 5 if name == "memory" else 0)
            if after - before > allowed:
                found.append(f"{self.kind}: {name} went from {before:,.0f} to {after:,.0f} in {count} looks")
        return found


class Watch:
    def __init__(self) -> None:
        self.peaks: dict[str, Look] = {}  # by kind of process: the most of each that one was seen to hold
        self.compared = 0  # lives that were long enough to tell
        self._lives: dict[int, Life] = {}

    def look(self, processes: Iterable[tuple[int, str]]) -> list[str]:
        """Looks at these processes, (id, kind) each; returns what is wrong at once, and what those gone have leaked."""
        found = []
        present = set()
        for pid, kind in processes:
            look = look_at(pid)
            if look is None:
                continue
            present.add(pid)
            self._lives.setdefault(pid, Life(kind)).add(look)
            peak = self.peaks.get(kind, look)
            self.peaks[kind] = Look(
                max(peak.descriptors, look.descriptors),
                max(peak.chunks, look.chunks),
                max(peak.doubled, look.doubled),
                max(peak.threads, look.threads),
                max(peak.memory, look.memory),
                max(peak.children, look.children),
            )
            if look.chunks > CHUNKS_MOST + DOUBLED_MOST or look.doubled > DOUBLED_MOST:
                found.append(f"{kind}: {look.chunks} chunks are open, {look.doubled} of them once more")
            if look.descriptors > MOST_DESCRIPTORS or look.threads > MOST_THREADS:
                found.append(f"{kind}: {look.descriptors} descriptors and {look.threads} threads")
        for pid in set(self._lives) - present:
            found += self._end(pid)
        return found

    def end(self) -> list[str]:
        """Returns what the processes that are left have leaked."""
        return [leak for pid in list(self._lives) for leak in self._end(pid)]

    def _end(self, pid: int) -> list[str]:
        life = self._lives.pop(pid)
        self.compared += len(life.looks) >= LEAST_LOOKS
        return life.leaks()


def look_at(pid: int) -> Look | None:
    """Returns what a process holds; None if it is gone, or only waits to be reaped."""
    home = PROC / str(pid)
    try:
        memory = sum(
            int(line.split()[1]) * 1024
            for line in (home / "smaps_rollup").read_text().splitlines()
            if line.startswith(("Private_Dirty:", "Swap:"))
        )
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
    found = []
    try:
        for thread in os.listdir(PROC / str(pid) / "task"):
            found += [int(child) for child in (PROC / str(pid) / "task" / thread / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def describe(pid: int) -> str:
    """Returns where a process is, as the system tells it: its state, what it waits for, the call that it is in."""
    home = PROC / str(pid)
    told = []
    for name in ("comm", "wchan", "syscall", "stack"):
        try:
            text = (home / name).read_text().strip()
        except OSError as error:
            text = error.strerror or "?"
        told.append(f"{name} {' '.join(text.split())[:300]}")
    try:
        status = (home / "status").read_text()
        told += [
            " ".join(line.split()) for line in status.splitlines() if line.startswith(("State:", "VmRSS:", "Threads:"))
        ]
    except OSError:
        told.append("gone")
    return f"process {pid}: " + "; ".join(told)
