"""The programs of README and of the guides: run, killed, and continued by other numbers of processes."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
import torch

from lazyshard import ChunkWriter
from lazyshard.stream import read_cursor
from tests.cli.commands import lazyshard
from tests.harness.processes.environment import environment
from tests.harness.processes.nursery import Nursery, has_ended
from tests.harness.processes.producing import run as produce
from tests.packaging import guide_programs
from tests.packaging.guide_programs import (
    DEADLINE_S,
    ROOT,
    blocks,
    finish,
    free_port,
    ranks_of,
    steps,
    wait_until,
    with_commands,
)

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
    cursor = read_cursor(tmp_path / "stream", "first")
    assert cursor is not None
    assert cursor.consumed == 40
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
    cursor = read_cursor(tmp_path / "stream", "run-1")
    assert cursor is not None
    assert cursor.consumed == 992


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
def job(folder: Path, nodes: int) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the batch script on so many nodes of one rank each; rank r prints to `out{r}`, all else goes to logs."""
    own = {"TRAIN": "train.py", "STREAM": "stream", "RUN": "runs/first", "PORT": str(free_port())}
    own |= {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "any", "SLURM_JOB_NUM_NODES": str(nodes)}
    own |= {"SLURM_GPUS_ON_NODE": "1", "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "train.sbatch"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=guide_programs.variables() | own,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
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
    write(writer, 0, 24)
    outputs = [tmp_path / "out0", tmp_path / "out1"]
    state = tmp_path / "runs" / "first" / "checkpoint-6" / "lazyshard.json"
    with job(tmp_path, 2) as process:
        wait_until(lambda: state.exists() and [len(steps(one)) for one in outputs] == [6, 6], "6 steps", [process.pid])
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    assert (tmp_path / "scontrol.log").read_text() == "requeue 17\n"
    trained = [i for path in outputs for ids in steps(path) for i in ids]
    assert sorted(trained) == list(range(24))
    write(writer, 24, 33)
    writer.close()
    with job(tmp_path, 1) as process:
        assert process.wait(DEADLINE_S) == 0, (tmp_path / "log0").read_text()
    assert (tmp_path / "scontrol.log").read_text() == "requeue 17\n"
    trained += [i for ids in steps(outputs[0]) for i in ids]
    assert len(trained) == len(set(trained)) == 32


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # Which torchdata still calls
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


def dialogue(text: str) -> list[tuple[str, str]]:
    return [(command, printed) for command, printed in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE)]


def settled(printed: str) -> str:
    """What a command prints, without what differs from one machine and moment to the next."""
    for pattern in (r"\(\d[^)]*/s\)", r"\d+ on \S+, heartbeat .* old", r"; .* old$", r"disk .* free$", r"rate .*/s$"):
        printed = re.sub(pattern, "...", printed, flags=re.MULTILINE)
    return printed


def test_the_page_prints_what_it_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
    found = re.findall(r"^```(\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    kinds, (prepare, background, program, *consoles) = zip(*found, strict=True)
    assert kinds == ("bash", "bash", "python", "console", "console", "console")
    env = with_commands(tmp_path)
    (tmp_path / "train.py").write_text(program)

    def run(command: str) -> str:
        done = subprocess.run(shlex.split(command), env=env, capture_output=True, text=True, timeout=DEADLINE_S)
        return done.stdout

    subprocess.run(["bash", "-c", prepare], env=env, check=True, timeout=DEADLINE_S)
    assert background.endswith("&\n")
    with subprocess.Popen(["bash", "-c", f"exec {background[:-2]}"], env=env) as producer:
        asked = [turn for text in consoles[:2] for turn in dialogue(text)]
        assert [command for command, _ in asked] == ["python train.py 3", "python train.py 100"]
        answers = [(command, run(command)) for command, _ in asked]
        assert producer.wait(DEADLINE_S) == 0, (tmp_path / "producer.log").read_text()
    assert answers == asked
    looks = dialogue(consoles[2])
    assert len(looks) == 3
    for line, printed in looks:
        name, *words = shlex.split(line)
        told = lazyshard(*words).stdout if name == "lazyshard" else run(line)
        assert settled(told) == settled(printed), line


def test_example_of_lengths_prints_what_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "lengths.md").read_text(encoding="utf-8")
    found = re.findall(r"^```(python|console|text)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (_, module), (_, program) = (block for block in found if block[0] == "python")
    (line,) = (text for kind, text in found if kind == "console" and "lazyshard-producer " in text)
    (printed,) = (text for kind, text in found if kind == "text")
    with ChunkWriter(tmp_path / "raw", 7) as writer:
        for number in range(40):
            writer.write({"id": number, "text": " ".join(["word"] * (1 + 13 * number % 37))})
    (tmp_path / "my_rows.py").write_text(module, encoding="utf-8")
    words = shlex.split(line.replace("\\\n", " ").removeprefix("$ "))
    assert produce(*words[1:], cwd=tmp_path).returncode == 0
    python = [sys.executable, "-c", program]
    assert subprocess.check_output(python, cwd=tmp_path, env=environment(), text=True, timeout=DEADLINE_S) == printed
