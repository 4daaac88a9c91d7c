"""Room for two files of each of very many chunks: an image that is mounted for the time, or a plain folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.harness.tools import find_tool

_FILES: Final = 2
"""Files of a chunk."""

_FILE_BYTES: Final = 1024
"""Room that a file takes in the image."""

_INODE_BYTES: Final = 256


@contextmanager
def room(place: Path, chunks: int) -> Iterator[Path]:
    """Gives a folder with room for the files, and removes it afterwards.

    An ext4 image of the right size, mounted, where that can be; then removing it takes no time. Else a folder on the
    disk of `place`, removed in the background with a low priority.

    Raises:
        OSError: there is no room for so many files.
    """
    folder = place / "million"
    folder.mkdir()
    files = int(chunks * _FILES * 1.02) + 1000
    image = place / "million.img"
    size = files * (_FILE_BYTES + _INODE_BYTES) * 5 // 4 + (64 << 20)
    if _mounted(image, folder, files, size):
        try:
            yield folder
        finally:
            subprocess.run([find_tool("umount") or "umount", "--lazy", str(folder)], check=False)
            image.unlink()
            folder.rmdir()
        return
    free = os.statvfs(place)
    if free.f_favail < files or free.f_bavail * free.f_frsize < files * 4096 * 2:
        folder.rmdir()
        raise OSError(f"{place}: {files:,} files do not fit: {free.f_favail:,} may still be made; name another --dir")
    try:
        yield folder
    finally:
        gone = folder.rename(place.parent / f".removing-{os.getpid()}-{place.name}")
        remover = subprocess.Popen(["nice", "-n", "19", "rm", "-rf", str(gone)], start_new_session=True)
        remover.returncode = 0  # It goes on alone.


def _mounted(image: Path, folder: Path, files: int, size: int) -> bool:
    mkfs = find_tool("mkfs.ext4")
    if os.geteuid() != 0 or mkfs is None:
        return False
    if shutil.disk_usage(image.parent).free < size * 5 // 4:
        return False
    with image.open("wb") as file:
        file.truncate(size)
    options = [
        "-q",
        "-F",
        "-b",
        "1024",
        "-I",
        str(_INODE_BYTES),
        "-N",
        str(files),
        "-O",
        "^has_journal,dir_index,large_dir",
    ]
    made = subprocess.run([mkfs, *options, str(image)], capture_output=True, check=False)
    mount = [find_tool("mount") or "mount", "-o", "loop,noatime", str(image), str(folder)]
    if made.returncode or subprocess.run(mount, capture_output=True, check=False).returncode:
        image.unlink()
        return False
    return True
