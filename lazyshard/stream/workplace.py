"""A producer's own directory for what is not published yet, `.tmp/EPOCH.TOKEN/`, and the end of those of others.

Whatever a producer makes appear in a stream, or takes out of it, it renames from or into its own directory. So one that
takes a stream over fences all before it by destroying their directories, and need not know whether they are alive: a
rename that has not happened by then never will. No look before the rename could give that, since a process may be
stopped between any two calls.

What that takes of a filesystem: a rename is one step; a directory that was removed is gone for whoever has used it; and
who makes a directory and then lists the one that holds it sees all that were made before. The last decides between two
that start at once: at least one of them sees the other, and of the two the lower one gives up.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lazyshard.store.durable import clear_folder, remove, rename
from lazyshard.store.files import check_folder

REMEMBERED_S: Final = 60.0
"""How long network filesystems may remember what another machine has removed; common settings are 3 to 60 s."""

_PAUSE_S: Final = 0.2

_NAME: Final = re.compile(r"([0-9]{1,19})\.([0-9a-f]{16})(\.gone)?")
_GONE: Final = ".gone"
"""Added to the name of a directory that is being destroyed: from there on its owner does not find it."""

_OTHERS: Final = (errno.ENOTEMPTY, errno.EEXIST)
"""What filesystems say of a directory in which something is left."""


@dataclass(frozen=True, slots=True)
class Workplace:
    """A producer's own directory.

    Attributes:
        epoch: the producer's, see `lazyshard.format.owner`.
        token: its token; makes the name one that is never given again.
        directory: the directory.
    """

    epoch: int
    token: str
    directory: Path

    def path(self, name: str) -> Path:
        """Returns under which name to write the file that is to be called `name`."""
        return self.directory / name

    def is_gone(self) -> bool:
        """Whether the directory is not there any more. Asks the server, not what this machine remembers."""
        try:
            os.close(os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW))
        except OSError as cause:
            return cause.errno in (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)
        return False

    def take_out(self, path: Path) -> None:
        """Removes a file of the stream if it is there, as long as nobody has taken the stream over.

        Raises:
            FileNotFoundError: somebody has.
            OSError: the filesystem refused.
        """
        mine = self.path(path.name)
        try:
            rename(path, mine)
        except FileNotFoundError:
            if os.path.lexists(path):
                raise
        else:
            remove(mine)

    def remove(self) -> None:
        """Removes the directory with what is in it, and `.tmp` if nothing is left there; as far as it can."""
        with contextlib.suppress(OSError):
            clear_folder(self.directory)
            os.rmdir(self.directory)
        with contextlib.suppress(OSError):
            os.rmdir(self.directory.parent)


def make_workplace(temporary: Path, least: int, token: str) -> Workplace:
    """Makes a directory of a higher epoch than all that are there.

    A network filesystem may remember `.tmp` although a producer elsewhere has removed it: then it can be neither made
    nor used until that is forgotten, which is waited for.

    Args:
        temporary: the stream's `.tmp`.
        least: the epoch is not to be lower.
        token: chosen at random.

    Raises:
        FileRefused: `.tmp` is a link; what is left in it gets cleared, so it must be the stream's own.
        OSError: the filesystem refused.
    """
    started = time.monotonic()
    while True:
        # Not `exist_ok`, which refuses one that another producer removes at this moment.
        with contextlib.suppress(FileExistsError):
            temporary.mkdir()
        check_folder(temporary)
        try:
            epoch = max(least, *(found + 1 for found, _ in list_workplaces(temporary)), 1)
            directory = temporary / f"{epoch}.{token}"
            with contextlib.suppress(FileExistsError):  # the answer to a request that was sent twice
                directory.mkdir()
        except FileNotFoundError:
            if time.monotonic() - started > REMEMBERED_S:
                raise
            time.sleep(_PAUSE_S)
        else:
            return Workplace(epoch, token, directory)


def list_workplaces(temporary: Path) -> dict[tuple[int, str], str]:
    """Returns the names of all producers' directories, by epoch and token."""
    found = ((name, _NAME.fullmatch(name)) for name in os.listdir(temporary))
    return {(int(parsed[1]), parsed[2]): name for name, parsed in found if parsed is not None}


def is_workplace(name: str) -> bool:
    """Whether a name in `.tmp` is one of a producer's directory."""
    return _NAME.fullmatch(name) is not None


def destroy(directory: Path) -> None:
    """Removes another producer's directory for good, if it is there, whatever that one does meanwhile.

    Raises:
        OSError: the filesystem refused, or files appear in it for a minute.
    """
    gone = directory if directory.name.endswith(_GONE) else directory.with_name(directory.name + _GONE)
    if gone != directory:
        with contextlib.suppress(FileNotFoundError):
            os.rename(directory, gone)
    started = time.monotonic()
    while True:
        try:
            left = clear_folder(gone)
            os.rmdir(gone)
        except FileNotFoundError:
            return
        except OSError as cause:
            # A client of NFS that works by handles may still find its way in, until the directory itself is gone.
            if cause.errno not in _OTHERS or time.monotonic() - started > REMEMBERED_S:
                raise
            if left:
                # Open in a process of this machine, and kept by NFS for that: by this name it does not find them.
                return
        else:
            return
