"""The program of `docs/guides/hugging-face-trainer.md`: the real Trainer, killed, gone on with other ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from lazyshard import ChunkWriter
from lazyshard.stream import read_cursor
from tests.packaging.guide_programs import blocks, command, finish, ranks_of, steps, wait_until

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

SPY = """
import runpy, sys, transformers
trains = transformers.Trainer.training_step
def noting(self, model, inputs, *args, **kwargs):
    ids = [int(bytes(row[:4].tolist())) for row in inputs["input_ids"]]
    result = trains(self, model, inputs, *args, **kwargs)
    print("trained", *ids, flush=True)
    return result
transformers.Trainer.training_step = noting
sys.argv = ["train.py", "stream", "runs/first"]
runpy.run_path("train.py", run_name="__main__")
"""
"""Notes what each step trains: the first four bytes of a text are its number."""


def test_trainer_that_is_killed_goes_on_with_other_ranks_and_trains_each_row_once(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (program,) = blocks("hugging-face-trainer.md", "python")
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    writer = ChunkWriter(tmp_path / "stream", 4)
    for number in range(32):
        writer.write({"text": f"{number:04d} and some words"})
    # Two ranks of two samples each: eight steps of what there is, of which six are saved.
    with ranks_of(tmp_path, 2, ["-c", SPY]) as processes:
        wait_until(lambda: all(len(steps(tmp_path, rank)) == 8 for rank in (0, 1)), "8 steps", processes)
    saved = sorted(path.parent.name for path in (tmp_path / "runs" / "first").glob("*/lazyshard.json"))
    assert saved == ["checkpoint-3", "checkpoint-6"]
    trained = [i for rank in (0, 1) for ids in steps(tmp_path, rank)[:6] for i in ids]
    for number in range(32, 41):
        writer.write({"text": f"{number:04d}"})
    writer.close()
    with ranks_of(tmp_path, 1, ["-c", SPY]) as processes:
        finish(tmp_path, processes)
    trained += [i for ids in steps(tmp_path, 0) for i in ids]
    assert len(trained) == len(set(trained)) == 40
    assert set(trained) <= set(range(41))
    cursor = read_cursor(tmp_path / "stream", "first")
    assert cursor is not None
    assert cursor.consumed == 40
    (audit,) = (line for line in blocks("hugging-face-trainer.md", "")[0].splitlines() if "audit" in line)
    printed = command(audit.partition("#")[0], tmp_path)
    assert "proven: no sample was trained twice, and none was passed over" in printed
    # Checkpoints say when they were saved, so that nothing has to be said of which one was audited.
    assert "not every state says when it was saved" not in printed
