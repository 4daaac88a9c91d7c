"""The commands and programs of short pages of `docs`, run as they stand: they print what the page says."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
import torch

from lazyshard import ChunkWriter, LazyShardedDataset, StreamReader
from tests.cli.commands import lazyshard
from tests.harness.processes.nursery import Nursery
from tests.packaging.guide_programs import ROOT, blocks, finish

pytestmark = [pytest.mark.full, pytest.mark.timeout(300), pytest.mark.usefixtures("here")]


def page(name: str, language: str) -> list[str]:
    return blocks(f"../{name}.md", language)


def publish(directory: str, rows: int, per_chunk: int, text: str = "") -> None:
    with ChunkWriter(directory, per_chunk) as writer:
        for number in range(rows):
            writer.write({"text": f"{number:04d}{text}"} if text else {"id": number})


def execute(program: str, **known: Any) -> dict[str, Any]:
    exec(program, known)
    return known


def test_validation_has_the_same_loss_on_any_number_of_ranks(tmp_path: Path, nursery: Nursery) -> None:
    program, held_out = page("validation", "python")
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    publish("validation", 7, 3)
    publish("stream", 16, 4)
    finish(nursery, tmp_path, 2, "train.py")
    assert [(tmp_path / "out0").read_text()] == page("validation", "text")
    assert (tmp_path / "out1").read_text() == ""
    for size in (1, 3):
        finish(nursery, tmp_path, size, "train.py")
        assert (tmp_path / "out0").read_text().startswith("step 0: loss 13.000 of 7 samples\n")
    alone = SimpleNamespace(broadcast=lambda tensor, rank: None)
    known = execute(held_out, LazyShardedDataset=LazyShardedDataset, torch=torch, dist=alone, encode=None)
    trained = [row["id"] for batch in known["training"].batches(collate_fn=list) for row in batch]
    assert trained == [*range(9), *range(10, 15)]
    assert [known["validation"][index]["id"] for index in range(len(known["validation"]))] == [9]


def logged_to_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_metrics_of_a_run_are_logged() -> None:
    pytest.importorskip("tensorboard")
    metrics, tensorboard, *_ = page("logging", "python")
    publish("stream", 40, 10)
    execute(metrics + tensorboard)
    found = logged_to_tensorboard(Path("runs/first"))
    names = {name: value for name, value in found.items() if name.startswith("data/")}
    assert sorted(names) == ["data/bad_samples", "data/lag_samples", "data/samples_per_s", "data/waited_s"]
    assert names["data/lag_samples"] == [(2, 32), (4, 24), (6, 16), (8, 8), (10, 0)]
    assert all(value > 0 for _, value in names["data/samples_per_s"])
    assert [value for _, value in names["data/bad_samples"]] == [0] * 5


def test_metrics_of_a_run_are_logged_by_trainer(tmp_path: Path, nursery: Nursery) -> None:
    for package in ("transformers", "tensorboard"):
        pytest.importorskip(package)
    metrics, *_, trainer = page("logging", "python")
    (program,) = blocks("hugging-face-trainer.md", "python")
    before, _, _ = program.partition("trainer = ")
    assert "report_to=[]" in before
    before = before.replace("report_to=[]", 'report_to=["tensorboard"], logging_steps=2')
    (tmp_path / "logged.py").write_text(f"{before}{metrics}{trainer}trainer.train()\n", encoding="utf-8")
    publish("stream", 24, 4, " and some words")
    finish(nursery, tmp_path, 2, "logged.py", "stream", "runs/first")
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
    assert logged_to_tensorboard(folder)["train/data/lag_samples"] == [(2, 16), (4, 8), (6, 0), (6, 0)]


RSYNC: Final = f"""#!{sys.executable}
import shutil, sys
*options, source, target = sys.argv[2:]
left_out = shutil.ignore_patterns(*(option.removeprefix("--exclude=") for option in options))
shutil.copytree(source, target, ignore=left_out, dirs_exist_ok=True)
"""  # What the page uses of it, where it is not installed


def without_times(text: str) -> str:
    return re.sub(r"\(\d+\.\d s, [^)]+\)", "(…)", text)


def test_moved_stream_is_whole_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("rsync") is None:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "rsync").write_text(RSYNC)
        (tmp_path / "bin" / "rsync").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=os.pathsep)
    writer = ChunkWriter("old", 2)
    for number in range(6):
        writer.write({"id": number})
    state = LazyShardedDataset("old", dp_rank=0, dp_size=1, max_total_samples=10).state_dict(4)
    writer.close(end=False)
    (session,) = page("moving", "console")
    for command, _, expected in (part.partition("\n") for part in re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]):
        name, *arguments = shlex.split(command)
        done = (
            lazyshard(*arguments)
            if name == "lazyshard"
            else subprocess.run([name, *arguments], capture_output=True, text=True)
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert without_times(done.stdout) == without_times(expected)
    shutil.copytree("new", "one_pass")
    for path in Path("one_pass").glob("chunk_00002*"):
        path.unlink()
    done = lazyshard("verify", "one_pass")
    assert done.returncode == 5
    assert "damage: chunk_00002.jsonl" in done.stdout
    with ChunkWriter("new", 2) as writer:
        assert writer.published_samples == 6
        for number in range(6, 10):
            writer.write({"id": number})
    moved = LazyShardedDataset("new", dp_rank=0, dp_size=1, max_total_samples=10)
    moved.load_state_dict(state)
    assert [moved[index]["id"] for index in moved.rank_indices] == [4, 5, 6, 7, 8, 9]


def test_hf_datasets_reads_published_chunks_and_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    paths = os.pathsep.join(map(str, sys.path))
    for name, value in {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}.items():
        monkeypatch.setenv(name, value)
    rows: list[dict[str, Any]] = [
        {"id": 0, "text": "a"},
        {"id": 1, "text": "b", "score": 0.5},
        {"id": 2, "text": "c"},
        {"id": 3, "text": "d"},
    ]
    writer = ChunkWriter("stream", 2)
    for row in [*rows, {"id": 4}]:
        writer.write(row)
    (program,) = page("hf-datasets", "python")
    read = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert [read.stdout] == page("hf-datasets", "text")
    writer.close(end=False)
    arrays = program.replace('"stream"', '"arrays"').replace("rows[2]", "rows[0]")
    with ChunkWriter("arrays", 1, arrays=True) as writer:
        writer.write({"input_ids": np.arange(3)})
    read = subprocess.run([sys.executable, "-c", arrays], capture_output=True, text=True, check=True)
    assert "{'$array': ['int64', [3], 0]}" in read.stdout
    # The other direction.
    (generator,) = page("hf-datasets", "py")
    (tmp_path / "hub.py").write_text(generator)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save = "import datasets; datasets.Dataset.from_json('rows.jsonl').save_to_disk('saved')"
    subprocess.run([sys.executable, "-c", save], capture_output=True, check=True)
    for command in page("hf-datasets", "")[0].splitlines():
        arguments = shlex.split(command)
        subprocess.run([sys.executable, "-m", "lazyshard_producer", *arguments[1:]], capture_output=True, check=True)
        assert [row["id"] for row in StreamReader(arguments[arguments.index("--out") + 1])] == [0, 1, 2, 3]


def test_stream_of_an_earlier_commit_is_read_and_one_of_a_later_format_refused() -> None:
    shutil.copytree(ROOT / "tests" / "written" / "by_5c9efa2" / "streams" / "ended", "stream")
    (session,) = page("upgrading", "console")
    command, _, expected = session.removeprefix("$ lazyshard ").partition("\n")
    assert without_times(lazyshard(*command.split()).stdout) == without_times(expected)
    manifest = Path("stream/stream.json")
    manifest.write_text(manifest.read_text().replace('"format":1', '"format":3'))
    done = lazyshard(*command.split())
    assert (done.returncode, [done.stderr]) == (5, page("upgrading", "text"))
