"""The scripts of `docs/guides/slurm.md`, and the `train.sbatch` that it links, run with stand-ins for Slurm."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from lazyshard import ChunkWriter
from tests.packaging.guide_programs import (
    DEADLINE_S,
    ROOT,
    blocks,
    command,
    finish,
    free_port,
    steps,
    variables,
    wait_until,
)

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

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
