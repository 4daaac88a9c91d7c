"""A filesystem with no room: one line, nothing half published, and it goes on when there is room again."""

import os
from pathlib import Path

import pytest

from lazyshard_producer.cli import main
from tests.harness.disks import SmallDisk, disk_fixture
from tests.harness.processes.producing import assert_one_line, chunk_files, head, ids, rows, run_arguments

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small filesystem")]


disk = disk_fixture("size=256k")


def test_disk_full(disk: SmallDisk, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "a.jsonl", disk.point / "out"
    source.write_bytes(b"".join(b'{"id":%d,"text":"%s"}\n' % (number, b"x" * 900) for number in range(1000)))
    arguments = run_arguments(out, [source], 50, "--no-progress")
    done: list[int] = []
    for _ in range(2):
        assert main(arguments) == 7
        assert_one_line(capsys.readouterr().err, "No space left on device")
        done = done or ids(out)
        assert ids(out) == done == list(range(len(done)))
        assert (head(out)["state"], head(out)["chunks"] * 50) == ("failed", len(done))
        assert "No space left on device" in head(out)["note"]
        assert len(chunk_files(out)) * 50 == len(done) > 0

    disk.change("size=8m")
    assert main(arguments) == 0
    assert ids(out) == list(range(1000))


@pytest.mark.parametrize("reason", ["No space left on device", "Read-only file system"])
def test_not_even_the_directory_can_be_made(
    reason: str, disk: SmallDisk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if reason == "Read-only file system":
        disk.change("ro")
    else:
        disk.fill()
    source = tmp_path / "a.jsonl"
    source.write_bytes(rows(0, 10))
    assert main(run_arguments(disk.point / "out", [source], 10, "--no-progress")) == 7
    assert_one_line(capsys.readouterr().err, reason)
