"""Chunks looked at by several processes: the same findings in the same order, and nobody left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lazyshard.inspection import verification, verification_chunks
from lazyshard.inspection.verification import verify
from lazyshard.inspection.verification_chunks import ChunkBatch, ChunkFiles, check_in_order
from tests.stream.damage import cut, flip, stream
from tests.stream.streams import HERE, wait_until

CHUNKS = 40


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes work from the start, a chunk at a time."""
    check = verification_chunks.check_in_order

    def check_by_others(batches: list[ChunkBatch], jobs: int) -> Any:
        single = [ChunkBatch(batch.directory, (files,), batch.quick) for batch in batches for files in batch.files]
        return check(single, jobs, alone_s=0.0)

    monkeypatch.setattr(verification, "check_in_order", check_by_others)


def damaged(directory: Path) -> Path:
    stream(directory, 2 * CHUNKS)
    for chunk in range(0, CHUNKS, 3):
        flip(f"chunk_{chunk:05d}.jsonl", 5)(directory)
    cut(f"chunk_{CHUNKS - 1:05d}.jsonl", 3)(directory)
    return directory


@pytest.mark.parametrize("jobs", [2, 5])
def test_findings_are_those_of_one_process(jobs: int, tmp_path: Path, at_once: None) -> None:
    alone = verify(damaged(tmp_path))
    assert len(alone.findings) == 14
    assert verify(tmp_path, jobs=jobs) == alone


def test_progress_is_told_in_order(tmp_path: Path, at_once: None) -> None:
    told = []
    verify(stream(tmp_path, 2 * CHUNKS), jobs=3, report=lambda phase, done, total: told.append((done, total)))
    assert told == [(done, CHUNKS) for done in range(CHUNKS + 1)]


def batches(directory: Path) -> list[ChunkBatch]:
    names = ((chunk, f"chunk_{chunk:05d}.jsonl") for chunk in range(CHUNKS))
    return [ChunkBatch(directory, (ChunkFiles(chunk, name, f"{name}.completed"),), False) for chunk, name in names]


def test_who_stops_listening_leaves_no_process(tmp_path: Path) -> None:
    results = check_in_order(batches(stream(tmp_path, 2 * CHUNKS)), 2, alone_s=0.0)
    assert [verdict.samples for verdict in next(results)] == [2]
    assert len(multiprocessing.active_children()) == 2
    results.close()  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == []


def test_process_that_is_killed_is_told(tmp_path: Path) -> None:
    results = check_in_order(batches(stream(tmp_path, 2 * CHUNKS)), 2, alone_s=0.0)
    next(results)
    for child in multiprocessing.active_children():
        child.kill()
    with pytest.raises(ChildProcessError, match="if memory was short, use fewer --jobs"):
        list(results)
    assert multiprocessing.active_children() == []


def test_a_process_that_gets_no_answer_does_not_hold_up_who_wants_no_more(tmp_path: Path) -> None:
    stream(tmp_path, 2 * CHUNKS)
    results = check_in_order(batches(tmp_path) * 1000, 2, alone_s=0.0)
    next(results)
    for child in multiprocessing.active_children():
        assert child.pid is not None
        os.kill(child.pid, signal.SIGSTOP)
    results.close()  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == []


WAITING = """
import multiprocessing, sys, time
from pathlib import Path
from tests.inspection.test_verification_processes import batches
from lazyshard.inspection.verification_chunks import check_in_order
results = check_in_order(batches(Path(sys.argv[1])), 2, alone_s=0.0)
next(results)
print(*(child.pid for child in multiprocessing.active_children()), flush=True)
time.sleep(60)
"""


def test_no_process_outlives_one_that_is_killed(tmp_path: Path) -> None:
    stream(tmp_path, 2 * CHUNKS)
    with subprocess.Popen(
        [sys.executable, "-c", WAITING, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(HERE)},
        stdout=subprocess.PIPE,
    ) as parent:
        assert parent.stdout is not None
        started = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(started) == 2
        assert all(blocks(pid, signal.SIGINT) for pid in started), "this process alone answers a Ctrl-C"
        parent.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() and alive(pid) for pid in started), "their end")


def blocks(pid: int, number: int) -> bool:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigBlk:"))
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def alive(pid: int) -> bool:
    """Whether a process runs: one that has ended may not have been reaped by whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
