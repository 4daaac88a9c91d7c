"""The disk of a soak: a small filesystem of its own that can be filled up, and what the stream takes on it. As root
everything is mounted in a namespace of this process, so nobody else sees it and the system unmounts it when the last
process of the soak has ended, however that comes about. Without root there is no such disk, and it is never full."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.harness.disks import find_tool

_CLONE_NEWNS: Final = 0x00020000
SHARED_MEMORY: Final = Path("/dev/shm")
_TORN_TENSORS: Final = 2  # So many may have been left by kills between two steps of torch
_PIECE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Use:
    chunks: int  # bytes of chunks and seals, as `ls -l` shows them
    largest: int  # of these, bytes of the largest chunk with its seal
    unpublished: int  # bytes under `.tmp`
    temporary: int  # files under `.tmp`


def own_namespace(small: Path, size: int) -> str | None:
    """Mounts a disk of this size, and an empty /dev/shm, for this process and those that it will start. Returns why it
    could not be done; None where it is."""
    if os.geteuid() != 0:
        return "needs root, to mount a small disk"
    mount = find_tool("mount")
    if mount is None:
        return "needs mount(8)"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        return f"cannot have a mount namespace: {os.strerror(ctypes.get_errno())}"
    wanted = [["--make-rprivate", "/"], ["-t", "tmpfs", "-o", f"size={size}", "lazyshard-soak", str(small)]]
    if SHARED_MEMORY not in small.resolve().parents:
        wanted.append(["-t", "tmpfs", "-o", "size=1g", "lazyshard-soak", str(SHARED_MEMORY)])
    for arguments in wanted:
        done = subprocess.run([mount, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            return f"mount {' '.join(arguments)}: {done.stderr.strip()}"
    return None


def leave(small: Path) -> None:
    if os.path.ismount(small):
        subprocess.run([find_tool("umount") or "umount", "--lazy", str(small)], check=False)


def left_in_memory(small: Path) -> list[str]:
    """Returns what is left in /dev/shm, where that is one's own."""
    if not os.path.ismount(small) or SHARED_MEMORY in small.resolve().parents:
        return []
    # The folder of polls per node stays, with at most the one file of the stream: whoever waits next removes it.
    looks = SHARED_MEMORY / f"lazyshard-{os.geteuid()}"
    found = {name for name in os.listdir(SHARED_MEMORY) if not _is_semaphore(name)}
    # torch too takes the name of what it shares away at once (`shm_open`, then `shm_unlink`), and leaves it where the
    # process is killed in between. That is rare: what leaks by itself leaks with every kill.
    tensors = {name for name in found if name.startswith("torch_")}
    if len(tensors) <= _TORN_TENSORS:
        found -= tensors
    if looks.is_dir() and len(os.listdir(looks)) <= 1:
        found.discard(looks.name)
    return sorted(found)


def _is_semaphore(name: str) -> bool:
    """Returns whether a name in /dev/shm is one of those that the C library gives semaphores. Python makes each by a
    name, `sem.mp-...`, that it takes away at once, and the C library makes it by a temporary one before, `sem.` and six
    letters: they stay where the process is killed between two of these steps. Those of a DataLoader's queues are all
    that there are; lazyshard has none."""
    return name.startswith("sem.")


class Ballast:
    def __init__(self, disk: Path) -> None:
        self._path = disk / "ballast"

    def fill(self) -> None:
        """Takes what is free now, to the last byte; again and again, as long as the disk is to be full."""
        with self._path.open("ab", buffering=0) as file:
            piece = _PIECE
            while piece:
                try:
                    if not file.write(bytes(piece)):
                        return
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    piece //= 4

    def drop(self) -> None:
        self._path.unlink(missing_ok=True)


def used_bytes(disk: Path) -> int:
    """Returns what is taken on a disk, what is deleted but still open included."""
    found = os.statvfs(disk)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def measure(stream: Path) -> Use:
    """Returns what a stream takes; never more than it did take at some moment while this looked. A file counts if it
    was there at both of two looks: so all that count were there between the two."""
    first, second = _chunk_files(stream), _chunk_files(stream)
    sizes = {name: size for name, size in first.items() if name in second}
    chunks: dict[str, int] = {}
    for name, size in sizes.items():
        data = name.removesuffix(".completed")
        chunks[data] = chunks.get(data, 0) + size
    unpublished = []
    for folder, _, names in os.walk(stream / ".tmp"):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                unpublished.append(os.stat(os.path.join(folder, name)).st_size)
    return Use(sum(sizes.values()), max(chunks.values(), default=0), sum(unpublished), len(unpublished))


def _chunk_files(stream: Path) -> dict[str, int]:
    sizes = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(stream) as entries:
        for entry in entries:
            if entry.name.startswith("chunk_"):
                with contextlib.suppress(FileNotFoundError):
                    sizes[entry.name] = entry.stat().st_size
    return sizes
