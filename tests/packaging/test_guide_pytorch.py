"""The program of `docs/guides/pytorch.md`: killed as DDP, gone on as FSDP with more ranks, and audited."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lazyshard import ChunkWriter
from tests.packaging.guide_programs import blocks, command, finish, ranks_of, steps, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

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
    assert "proven: no sample was trained twice, and none was passed over" in command(audit, tmp_path)
    # Two steps of two ranks of two samples, under the names of the columns.
    assert len(command(trace, tmp_path).splitlines()) == 1 + 8
