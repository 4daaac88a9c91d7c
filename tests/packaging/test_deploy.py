"""The examples under producer/deploy: each is checked by its own tool where that is here, and run where it can be."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import lazyshard
from tests.harness.processes.environment import environment
from tests.harness.processes.producing import published, rows, run, wait_until

DEPLOY = Path(__file__).resolve().parents[2] / "producer" / "deploy"
KUBERNETES = DEPLOY / "kubernetes"


def manifests(path: Path) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


@pytest.mark.parametrize("path", sorted(KUBERNETES.glob("*.yaml")), ids=lambda path: path.stem)
def test_kubernetes_manifests_keep_to_the_schema(path: Path) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for document in manifests(path):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def of_kind(kind: str, *names: str) -> dict[str, Any]:
    every = [one for name in names or ("training", "watch") for one in manifests(KUBERNETES / f"{name}.yaml")]
    (found,) = (one for one in every if one["kind"] == kind)
    return found


def pod(manifest: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = manifest["spec"]["template"]["spec"]
    return found


def test_options_of_commands_are_there() -> None:
    sidecar = pod(of_kind("Job", "sidecar"))["initContainers"][0]["command"]
    generators = pod(of_kind("Job", "generators"))["containers"][0]["command"]
    deployed = pod(of_kind("Deployment", "deployment"))["containers"][0]["command"]
    watch = pod(of_kind("Deployment"))["containers"][0]["command"]
    producers, watches = run("run", "--help").stdout, lazyshard("watch", "--help").stdout
    for command, program, text in (
        (sidecar, ["lazyshard-producer", "run"], producers),
        (generators, ["lazyshard-producer", "run"], producers),
        (deployed, ["lazyshard-producer", "run"], producers),
        (watch, ["lazyshard", "watch"], watches),
    ):
        assert command[:2] == program
        assert [word for word in command if word.startswith("--") and f" {word} " not in text] == []


def test_pods_mount_the_claim_and_ranks_find_the_first_one() -> None:
    name = of_kind("PersistentVolumeClaim")["metadata"]["name"]
    for spec in (pod(of_kind("Job")), pod(of_kind("Deployment"))):
        (claimed,) = (volume for volume in spec["volumes"] if "persistentVolumeClaim" in volume)
        assert claimed["persistentVolumeClaim"]["claimName"] == name
        volumes = {volume["name"] for volume in spec["volumes"]}
        assert {mount["name"] for mount in spec["containers"][0]["volumeMounts"]} == volumes
    job, service = of_kind("Job"), of_kind("Service")
    command = pod(job)["containers"][0]["command"]
    assert pod(job)["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert f"--master-addr={job['metadata']['name']}-0.{service['metadata']['name']}" in command
    assert f"--nnodes={job['spec']['completions']}" in command
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    torchrun = pytest.importorskip("torch.distributed.run")
    given = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in command[1:]]
    parsed = torchrun.get_args_parser().parse_args(given)
    assert (parsed.nnodes, parsed.node_rank, parsed.training_script) == ("2", 1, "train.py")


def test_systemd_unit_is_valid(tmp_path: Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed")
    text = (DEPLOY / "systemd" / "lazyshard-producer@.service").read_text()
    unit = tmp_path / "lazyshard-producer@.service"  # The tool looks whether the program is there
    unit.write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", text))
    done = subprocess.run([tool, "verify", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def slurm(tmp_path: Path, producer: str, out: Path, script: str = "producer", **more: str) -> subprocess.Popen[str]:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "scontrol").write_text(f'#!/bin/sh\necho "$@" > {tmp_path / "scontrol"}\n')
    (tools / "producer").write_text(producer)
    for tool in tools.iterdir():
        tool.chmod(0o755)
    config = tmp_path / "producer.toml"
    config.write_text(
        f'out = "{out}"\nsamples_per_chunk = 5\nrate = 50\n[[source]]\npath = "{tmp_path / "rows.jsonl"}"\n'
    )
    (tmp_path / "rows.jsonl").write_bytes(rows(0, 100_000))
    variables = {"CONFIG": str(config), "PRODUCER": str(tools / "producer"), "SLURM_JOB_ID": "17"}
    env = environment() | variables | more | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    told: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(["bash", str(DEPLOY / "slurm" / f"{script}.sbatch")], cwd=tmp_path, env=env, **told)


def terminated(started: "subprocess.Popen[str]", out: Path) -> str:
    """What a job says that is told, once it has published, that its time is over."""
    with started as job:
        try:
            wait_until(lambda: published(out) >= 2, job)
            job.send_signal(signal.SIGTERM)
            output, _ = job.communicate(timeout=60)
        finally:
            job.kill()
    assert job.returncode == 0, output
    return output


def test_slurm_job_ends_in_good_order_when_its_time_is_over_and_asks_to_go_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    real = f'#!/bin/sh\nexec "{sys.executable}" -m lazyshard_producer "$@"\n'
    output = terminated(slurm(tmp_path, real, out), out)
    assert "result=terminated" in output
    assert (tmp_path / "scontrol").read_text() == "requeue 17\n"


def test_tasks_of_a_slurm_array_are_writers_of_one_stream(tmp_path: Path) -> None:
    (tmp_path / "generate.py").write_text(GENERATE)
    out, real = tmp_path / "out", f'#!/bin/sh\nexec "{sys.executable}" -m lazyshard_producer "$@"\n'
    array = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8", "SLURM_ARRAY_JOB_ID": "16", "STREAM": str(out)}
    terminated(slurm(tmp_path, real, out, "generators", **array), out)
    assert os.listdir(out / ".writers" / "task-3")
    assert (tmp_path / "scontrol").read_text() == "requeue 16_3\n"


GENERATE = """
def rows(position):
    number = position or 0
    while True:
        number += 1
        yield {"id": number}, number
"""


@pytest.mark.parametrize(
    ("program", "stopped", "code"),
    [
        ("exit 0", False, 0),
        ("exit 3", False, 3),
        ("trap 'exit 7' TERM\ntouch began\nwhile :; do sleep 0.05; done", True, 7),  # One that fails after the signal
    ],
)
def test_slurm_job_has_the_exit_code_of_the_producer(program: str, stopped: bool, code: int, tmp_path: Path) -> None:
    with slurm(tmp_path, f"#!/bin/bash\n{program}\n", tmp_path / "out") as job:
        if stopped:
            wait_until((tmp_path / "began").exists, job)
            job.send_signal(signal.SIGTERM)
        job.communicate(timeout=60)
    assert job.returncode == code
    assert not (tmp_path / "scontrol").exists()
