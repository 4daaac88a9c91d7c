"""The program of README: copied as it stands, killed, and gone on with by other numbers of processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from lazyshard import ChunkWriter
from lazyshard.stream import read_cursor
from tests.packaging.guide_programs import ROOT, blocks, finish, ranks_of, wait_until

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

PER_CHUNK = 50
ROWS = 3000


def trained(folder: Path, size: int, last: int) -> list[int]:
    """Returns the ids that so many ranks have printed whole, up to a step."""
    lines = [line for rank in range(size) for line in (folder / f"out{rank}").read_text().splitlines(keepends=True)]
    found = [re.fullmatch(r"step (\d+): \[(.*)\]\n", line) for line in lines]
    return [int(word) for step in found if step and int(step[1]) <= last for word in step[2].split(",")]


def test_program_is_killed_and_goes_on_with_other_processes_and_trains_each_row_once(tmp_path: Path) -> None:
    (program,) = [text for text in blocks(str(ROOT / "README.md"), "python") if "batches.step" in text]
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    arguments = ["train.py", "stream", "run.pt"]
    writer = ChunkWriter(tmp_path / "stream", PER_CHUNK)
    for number in range(2800):
        writer.write({"id": number})
    # 16 rows a step: all that there is; the last checkpoint is that of step 100.
    with ranks_of(tmp_path, 2, arguments) as processes:
        wait_until(lambda: len(trained(tmp_path, 2, 175)) == 2800, "175 steps", processes)
    seen = trained(tmp_path, 2, 100)
    # 8 rows a step: all that there is again; the last checkpoint is that of step 200.
    with ranks_of(tmp_path, 1, arguments) as processes:
        wait_until(lambda: len(trained(tmp_path, 1, 250)) == 1200, "150 steps", processes)
    seen += trained(tmp_path, 1, 200)
    assert len(seen) == 1600 + 800
    for number in range(2800, ROWS):
        writer.write({"id": number})
    writer.close()
    with ranks_of(tmp_path, 2, arguments) as processes:
        finish(tmp_path, processes)
    seen += trained(tmp_path, 2, ROWS)
    assert (len(seen), len(set(seen))) == (2992, 2992)
    assert torch.load(tmp_path / "run.pt")["data"]["consumed"] == 2992
    cursor = read_cursor(tmp_path / "stream", "run-1")
    assert cursor is not None
    assert cursor.consumed == 2992
    # A run that has ended has nothing left to train.
    with ranks_of(tmp_path, 1, arguments) as processes:
        finish(tmp_path, processes)
    assert len(trained(tmp_path, 1, ROWS)) == 8
