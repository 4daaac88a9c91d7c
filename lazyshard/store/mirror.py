"""Copies of the chunks of a stream in an object store, on this node: fetched when they are asked for, and ahead.

One cache serves all processes of a node. Of those that want the same chunk at a time one fetches it, under a temporary
name that is locked while it does; the others wait for it, as long as it gets on. It gets its name once it is whole and
its rows are those that its seal tells; by then its seal is there, and the side file of its arrays if it has one. See
`mirror_room` for the files, and for what goes when there is no room.

Killed at any moment, a process leaves at the most a part that nobody has locked, which the next one removes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lazyshard.errors import SealInvalid
from lazyshard.format import Seal, SealedArrays
from lazyshard.format.names import arrays_name, chunk_name, seal_name
from lazyshard.store.durable import create, remove, write_all
from lazyshard.store.files import OpenFile, read_file
from lazyshard.store.mirror_fetching import Downloads
from lazyshard.store.mirror_place import BYTES_VARIABLE, FOLDER_VARIABLE, cache_bytes, folder_of
from lazyshard.store.mirror_room import PART_SUFFIX, drop, is_at, lock, note_use, part_of, reserve
from lazyshard.store.urls import UrlPath

_LOOK_S: Final = 0.02
"""How often to look whether another process has fetched what this one waits for."""

_STALLED_S: Final = 60.0
"""One that fetches and gets no byte for so long has failed many times, or was stopped, and is not waited for."""

_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW

_Copy = tuple[Seal, int, int | None]
"""Of a chunk: its seal, and descriptors of its data file and of its side file, if it has one."""

_fetching: set[int] = set()
"""Descriptors of the parts that threads of this process are fetching."""


def _close_parts() -> None:
    """Lets go of what a parent's threads are fetching, so that a fork does not keep it locked."""
    while _fetching:
        with contextlib.suppress(OSError):
            os.close(_fetching.pop())


os.register_at_fork(after_in_child=_close_parts)


