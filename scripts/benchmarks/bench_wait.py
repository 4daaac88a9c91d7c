"""Waiting for a live stream: latency of a chunk, cost and polling rate of idle waiting, memory.

- Latency from the last row of a chunk in the writer to the first sample of a rank that waits for it in another process.
  If a stripe has a chunk for each of several ranks, it is measured from the last row of the stripe. Without inotify, as
  when another machine writes, the pause between two polls is a tenth of the wait.
- The share of a core of each rank that waits in vain, and the number of path lookups of all ranks in the stream,
  measured by strace.
- Anonymous memory of a rank and its DataLoader workers while they read streams of few and of many chunks.
"""

from __future__ import annotations

import functools
import re
import shutil
import statistics
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from lazyshard import ChunkWriter
from scripts.benchmarks.bench_harness import Benchmark, Failed, Figures, Missing, Row, Setting, Side, bound, child
from scripts.benchmarks.bench_wait_ranks import Rank, closing_all

PER_CHUNK: Final = 8
PUBLISHED: Final = 8 * PER_CHUNK
"""Samples that are there before ranks begin to wait for what never comes: a chunk for each of 8."""

WARM_UP: Final = 5
PAUSE_S: Final = {True: 0.05, False: 0.5}
"""Before the last row of a stripe, so that the ranks have come to wait; where they poll, for more than the shortest
pause between two looks."""

_CALL: Final = re.compile(r"(?:\d+ +)?(?P<at>\d+\.\d+) (?P<call>\w+)\(.*?\"(?P<path>[^\"]*)\"")
"""A line of `strace -f -ttt`: of a call that is interrupted only the first half has the path."""


def latency(place: Path, ranks: int, woken: bool, stripes: int) -> Figures:
    """Returns the median over stripes and ranks.

    Raises:
        Failed: a rank failed, or read another sample than it should.
    """
    directory = place / f"latency_{time.monotonic_ns()}"
    row = {"text": "x" * 2000}
    found, number = [], 0
    settings = {"directory": str(directory), "ranks": ranks, "per_chunk": PER_CHUNK, "woken": woken}
    settings["stripes"] = WARM_UP + stripes
    with ChunkWriter(directory, PER_CHUNK) as writer:
        processes = [Rank("latency", settings | {"rank": rank}, place) for rank in range(ranks)]
        with closing_all(processes):
            for process in processes:
                process.line()
            for stripe in range(WARM_UP + stripes):
                for _ in range(ranks * PER_CHUNK - 1):
                    writer.write(row | {"id": number})
                    number += 1
                time.sleep(PAUSE_S[woken])
                given = time.monotonic()
                writer.write(row | {"id": number})
                number += 1
                for rank, process in enumerate(processes):
                    answer, expected = process.line(), (stripe * ranks + rank) * PER_CHUNK
                    if answer["id"] != expected or answer["at"] < given:
                        raise Failed(f"rank {rank} of {ranks} expected sample {expected}, not before now: {answer}")
                    if stripe >= WARM_UP:
                        found.append((answer["at"] - given) * 1000)
    return {"ms": statistics.median(found)}


class Idle:
    """Ranks that wait in vain.

    Args:
        place: a directory to work in.
        settle_s: seconds of a wait that are not measured.
        seconds: those that are.
    """

    def __init__(self, place: Path, settle_s: float, seconds: float) -> None:
        self._place = place
        self._settle_s = settle_s
        self._seconds = seconds

    @functools.cached_property
    def _stream(self) -> Path:
        directory = self._place.resolve() / "idle"
        writer = ChunkWriter(directory, PER_CHUNK)
        for number in range(PUBLISHED):
            writer.write({"id": number})
        writer.close(False)
        return directory

    def _wait(self, ranks: int, before: Iterable[list[str]]) -> list[dict[str, float]]:
        settings = {"directory": str(self._stream), "ranks": ranks, "published": PUBLISHED}
        settings |= {"settle_s": self._settle_s, "seconds": self._seconds}
        processes = [
            Rank("idle", settings | {"rank": rank}, self._place, words)
            for rank, words in zip(range(ranks), before, strict=True)
        ]
        with closing_all(processes):
            return [process.line() for process in processes]

    def share(self, ranks: int) -> Figures:
        """Returns the mean share of a core per rank."""
        found = self._wait(ranks, [[]] * ranks)
        return {"% of a core": 100 * statistics.fmean(one["share"] for one in found)}

    def calls(self, ranks: int) -> Figures:
        """Returns the lookups of all ranks, from when the last one has settled until the first one is done."""
        strace = shutil.which("strace")
        if strace is None:
            raise Missing("there is no strace")
        logs = [self._place / f"strace_{ranks}_{rank}" for rank in range(ranks)]
        # Only calls with a path: calls on open files do not reach the metadata server.
        words = [strace, "-f", "-ttt", "-s", "4096", "-e", "trace=%file", "-o"]
        found = self._wait(ranks, [[*words, str(log)] for log in logs])
        began, stopped = max(one["began"] for one in found), min(one["stopped"] for one in found)
        if stopped - began < self._seconds / 2:
            raise Missing(f"the ranks waited together for {stopped - began:.1f} s only; this machine is busy")
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
        if not count_calls(lines, self._stream, 0, began):
            raise Failed(f"strace has seen no call for {self._stream}")
        return {"calls": count_calls(lines, self._stream, began, stopped) * self._seconds / (stopped - began)}


