"""A filesystem with little room or few files. Needs root."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import TracebackType
from typing import Final

import pytest


class SmallDisk:
    """A context manager: a tmpfs, mounted, and unmounted whatever happens.

    Args:
        point: where to mount it; made.
        options: as of mount(8): ``size=256k``, ``nr_inodes=20``.
    """

    def __init__(self, point: Path, options: str) -> None:
        self.point: Final = point
        self._options = options

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
        subprocess.run(["umount", "--lazy", str(self.point)], check=True)

    def change(self, options: str) -> None:
        """Mounts it with other options."""
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.point)], check=True)
