"""The program of `docs/resume.md`, killed and started again with other ranks while the stream grows; and its state."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from lazyshard import ChunkWriter
from lazyshard.stream import read_cursor
from tests.data.runs import open_ranks
from tests.data.workers import DEADLINE_S
from tests.stream.streams import HERE

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

GUIDE = (HERE / "docs" / "resume.md").read_text(encoding="utf-8")
ROWS = 96


def block(language: str, within: str) -> str:
    """Returns the first block of that language which has a text in it."""
    blocks: list[str] = re.findall(rf"^```{language}\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    return next(block for block in blocks if within in block)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextmanager
def ranks_of(folder: Path, dp: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Runs the program on so many ranks, as torchrun starts it, and kills what is left of them."""
    common = {"WORLD_SIZE": str(dp), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    processes = []
    for rank in range(dp):
        with (folder / f"out{rank}").open("wb") as output, (folder / f"log{rank}").open("wb") as log:
            environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "train.py", "s", "run.pt"]
            processes.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=log))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait(DEADLINE_S)


def steps(folder: Path, rank: int) -> list[list[int]]:
    """Returns the ids of each step that a rank has printed whole."""
    lines = (folder / f"out{rank}").read_text().splitlines(keepends=True)
    return [[int(word) for word in line.split()[1:]] for line in lines if line[-1] == "\n"]


def run(folder: Path, dp: int, kill_after: int | None) -> list[int]:
    """Runs on so many ranks and returns what was trained up to the checkpoint that is there in the end."""
    path = folder / "run.pt"
    begun = torch.load(path)["data"]["consumed"] if path.exists() else 0
    with ranks_of(folder, dp) as processes:
        if kill_after is None:
            assert [process.wait(2 * DEADLINE_S) for process in processes] == [0] * dp, (folder / "log0").read_text()
        else:
            wait_until(lambda: len(steps(folder, 0)) >= kill_after, f"{kill_after} steps of {dp} ranks", 2 * DEADLINE_S)
    trained = (torch.load(path)["data"]["consumed"] - begun) // (4 * dp)
    of_ranks = [steps(folder, rank) for rank in range(dp)]
    assert all(len(each) >= trained for each in of_ranks)
    return [i for each in of_ranks for ids in each[:trained] for i in ids]


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {deadline_s:.0f} s: {what}"
        time.sleep(0.05)


def test_program_that_is_killed_and_goes_on_with_other_ranks_trains_each_row_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block("python", "init_process_group"), encoding="utf-8")
    writer = ChunkWriter(tmp_path / "s", 8)
    for number in range(64):
        writer.write({"id": number})
    # All that there is, in eight steps; it may be killed before the last of them is saved.
    trained = run(tmp_path, 2, 8)
    assert len(trained) in (56, 64)
    for number in range(64, ROWS):
        writer.write({"id": number})
    writer.close()
    trained += run(tmp_path, 3, 2)
    trained += run(tmp_path, 1, None)
    assert sorted(trained) == list(range(ROWS))
    cursor = read_cursor(tmp_path / "s", "demo")
    assert cursor is not None
    assert (cursor.consumed, cursor.chunks_before) == (ROWS, ROWS // 8)


def test_state_is_as_it_is_shown(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path / "s", 8) as writer:
        for number in range(ROWS):
            writer.write({"id": number})
    shown: dict[str, Any] = json.loads(block("json", "stream_id"))
    dataset = open_ranks(tmp_path / "s", 2, batch_size=4, shuffle_window=1)[0]
    batches = dataset.batches(collate_fn=list)
    assert len([*islice(batches, 3)]) == 3
    state = batches.state_dict()
    assert shown | {"stream_id": dataset.stream_id} == state
    assert list(shown) == list(state)
