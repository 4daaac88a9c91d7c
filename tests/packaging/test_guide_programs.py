"""The programs of README, guides and pages, run as they stand: killed and continued, and what they print."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
import torch

from lazyshard import ChunkWriter, LazyShardedDataset, StreamReader
from tests.cli.commands import lazyshard
from tests.harness.processes.environment import environment, run_command
from tests.harness.processes.nursery import Nursery, has_ended
from tests.harness.processes.producing import run as produce
from tests.packaging import guide_programs
from tests.packaging.guide_programs import DEADLINE_S, QUIET, ROOT, blocks, finish, ranks_of, settled, steps, wait_until
from tests.stream.streams import cursor_of, publish_rows
from tests.swift.commands import free_port

pytestmark = [pytest.mark.full, pytest.mark.timeout(300), pytest.mark.usefixtures("here")]

WRAPPED = "model = DistributedDataParallel(torch.nn.Linear(1, 1).to(device))\n"


def command(line: str) -> str:
    done = lazyshard(*line.partition("#")[0].replace("/shared/", "").split()[1:])
    assert done.returncode == 0, f"{line}: {done}"
    return done.stdout


def write(writer: ChunkWriter, first: int, last: int, text: str = "") -> None:
    for number in range(first, last):
        writer.write({"text": f"{number:04d}{text}"} if text else {"id": number})


def test_torchrun_that_is_killed_ends_its_ranks_and_others_go_on_as_fsdp(tmp_path: Path, nursery: Nursery) -> None:
    program, fsdp = blocks("pytorch.md", "python")
    assert WRAPPED in program
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    (tmp_path / "train_fsdp.py").write_text(program.replace(WRAPPED, fsdp), encoding="utf-8")
    writer = ChunkWriter(tmp_path / "stream", 4)
    write(writer, 0, 32)
    # Two ranks of two samples each: eight steps of what there is, of which six are saved.
    apart = ("--nproc-per-node", "2", "--master-port", str(free_port()), "--log-dir", "logs", "--redirects", "3")
    with ranks_of(nursery, tmp_path, 1, "torchrun", *apart, "train.py", "stream", "runs/first") as (torchrun,):

        def trained_by(rank: int) -> list[list[int]]:
            return [step for output in tmp_path.glob(f"logs/*/attempt_0/{rank}/stdout.log") for step in steps(output)]

        wait_until(lambda: all(len(trained_by(rank)) == 8 for rank in (0, 1)), "8 steps", [torchrun])
        children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()
        ranks = [int(pid) for pid in children if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(ranks) == 2
        os.kill(torchrun, signal.SIGKILL)  # Without the program's `prctl` they would train on
        for pid in ranks:
            try:
                assert has_ended(pid, DEADLINE_S), "torchrun was killed, and its ranks are still there"
            except ProcessLookupError:
                continue
    states = [tmp_path / "runs" / "first" / f"checkpoint-{step}" / "lazyshard.json" for step in (3, 6, 9)]
    assert [path.exists() and json.loads(path.read_text())["state"]["consumed"] for path in states] == [12, 24, False]
    trained = [i for rank in range(2) for ids in trained_by(rank)[:6] for i in ids]
    write(writer, 32, 55)
    writer.close()
    finish(nursery, tmp_path, 3, "train_fsdp.py", "stream", "runs/first")
    trained += [i for rank in range(3) for ids in steps(tmp_path / f"out{rank}") for i in ids]
    assert len(trained) == len(set(trained)) == 24 + 30  # Of 31 left, three ranks of two train five steps
    assert set(trained) <= set(range(55))
    (asked,) = (block for block in blocks("pytorch.md", "") if "audit" in block)
    audit, trace = asked.splitlines()
    audited = command(audit).splitlines()
    assert audited[-1] == "proven: no sample was trained twice, and none was passed over"
    # Checkpoints say when they were saved, so that nothing has to be said of which one was audited.
    assert not [line for line in audited if "not every state has a save time" in line]
    assert len(command(trace).splitlines()) == 1 + 8  # Two steps of two ranks of two samples


def test_trainer_that_is_killed_goes_on_and_trains_each_row_once(tmp_path: Path, nursery: Nursery) -> None:
    pytest.importorskip("transformers")
    (program,) = blocks("hugging-face-trainer.md", "python")
    (tmp_path / "trainer.py").write_text(program, encoding="utf-8")
    arguments = ("trainer.py", "stream", "runs/first")
    writer = ChunkWriter(tmp_path / "stream", 4)
    write(writer, 0, 32, " and some words")
    outputs = [tmp_path / f"out{rank}" for rank in (0, 1)]
    with ranks_of(nursery, tmp_path, 2, *arguments) as ranks:  # Eight steps of two ranks of two; six are saved
        wait_until(lambda: all(len(steps(output)) == 8 for output in outputs), "8 steps", ranks)
    saved = sorted(path.parent.name for path in (tmp_path / "runs" / "first").glob("*/lazyshard.json"))
    assert saved == ["checkpoint-3", "checkpoint-6"]
    trained = [i for output in outputs for ids in steps(output)[:6] for i in ids]
    write(writer, 32, 41, ".")
    writer.close()
    finish(nursery, tmp_path, 1, *arguments)
    trained += [i for ids in steps(outputs[0]) for i in ids]
    assert len(trained) == len(set(trained)) == 40
    assert set(trained) <= set(range(41))
    assert cursor_of(tmp_path / "stream", "first").consumed == 40
    (audit,) = (line for line in blocks("hugging-face-trainer.md", "")[0].splitlines() if "audit" in line)
    printed = command(audit)
    assert "proven: no sample was trained twice, and none was passed over" in printed
    assert "not every state has a save time" not in printed


def trained_by(folder: Path, size: int, last: int) -> list[int]:
    outputs = [folder / f"out{rank}" for rank in range(size)]
    lines = [line for path in outputs if path.exists() for line in path.read_text().splitlines(keepends=True)]
    found = [re.fullmatch(r"step (\d+): \[(.*)\]\n", line) for line in lines]
    return [int(word) for step in found if step and int(step[1]) <= last for word in step[2].split(",")]


def test_program_that_is_killed_goes_on_and_trains_each_row_once(tmp_path: Path, nursery: Nursery) -> None:
    (program,) = [text for text in blocks(str(ROOT / "README.md"), "python") if "batches.step" in text]
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    writer = ChunkWriter(tmp_path / "stream", 50)
    write(writer, 0, 850)
    with ranks_of(nursery, tmp_path, 1, "train.py", "stream", "run.pt") as ranks:  # All but two; step 100 is saved
        wait_until(lambda: len(trained_by(tmp_path, 1, 106)) == 848, "106 steps", ranks)
    seen = trained_by(tmp_path, 1, 100)
    write(writer, 850, 1000)
    writer.close()
    finish(nursery, tmp_path, 2, "train.py", "stream", "run.pt")  # 16 rows a step, of the 200 that are left
    seen += trained_by(tmp_path, 2, 1000)
    assert (len(seen), len(set(seen))) == (992, 992)
    assert torch.load(tmp_path / "run.pt")["data"]["consumed"] == 992
    assert cursor_of(tmp_path / "stream", "run-1").consumed == 992


TRAIN: Final = (ROOT / "producer" / "deploy" / "slurm" / "train.sbatch").read_text(encoding="utf-8")

SRUN = """#!/bin/bash
# One task a node, all on this machine; hands SIGTERM down, as srun does.
while [[ $1 == --* ]]; do shift; done
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do SLURM_PROCID=$node "$@" & tasks+=($!); done
trap 'kill -TERM "${tasks[@]}" 2>/dev/null' TERM
code=0
for task in "${tasks[@]}"; do
    while wait "$task"; kill -0 "$task" 2>/dev/null; do :; done
    wait "$task" || code=$?
