"""Disks: one whose power can be cut, that turns read-only or hangs; a small one; one in memory. Needs root."""

import contextlib
import ctypes
import fcntl
import os
import secrets
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

import pytest

_ROOM: Final = 512 << 20  # Bytes that images and what is beside them may take of memory


@contextmanager
def fast_folder(fallback: Path) -> Iterator[Path]:
    """A folder in memory if there is room, where syncing costs nothing; kills and power cuts show the same there."""
    memory = Path("/dev/shm")
    roomy = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > _ROOM
    with tempfile.TemporaryDirectory(dir=memory if roomy else fallback) as folder:
        yield Path(folder)


def find_tool(name: str) -> str | None:
    """Returns the path of a program; the folders of the administrator's are looked through as well."""
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin")))


def tool(name: str) -> str:
    found = find_tool(name)
    if found is None:
        pytest.skip(f"needs {name}, which is not on this machine")
    return found


Filesystem = Literal["ext4", "xfs"]
FILESYSTEMS: Final[tuple[Filesystem, ...]] = ("ext4", "xfs")
_SHUTDOWN: Final = 0x8004587D  # EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN are one number
_LOG_FLUSH: Final = 1
_NO_LOG_FLUSH: Final = 2
_SIZES: Final[dict[Filesystem, int]] = {"ext4": 16 << 20, "xfs": 320 << 20}  # mkfs.xfs makes nothing below 300 MB


class Disk:  # A filesystem in a file of this folder, mounted; a test is skipped where that cannot be made
    def __init__(self, folder: Path, filesystem: Filesystem = "ext4") -> None:
        self.point: Final = folder / "disk"  # where it is mounted
        self.filesystem: Final = filesystem  # its kind
        self._image = folder / "image"
        self._options = "loop,nouuid" if filesystem == "xfs" else "loop"  # An image may be a copy of another one

    def __enter__(self) -> "Disk":
        make, self._mount_tool, self._umount_tool = tool(f"mkfs.{self.filesystem}"), tool("mount"), tool("umount")
        if os.geteuid():
            pytest.skip("needs root, to mount a filesystem")
        self.point.mkdir(parents=True)
        with self._image.open("wb") as file:
            file.truncate(_SIZES[self.filesystem])
        force = "-F" if self.filesystem == "ext4" else "-f"  # Onto a file that is no block device, without being asked
        made = subprocess.run([make, "-q", force, self._image], capture_output=True, text=True, check=False)
        if made.returncode:
            pytest.skip(f"cannot make a filesystem: {made.stderr.strip()}")
        mounted = self._mount()
        if mounted.returncode:
            pytest.skip(f"cannot mount {self.filesystem}: {mounted.stderr.strip()}")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        subprocess.run([self._umount_tool, *(["-l"] if kind else []), str(self.point)], check=True)
        self._image.unlink()

    def cut(self, *, flush: bool = False) -> None:
        """Cuts its power and mounts it anew; see `cut_power`. Nobody may have anything open on it."""
        cut_power(str(self.point), flush=flush)
        self.restart()

    def restart(self) -> None:
        """Mounts it anew: the journal is replayed."""
        subprocess.run([self._umount_tool, str(self.point)], check=True)
        if self._is_held():
            self._replace()
        self._mount().check_returncode()

    def sync(self) -> None:
        fd = os.open(self.point, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if ctypes.CDLL(None, use_errno=True).syncfs(fd):  # Not `os.sync`: there are other disks
                raise OSError(ctypes.get_errno(), "syncfs failed")
        finally:
            os.close(fd)

    def fail(self) -> None:
        """Has it turn read-only by itself, as after an error of its device, whatever is open. Only ext4."""
        subprocess.run([self._mount_tool, "-o", "remount,abort", str(self.point)], check=True)

    @contextmanager
    def hanging(self) -> Iterator[None]:
        freeze = tool("fsfreeze")
        subprocess.run([freeze, "--freeze", str(self.point)], check=True)
        try:
            yield
        finally:
            subprocess.run([freeze, "--unfreeze", str(self.point)], check=True)

    def _is_held(self) -> bool:
        """Whether it is mounted in a namespace made meanwhile: mounted again it would be the same one."""
        for path in Path("/sys/block").glob("loop*/loop/backing_file"):
            with contextlib.suppress(OSError):
                if path.read_text().strip() == str(self._image):
                    return True
        return False

    def _replace(self) -> None:
        old, self._image = self._image, self._image.with_name(f"image-{secrets.token_hex(4)}")
        subprocess.run([tool("cp"), "--sparse=always", str(old), str(self._image)], check=True)
        old.unlink()

    def _mount(self) -> subprocess.CompletedProcess[str]:
        command = [self._mount_tool, "-t", self.filesystem, "-o", self._options, str(self._image), str(self.point)]
        return subprocess.run(command, capture_output=True, text=True, check=False)


def cut_power(point: str, *, flush: bool = False) -> None:
    """What is not on the device never comes onto it. `flush`: but the journal does, and with it the names."""
    fd = os.open(point, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _LOG_FLUSH if flush else _NO_LOG_FLUSH))
    finally:
        os.close(fd)


class SmallDisk:  # A tmpfs, mounted. `all_closed`: whether it is a fault if a file of it is still open at the end.
    def __init__(self, point: Path, options: str, *, all_closed: bool = False) -> None:
        self.point: Final = point
        self._options = options
        self._all_closed = all_closed

    def __enter__(self) -> "SmallDisk":
        self.point.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", self._options, "lazyshard-test", str(self.point)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
        return self

    def __exit__(self, *_: object) -> None:
        if self._all_closed:
            done = subprocess.run(["umount", str(self.point)], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return
        subprocess.run(["umount", "--lazy", str(self.point)], check=True)  # It would be in the way of a deletion
        if self._all_closed:
            pytest.fail(f"files of a small disk stayed open: {done.stderr.strip()}")

    def fill(self) -> None:
        with (self.point / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(4096))

    def change(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.point)], check=True)


def disk_fixture(options: str) -> Callable[..., Iterator[SmallDisk]]:
    @pytest.fixture
    def disk(tmp_path: Path) -> Iterator[SmallDisk]:
        with SmallDisk(tmp_path / "mount", options, all_closed=True) as found:
            yield found

    return disk
