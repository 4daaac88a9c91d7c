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
MANIFESTS = sorted(KUBERNETES.glob("*.yaml"))


def manifests(path: Path) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_kubernetes_manifests_keep_to_the_schema(path: Path) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for document in manifests(path):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def commands(value: Any) -> list[list[str]]:
    if isinstance(value, dict):
        own = value.get("command")
        found = [own] if isinstance(own, list) and own[0] == "lazyshard-producer" else []
        return found + [command for item in value.values() for command in commands(item)]
    return [command for item in value for command in commands(item)] if isinstance(value, list) else []


@pytest.mark.parametrize("path", [KUBERNETES / f"{name}.yaml" for name in ("deployment", "sidecar")])
def test_kubernetes_manifests_use_options_that_there_are(path: Path) -> None:
    found = [command for document in manifests(path) for command in commands(document)]
    assert found
    text = run("run", "--help").stdout
    for command in found:
        assert command[1] == "run"
        for option in (word for word in command if word.startswith("--")):
            assert f" {option} " in text


def pod(manifest: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = manifest["spec"]["template"]["spec"]
    return found


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = (
        one for name in ("training", "watch") for one in manifests(KUBERNETES / f"{name}.yaml") if one["kind"] == kind
    )
    return found


def test_pods_mount_the_claim() -> None:
    name = of_kind("PersistentVolumeClaim")["metadata"]["name"]
    for manifest in (of_kind("Job"), of_kind("Deployment")):
        spec = pod(manifest)
        (claimed,) = (volume for volume in spec["volumes"] if "persistentVolumeClaim" in volume)
        assert claimed["persistentVolumeClaim"]["claimName"] == name
        volumes = {volume["name"] for volume in spec["volumes"]}
        assert {mount["name"] for mount in spec["containers"][0]["volumeMounts"]} == volumes


def test_ranks_find_the_first_pod() -> None:
    job, service = of_kind("Job"), of_kind("Service")
    command = pod(job)["containers"][0]["command"]
    assert pod(job)["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert f"--master-addr={job['metadata']['name']}-0.{service['metadata']['name']}" in command
    assert f"--nnodes={job['spec']['completions']}" in command
    assert job["spec"]["completions"] == job["spec"]["parallelism"]


def test_options_of_watch_and_torchrun_are_there() -> None:
    watch = pod(of_kind("Deployment"))["containers"][0]["command"]
    assert watch[:2] == ["lazyshard", "watch"]
    text = lazyshard("watch", "--help").stdout
    assert all(f"{word} " in text for word in watch if word.startswith("--"))
    torchrun = pytest.importorskip("torch.distributed.run")
    command = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in pod(of_kind("Job"))["containers"][0]["command"]]
    parsed = torchrun.get_args_parser().parse_args(command[1:])
    assert (parsed.nnodes, parsed.node_rank, parsed.training_script) == ("2", 1, "train.py")


def test_systemd_unit_is_valid(tmp_path: Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed")
    text = (DEPLOY / "systemd" / "lazyshard-producer@.service").read_text()
    # The tool looks whether the program is there.
    unit = tmp_path / "lazyshard-producer@.service"
    unit.write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", text))
    done = subprocess.run([tool, "verify", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def slurm(tmp_path: Path, producer: str, out: Path) -> subprocess.Popen[str]:
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
    return subprocess.Popen(
        ["bash", str(DEPLOY / "slurm" / "producer.sbatch")],
        env=environment() | variables | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_slurm_job_ends_in_good_order_when_its_time_is_over_and_asks_to_go_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    real = f'#!/bin/sh\nexec "{sys.executable}" -m lazyshard_producer "$@"\n'
    with slurm(tmp_path, real, out) as job:
        try:
            wait_until(lambda: published(out) >= 2, job)
            job.send_signal(signal.SIGTERM)
            output, _ = job.communicate(timeout=60)
        finally:
            job.kill()
    assert job.returncode == 0, output
    assert "result=terminated" in output
    assert (tmp_path / "scontrol").read_text() == "requeue 17\n"


@pytest.mark.parametrize("code", [0, 3])
def test_slurm_job_has_the_exit_code_of_the_producer_and_is_not_started_again(tmp_path: Path, code: int) -> None:
    with slurm(tmp_path, f"#!/bin/sh\nexit {code}\n", tmp_path / "out") as job:
        job.communicate(timeout=60)
    assert job.returncode == code
    assert not (tmp_path / "scontrol").exists()


def test_slurm_job_takes_the_code_of_a_producer_that_fails_after_the_signal(tmp_path: Path) -> None:
    began = tmp_path / "began"
    failing = f"#!/bin/bash\ntrap 'exit 7' TERM\ntouch {began}\nwhile :; do sleep 0.05; done\n"
    with slurm(tmp_path, failing, tmp_path / "out") as job:
        wait_until(began.exists, job)
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=60)
    assert job.returncode == 7
    assert not (tmp_path / "scontrol").exists()
