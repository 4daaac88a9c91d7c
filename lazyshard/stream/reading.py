"""Reading marks on disk: hints, replaced whole by a reader and never synced; in nobody's way.

Files, in the stream's directory: `cursors/NAME.reading.json`, one for each consumer, and while it is being written
`cursors/.NAME.reading.TOKEN`, which a kill may leave behind.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets

from lazyshard.errors import FormatInvalid
from lazyshard.format import ReadingMark
from lazyshard.format.cursor import CURSORS
from lazyshard.format.reading import reading_name
from lazyshard.store.durable import publish_bytes, remove
from lazyshard.store.files import check_folder, read_file
from lazyshard.store.urls import UrlPath, stream_path

_log = logging.getLogger("lazyshard")

_told: set[str] = set()
"""Files of which this process has said that they cannot be written."""


def write_reading(directory: str | os.PathLike[str], mark: ReadingMark) -> bool:
    """Replaces a consumer's reading mark; a reader sees the old one or the new one, whole.

    Reading goes on without it, so an error of the filesystem is logged, once in each process for each file, and not
    raised. Not guaranteed: that it survives a power cut, and that of two processes which write the same consumer's
    mark at a time the higher one stays.

    Args:
        directory: the stream's directory.
        mark: the new mark.

    Returns:
        Whether it was written.
    """
    folder = stream_path(directory) / CURSORS
    target = folder / reading_name(mark.consumer)
    temporary = folder / f".{mark.consumer}.reading.{secrets.token_hex(8)}"
    try:
        if isinstance(target, UrlPath):
            # Once: a store that does not answer is not waited for to give it a hint.
            target.store.put(target.key, mark.encode(), patience_s=0)
            return True
        folder.mkdir(exist_ok=True)
        check_folder(folder)
        try:
            publish_bytes(mark.encode(), target, temporary, durable=False)
        except BaseException:
            with contextlib.suppress(OSError):
                remove(temporary)
            raise
    except OSError as error:
        if str(target) not in _told:
            _told.add(str(target))
            refused = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
            remedy = f"; let uid {os.geteuid()} write to {folder}" if refused else ""
            _log.warning(
                "%s: cannot be written (%s), so the producer is not told how far this run reads: one that goes no "
                "further ahead than its consumers need may hold back what this run waits for%s",
                target,
                error.strerror or error,
                remedy,
            )
        return False
    return True


def read_reading(directory: str | os.PathLike[str], consumer: str) -> ReadingMark | None:
    """Returns a consumer's reading mark, None if there is none that can be used: it is a hint.

    Whether it belongs to the stream that is in the directory now is told by its `stream_id`.

    Args:
        directory: the stream's directory.
        consumer: the consumer's name.

    Raises:
        ValueError: there can be no consumer of this name.
    """
    path = stream_path(directory) / CURSORS / reading_name(consumer)
    try:
        check_folder(path.parent)
        return ReadingMark.decode(read_file(path), consumer, str(path))
    except (OSError, FormatInvalid):
        return None
