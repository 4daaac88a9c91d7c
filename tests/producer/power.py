"""A disk that can fail: its power is cut and what was not synced is gone, it turns read-only, it hangs. Needs root."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final

import pytest

_EXT4_IOC_SHUTDOWN: Final = 0x8004587D
_NO_LOG_FLUSH: Final = 2

_SIZE: Final = 16 << 20


class Disk:
    """A context manager: an ext4 filesystem in a file, mounted.

    Args:
        folder: where to put the file and the mount point.

    Attributes:
        point: where it is mounted.
    """

    def __init__(self, folder: Path) -> None:
        self.point: Final = folder / "disk"
        self._image = folder / "image"

    def __enter__(self) -> Disk:
        self.point.mkdir()
        with self._image.open("wb") as file:
            file.truncate(_SIZE)
        try:
            made = subprocess.run(["mkfs.ext4", "-q", "-F", self._image], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("needs mkfs.ext4")
        if made.returncode:
            pytest.skip(f"cannot make a filesystem: {made.stderr.strip()}")
        mounted = self._mount()
        if mounted.returncode:
            pytest.skip(f"cannot mount it: {mounted.stderr.strip()}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        subprocess.run(["umount", str(self.point)], check=True)

    def restart(self) -> None:
        """Mounts it anew."""
        subprocess.run(["umount", str(self.point)], check=True)
        self._mount().check_returncode()

    def fail(self) -> None:
        """Has it turn read-only by itself, as after an error of its device, whatever is open."""
        subprocess.run(["mount", "-o", "remount,abort", str(self.point)], check=True)

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """It gives no answer to whoever writes, as a share whose server is gone."""
        subprocess.run(["fsfreeze", "--freeze", str(self.point)], check=True)
        try:
            yield
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", str(self.point)], check=True)

    def _mount(self) -> subprocess.CompletedProcess[str]:
        command = ["mount", "-o", "loop", str(self._image), str(self.point)]
        return subprocess.run(command, capture_output=True, text=True, check=False)


def cut_power(point: str) -> None:
    """Stops a filesystem at once: nothing that is not on the device comes onto it."""
    fd = os.open(point, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(fd, _EXT4_IOC_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
    finally:
        os.close(fd)