done
exit "$code"
"""
SCONTROL = """#!/bin/bash
[[ $1 == show ]] && { echo localhost; echo localhost; exit; }
echo "$@" >> scontrol.log
"""


def test_scripts_are_bash_and_options_of_the_job_are_at_its_head() -> None:
    for script in (TRAIN, *blocks("slurm.md", "bash")):
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
    head, _, rest = TRAIN.partition("\nset -uo pipefail\n")  # sbatch reads them up to the first command
    assert len(re.findall(r"^#SBATCH --[\w-]+=\S+$|^#SBATCH --requeue$", head, re.MULTILINE)) == head.count("#SBATCH")
    assert "#SBATCH" not in rest


def test_configuration_file_is_written_and_checked(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"id": 0}\n', encoding="utf-8")
    (commands,) = blocks("slurm.md", "")
    init, check = commands.splitlines()
    done = [produce(*line.split()[1:], cwd=tmp_path) for line in (init, check)]
    assert ([one.returncode for one in done], "1,000 samples per chunk" in done[1].stdout) == ([0, 0], True)


@contextmanager
def job(folder: Path, env: dict[str, str], nodes: int) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the batch script on so many nodes of one rank each; rank r prints to `out{r}`, all else goes to logs."""
    own = {"TRAIN": "train.py", "STREAM": "stream", "RUN": "runs/first", "PORT": str(free_port())}
    own |= {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "any", "SLURM_JOB_NUM_NODES": str(nodes)}
    options: dict[str, Any] = {"env": env | QUIET | own | {"SLURM_GPUS_ON_NODE": "1"}, "start_new_session": True}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(["bash", "train.sbatch"], cwd=folder, stdout=log, stderr=log, **options)
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(DEADLINE_S)


