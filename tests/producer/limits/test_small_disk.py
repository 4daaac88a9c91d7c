"""A filesystem that is full at any write, or has no inode: one line, and on when there is room."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from lazyshard_producer.cli import main
from tests.harness.disks import SmallDisk, disk_fixture
from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import assert_one_line, chunk_files, head, ids, published, run, run_arguments
from tests.harness.scenes.rows import made
from tests.harness.scenes.sources import KINDS
from tests.harness.scenes.streams import Stream
from tests.producer.commands import Running

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small filesystem")]
MAKES: Final = ("--on-bad-row", "quarantine", "--transform", "tests.harness.scenes.rows:thirds")
disk = disk_fixture("size=256k")


def test_disk_full(disk: SmallDisk, tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", disk.point / "out"
    source.write_bytes(b"".join(b'{"id":%d,"text":"%s"}\n' % (number, b"x" * 900) for number in range(1000)))
    arguments = run_arguments(out, [source], 50, "--no-progress")
    done: list[int] = []
    for _ in range(2):
        failed = run(*arguments)
        assert failed.returncode == 7
        assert_one_line(failed.stderr, "No space left on device")
        done = done or ids(out)
        assert ids(out) == done == list(range(len(done)))
        assert (head(out)["state"], head(out)["chunks"] * 50) == ("failed", len(done))
        assert "No space left on device" in head(out)["note"]
        assert len(chunk_files(out)) * 50 == len(done) > 0

    disk.change("size=8m")
    assert run(*arguments).returncode == 0
    assert ids(out) == list(range(1000))


# A page or an inode more each time: what finds no room is another one each time.
@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("followed while it grows", lambda step: f"size={24 + 4 * step}k"),
        ("plain", lambda step: f"size=8m,nr_inodes={3 + step}"),
    ],
    ids=["a followed directory", "no inode"],
)
def test_a_disk_that_is_full_at_any_write(kind: str, size: Callable[[int], str], tmp_path: Path) -> None:
    source, failures = KINDS[kind](tmp_path, 0), 0
    (tmp_path / "nursery").mkdir()
    # The nursery must not outlive the disk.
    with SmallDisk(tmp_path / "disk", size(0)) as disk, Commands(tmp_path / "nursery") as nursery:
        stream = Stream(nursery, disk.point / "out", [source], MAKES, 14)
        while True:
            status, err = stream.run()
            if status == 0:
                break
            assert status == 7, err
            assert_one_line(err, "No space left on device", str(stream.out))
            stream.check({})
            failures += 1
            disk.change(size(failures))
        assert failures > 10
        assert sorted(map(str, stream.rows())) == sorted(map(str, made(source.rows, transform=True, where=False)))
        lines = [(entry["source"], entry["line"]) for entry in stream.refused()]
        assert len(set(lines)) == len(lines) > 0
        stream.check_ended()


@pytest.mark.full
@pytest.mark.parametrize("end", ["room", "signal where no room is left at all"])
def test_with_min_free_disk_it_waits_for_room_and_goes_on(end: str, nursery: Commands, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b"".join(b'{"id":%d,"text":"%s"}\n' % (number, b"x" * 500) for number in range(1000)))
    out = tmp_path / "disk" / "out"
    arguments = run_arguments(out, [source], 50, "--min-free-disk", "100kB")
    with SmallDisk(tmp_path / "disk", "size=256k") as disk, Running(nursery, *arguments) as run:
        run.wait_until(lambda: "--min-free-disk" in head(out).get("note", ""))
        assert head(out)["state"] == "waiting"
        assert 0 < published(out) * 50 < 1000
        assert os.statvfs(disk.point).f_bavail * os.statvfs(disk.point).f_frsize >= 100_000
        if end == "room":
            disk.change("size=8m")
            status, err = run.end()
        else:
            disk.fill()
            status, err = run.end(signal.SIGTERM)
        assert status == 0, err
        if end != "room":
            assert head(out)["state"] == "idle"
            assert not (out / ".tmp").exists()
            disk.change("size=8m")
            assert main(run_arguments(out, [source], 50)) == 0
        assert ids(out) == list(range(1000))
