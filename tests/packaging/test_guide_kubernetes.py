"""The manifests that `docs/guides/kubernetes.md` links keep to the schemas, and name what there is."""

from __future__ import annotations

import contextlib
import io
from typing import Any, Final

import pytest

from lazyshard.cli.main import main
from tests.packaging.guide_programs import GUIDES, ROOT

EXAMPLES: Final = ROOT / "producer" / "deploy" / "kubernetes"


def manifests() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    texts = [(EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8") for name in ("training", "watch")]
    return [document for text in texts for document in yaml.safe_load_all(text)]


def pod(manifest: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = manifest["spec"]["template"]["spec"]
    return found


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = (manifest for manifest in manifests() if manifest["kind"] == kind)
    return found


def test_manifests_keep_to_the_schemas() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    found = manifests()
    assert [manifest["kind"] for manifest in found] == ["PersistentVolumeClaim", "Service", "Job", "Deployment"]
    for manifest in found:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


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
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main(["watch", "--help"])
    assert all(f"{word} " in text.getvalue() for word in watch if word.startswith("--"))
    run = pytest.importorskip("torch.distributed.run")
    command = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in pod(of_kind("Job"))["containers"][0]["command"]]
    parsed = run.get_args_parser().parse_args(command[1:])
    assert (parsed.nnodes, parsed.node_rank, parsed.training_script) == ("2", 1, "train.py")


def test_examples_that_are_linked_are_there() -> None:
    text = (GUIDES / "kubernetes.md").read_text(encoding="utf-8")
    for name in ("deployment.yaml", "sidecar.yaml", "training.yaml", "watch.yaml"):
        assert f"(../../producer/deploy/kubernetes/{name})" in text
        assert (EXAMPLES / name).is_file()
