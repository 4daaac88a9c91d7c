"""Stores that cannot put under a condition, and commands that only look at a stream in a store."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from lazyshard import StreamReader
from lazyshard.format.names import MANIFEST
from lazyshard.store.urls import UrlPath, stream_path
from lazyshard_producer.cli import main
from tests.harness.processes.producing import assert_one_line, rows, run_arguments
from tests.store.producing import Run, check_ended, objects
from tests.store.streams import upload
from tests.stream.streams import produce


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
    assert f"warning: {memory}: " in said
    check_ended(objects(memory), 7, 3)
    assert main(arguments) == 0
    assert "already ended" in capfd.readouterr().err


def test_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, source: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "s3fs" else object())
    assert main(["run", "--source", str(source), "--out", "s3://bucket/a", "--samples-per-chunk", "3"]) == 1
    assert_one_line(capfd.readouterr().err, "pip install 'lazyshard[objects]'")


def test_check_says_how_far_a_stream_in_a_bucket_is_and_changes_nothing(run: Run, source: Path) -> None:
    def check() -> str:
        arguments = ("--source", source, "--out", run.url, "--samples-per-chunk", 3, "--rows", 1)
        code, said = run.nursery.run("check", *arguments)
        assert code == 0, said
        return said

    assert f"{run.url}: not there yet" in check()
    run.kill_at(7, "after")
    before = run.objects()
    said = check()
    assert f"{run.url}: holds 6 samples in 2 chunks" in said
    assert f"  {source}:7  " in said
    assert run.objects() == before
    run.finish()
    assert f"{run.url}: has ended with 7 samples in 3 chunks" in check()


def test_quarantine_shows_the_refused_rows_of_a_stream_in_a_bucket(run: Run, source: Path) -> None:
    source.write_bytes(rows(0, 4) + b"no row\n" + rows(4, 7))
    run.finish("--on-bad-row", "quarantine")
    code, said = run.nursery.run("quarantine", run.url)
    assert code == 0, said
    assert f"{run.url}: 1 row" in said
    assert run.nursery.run("quarantine", run.url, "--rows") == (0, "no row\n")


def test_stream_in_a_store_is_a_source(bucket: UrlPath, tmp_path: Path) -> None:
    upload(produce(tmp_path / "old", 10, 3), bucket)
    assert main(run_arguments(tmp_path / "new", [bucket], 4)) == 0
    assert [row["id"] for row in StreamReader(tmp_path / "new")] == list(range(10))
    assert main(run_arguments(tmp_path / "new", [bucket], 4)) == 0
    # What was deleted since holds no rows that the stream lacks.
    (bucket / MANIFEST).store.delete((bucket / MANIFEST).key)
    assert main(run_arguments(tmp_path / "new", [bucket], 4)) == 0
    assert main(run_arguments(tmp_path / "other", [bucket], 4)) == 4
    assert not (tmp_path / "other").exists()
