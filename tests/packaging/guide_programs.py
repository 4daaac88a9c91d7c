"""Runs the programs of `docs/guides`: real processes with gloo, killed where a test says so."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
GUIDES: Final = ROOT / "docs" / "guides"
DEADLINE_S: Final = 120.0


def blocks(guide: str, language: str) -> list[str]:
    """Returns what stands in the blocks of that language on a page; "" for those that name none, commands."""
    text = (GUIDES / guide).read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for of, block in found if of == language]


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def variables() -> dict[str, str]:
    """The environment of a program: this checkout, no network."""
    paths = [ROOT, ROOT / "producer", ROOT / "integrations" / "swift"]
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(map(str, paths))}


@contextmanager
def ranks_of(folder: Path, size: int, arguments: list[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts so many processes with the variables that torchrun sets, and kills what is left of them in the end.

    What rank r prints goes to `out{r}`, what it logs to `log{r}`, both in `folder`.
    """
    common = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(free_port())}
    processes = []
    for rank in range(size):
        with (folder / f"out{rank}").open("wb") as output, (folder / f"log{rank}").open("wb") as log:
            environment = {**variables(), **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, *arguments]
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=output, stderr=log, start_new_session=True
            )
            processes.append(process)
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its loader's workers too
        for process in processes:
            process.wait(DEADLINE_S)


def steps(folder: Path, rank: int) -> list[list[int]]:
    lines = (folder / f"out{rank}").read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line.split() for line in lines if line.startswith("trained ") and line[-1] == "\n"]
    return [[int(word) for word in words[1:]] for words in whole]


def logs(folder: Path, size: int) -> str:
    return "\n".join((folder / f"log{rank}").read_text(encoding="utf-8")[-3000:] for rank in range(size))


def command(line: str, folder: Path) -> str:
    name, *words = line.replace("/shared/", "").split()
    module = {"lazyshard": "lazyshard.cli", "lazyshard-producer": "lazyshard_producer"}[name]
    whole = [sys.executable, "-m", module, *words]
    done = subprocess.run(whole, cwd=folder, env=variables(), capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
    return done.stdout


def wait_until(condition: Callable[[], bool], what: str, processes: list[subprocess.Popen[bytes]]) -> None:
    """Returns when the condition holds; fails when a process has ended before, or the time is over."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:.0f} s: {what}"
        ended = [process.returncode for process in processes if process.poll() is not None]
        assert not ended, f"ended with {ended} before {what}"
        time.sleep(0.05)


def finish(folder: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    codes = [process.wait(DEADLINE_S) for process in processes]
    assert codes == [0] * len(processes), logs(folder, len(processes))
