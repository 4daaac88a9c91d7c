"""What something takes: by the clock and in processor time, in this process or another; the command as a process."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

PEAK = """
import os, sys
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, used = os.wait4(pid, 0)
print("\\n", used.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""
"""Started by a small process, since the system counts the memory of the one that starts it too."""


class Taken(NamedTuple):
    """Seconds.

    Attributes:
        clock: from start to end.
        processor: of all threads and processes that did the work. What else runs on the machine disturbs it less.
    """

    clock: float
    processor: float


def processor_s() -> float:
    """Returns the processor time of this process and of those that it has waited for."""
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def timed(work: Callable[[], object]) -> Taken:
    """Returns what something takes."""
    processor, clock = processor_s(), time.perf_counter()
    work()
    return Taken(time.perf_counter() - clock, processor_s() - processor)


def run_process(command: list[str]) -> Taken:
    """Runs a program.

    Raises:
        SystemExit: it failed.
    """
    with tempfile.TemporaryFile() as said:
        to_file = [(os.POSIX_SPAWN_DUP2, said.fileno(), fd) for fd in (1, 2)]
        statuses: list[int] = []

        def work() -> None:
            # Not subprocess: its own work would be in the figure.
            pid = os.posix_spawn(command[0], command, os.environ, file_actions=to_file)
            statuses.append(os.waitpid(pid, 0)[1])

        taken = timed(work)
        if statuses != [0]:
            said.seek(0)
            raise SystemExit(f"{' '.join(command)}: failed\n{said.read().decode(errors='replace')}")
    return taken


def peak_mb(command: list[str]) -> float:
    """Runs a program and returns its peak of resident memory in MB."""
    found = subprocess.run([sys.executable, "-ISc", PEAK, *command], capture_output=True, text=True, check=True)
    return int(found.stdout.split()[-1]) * 1024 / 1e6


class Producer:
    """The command, with so many rows a chunk."""

    def __init__(self, samples_per_chunk: int) -> None:
        self._samples_per_chunk = samples_per_chunk
        self._last: Taken | None = None

    def run_whole(self, source: Path, out: Path) -> Taken:
        """Runs it from start to end; as `run` measured it, if that was called before."""
        taken, self._last = self._last, None
        return taken or run_process(self.command(source, out))

    def run(self, source: Path, out: Path) -> Taken:
        """Returns what it takes, less what it takes for a source of one row."""
        self._last = run_process(self.command(source, out))
        with tempfile.TemporaryDirectory(dir=out.parent) as place:
            one = Path(place) / "one.jsonl"
            one.write_bytes(b'{"id":0}\n')
            start = run_process(self.command(one, Path(place) / "out"))
        return Taken(self._last.clock - start.clock, self._last.processor - start.processor)

    def report_memory(self, source: Path, place: Path) -> dict[str, float]:
        """Prints and returns the peaks of memory in MB."""
        bare = peak_mb([sys.executable, "-c", "pass"])
        found = {"a bare interpreter": bare}
        for name, samples_per_chunk in (("the run", self._samples_per_chunk), ("with chunks ten times as large", 0)):
            out = place / "memory"
            producer = Producer(samples_per_chunk or 10 * self._samples_per_chunk)
            found[name] = peak_mb(producer.command(source, out))
            shutil.rmtree(out)
        print("\npeak of resident memory: " + ", ".join(f"{name} {peak:.1f} MB" for name, peak in found.items()))
        print(f"the run above a bare interpreter: {found['the run'] - bare:.1f} MB (limit: 64 MB and one chunk)")
        return found

    def command(self, source: Path, out: Path) -> list[str]:
        """Returns the command line."""
        program = str(Path(sys.executable).with_name("lazyshard-producer"))
        options = ["--no-progress", "--samples-per-chunk", str(self._samples_per_chunk)]
        return [program, "run", "--source", str(source), "--out", str(out), *options]
