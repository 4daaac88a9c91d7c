"""The examples under producer/deploy: each is checked by its own tool where that is here, and run where it can be."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import lazyshard
from tests.harness.processes.producing import published, rows, run, wait_until
from tests.packaging.guide_programs import as_command, with_tools

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
    helps = {
        "lazyshard-producer run": run("run", "--help").stdout,
        "lazyshard watch": lazyshard("watch", "--help").stdout,
    }
    for name, kind, containers, program in (
        ("sidecar", "Job", "initContainers", "lazyshard-producer run"),
        ("generators", "Job", "containers", "lazyshard-producer run"),
        ("deployment", "Deployment", "containers", "lazyshard-producer run"),
        ("watch", "Deployment", "containers", "lazyshard watch"),
    ):
        command = pod(of_kind(kind, name))[containers][0]["command"]
        assert " ".join(command[:2]) == program
        assert [word for word in command if word.startswith("--") and f" {word} " not in helps[program]] == []


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


def slurm(tmp_path: Path, producer: str, script: str = "producer", **more: str) -> subprocess.Popen[str]:
    scontrol = f'#!/bin/sh\necho "$@" > {tmp_path / "scontrol"}\n'
    env = with_tools(tmp_path, {"scontrol": scontrol, "producer": producer})
    source, config = tmp_path / "rows.jsonl", tmp_path / "producer.toml"
    source.write_bytes(rows(0, 100_000))
    config.write_text(f'out = "out"\nsamples_per_chunk = 5\nrate = 50\n[[source]]\npath = "{source}"\n')
    env |= {"CONFIG": str(config), "PRODUCER": str(tmp_path / "bin" / "producer"), "SLURM_JOB_ID": "17"} | more
    told: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(["bash", str(DEPLOY / "slurm" / f"{script}.sbatch")], cwd=tmp_path, env=env, **told)


@pytest.mark.parametrize("script", ["producer", "generators"])
def test_slurm_job_ends_in_good_order_when_its_time_is_over_and_asks_to_go_on(script: str, tmp_path: Path) -> None:
    (tmp_path / "generate.py").write_text(GENERATE)
    task = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8", "SLURM_ARRAY_JOB_ID": "16", "STREAM": "out"}
    more = task if script == "generators" else {}
    with slurm(tmp_path, as_command("lazyshard_producer"), script, **more) as job:
        try:
            wait_until(lambda: published(tmp_path / "out") >= 2, job)
            job.send_signal(signal.SIGTERM)
            output, _ = job.communicate(timeout=60)
        finally:
            job.kill()
    assert (job.returncode, "result=terminated" in output) == (0, True), output
    assert (tmp_path / "scontrol").read_text() == ("requeue 16_3\n" if more else "requeue 17\n")
    if more:  # Tasks of an array are writers of one stream
        assert os.listdir(tmp_path / "out" / ".writers" / "task-3")


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
    with slurm(tmp_path, f"#!/bin/bash\n{program}\n") as job:
        if stopped:
            wait_until((tmp_path / "began").exists, job)
            job.send_signal(signal.SIGTERM)
        job.communicate(timeout=60)
    assert job.returncode == code
    assert not (tmp_path / "scontrol").exists()
