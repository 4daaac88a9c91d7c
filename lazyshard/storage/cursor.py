"""Cursors on disk: written durably and whole by a consumer, read again by its next start and by producers.

Files, in the stream's directory: `cursors/NAME.json`, one for each consumer, and while it is being written
`cursors/.NAME.TOKEN`, which a kill may leave behind. Names with a leading dot are nobody's cursor. Which run may write
is the affair of `cursor_owner`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from lazyshard.errors import StreamMissing
from lazyshard.format.cursor import CURSORS, Cursor, cursor_name
from lazyshard.storage.durable import create, remove, rename, sync, sync_directory, write_all
from lazyshard.storage.files import read_file


def write_cursor(
    directory: str | os.PathLike[str], cursor: Cursor, *, check: Callable[[], object] = lambda: None
) -> None:
    """Replaces a consumer's cursor; returns when the new one is on the device.

    Whenever this process is killed or power is lost, the old cursor or the new one is there, whole. Not guaranteed:
    that of two processes which write the same consumer's cursor at a time the later one wins; see `CursorOwner`.

    Args:
        directory: the stream's directory.
        cursor: the new cursor. That it stands for a checkpoint which is on the device already is the caller's affair.
        check: is called when only the rename is left to do; what it raises leaves the old cursor.

    Raises:
        StreamMissing: there is no such directory.
        OSError: the filesystem refused; the old cursor may still be the one that counts.
    """
    folder = make_folder(directory)
    # Always: who has made the folder may have been killed before its name was durable.
    sync_directory(folder.parent)
    temporary = folder / f".{cursor.consumer}.{secrets.token_hex(8)}"
    try:
        fd = create(temporary)
        try:
            write_all(fd, cursor.encode())
            sync(fd)
        finally:
            os.close(fd)
        check()
        rename(temporary, folder / cursor_name(cursor.consumer))
        sync_directory(folder)
    except BaseException:
        with contextlib.suppress(OSError):
            remove(temporary)
        raise


def make_folder(directory: str | os.PathLike[str]) -> Path:
    """Returns the folder of a stream's cursors, made if it was not there; its name is not durable yet.

    Raises:
        StreamMissing: the stream has no directory.
        OSError: the filesystem refused.
    """
    folder = Path(directory) / CURSORS
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError as cause:
        stream = folder.parent
        raise StreamMissing(
            f"{stream}: no such directory, so no cursor can be written there", directory=str(stream)
        ) from cause
    return folder


def read_cursor(directory: str | os.PathLike[str], consumer: str) -> Cursor | None:
    """Returns a consumer's cursor, None if it has not written one.

    Whether it belongs to the stream that is in the directory now is told by its `stream_id`.

    Args:
        directory: the stream's directory.
        consumer: the consumer's name.

    Raises:
        CursorInvalid, VersionUnsupported: the file cannot be used.
        FileRefused, FileUnreadable, OSError: it cannot be read.
        ValueError: there can be no consumer of this name.
    """
    path = Path(directory) / CURSORS / cursor_name(consumer)
    try:
        data = read_file(path)
    except FileNotFoundError:
        return None
    return Cursor.decode(data, consumer, str(path))
