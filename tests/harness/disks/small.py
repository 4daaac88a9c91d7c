"""A filesystem with little room or few files. Needs root."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Final

import pytest


class SmallDisk:
    """A context manager: a tmpfs, mounted, and unmounted whatever happens.

    Args:
        point: where to mount it; made.
        options: as of mount(8): ``size=256k``, ``nr_inodes=20``.
        all_closed: whether it is a fault if somebody still has a file of it open at the end.
    """

    def __init__(self, point: Path, options: str, *, all_closed: bool = False) -> None:
        self.point: Final = point
        self._options = options
        self._all_closed = all_closed

    def __enter__(self) -> SmallDisk:
        self.point.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", self._options, "lazyshard-test", str(self.point)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._all_closed:
            done = subprocess.run(["umount", str(self.point)], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return
        # A mount that stayed would be in the way of whoever deletes the test's folder, days later perhaps.
        subprocess.run(["umount", "--lazy", str(self.point)], check=True)
        if self._all_closed:
            pytest.fail(f"files of a small disk stayed open: {done.stderr.strip()}")

    def fill(self) -> None:
        """Leaves no room at all."""
        with (self.point / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(4096))

    def change(self, options: str) -> None:
        """Mounts it with other options."""
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.point)], check=True)


def disk_fixture(options: str) -> Callable[..., Iterator[SmallDisk]]:
    """Returns a fixture: a small disk, of which nothing may be open when its test is over."""

    @pytest.fixture
    def disk(tmp_path: Path) -> Iterator[SmallDisk]:
        with SmallDisk(tmp_path / "mount", options, all_closed=True) as found:
            yield found

    return disk
