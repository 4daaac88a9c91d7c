"""The program of `docs/guides/pytorch.md`: killed as DDP, gone on as FSDP with more ranks, and audited."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lazyshard import ChunkWriter
from tests.packaging.guide_programs import (
    DEADLINE_S,
    blocks,
    command,
    finish,
    free_port,
    ranks_of,
    steps,
    variables,
    wait_until,
)

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

WRAPPED = "model = DistributedDataParallel(torch.nn.Linear(1, 1).to(device))\n"


def consumed(folder: Path, step: int) -> int:
    path = folder / "runs" / "first" / f"checkpoint-{step}" / "lazyshard.json"
    return int(json.loads(path.read_text())["state"]["consumed"]) if path.exists() else -1


def test_program_that_is_killed_goes_on_with_other_ranks_as_fsdp_and_trains_each_row_once(tmp_path: Path) -> None:
    program, fsdp = blocks("pytorch.md", "python")
    assert WRAPPED in program
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    (tmp_path / "train_fsdp.py").write_text(program.replace(WRAPPED, fsdp), encoding="utf-8")
    writer = ChunkWriter(tmp_path / "stream", 4)
    for number in range(32):
        writer.write({"id": number})
    # Two ranks of two samples each: eight steps of what there is, of which six are saved.
    with ranks_of(tmp_path, 2, ["train.py", "stream", "runs/first"]) as processes:
        wait_until(lambda: all(len(steps(tmp_path, rank)) == 8 for rank in (0, 1)), "8 steps", processes)
    assert [consumed(tmp_path, step) for step in (3, 6, 9)] == [12, 24, -1]
    trained = [i for rank in range(2) for ids in steps(tmp_path, rank)[:6] for i in ids]
    for number in range(32, 55):
        writer.write({"id": number})
    writer.close()
    with ranks_of(tmp_path, 3, ["train_fsdp.py", "stream", "runs/first"]) as processes:
        finish(tmp_path, processes)
    trained += [i for rank in range(3) for ids in steps(tmp_path, rank) for i in ids]
    # Of the 31 that were left, three ranks of two samples train five steps.
    assert len(trained) == len(set(trained)) == 24 + 30
    assert set(trained) <= set(range(55))
    (asked,) = (block for block in blocks("pytorch.md", "") if "audit" in block)
    audit, trace = asked.splitlines()
    audited = command(audit, tmp_path).splitlines()
    assert audited[-1] == "proven: no sample was trained twice, and none was passed over"
    # Checkpoints say when they were saved, so that nothing has to be said of which one was audited.
    assert not [line for line in audited if "not every state says when it was saved" in line]
    # Two steps of two ranks of two samples, under the names of the columns.
    assert len(command(trace, tmp_path).splitlines()) == 1 + 8


def test_ranks_of_a_torchrun_that_is_killed_end_too(tmp_path: Path) -> None:
    """They have sessions of their own: without the program's `prctl` they would train on."""
    program, _ = blocks("pytorch.md", "python")
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    writer = ChunkWriter(tmp_path / "stream", 4)
    for number in range(8):
        writer.write({"id": number})
    writer.close(end=False)
    module = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    line = [sys.executable, "-m", *module, "train.py", "stream", "runs/first"]
    with (tmp_path / "out0").open("wb") as output:
        torchrun = subprocess.Popen(line, cwd=tmp_path, env=variables(), stdout=output, stderr=output)

    def trained() -> bool:
        # Not whole lines: torchrun has its ranks write unbuffered, word by word, and both to one file here.
        return (tmp_path / "out0").read_text(encoding="utf-8").count("trained") == 4

    ranks: list[int] = []
    try:
        wait_until(trained, "2 steps of 2 ranks", [torchrun])
        children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
        ranks = [int(pid) for pid in children if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(ranks) == 2
        torchrun.kill()
        deadline = time.monotonic() + DEADLINE_S
        while left := [pid for pid in ranks if alive(pid)]:
            assert time.monotonic() < deadline, f"torchrun was killed, and its ranks {left} are still there"
            time.sleep(0.05)
    finally:
        torchrun.kill()
        torchrun.wait(DEADLINE_S)
        for pid in ranks:
            if alive(pid):
                os.killpg(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    """Whether a process is there and runs; one that has ended may not have been reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False
