"""The scripts of `docs/guides/slurm.md`: their syntax, and `train.sbatch` run with stand-ins for Slurm's commands."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lazyshard import ChunkWriter
from tests.packaging.guide_programs import DEADLINE_S, blocks, command, free_port, variables

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

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


@pytest.mark.parametrize("script", blocks("slurm.md", "bash"), ids=lambda text: text.split("\n")[0][:20])
def test_script_is_bash(script: str) -> None:
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_options_of_the_job_are_at_its_head() -> None:
    # sbatch reads them up to the first command.
    head, _, rest = blocks("slurm.md", "bash")[0].partition("\nset -uo pipefail\n")
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
    """Runs the batch script on so many nodes of one rank each; what ranks print goes to `log`."""
    own = {"TRAIN": "train.py", "STREAM": "stream", "RUN": "runs/first", "PORT": str(free_port())}
    own |= {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "any", "SLURM_JOB_NUM_NODES": str(nodes)}
    own |= {"SLURM_GPUS_ON_NODE": "1", "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "train.sbatch"]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=variables() | own, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(DEADLINE_S)


def trained(folder: Path) -> list[int]:
    """Returns the ids that all ranks have printed."""
    lines = re.findall(r"trained ([\d ]+)\n", (folder / "log").read_text(encoding="utf-8"))
    return [int(word) for line in lines for word in line.split()]


def test_job_is_queued_again_when_its_time_is_over_and_goes_on_with_another_number_of_nodes(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    torchrun = f'#!/bin/sh\nexec "{sys.executable}" -m torch.distributed.run "$@"\n'
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("torchrun", torchrun)):
        (tmp_path / "bin" / name).write_text(text, encoding="utf-8")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "train.sbatch").write_text(blocks("slurm.md", "bash")[0], encoding="utf-8")
    (tmp_path / "train.py").write_text(blocks("pytorch.md", "python")[0], encoding="utf-8")
    writer = ChunkWriter(tmp_path / "stream", 4)
    for number in range(24):
        writer.write({"id": number})
    state = tmp_path / "runs" / "first" / "checkpoint-6" / "lazyshard.json"
    with job(tmp_path, 2) as process:
        deadline = time.monotonic() + DEADLINE_S
        while not state.exists():
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    assert (tmp_path / "scontrol.log").read_text() == "requeue 17\n"
    assert sorted(trained(tmp_path)) == list(range(24))
    for number in range(24, 33):
        writer.write({"id": number})
    writer.close()
    with job(tmp_path, 1) as process:
        assert process.wait(DEADLINE_S) == 0, (tmp_path / "log").read_text()[-3000:]
    assert (tmp_path / "scontrol.log").read_text() == "requeue 17\n"
    found = trained(tmp_path)
    assert len(found) == len(set(found)) == 32