class Mirror:
    """The copies of one stream.

    Args:
        directory: the stream's URL.
        stream_id: its identity.
        check_identity: raises if another stream is at the URL now.

    Attributes:
        folder: where they lie; made if it was not there.
    """

    def __init__(self, directory: UrlPath, stream_id: str, check_identity: Callable[[], None]) -> None:
        self._directory = directory
        self._check_identity = check_identity
        self._most = cache_bytes()
        self.folder = folder_of(str(directory), stream_id)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._downloads = Downloads(directory)

    @property
    def fetched(self) -> int:
        """Chunks that this process has fetched."""
        return self._downloads.fetched

    def open(self, chunk: int) -> tuple[Seal, OpenFile, OpenFile | None]:
        """Opens a chunk's copy, fetched if it is not there yet: its data file, and its side file if it has one.

        A data object that is not what its seal tells is fetched twice, and then opened as it is, for this process
        alone: what is wrong with it is found where its rows are read.

        Raises:
            FileNotFoundError: an object of it is not there (yet); its `filename` is the URL.
            SealInvalid: the seal is.
            StreamMismatch: another stream is at the URL now.
            StoreRefused, StoreUnavailable: the store does not give it.
            OSError: the copy cannot be written here.
        """
        found = self._get(chunk, ahead=False)
        assert found is not None
        seal, fd, side = found
        rows = OpenFile(fd, self._directory / chunk_name(chunk), os.fstat(fd).st_size)
        if side is None:
            return seal, rows, None
        return seal, rows, OpenFile(side, self._directory / arrays_name(chunk), os.fstat(side).st_size)

    def fetch(self, chunk: int) -> None:
        """Sees to it that a copy is there when it is asked for, unless there is no room. Raises as `open` does."""
        if (self.folder / chunk_name(chunk)).exists():
            return
        _close(self._get(chunk, ahead=True))

    def drop(self, chunk: int) -> None:
        """Removes a copy that is not what its seal tells; who has it open keeps it."""
        remove(self.folder / chunk_name(chunk))

    def _get(self, chunk: int, *, ahead: bool) -> _Copy | None:
        part = part_of(self.folder / chunk_name(chunk))
        moved_at, progress = time.monotonic(), -1
        while True:
            try:
                found = self._opened(chunk, read=not ahead)
            except BlockingIOError:
                # Its process is about to read it, or somebody is removing it: a matter of a moment.
                time.sleep(_LOOK_S)
                continue
            if found is not None:
                return found
            fd = self._part(part)
            _fetching.add(fd)
            keep = False
            try:
                if lock(fd, shared=False):
                    if not is_at(fd, part):
                        # Fetched and renamed, or removed, since it was opened.
                        continue
                    # Between the look and the lock another one may have come to its end.
                    if (self.folder / chunk_name(chunk)).exists():
                        remove(part)
                        continue
                    copy = self._fill(fd, part, chunk, ahead=ahead)
                    keep = copy is not None
                    return copy
                now, at = time.monotonic(), os.fstat(fd).st_mtime_ns
                if at != progress:
                    moved_at, progress = now, at
                if ahead:
                    return None
                if now - moved_at > _STALLED_S:
                    return self._alone(chunk)
            finally:
                _fetching.discard(fd)
                if not keep:
                    os.close(fd)
            time.sleep(_LOOK_S)

    def _part(self, part: Path) -> int:
        try:
            return os.open(part, _FLAGS | os.O_CREAT, 0o600)
        except FileNotFoundError:
            # Whoever removed the last copy has removed the folder.
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return os.open(part, _FLAGS | os.O_CREAT, 0o600)

    def _opened(self, chunk: int, *, read: bool) -> _Copy | None:
        """Opens a copy that is there, None if there is none that is whole. Raises BlockingIOError: it is locked."""
        data, sealed = self.folder / chunk_name(chunk), self.folder / seal_name(chunk)
        try:
            fd = os.open(data, _FLAGS)
        except FileNotFoundError:
            return None
        try:
            if not lock(fd, shared=True):
                raise BlockingIOError(errno.EAGAIN, "is locked", str(data))
            if not is_at(fd, data):
                return None
            with contextlib.suppress(FileNotFoundError, SealInvalid):
                seal = Seal.decode(read_file(sealed), chunk, str(self._directory / sealed.name))
                side = self._opened_side(seal)
                if side is not None and not is_at(fd, data):
                    # Found to be damaged by another process, and fetched again since: the side file may be the new one.
                    _close_side(side)
                    return None
                if os.fstat(fd).st_size == seal.size:
                    if read:
                        note_use(fd, read=True)
                    copy, fd = fd, -1
                    return seal, copy, side
                _close_side(side)
        finally:
            if fd >= 0:
                os.close(fd)
        # Nobody of ours has left it so; another program has been here.
        drop(data)
        return None

    def _opened_side(self, seal: Seal) -> int | None:
        """Opens the copy of a side file. Raises FileNotFoundError: it is not there, or of another size than sealed."""
        if seal.arrays is None:
            return None
        path = self.folder / arrays_name(seal.chunk)
        side = os.open(path, _FLAGS)
        if os.fstat(side).st_size == seal.arrays.size:
            return side
        os.close(side)
        raise FileNotFoundError(errno.ENOENT, "is of another size", str(path))

    def _fill(self, fd: int, part: Path, chunk: int, *, ahead: bool) -> _Copy | None:
        """Fetches a chunk into its part, which is locked, and gives it its name; None if there is no room for it."""
        side: int | None = None
        try:
            seal, sealed = self._downloads.seal(chunk)
            wanted: list[tuple[int, str, Seal | SealedArrays]] = [(fd, chunk_name(chunk), seal)]
            if seal.arrays is not None:
                # In place, as the seal: nobody looks at them before the data has its name.
                side = _make(self.folder / arrays_name(chunk))
                wanted.append((side, arrays_name(chunk), seal.arrays))
            others = [self._downloads.is_other_size(*one) for one in wanted]
            if any(others):
                self._drop_part(part, chunk, side)
                for one, other in zip(wanted, others, strict=True):
                    if not other:
                        self._downloads.download(*one)
                return seal, fd, side
            size = sum(one.size for _, _, one in wanted)
            if not reserve(self.folder.parent, fd, size + len(sealed), self._most, ahead=ahead):
                self._drop_part(part, chunk, side)
                _close_side(side)
                return None
            if side is not None and seal.arrays is not None:
                # Each file has what it takes from here on, so that nothing is counted twice.
                os.ftruncate(side, seal.arrays.size)
                os.ftruncate(fd, seal.size + len(sealed))
            whole = [self._downloads.download(*one) for one in wanted]
            # After all was fetched: a stream that was made anew in the same place has its manifest before its chunks.
            self._check_identity()
            if whole[0]:
                os.ftruncate(fd, seal.size)
            if not all(whole):
                self._drop_part(part, chunk, side)
                return seal, fd, side
            self._write_seal(chunk, sealed)
            note_use(fd, read=not ahead)
            os.rename(part, self.folder / chunk_name(chunk))
            lock(fd, shared=True)
            return seal, fd, side
        except OSError as error:
            self._drop_part(part, chunk, side)
            _close_side(side)
            if error.errno != errno.ENOSPC:
                raise
            raise OSError(
                errno.ENOSPC,
                f"no space left for a copy of chunk {chunk} of {self._directory}: free some, or set {BYTES_VARIABLE}, "
                f"or {FOLDER_VARIABLE} to a folder on another disk",
                str(self.folder),
            ) from error
        except BaseException:
            self._drop_part(part, chunk, side)
            _close_side(side)
            raise

    def _drop_part(self, part: Path, chunk: int, side: int | None) -> None:
        """Takes a part's name away, and before that the name of the side file beside it, if one was made."""
        if side is not None:
            remove(self.folder / arrays_name(chunk))
        remove(part)

    def _write_seal(self, chunk: int, sealed: bytes) -> None:
        fd = create(self.folder / seal_name(chunk))
        try:
            write_all(fd, sealed)
        finally:
            os.close(fd)

    def _alone(self, chunk: int) -> _Copy:
        """Fetches a chunk for this process alone, into files without a name."""
        seal, _ = self._downloads.seal(chunk)
        fds: list[int] = []
        try:
            parts: tuple[tuple[str, Seal | SealedArrays | None], ...]
            parts = ((chunk_name(chunk), seal), (arrays_name(chunk), seal.arrays))
            for name, sealed in parts:
                if sealed is not None:
                    path = self.folder / f".{name}.{os.getpid()}{PART_SUFFIX}"
                    fds.append(os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600))
                    remove(path)
                    if not self._downloads.is_other_size(fds[-1], name, sealed):
                        self._downloads.download(fds[-1], name, sealed)
            self._check_identity()
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return seal, fds[0], fds[1] if len(fds) > 1 else None


def _make(path: Path) -> int:
    """Makes an empty file, in place of any of its name, to be written and read."""
    remove(path)
    return os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)


def _close(copy: _Copy | None) -> None:
    if copy is not None:
        os.close(copy[1])
        _close_side(copy[2])


def _close_side(side: int | None) -> None:
    if side is not None:
        os.close(side)
