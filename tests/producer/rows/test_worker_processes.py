"""Worker processes: failures, and nobody left behind. What they make: test_going_on."""

import contextlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lazyshard_producer.errors import WorkerFailed, exit_code
from lazyshard_producer.rows.recipe import Workers
from tests.harness.processes.environment import ROOT, environment
from tests.producer.rows.draining import making

HERE = "tests.producer.recipes"


def test_a_worker_that_is_killed_ends_the_run() -> None:
    workers = Workers(making(transform=f"{HERE}:dies"), 1)
    try:
        work = workers.submit([b"{}"], 0)
        with pytest.raises(WorkerFailed) as failed:
            while workers.result(work, 1.0) is None:
                pass
        assert exit_code(failed.value) == 8
        with pytest.raises(WorkerFailed):
            workers.submit([b"{}"], 1)
    finally:
        workers.close()


def test_closing_in_the_middle_of_what_workers_send_leaves_no_thread() -> None:
    before = threading.enumerate()
    workers = Workers(making(transform=f"{HERE}:large"), 2)
    under_way = [workers.submit([b"{}"] * 4, 4 * index) for index in range(8)]
    while workers.result(under_way[0], 1.0) is None:
        pass
    workers.close()
    assert threading.enumerate() == before


PROGRAM = """
import os, signal, sys
from lazyshard_producer.rows.recipe import Workers
from tests.producer.rows.draining import making
if __name__ == "__main__":
    workers = Workers(making(transform="tests.producer.recipes:twice"), 1)
    work = workers.submit([b"{}"], 0)
    # A process that is started takes far longer to come to its work than this one to its end.
    print("Made" if sys.argv[1] == "kill at once" else workers.result(work, 60), *workers._pool._processes, flush=True)
    if sys.argv[1] != "close":
        os.kill(os.getpid(), signal.SIGKILL)
    workers.close()
"""


@pytest.mark.parametrize("how", ["kill", pytest.param("kill at once", marks=pytest.mark.full), "close"])
def test_no_worker_is_left_behind(tmp_path: Path, how: str) -> None:
    program, pipe = tmp_path / "program.py", subprocess.PIPE
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), how]
    # The pipe is at its end when the last process that has it has gone.
    with subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        out, err = process.communicate(timeout=60)
    # Nor does Python's resource tracker complain of semaphores that it removes.
    assert ("Made" in out, err) == (True, "")
    # What is left is no more than an exit status, which nobody may come to read.
    with contextlib.suppress(FileNotFoundError):
        assert Path(f"/proc/{out.split()[-1]}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
