"""The directory in which a run publishes: whether there can be one of this name, and whether it is still there."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from lazyshard.errors import StreamInvalid
from lazyshard_producer.configuration.source_problems import MAX_NAME_BYTES
from lazyshard_producer.errors import SettingInvalid


def check_out(out: str) -> None:
    """Checks that a directory can have this name, or has it.

    Raises:
        SettingInvalid: no file can have this name.
        StreamInvalid: something else than a directory has it.
        OSError: the filesystem failed.
    """
    try:
        mode = os.stat(out).st_mode
    except FileNotFoundError:
        if os.path.islink(out):
            raise StreamInvalid(f"{out}: expected a directory, found a link to nothing", directory=out) from None
        # The filesystem says so only once the directories above it are there, that is after some were made.
        for part in Path(out).parts:
            if len(os.fsencode(part)) > MAX_NAME_BYTES:
                raise _too_long(part) from None
        return
    except OSError as cause:
        if cause.errno == errno.ENAMETOOLONG:
            raise _too_long(out) from None
        if cause.errno in (errno.ENOTDIR, errno.ELOOP):
            raise StreamInvalid(f"{out}: cannot be a directory: {cause.strerror}", directory=out) from None
        raise
    if not stat.S_ISDIR(mode):
        raise StreamInvalid(f"{out}: expected a directory (or nothing yet), found a file", directory=out)


def is_gone(out: str) -> bool:
    """Returns whether the filesystem says that there is no such directory."""
    # No answer, or no permission, is none.
    try:
        os.stat(out)
    except OSError as cause:
        return cause.errno in (errno.ENOENT, errno.ENOTDIR)
    return False


def _too_long(name: str) -> SettingInvalid:
    return SettingInvalid(f"--out: a name of {len(name)} characters is too long: {name[:40]}...", option="--out")
