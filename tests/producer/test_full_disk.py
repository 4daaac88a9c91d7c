"""A filesystem with no room: one line, nothing half published, and it goes on when there is room again."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.producer.commands import assert_one_line, chunk_files, ids, rows, run, run_arguments

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small filesystem"),
]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    point = tmp_path / "mount"
    point.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "lazyshard-test", point],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", point], check=True)


def remount(point: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", point], check=True)


def wide_rows(count: int) -> bytes:
    return b"".join(b'{"id":%d,"text":"%s"}\n' % (number, b"x" * 900) for number in range(count))


def test_disk_full(mount: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", mount / "out"
    source.write_bytes(wide_rows(1000))
    arguments = run_arguments(out, [source], 50)

    done = run(*arguments)
    assert done.returncode == 7
    assert_one_line(done.stderr, "No space left on device", "samples are published and safe")
    before = ids(out)
    assert before == list(range(len(before)))
    assert before
    assert len(before) % 50 == 0
    assert len(chunk_files(out)) == len(before) // 50

    again = run(*arguments)
    assert again.returncode == 7
    assert_one_line(again.stderr, "No space left on device")
    assert ids(out) == before

    remount(mount, "size=8m")
    assert run(*arguments).returncode == 0
    assert ids(out) == list(range(1000))


def test_no_room_for_even_the_directory(mount: Path, tmp_path: Path) -> None:
    (mount / "filler").write_bytes(b"")
    with (mount / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))
    source = tmp_path / "a.jsonl"
    source.write_bytes(rows(0, 10))
    done = run(*run_arguments(mount / "out", [source]))
    assert done.returncode == 7
    assert_one_line(done.stderr, "No space left on device")


def test_read_only(mount: Path, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(rows(0, 100))
    remount(mount, "ro")
    done = run(*run_arguments(mount / "out", [source]))
    assert done.returncode == 7
    assert_one_line(done.stderr, "Read-only file system", str(mount / "out"))
