"""Worker processes: order, failures, and nobody left behind."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lazyshard_producer.errors import WorkerFailed
from lazyshard_producer.rows.recipe import MadeOfRow, Recipe, Workers
from tests.harness.processes.environment import ROOT, environment

HERE = "tests.producer.recipes"


def results(workers: Workers, lines: list[bytes]) -> list[list[MadeOfRow]]:
    under_way = [workers.submit([line], index) for index, line in enumerate(lines)]
    found = []
    for work in under_way:
        made = None
        while made is None:
            made = workers.result(work, 1.0)
        found.append(made)
    return found


def test_rows_come_back_as_they_went_with_what_was_refused() -> None:
    workers = Workers(Recipe(transform=f"{HERE}:some"), 2)
    try:
        first, second, third = results(workers, [b'{"a":1}', b'{"a":2}', b"bad"])
        assert (first, second) == ([MadeOfRow([])], [MadeOfRow([b'{"a":2,"copy":0}\n'])])
        assert third[0].refused is not None
        assert third[0].refused.byte == 0
    finally:
        workers.close()


def test_a_worker_that_is_killed_ends_the_run_with_a_hint() -> None:
    workers = Workers(Recipe(transform=f"{HERE}:dies"), 1)
    try:
        with pytest.raises(WorkerFailed, match=r"out of memory\?.*--workers"):
            results(workers, [b"{}"])
        with pytest.raises(WorkerFailed):
            workers.submit([b"{}"], 1)
    finally:
        workers.close()


def test_closing_in_the_middle_of_what_workers_send_leaves_no_thread() -> None:
    before = threading.enumerate()
    for _ in range(5):
        workers = Workers(Recipe(transform=f"{HERE}:large"), 2)
        under_way = [workers.submit([b"{}"] * 4, 4 * index) for index in range(8)]
        while workers.result(under_way[0], 1.0) is None:
            pass
        workers.close()
        assert threading.enumerate() == before


def is_running(pid: int) -> bool:
    """Whether there is such a process that is more than its exit status, which nobody may come to read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


PROGRAM = """
import os, signal, sys
from lazyshard_producer.rows.recipe import Recipe
from lazyshard_producer.rows.recipe import Workers
if __name__ == "__main__":
    workers = Workers(Recipe(transform="tests.producer.recipes:twice"), 1)
    work = workers.submit([b"{}"], 0)
    # A process that is started takes far longer to come to its work than this one to its end.
    print("Made" if sys.argv[1] == "kill at once" else workers.result(work, 60), *workers._pool._processes, flush=True)
    if sys.argv[1] != "close":
        os.kill(os.getpid(), signal.SIGKILL)
    workers.close()
"""


@pytest.mark.parametrize("how", ["kill", "kill at once", "close"])
def test_no_worker_is_left_behind(tmp_path: Path, how: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # The pipe is at its end when the last process that has it has gone.
    with subprocess.Popen(
        [sys.executable, str(program), how],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        out, err = process.communicate(timeout=60)
    # Nor does Python's resource tracker complain of semaphores that it removes.
    assert ("Made" in out, err) == (True, "")
    pid = int(out.split()[-1])
    assert not is_running(pid)