def count_calls(lines: Iterable[str], directory: Path, began: float, stopped: float) -> int:
    """Counts calls for a directory or what is in it, by name, in the half-open range [began, stopped) of seconds."""
    found = 0
    for line in lines:
        call = _CALL.match(line)
        if call is not None and began <= float(call["at"]) < stopped:
            path = Path(call["path"])
            found += path == directory or directory in path.parents
    return found


def memory(place: Path, chunks: int, text: int) -> Figures:
    """Returns the anonymous memory of a rank and a worker that read so many chunks of two rows."""
    directory = place / f"memory_{chunks}_{text}"
    if not directory.exists():
        with ChunkWriter(directory, 2) as writer:
            for number in range(2 * chunks):
                writer.write({"id": number, "text": "x" * text})
    return child("bench_wait_ranks.memory", {"directory": str(directory), "text": text}, place)


def prepare(setting: Setting) -> Mapping[str, Side]:
    """Returns the sides."""
    place, stripes, long = setting.place, setting.size(20, 3), setting.size(1_000_000, 10_000)
    idle = Idle(place, setting.size(10, 1), setting.size(20, 3))
    most = setting.size(8, 2)
    many, some = setting.size(1000, 20), setting.size(100, 20)
    return {
        "1 rank, woken": lambda: latency(place, 1, True, stripes),
        "8 ranks, woken": lambda: latency(place, most, True, stripes),
        "1 rank, polling": lambda: latency(place, 1, False, stripes),
        "8 ranks, polling": lambda: latency(place, most, False, stripes),
        "1 rank, idle": lambda: idle.share(1),
        "each of 8 ranks, idle": lambda: idle.share(most),
        "8 ranks asking": lambda: idle.calls(most),
        "1 rank asking": lambda: idle.calls(1),
        "1,000 chunks of rows of 2 KB": lambda: memory(place, many, 2_000),
        "10 chunks of rows of 2 KB": lambda: memory(place, 10, 2_000),
        "100 chunks of rows of 1 MB": lambda: memory(place, some, long),
        "10 chunks of rows of 1 MB": lambda: memory(place, 10, long),
    }


_MS: Final = 10.0
_PERCENT: Final = 0.1

_POLLING_MS: Final = _MS + PAUSE_S[False] * 1000 / 10
"""With one look more: a tenth of the wait."""

_SHORT, _LONG = "chunks of rows of 2 KB", "chunks of rows of 1 MB"

WAIT: Final = Benchmark(
    "wait",
    "a live stream: how soon a chunk is there, what waiting costs, how often it asks; memory",
    (
        bound("woken", "1 rank, woken", _MS, "ms"),
        bound("woken-8", "8 ranks, woken", _MS, "ms"),
        bound("polling", "1 rank, polling", _POLLING_MS, "ms"),
        bound("polling-8", "8 ranks, polling", _POLLING_MS, "ms"),
        bound("idle", "1 rank, idle", _PERCENT, "% of a core"),
        bound("idle-8", "each of 8 ranks, idle", _PERCENT, "% of a core"),
        # A rank that comes a moment late asks once more.
        Row("asking", "8 ranks asking", "1 rank asking", "calls", 0.6),
        Row("memory", f"1,000 {_SHORT}", f"10 {_SHORT}", "rank MB", 0.93),
        Row("memory-worker", f"1,000 {_SHORT}", f"10 {_SHORT}", "worker MB", 0.93),
        Row("memory-long", f"100 {_LONG}", f"10 {_LONG}", "rank MB", 0.93),
        Row("memory-long-worker", f"100 {_LONG}", f"10 {_LONG}", "worker MB", 0.93),
        Row("memory-rows", f"100 {_LONG}", f"1,000 {_SHORT}", "rank MB", 0.93),
    ),
    prepare,
)