def test_job_is_queued_again_when_its_time_is_over_and_goes_on_with_another_number_of_nodes(tmp_path: Path) -> None:
    own = '>"out$SLURM_PROCID" 2>"log$SLURM_PROCID"'
    torchrun = f'#!/bin/sh\nexec "{sys.executable}" -m torch.distributed.run "$@" {own}\n'
    env = guide_programs.with_tools(tmp_path, {"srun": SRUN, "scontrol": SCONTROL, "torchrun": torchrun})
    (tmp_path / "train.sbatch").write_text(TRAIN, encoding="utf-8")
    (tmp_path / "train.py").write_text(blocks("pytorch.md", "python")[0], encoding="utf-8")
    writer = ChunkWriter(tmp_path / "stream", 4)
    write(writer, 0, 24)
    outputs = [tmp_path / "out0", tmp_path / "out1"]
    state = tmp_path / "runs" / "first" / "checkpoint-6" / "lazyshard.json"
    with job(tmp_path, env, 2) as process:
        wait_until(lambda: state.exists() and [len(steps(one)) for one in outputs] == [6, 6], "6 steps", [process.pid])
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    assert (tmp_path / "scontrol.log").read_text() == "requeue 17\n"
    trained = [i for path in outputs for ids in steps(path) for i in ids]
    assert sorted(trained) == list(range(24))
    write(writer, 24, 33)
    writer.close()
    with job(tmp_path, env, 1) as process:
        assert process.wait(DEADLINE_S) == 0, (tmp_path / "log0").read_text()
    assert (tmp_path / "scontrol.log").read_text() == "requeue 17\n"
    trained += [i for ids in steps(outputs[0]) for i in ids]
    assert len(trained) == len(set(trained)) == 32


