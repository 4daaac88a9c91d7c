"""A filesystem that is full at any write, has no inode or turns read-only: one line, and on when there is room."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.harness.disks import Disk, SmallDisk
from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import (
    assert_one_line,
    ids,
    published,
    rows,
    run,
    run_arguments,
    start,
    wait_until,
)
from tests.harness.scenes.rows import made
from tests.harness.scenes.sources import KINDS
from tests.harness.scenes.streams import Stream

pytestmark = [
    pytest.mark.full,
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small filesystem"),
]

MAKES: Final = ("--on-bad-row", "quarantine", "--transform", "tests.harness.scenes.rows:thirds")


def check_failed(stream: Stream, status: int, err: str, reason: str) -> None:
    """Whether the run has ended by the filesystem, in a line, and what is there is whole."""
    assert status == 7, err
    assert_one_line(err, reason, str(stream.out))
    stream.check({})


def wide(path: Path, count: int) -> None:
    path.write_bytes(b"".join(b'{"id":%d,"text":"%s"}\n' % (number, b"x" * 500) for number in range(count)))


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Commands]:
    """One for each test: it must not outlive the disks that are mounted meanwhile."""
    (tmp_path / "nursery").mkdir()
    with Commands(tmp_path / "nursery") as nursery:
        yield nursery


@pytest.mark.parametrize("kind", ["plain", "followed while it grows"])
def test_a_disk_that_is_full_at_any_write(kind: str, nursery: Commands, tmp_path: Path) -> None:
    source = KINDS[kind](tmp_path, 0)
    expected = made(source.rows, transform=True, where=False)
    with SmallDisk(tmp_path / "disk", "size=24k") as disk:
        stream = Stream(nursery, disk.point / "out", [source], MAKES)
        failures = 0
        # A page more each time: the write that finds no room is another one each time.
        for pages in range(7, 200):
            status, err = stream.run()
            if status == 0:
                break
            check_failed(stream, status, err, "No space left on device")
            failures += 1
            disk.change(f"size={4 * pages}k")
        assert failures > 10
        assert sorted(map(str, stream.rows())) == sorted(map(str, expected))
        lines = [(entry["source"], entry["line"]) for entry in stream.refused()]
        assert len(set(lines)) == len(lines) > 0
        stream.check_ended()


def test_no_inode_is_left_at_any_file(nursery: Commands, tmp_path: Path) -> None:
    source = KINDS["plain"](tmp_path, 0)
    with SmallDisk(tmp_path / "disk", "size=8m,nr_inodes=3") as disk:
        stream = Stream(nursery, disk.point / "out", [source], MAKES)
        failures = 0
        for inodes in range(4, 200):
            status, err = stream.run()
            if status == 0:
                break
            check_failed(stream, status, err, "No space left on device")
            failures += 1
            disk.change(f"nr_inodes={inodes}")
        assert failures > 10
        assert stream.rows() == made(source.rows, transform=True, where=False)
        stream.check_ended()


def test_a_filesystem_that_turns_read_only(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(rows(0, 100))
    with Disk(tmp_path) as disk:
        out = disk.point / "out"
        arguments = run_arguments(out, [source], 10, "--rate", 50)
        process = start(*arguments)
        wait_until(lambda: published(out) >= 2, process)
        disk.fail()
        _, err = process.communicate(timeout=60)
        assert process.returncode == 7
        assert_one_line(err, "Read-only file system", "samples are published and safe")
        again = run(*arguments)
        assert again.returncode == 7
        assert_one_line(again.stderr, "Read-only file system")
        disk.restart()
        done = ids(out)
        assert done == list(range(len(done)))
        assert len(done) >= 20
        assert run(*run_arguments(out, [source], 10)).returncode == 0
        assert ids(out) == list(range(100))


def test_with_min_free_disk_it_waits_for_room_and_goes_on(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    wide(source, 1000)
    with SmallDisk(tmp_path / "disk", "size=256k") as disk:
        out = disk.point / "out"
        process = start(*run_arguments(out, [source], 50, "--min-free-disk", "100kB"))
        wait_until(lambda: "--min-free-disk" in head(out).get("note", ""), process)
        held = published(out)
        assert head(out)["state"] == "waiting"
        assert 0 < held * 50 < 1000
        assert os.statvfs(disk.point).f_bavail * os.statvfs(disk.point).f_frsize >= 100_000
        disk.change("size=8m")
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert ids(out) == list(range(1000))


@pytest.mark.parametrize("full", [False, True], ids=["room for others", "no room at all"])
def test_a_run_that_waits_for_room_ends_at_a_signal_and_goes_on_later(full: bool, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    wide(source, 1000)
    with SmallDisk(tmp_path / "disk", "size=256k") as disk:
        out = disk.point / "out"
        process = start(*run_arguments(out, [source], 50, "--min-free-disk", "100kB"))
        wait_until(lambda: "--min-free-disk" in head(out).get("note", ""), process)
        if full:
            disk.fill()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        process.communicate()
        assert head(out)["state"] == "idle"
        assert not (out / ".tmp").exists()
        disk.change("size=8m")
        assert run(*run_arguments(out, [source], 50)).returncode == 0
        assert ids(out) == list(range(1000))


def head(out: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((out / "head.json").read_bytes())
    except FileNotFoundError:
        return {}
    return found
