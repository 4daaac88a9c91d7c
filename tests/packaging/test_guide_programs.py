"""The programs of README and of the guides: run, killed, and gone on with by other numbers of processes."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import pytest
import torch

from lazyshard import ChunkWriter
from lazyshard.stream import read_cursor
from tests.harness.processes.environment import environment
from tests.packaging.guide_programs import (
    DEADLINE_S,
    ROOT,
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


PER_CHUNK = 50
ROWS = 3000


def trained(folder: Path, size: int, last: int) -> list[int]:
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


@pytest.mark.parametrize("script", [TRAIN, *blocks("slurm.md", "bash")], ids=lambda text: text.split("\n")[0][:20])
def test_script_is_bash(script: str) -> None:
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_options_of_the_job_are_at_its_head() -> None:
    # sbatch reads them up to the first command.
    head, _, rest = TRAIN.partition("\nset -uo pipefail\n")
    assert len(re.findall(r"^#SBATCH --[\w-]+=\S+$|^#SBATCH --requeue$", head, re.MULTILINE)) == head.count("#SBATCH")
    assert "#SBATCH" not in rest


def test_configuration_file_is_written_and_checked(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"id": 0}\n', encoding="utf-8")
    (commands,) = blocks("slurm.md", "")
    init, check = commands.splitlines()
    command(init, tmp_path)
    # What it writes is an example, over a file of this name.
    assert "1,000 samples a chunk" in command(check, tmp_path)


@contextmanager
def job(folder: Path, nodes: int) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the batch script on so many nodes of one rank each; rank r prints to `out{r}`, all else goes to logs."""
    own = {"TRAIN": "train.py", "STREAM": "stream", "RUN": "runs/first", "PORT": str(free_port())}
    own |= {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "any", "SLURM_JOB_NUM_NODES": str(nodes)}
    own |= {"SLURM_GPUS_ON_NODE": "1", "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "train.sbatch"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=variables() | own, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(DEADLINE_S)


def test_job_is_queued_again_when_its_time_is_over_and_goes_on_with_another_number_of_nodes(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    own = '>"out$SLURM_PROCID" 2>"log$SLURM_PROCID"'
    torchrun = f'#!/bin/sh\nexec "{sys.executable}" -m torch.distributed.run "$@" {own}\n'
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("torchrun", torchrun)):
        (tmp_path / "bin" / name).write_text(text, encoding="utf-8")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "train.sbatch").write_text(TRAIN, encoding="utf-8")
    (tmp_path / "train.py").write_text(blocks("pytorch.md", "python")[0], encoding="utf-8")
    writer = ChunkWriter(tmp_path / "stream", 4)
    for number in range(24):
        writer.write({"id": number})
    state = tmp_path / "runs" / "first" / "checkpoint-6" / "lazyshard.json"
    with job(tmp_path, 2) as process:
        outputs = [tmp_path / "out0", tmp_path / "out1"]
        wait_until(lambda: all(path.exists() for path in [state, *outputs]), "checkpoint 6", [process])
        wait_until(lambda: all(len(steps(tmp_path, rank)) == 6 for rank in (0, 1)), "6 steps", [process])
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    assert (tmp_path / "scontrol.log").read_text() == "requeue 17\n"
    trained = [i for rank in (0, 1) for ids in steps(tmp_path, rank) for i in ids]
    assert sorted(trained) == list(range(24))
    for number in range(24, 33):
        writer.write({"id": number})
    writer.close()
    with job(tmp_path, 1) as process:
        finish(tmp_path, [process])
    assert (tmp_path / "scontrol.log").read_text() == "requeue 17\n"
    trained += [i for ids in steps(tmp_path, 0) for i in ids]
    assert len(trained) == len(set(trained)) == 32


# Which torchdata still calls, and torch has given up.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_goes_on_by_the_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torchdata")
    (text,) = blocks("torchdata.md", "python")
    program = compile(text, "program.py", "exec")
    monkeypatch.chdir(tmp_path)

    def call(*words: int) -> list[list[int]]:
        monkeypatch.setattr(sys, "argv", ["program.py", *map(str, words)])
        exec(program, {"__name__": "__main__"})
        return [[int(word) for word in line.split()[1:]] for line in capsys.readouterr().out.splitlines()]

    writer = ChunkWriter("stream", 4)
    for i in range(40):  # more than is asked for, so that no worker waits when its loader is dropped
        writer.write({"id": i})
    calls = [call(rank, 2, 3) for rank in (1, 0)]
    calls += [call(rank, 2, 2) for rank in (1, 0)]
    assert [len(steps) for steps in calls] == [3, 3, 2, 2]
    writer.write({"id": 40})
    writer.close()
    calls += [call(0, 1, 2), call(0, 1, 1000)]
    assert [len(steps) for steps in calls[4:]] == [2, 8]
    trained = [i for steps in calls for ids in steps for i in ids]
    assert len(trained) == len(set(trained)) == 40
    assert set(trained) <= set(range(41))
    assert call(0, 1, 1000) == []


PAGE: Final = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
PROGRAMS: Final = {"python": "", "lazyshard": "-m lazyshard.cli", "lazyshard-producer": "-m lazyshard_producer"}


class Block(NamedTuple):
    kind: str
    text: str


def page_blocks() -> list[Block]:
    return [Block(*found) for found in re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)]


def dialogue(text: str) -> list[tuple[str, str]]:
    return [(command, printed) for command, printed in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE)]


def settled(printed: str) -> str:
    """What a command prints, without what differs from one machine and moment to the next."""
    for pattern in (r"\(\d[^)]*/s\)", r"\d+ on \S+, heartbeat .* old", r"; .* old$", r"disk .* free$", r"rate .*/s$"):
        printed = re.sub(pattern, "...", printed, flags=re.MULTILINE)
    return printed


def test_the_page_prints_what_it_says(tmp_path: Path) -> None:
    found = page_blocks()
    assert [block.kind for block in found] == ["bash", "bash", "python", "console", "console", "console"]
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, arguments in PROGRAMS.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    env = environment() | {"PATH": os.pathsep.join([str(programs), os.environ["PATH"]])}
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.py").write_text(found[2].text)

    def run(command: str) -> str:
        # A shell would add to the output that its child was killed.
        words = shlex.split(command)
        return subprocess.run(
            words, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE_S,
            check=False,
        ).stdout  # fmt: skip

    subprocess.run(["bash", "-c", found[0].text], cwd=folder, env=env, check=True, timeout=DEADLINE_S)
    background = found[1].text.removesuffix("&\n")
    assert background != found[1].text
    with subprocess.Popen(
        ["bash", "-c", f"exec {background}"], cwd=folder, env=env, stdin=subprocess.DEVNULL
    ) as producer:
        asked = [turn for block in found[3:5] for turn in dialogue(block.text)]
        assert [command for command, _ in asked] == ["python train.py 3", "python train.py 100"]
        answers = [(command, run(command)) for command, _ in asked]
        assert producer.wait(DEADLINE_S) == 0, (folder / "producer.log").read_text()
    assert answers == asked
    looks = dialogue(found[5].text)
    assert len(looks) == 3
    for line, printed in looks:
        assert settled(run(line)) == settled(printed), line