def test_goes_on_by_the_loader(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchdata")
    (text,) = blocks("torchdata.md", "python")
    program = compile(text, "program.py", "exec")

    def call(*words: int) -> list[list[int]]:
        monkeypatch.setattr(sys, "argv", ["program.py", *map(str, words)])
        exec(program, {"__name__": "__main__"})
        return [[int(word) for word in line.split()[1:]] for line in capsys.readouterr().out.splitlines()]

    writer = ChunkWriter("stream", 4)
    write(writer, 0, 40)  # more than is asked for, so that no worker waits when its loader is dropped
    calls = [call(rank, 2, 3) for rank in (1, 0)]
    calls += [call(rank, 2, 2) for rank in (1, 0)]
    assert [len(steps) for steps in calls] == [3, 3, 2, 2]
    write(writer, 40, 41)
    writer.close()
    calls += [call(0, 1, 2), call(0, 1, 1000)]
    assert [len(steps) for steps in calls[4:]] == [2, 8]
    trained = [i for steps in calls for ids in steps for i in ids]
    assert len(trained) == len(set(trained)) == 40
    assert set(trained) <= set(range(41))
    assert call(0, 1, 1000) == []


def test_the_page_prints_what_it_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
    found = re.findall(r"^```(\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    kinds, (prepare, background, program, *consoles) = zip(*found, strict=True)
    assert kinds == ("bash", "bash", "python", "console", "console", "console")
    env = guide_programs.with_commands(tmp_path)
    (tmp_path / "train.py").write_text(program)

    def run(command: str) -> str:
        done = subprocess.run(shlex.split(command), env=env, capture_output=True, text=True, timeout=DEADLINE_S)
        return done.stdout

    subprocess.run(["bash", "-c", prepare], env=env, check=True, timeout=DEADLINE_S)
    assert background.endswith("&\n")
    with subprocess.Popen(["bash", "-c", f"exec {background[:-2]}"], env=env) as producer:
        asked = [turn for text in consoles[:2] for turn in guide_programs.dialogue(text)]
        assert [command for command, _ in asked] == ["python train.py 3", "python train.py 100"]
        answers = [(command, run(command)) for command, _ in asked]
        assert producer.wait(DEADLINE_S) == 0, (tmp_path / "producer.log").read_text()
    assert answers == asked
    looks = guide_programs.dialogue(consoles[2])
    assert len(looks) == 2
    for line, printed in looks:
        assert settled(lazyshard(*shlex.split(line)[1:]).stdout) == settled(printed), line


def test_example_of_lengths_prints_what_the_page_says(tmp_path: Path) -> None:
    module, program = blocks("../lengths.md", "python")
    (line,) = (text for text in blocks("../lengths.md", "console") if "lazyshard-producer " in text)
    (printed,) = blocks("../lengths.md", "text")
    texts = [" ".join(["word"] * (1 + 13 * number % 37)) for number in range(40)]
    publish_rows(tmp_path / "raw", 7, ({"id": number, "text": text} for number, text in enumerate(texts)))
    (tmp_path / "my_rows.py").write_text(module, encoding="utf-8")
    words = shlex.split(line.replace("\\\n", " ").removeprefix("$ "))
    assert produce(*words[1:], cwd=tmp_path).returncode == 0
    python = [sys.executable, "-c", program]
    assert subprocess.check_output(python, cwd=tmp_path, env=environment(), text=True, timeout=DEADLINE_S) == printed


def page(name: str, language: str) -> list[str]:
    return blocks(f"../{name}.md", language)


def publish(directory: str, rows: int, per_chunk: int, text: str = "") -> None:
    with ChunkWriter(directory, per_chunk) as writer:
        write(writer, 0, rows, text)


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


def test_moved_stream_is_whole_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("rsync") is None:
        monkeypatch.setenv("PATH", guide_programs.with_tools(tmp_path, {"rsync": RSYNC})["PATH"])
    writer = ChunkWriter("old", 2)
    write(writer, 0, 6)
    state = LazyShardedDataset("old", dp_rank=0, dp_size=1, max_total_samples=10).state_dict(4)
    writer.close(end=False)
    (session,) = page("moving", "console")
    for command, expected in guide_programs.dialogue(session):
        name, *arguments = shlex.split(command)
        run = lazyshard if name == "lazyshard" else partial(run_command, name)
        done = run(*arguments)
        assert (done.returncode, done.stderr) == (0, "")
        assert settled(done.stdout) == settled(expected)
    shutil.copytree("new", "one_pass")
    for path in Path("one_pass").glob("chunk_00002*"):
        path.unlink()
    done = lazyshard("verify", "one_pass")
    assert done.returncode == 5
    assert "damage: chunk_00002.jsonl" in done.stdout
    with ChunkWriter("new", 2) as writer:
        assert writer.published_samples == 6
        write(writer, 6, 10)
    moved = LazyShardedDataset("new", dp_rank=0, dp_size=1, max_total_samples=10)
    moved.load_state_dict(state)
    assert [moved[index]["id"] for index in moved.rank_indices] == [4, 5, 6, 7, 8, 9]


def test_hf_datasets_reads_published_chunks_and_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    paths = os.pathsep.join(map(str, sys.path))
    for name, value in {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}.items():
        monkeypatch.setenv(name, value)
    rows: list[dict[str, Any]] = [{"id": number, "text": text} for number, text in enumerate("abcd")]
    rows[1]["score"] = 0.5
    writer = ChunkWriter("stream", 2)
    for row in [*rows, {"id": 4}]:
        writer.write(row)
    (program,) = page("hf-datasets", "python")
    read = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert [read.stdout] == page("hf-datasets", "text")
    writer.close(end=False)
    arrays = program.replace('"stream"', '"arrays"').replace("rows[2]", "rows[0]")
    publish_rows(Path("arrays"), 1, [{"input_ids": np.arange(3)}], arrays=True)
    read = subprocess.run([sys.executable, "-c", arrays], capture_output=True, text=True, check=True)
    assert "{'$array': ['int64', [3], 0]}" in read.stdout
    # The other direction.
    (tmp_path / "hub.py").write_text(*page("hf-datasets", "py"))
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
    ((line, expected),) = guide_programs.dialogue(session)
    command = line.removeprefix("lazyshard ").split()
    assert settled(lazyshard(*command).stdout) == settled(expected)
    manifest = Path("stream/stream.json")
    manifest.write_text(manifest.read_text().replace('"format":1', '"format":3'))
    done = lazyshard(*command)
    assert (done.returncode, [done.stderr]) == (5, page("upgrading", "text"))
