"""Where a node keeps copies of the chunks of object stores, and how many bytes of them.

The settings are variables of the environment, since one cache serves all processes of a node, whatever made them:

- ``LAZYSHARD_OBJECTS_CACHE``: the folder, on a disk of this machine; default ``/var/tmp/lazyshard-objects-UID``
- ``LAZYSHARD_OBJECTS_CACHE_BYTES``: what all copies in it take at the most; default `CACHE_BYTES`
- ``LAZYSHARD_OBJECTS_AHEAD``: how many chunks each process has fetched before it comes to them; default `AHEAD`
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

import xxhash

from lazyshard.errors import FileRefused, StoreRefused

FOLDER_VARIABLE: Final = "LAZYSHARD_OBJECTS_CACHE"
BYTES_VARIABLE: Final = "LAZYSHARD_OBJECTS_CACHE_BYTES"
AHEAD_VARIABLE: Final = "LAZYSHARD_OBJECTS_AHEAD"

CACHE_BYTES: Final = 16 << 30
"""What a machine can spare that trains, and room for some chunks of each of its ranks."""

AHEAD: Final = 2
"""One chunk that is there when the one before it is done with, and one that may take longer than usual."""

_FOLDER: Final = "/var/tmp/lazyshard-objects-{uid}"  # noqa: S108
"""On a disk nearly everywhere, where /tmp is often memory. A fixed place, since processes of one job may differ in
TMPDIR; who may write there is checked below."""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def cache_folder() -> Path:
    """Returns the folder of all copies, made if it was not there.

    Raises:
        FileRefused: it is no folder; or another user's, or others may write to it, who could put other rows in the
            place of ours.
        OSError: it cannot be made.
    """
    uid = os.geteuid()
    folder = Path(os.environ.get(FOLDER_VARIABLE) or _FOLDER.format(uid=uid)).absolute()
    if not folder.is_dir():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as cause:
            raise FileRefused(
                f"{folder}: expected a folder for the copies of chunks, found a file in its place; name another one "
                f"with {FOLDER_VARIABLE}",
                file=str(folder),
                kind="a file",
            ) from cause
    found = folder.stat()
    if found.st_uid != uid or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        kind = f"one of uid {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}"
        raise FileRefused(
            f"{folder}: expected a folder that only uid {uid} may write to, found {kind}; name another one for the "
            f"copies of chunks with {FOLDER_VARIABLE}",
            file=str(folder),
            kind=kind,
        )
    return folder


def cache_bytes() -> int:
    """Returns how many bytes all copies together may take. Raises StoreRefused: the variable says no such number."""
    return _number(BYTES_VARIABLE, CACHE_BYTES)


def chunks_ahead() -> int:
    """Returns how many chunks to fetch ahead. Raises StoreRefused: the variable says no such number."""
    return _number(AHEAD_VARIABLE, AHEAD)


def folder_of(url: str, stream_id: str) -> Path:
    """Returns the folder for the copies of one stream; it may not be there.

    A machine that was started again has others: nothing in it was ever synced, so that after a power cut the names may
    be there without the bytes.
    """
    try:
        boot = _BOOT_ID.read_text(encoding="ascii")
    except OSError:
        boot = ""
    return cache_folder() / xxhash.xxh3_128_hexdigest(f"1 {boot} {url} {stream_id}".encode())


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable) or str(default)
    if not text.isdecimal():
        raise StoreRefused(f"{variable} is a number from 0 on, got {text!r}")
    return int(text)
