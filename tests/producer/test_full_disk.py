"""A filesystem with no room: one line, nothing half published, and it goes on when there is room again."""

import json
import os
from pathlib import Path

import pytest

from tests.harness.disks import SmallDisk, disk_fixture
from tests.harness.processes.producing import assert_one_line, chunk_files, ids, rows, run, run_arguments

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small filesystem"),
]


disk = disk_fixture("size=256k")


def wide_rows(count: int) -> bytes:
    return b"".join(b'{"id":%d,"text":"%s"}\n' % (number, b"x" * 900) for number in range(count))


def test_disk_full(disk: SmallDisk, tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", disk.point / "out"
    source.write_bytes(wide_rows(1000))
    arguments = run_arguments(out, [source], 50)

    done = run(*arguments)
    assert done.returncode == 7
    assert_one_line(done.stderr, "No space left on device", "samples are published and safe")
    before = ids(out)
    assert before == list(range(len(before)))
    assert before
    told = json.loads((out / "head.json").read_bytes())
    assert (told["state"], told["chunks"]) == ("failed", len(before) // 50)
    assert "No space left on device" in told["note"]
    assert len(before) % 50 == 0
    assert len(chunk_files(out)) == len(before) // 50

    again = run(*arguments)
    assert again.returncode == 7
    assert_one_line(again.stderr, "No space left on device")
    assert ids(out) == before

    disk.change("size=8m")
    assert run(*arguments).returncode == 0
    assert ids(out) == list(range(1000))


def test_no_room_for_even_the_directory(disk: SmallDisk, tmp_path: Path) -> None:
    disk.fill()
    source = tmp_path / "a.jsonl"
    source.write_bytes(rows(0, 10))
    done = run(*run_arguments(disk.point / "out", [source]))
    assert done.returncode == 7
    assert_one_line(done.stderr, "No space left on device")


def test_read_only(disk: SmallDisk, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(rows(0, 100))
    disk.change("ro")
    done = run(*run_arguments(disk.point / "out", [source]))
    assert done.returncode == 7
    assert_one_line(done.stderr, "Read-only file system", str(disk.point / "out"))
