"""Stores that cannot put under a condition, places that do not go with options, and commands that only look."""

import sys
import uuid
from pathlib import Path

import fsspec
import pytest

from lazyshard import StreamReader
from lazyshard.format.records import MANIFEST, chunk_name, seal_name
from lazyshard.store.files import UrlPath, stream_path
from lazyshard_producer.cli import main
from tests.harness.processes.producing import assert_one_line, rows, run_arguments
from tests.store.producing import check_ended, objects
from tests.store.server import Server
from tests.store.streams import upload
from tests.stream.streams import produce


def test_a_store_without_conditions(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    memory = stream_path(f"memory://{uuid.uuid4().hex}/run")
    assert isinstance(memory, UrlPath)
    arguments = ["run", "--source", str(source), "--out", str(memory), "--samples-per-chunk", "3"]
    arguments += ["--spool", str(tmp_path / "spool")]
    assert main(arguments) == 0
    said = capfd.readouterr().err
    assert f"warning: {memory}: " in said
    check_ended(objects(memory), 7, 3)
    assert main(arguments) == 0
    assert "already ended" in capfd.readouterr().err
    fsspec.filesystem("memory").store.clear()


def test_missing_package(monkeypatch: pytest.MonkeyPatch, source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    assert main(["run", "--source", str(source), "--out", "s3://bucket/a", "--samples-per-chunk", "3"]) == 1
    assert_one_line(capfd.readouterr().err, "pip install 'lazyshard[objects]'")


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ("--out file:///tmp/a", 2, "--out: "),
        ("--out s3://", 2, "--out: "),
        ("--out s3://bucket/a --min-free-disk 1GB", 2, "--min-free-disk: "),
        ("--out s3://bucket/a --max-spool 0", 2, "--max-spool: "),
        ("--out a --spool b", 2, "--spool: "),
        ("--out s3://not-there/a", 7, "s3://not-there/a"),
    ],
)
def test_settings_that_do_not_go_with_a_place_and_a_bucket_that_is_not_there_are_refused(
    server: Server, source: Path, capfd: pytest.CaptureFixture[str], options: str, code: int, said: str
) -> None:
    assert main(["run", "--source", str(source), "--samples-per-chunk", "3", *options.split()]) == code
    assert_one_line(capfd.readouterr().err, said)


def test_check_and_quarantine(bucket: UrlPath, source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source.write_bytes(rows(0, 6) + b"no row\n" + rows(6, 7))
    options = ["--source", str(source), "--samples-per-chunk", "3", "--on-bad-row", "quarantine", "--out"]

    def said(*arguments: str) -> str:
        assert main([*arguments]) == 0
        told = capfd.readouterr()
        return told.out + told.err

    assert f"{bucket}: does not exist yet" in said("check", *options, str(bucket), "--rows", "1")
    local = tmp_path / "local"
    said("run", *options, str(local))
    for name in ("stream.end", "head.json", chunk_name(2), seal_name(2)):
        (local / name).unlink()
    upload(local, bucket)
    before = objects(bucket)
    told = said("check", *options, str(bucket), "--rows", "1")
    assert f"{bucket}: holds 6 samples in 2 chunks" in told and f"  {source}:7  refused" in told
    assert objects(bucket) == before
    said("run", *options, str(bucket), "--spool", str(tmp_path / "spool"))
    assert f"{bucket}: has ended with 7 samples in 3 chunks" in said("check", *options, str(bucket), "--rows", "1")
    assert f"{bucket}: 1 row" in said("quarantine", str(bucket))
    assert said("quarantine", str(bucket), "--rows") == "no row\n"


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
