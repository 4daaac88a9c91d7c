"""What ranks that wait for a live stream take of the processor, and how often they ask its filesystem."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from lazyshard import ChunkWriter
from scripts.benchmarks.bench_wait_ranks import Rank, close_all

PER_CHUNK: Final = 8
CHUNKS: Final = 8
"""Published before the ranks begin to wait: one for each of 8 ranks."""

_CALL: Final = re.compile(r"(?:\d+ +)?(?P<at>\d+\.\d+) (?P<call>\w+)\(.*?\"(?P<path>[^\"]*)\"")
"""A line of `strace -f -ttt`: of a call that is interrupted only the first half has the path."""


def make_stream(directory: Path) -> None:
    """Writes a few chunks of a stream that goes on later."""
    writer = ChunkWriter(directory, PER_CHUNK)
    for number in range(CHUNKS * PER_CHUNK):
        writer.write({"id": number})
    writer.close(False)


def _settings(
    directory: Path, rank: int, ranks: int, settle_s: float, seconds: float, woken: bool
) -> dict[str, object]:
    return {
        "directory": str(directory),
        "rank": rank,
        "ranks": ranks,
        "published": CHUNKS * PER_CHUNK,
        "settle_s": settle_s,
        "seconds": seconds,
        "woken": woken,
    }


def measure_idle(directory: Path, ranks: int, settle_s: float, seconds: float) -> list[float]:
    """Returns the share of a core that each of so many waiting ranks takes."""
    processes = [Rank("idle", _settings(directory, rank, ranks, settle_s, seconds, True)) for rank in range(ranks)]
    with close_all(processes):
        return [process.line()["share"] for process in processes]


def measure_asking(directory: Path, ranks: int, settle_s: float, seconds: float, place: Path) -> Counter[str]:
    """Returns how often so many waiting ranks together call for something in the stream's directory, by its name.

    Counted from when the last of them has settled to when the first of them is done.

    Raises:
        SystemExit: there is no strace, or it has seen nothing.
    """
    strace = shutil.which("strace")
    if strace is None:
        raise SystemExit("bench_wait: the part `asking` needs strace, and there is none")
    logs = [place / f"strace_{ranks}_{rank}" for rank in range(ranks)]
    # Only what asks for something by a name: what is open already asks no metadata server.
    before = [[strace, "-f", "-ttt", "-s", "4096", "-e", "trace=%file", "-o", str(log)] for log in logs]
    processes = [
        Rank("idle", _settings(directory, rank, ranks, settle_s, seconds, True), before[rank]) for rank in range(ranks)
    ]
    with close_all(processes):
        answers = [process.line() for process in processes]
    began, stopped = max(one["began"] for one in answers), min(one["stopped"] for one in answers)
    if stopped - began < seconds / 2:
        raise SystemExit(
            f"bench_wait: the ranks waited together for {stopped - began:.1f} s only; this machine is busy"
        )
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
    if not count_calls(lines, directory, 0, began):
        raise SystemExit(f"bench_wait: strace has seen no call for {directory}")
    found = count_calls(lines, directory, began, stopped)
    return Counter({name: round(count * seconds / (stopped - began)) for name, count in found.items()})


def count_calls(lines: Iterable[str], directory: Path, began: float, stopped: float) -> Counter[str]:
    """Counts calls for what is in a directory, or for it, by name; the directory itself is ".".

    Args:
        lines: of strace.
        directory: the directory.
        began: seconds since 1970.
        stopped: the same; what is counted lies in the half-open range [began, stopped).
    """
    found: Counter[str] = Counter()
    for line in lines:
        call = _CALL.match(line)
        if call is None or not began <= float(call["at"]) < stopped:
            continue
        path = Path(call["path"])
        if path == directory or directory in path.parents:
            found[str(path.relative_to(directory))] += 1
    return found
