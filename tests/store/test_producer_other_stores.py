"""Stores that cannot put under a condition, and commands that only look at a stream in a store."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from lazyshard.store.urls import UrlPath, stream_path
from lazyshard_producer.cli import main
from tests.harness.processes.environment import environment
from tests.harness.processes.producing import assert_one_line, rows
from tests.store.producing import Run, check_ended, objects


@pytest.fixture
def memory() -> Iterator[UrlPath]:
    url = stream_path(f"memory://{uuid.uuid4().hex}/run")
    assert isinstance(url, UrlPath)
    yield url
    fsspec.filesystem("memory").store.clear()


def test_a_store_without_conditions_is_published_to_with_a_warning(
    memory: UrlPath, source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", "--source", str(source), "--out", str(memory), "--samples-per-chunk", "3"]
    arguments += ["--spool", str(tmp_path / "spool")]
    assert main(arguments) == 0
    said = capfd.readouterr().err
    assert f"warning: {memory}: this store cannot put an object on condition that there is none" in said
    check_ended(objects(memory), 7, 3)
    assert main(arguments) == 0
    assert "already ended" in capfd.readouterr().err


def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, source: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "s3fs" else object())
    assert main(["run", "--source", str(source), "--out", "s3://bucket/a", "--samples-per-chunk", "3"]) == 1
    assert_one_line(capfd.readouterr().err, "s3fs is needed", "pip install 'lazyshard[objects]'")


def test_a_run_into_a_directory_loads_nothing_of_it(source: Path, tmp_path: Path) -> None:
    arguments = ["run", "--source", str(source), "--out", str(tmp_path / "out"), "--samples-per-chunk", "3"]
    program = f"""
import sys
from lazyshard_producer.cli import main
assert main({arguments!r}) == 0
print(sorted({{"fsspec", "s3fs", "botocore", "aiobotocore"}} & set(sys.modules)))
"""
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True
    )
    assert found.stdout == "[]\n"


def check(run: Run, source: Path) -> tuple[int, str]:
    return run.nursery.run("check", "--source", source, "--out", run.url, "--samples-per-chunk", 3, "--rows", 1)


def test_check_says_how_far_a_stream_in_a_bucket_is_and_changes_nothing(run: Run, source: Path) -> None:
    code, said = check(run, source)
    assert (code, said.splitlines()[0]) == (0, f"stream    {run.url}: not there yet; 3 samples a chunk")
    run.kill_at(7, "after")
    before = run.objects()
    code, said = check(run, source)
    assert code == 0, said
    holds = f"stream    {run.url}: holds 6 samples in 2 chunks; a run would go on after them, 3 samples a chunk"
    assert said.splitlines()[0] == holds
    assert f"  {source}:7  " in said
    assert run.objects() == before
    run.finish()
    code, said = check(run, source)
    assert said.splitlines()[0] == f"stream    {run.url}: has ended with 7 samples in 3 chunks; a run would do nothing"


def test_quarantine_shows_the_refused_rows_of_a_stream_in_a_bucket(run: Run, source: Path) -> None:
    source.write_bytes(rows(0, 4) + b"no row\n" + rows(4, 7))
    run.finish("--on-bad-row", "quarantine")
    code, said = run.nursery.run("quarantine", run.url)
    assert code == 0, said
    assert said.splitlines()[0] == f"{run.url}: 1 row refused so far, those mended since included"
    assert run.nursery.run("quarantine", run.url, "--rows") == (0, "no row\n")
