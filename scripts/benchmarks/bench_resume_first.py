"""From the constructor of a resumed data set to its first sample, at several positions, a fresh process each time."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lazyshard.format.state import PartState, RunState
from lazyshard.storage.run_state import course_of, draws_of, resumed
from scripts.benchmarks.bench_read import SAMPLES_PER_CHUNK
from scripts.benchmarks.bench_resume_stream import SparseStream

PROCESS: Final = Path(__file__).with_name("bench_resume_process.py")

_HISTORY: Final = (8, 6, 7, 5)
"""Numbers of ranks that take turns in a long history."""

Found = dict[str, Any]
"""What one process reports: milliseconds (`ms`; `processor_ms`) and MB (`peak_mb`, `rss_mb`, `pss_mb`)."""


@dataclass(frozen=True)
class Case:
    """A run that goes on.

    Attributes:
        draws: samples that each of its ranks has drawn before.
        saved: ranks before.
        ranks: ranks from here on.
        window: chunks shuffled together.
        live: whether the stream is still being produced.
        rescales: times the ranks had changed before.
    """

    draws: int
    saved: int
    ranks: int
    window: int
    live: bool = False
    rescales: int = 0

    @property
    def name(self) -> str:
        """What it is called in the table."""
        notes = ", live" * self.live + f", after {self.rescales} rescales" * bool(self.rescales)
        return f"{self.saved} to {self.ranks} ranks, window {self.window}{notes}"

    def state(self, stream: SparseStream) -> RunState:
        """Returns the state that was saved."""
        limit = stream.total if self.live else None
        before = [
            PartState(_HISTORY[i % len(_HISTORY)], draws=self.draws // (self.rescales + 1))
            for i in range(self.rescales)
        ]
        parts = (*before, PartState(self.saved, draws=self.draws // (self.rescales + 1)))
        consumed = sum(part.dp * part.draws for part in parts)
        window = self.window * SAMPLES_PER_CHUNK
        return RunState(stream.stream_id, SAMPLES_PER_CHUNK, SAMPLES_PER_CHUNK, window, 0, limit, parts, consumed)


_EARLY: Final = 1250
_LATE: Final = 12_501_250
"""Draws of 8 ranks: 10^4 and 10^8 samples. In the middle of a chunk, and of a window of 4."""

CASES: Final = (
    *(
        Case(draws, 8, ranks, window)
        for draws in (0, _EARLY, _LATE)
        for ranks, window in ((8, 0), (6, 0), (8, 4), (6, 4))
    ),
    Case(_LATE, 8, 6, 4, live=True),
    Case(_LATE, 8, 6, 4, rescales=100),
    Case(97_650, 1024, 768, 4),
)


def measure_first(streams: dict[bool, SparseStream], rounds: int) -> dict[Case, list[Found]]:
    """Returns what the processes of each case found; the cases take turns, and a first round is not counted.

    Args:
        streams: one that has ended under True, a live one under False.
        rounds: processes of each case.

    Raises:
        SystemExit: a process failed or read another row than it should.
    """
    commands = {case: _prepare(case, streams[not case.live]) for case in CASES}
    found: dict[Case, list[Found]] = {case: [] for case in CASES}
    for number in range(rounds + 1):
        for case, (settings, row) in commands.items():
            one = run([sys.executable, str(PROCESS), "first", json.dumps(settings)], case.name)
            if one["result"] != row:
                raise SystemExit(f"{case}: expected row {row} of a chunk, read row {one['result']}")
            if number:
                found[case].append(one)
    return found


def run(command: list[str], name: str, **options: Any) -> Found:
    """Runs a process and returns what it prints.

    Raises:
        SystemExit: it failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise SystemExit(f"{name}: failed\n{done.stdout}{done.stderr}")
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def _prepare(case: Case, stream: SparseStream) -> tuple[dict[str, Any], int]:
    """Makes the chunk that the case will read; returns the settings of its processes, and the row that they read."""
    state = case.state(stream)
    rank = case.ranks // 2
    goes_on = resumed(state, case.ranks, 1)
    sample = course_of(goes_on).draw(rank, draws_of(goes_on, goes_on.consumed), stream.total).sample
    stream.add(sample)
    arguments = {
        "dp_rank": rank,
        "dp_size": case.ranks,
        "shuffle_window": case.window,
        "max_total_samples": state.max_total_samples,
        # A chunk that should not be read fails at once.
        "max_wait": 1,
    }
    settings = {"directory": str(stream.directory), "arguments": arguments, "state": state.to_dict()}
    return settings, sample % SAMPLES_PER_CHUNK
