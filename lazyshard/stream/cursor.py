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
from typing import Final

from lazyshard.errors import StoreUnavailable, StreamMissing
from lazyshard.format.cursor import CURSORS, Cursor, cursor_name
from lazyshard.store.durable import create, remove, rename, sync, sync_directory, write_all
from lazyshard.store.files import check_folder, read_replaced_file
from lazyshard.store.urls import UrlPath, stream_path

_TRIES: Final = 5
"""Who has put a cursor beside ours is seen at the next try, and either ends this or was late itself."""


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
    path = stream_path(directory)
    if isinstance(path, UrlPath):
        check()
        target = path / CURSORS / cursor_name(cursor.consumer)
        target.store.put(target.key, cursor.encode())
        return
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


def replace_object(directory: UrlPath, cursor: Cursor, check: Callable[[bytes | None], None]) -> None:
    """Replaces a consumer's cursor in an object store, if it may; returns when the store has the new one.

    Args:
        directory: the stream's URL.
        cursor: the new cursor.
        check: is called with the bytes of the one that is there, None if there is none; what it raises leaves that. It
            is called again if another one has come between.

    Raises:
        StoreRefused, StoreUnavailable: the store did not take it; the old cursor may still be the one that counts.
    """
    target = directory / CURSORS / cursor_name(cursor.consumer)
    assert isinstance(target, UrlPath)
    store, key, data = target.store, target.key, cursor.encode()
    for _ in range(_TRIES):
        try:
            found, tag = store.get_tagged(key)
        except FileNotFoundError:
            check(None)
            done = store.put_new(key, data)
        else:
            check(found)
            done = store.put_matching(key, data, tag)
        if done:
            return
    raise StoreUnavailable(
        f"{target}: it was replaced by somebody else at each of {_TRIES} tries to write it; see who that is",
        url=str(target),
    )


def make_folder(directory: str | os.PathLike[str]) -> Path:
    """Returns the folder of a stream's cursors, made if it was not there; its name is not durable yet.

    Raises:
        StreamMissing: the stream has no directory.
        FileRefused: the folder is a link.
        OSError: the filesystem refused.
    """
    folder = stream_path(directory) / CURSORS
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError as cause:
        stream = folder.parent
        raise StreamMissing(
            f"{stream}: no such directory, so no cursor can be written there", directory=str(stream)
        ) from cause
    return check_folder(folder)


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
    path = check_folder(stream_path(directory) / CURSORS) / cursor_name(consumer)
    try:
        return read_replaced_file(path, lambda data: Cursor.decode(data, consumer, str(path)))
    except FileNotFoundError:
        return None
