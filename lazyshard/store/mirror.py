"""Copies of the chunks of a stream in an object store, on this node: fetched when they are asked for, and ahead.

Of the processes of a node that want the same chunk at a time one fetches it, under a temporary name that is locked
while it does; the others wait for it, as long as it gets on. It gets its name once it is whole and its rows are those
that its seal tells. A copy is one file: the rows, the arrays if the chunk has any, the seal, and its size in 8 bytes.

The cache for chunks of object stores serves all processes of a node, so its settings are variables of the environment.
Files in it: `.lock`, held (flock) for the moment in which room is made; and in the folder of a stream, for each chunk,
its copy, `chunk_N.jsonl`, or `.chunk_N.jsonl.part` while it is being fetched. Whoever reads a copy holds a shared flock
on it, who fetches it an exclusive one on the part. So what may go is what can be locked, and a lock ends with its
process: a part that can be locked was left by one that was killed. A copy's modification time says when it was last
opened, its access time `_UNREAD` that it was fetched ahead and never opened yet.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

import xxhash

from lazyshard.errors import ConfigInvalid, LazyShardError, SealInvalid
from lazyshard.format.records import arrays_name, chunk_name, seal_name
from lazyshard.format.seal import Seal, SealedArrays
from lazyshard.store import files
from lazyshard.store.durable import held, lock, locked, remove, this_boot, write_all
from lazyshard.store.files import PART_BYTES, OpenFile, UrlPath, evict, files_in, open_file, open_unread, size_of

BYTES_VARIABLE: Final = "LAZYSHARD_OBJECTS_CACHE_BYTES"
AHEAD_VARIABLE: Final = "LAZYSHARD_OBJECTS_AHEAD"
PART_SUFFIX: Final = ".part"
_UNREAD: Final = 0

_LOOK_S: Final = 0.02  # how often to look whether another process has fetched what this one waits for

# One that fetches and gets no byte for so long has failed many times, or was stopped, and is not waited for
_STALLED_S: Final = 60.0

_log = logging.getLogger("lazyshard")
_told: set[str] = set()

# Of a chunk: its seal, its data file and its side file, if it has one. Files are closed with their last reference
_Copy: TypeAlias = tuple[Seal, OpenFile, OpenFile | None]


class Mirror:
    """The copies of one stream, in `folder`; `check_identity` raises if another stream is at the URL now.

    A thread fetches those that come next. What is raised there is met again by who asks for that chunk.
    """

    def __init__(self, directory: UrlPath, stream_id: str, check_identity: Callable[[], None]) -> None:
        self._directory, self._check_identity = directory, check_identity
        # What a machine can spare that trains, and room for some chunks of each of its ranks.
        self._most = number_of(BYTES_VARIABLE, 16 << 30)
        # One that is there when the one before it is done with, and one that may take longer than usual.
        self._ahead = number_of(AHEAD_VARIABLE, 2)
        # A machine that was started again has another one: nothing in it was ever synced.
        name = f"2 {this_boot()} {directory} {stream_id}"
        self.folder = files.cache_folder() / xxhash.xxh3_128_hexdigest(name.encode())
        self.folder.mkdir(mode=0o700, exist_ok=True)
        # Chunks opened last, of which the distance is guessed; a window of more is opened in parts that tell the same.
        self._recent: deque[int] = deque(maxlen=16)
        self._wanted: list[int] = []  # that the thread has not taken up yet
        self._thread: threading.Thread | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_thread": None}

    def open(self, chunk: int) -> _Copy:
        """Opens a chunk's copy, fetched if it is not there yet: its data file, and its side file if it has one.

        What is not as its seal tells is fetched once more, and then opened as it is, for this process alone. Raises
        FileNotFoundError: an object is not there (yet). SealInvalid, StreamMismatch, AccessRefused, StoreUnavailable.
        """
        found = self._get(chunk, ahead=False)
        assert found is not None
        self._recent.append(chunk)
        self._wanted = guess_next(self._recent, self._ahead)
        if self._wanted and not (self._thread is not None and self._thread.is_alive()):
            # A daemon: what it is fetching when the process ends is fetched anew by whoever wants it.
            self._thread = threading.Thread(target=self._fetch_ahead, name="lazyshard-read-ahead", daemon=True)
            self._thread.start()
        return found

    def _fetch_ahead(self) -> None:
        # Not published yet, most often. Whoever comes to it meets the same.
        with contextlib.suppress(LazyShardError, OSError, IndexError):
            # When the reader is on, what it comes to next is more urgent.
            while self._wanted:
                self.fetch(self._wanted.pop(0))

    def fetch(self, chunk: int) -> None:
        """Sees to it that a copy is there when it is asked for, unless there is no room. Raises as `open` does."""
        if not (self.folder / chunk_name(chunk)).exists():
            self._get(chunk, ahead=True)

    def drop(self, chunk: int) -> None:
        """Removes a copy that is not what its seal tells; who has it open keeps it."""
        remove(self.folder / chunk_name(chunk))

    def _get(self, chunk: int, *, ahead: bool) -> _Copy | None:
        copy = self.folder / chunk_name(chunk)
        part = copy.with_name(f".{copy.name}{PART_SUFFIX}")
        moved_at, progress = time.monotonic(), -1
        while True:
            try:
                if (found := self._opened(chunk, copy, read=not ahead)) is not None:
                    return found
                file = _file(part, os.O_CREAT)
            except BlockingIOError:
                # Its process is about to read it, or somebody is removing it: a matter of a moment.
                time.sleep(_LOOK_S)
                continue
            except FileNotFoundError:
                # Whoever removed the last copy has removed the folder.
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                continue
            with held(file.fd):
                mine = lock(file.fd, shared=False)
                # Since it was opened it may have been fetched and renamed, or removed.
                if mine and is_at(file.fd, part):
                    if not copy.exists():
                        return self._fill(file, part, chunk, ahead=ahead) or (None if ahead else self._alone(chunk))
                    # Between the look and the lock another one has come to its end.
                    remove(part)
            if mine:
                del file  # and its lock, which would keep this process out too
                continue
            now, at = time.monotonic(), os.fstat(file.fd).st_mtime_ns
            if at != progress:
                moved_at, progress = now, at
            if ahead:
                return None
            if now - moved_at > _STALLED_S:
                return self._alone(chunk)
            time.sleep(_LOOK_S)

    def _opened(self, chunk: int, copy: Path, *, read: bool) -> _Copy | None:
        """Opens a copy that is there, None if there is none that is whole. Raises BlockingIOError: it is locked."""
        if not copy.exists():
            return None
        file = _file(copy)
        if not lock(file.fd, shared=True):
            raise BlockingIOError(errno.EAGAIN, "is locked", str(copy))
        if not is_at(file.fd, copy):
            return None
        size = os.fstat(file.fd).st_size - 8
        sealed = int.from_bytes(file.read(max(0, size), 8), "little")
        with contextlib.suppress(SealInvalid):
            seal = Seal.decode(file.read(size - sealed, sealed) if sealed <= size else b"", chunk)
            if sum(one.size for _, one in self._objects(seal)) + sealed == size:
                if read:
                    note_use(file.fd, read=True)
                return self._parts(file, seal)
        # Nobody of ours has left it so; another program has been here.
        del file
        drop(copy)
        return None

    def _objects(self, seal: Seal) -> list[tuple[UrlPath, Seal | SealedArrays]]:
        """Returns the objects of a chunk beside its seal, in the order in which its copy has them."""
        objects: list[tuple[UrlPath, Seal | SealedArrays]] = [(self._directory / chunk_name(seal.chunk), seal)]
        return objects if seal.arrays is None else [*objects, (self._directory / arrays_name(seal.chunk), seal.arrays)]

    def _parts(self, file: OpenFile, seal: Seal) -> _Copy:
        """Returns a copy as files of its own, whose names for messages are those of the objects."""
        data, *side = self._objects(seal)
        opened = OpenFile(os.dup(file.fd), data[0], seal.size)
        return seal, opened, OpenFile(os.dup(file.fd), side[0][0], side[0][1].size, seal.size) if side else None

    def _fill(self, file: OpenFile, part: Path, chunk: int, *, ahead: bool) -> _Copy | None:
        """Fetches a chunk into its locked part, and names it; None: no room, or it is not what its seal tells."""
        with contextlib.ExitStack() as undo:
            # An error keeps it open as long as somebody keeps that.
            undo.callback(os.ftruncate, file.fd, 0)
            undo.callback(remove, part)
            try:
                seal, sealed = self._seal(chunk)
                objects = self._objects(seal)
                end, size = sealed + len(sealed).to_bytes(8, "little"), sum(one.size for _, one in objects)
                if not all(_may_be(*one) for one in objects):
                    return None
                if not reserve(self.folder.parent, file.fd, size + len(end), self._most, ahead=ahead):
                    return None
                begins = (0, seal.size)
                whole = all(_download(file.fd, begin, *one) for begin, one in zip(begins, objects, strict=False))
                # After all was fetched: a stream that was made anew has its manifest before its chunks.
                self._check_identity()
                if not whole:
                    return None
                write_all(file.fd, end, size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                what = f"no space left for a copy of chunk {chunk} of {self._directory}: free some, or set"
                way = f"{BYTES_VARIABLE}, or {files.FOLDER_VARIABLE} to a folder on another disk"
                raise OSError(errno.ENOSPC, f"{what} {way}", str(self.folder)) from error
            note_use(file.fd, read=not ahead)
            # From here on others may read it.
            undo.pop_all()
            os.rename(part, self.folder / chunk_name(chunk))
            lock(file.fd, shared=True)
            return self._parts(file, seal)

    def _alone(self, chunk: int) -> _Copy:
        """Opens a chunk for this process alone, as it is."""
        seal, _ = self._seal(chunk)
        data, *side = [(open_file if _may_be(*one) else open_unread)(one[0]) for one in self._objects(seal)]
        self._check_identity()
        return seal, data, side[0] if side else None

    def _seal(self, chunk: int) -> tuple[Seal, bytes]:
        path = self._directory / seal_name(chunk)
        data = files.read_file(path)
        return Seal.decode(data, chunk, str(path)), data


def _file(path: Path, flags: int = 0) -> OpenFile:
    return OpenFile(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600), path, 0)


def number_of(variable: str, default: int) -> int:
    """Returns the number that a variable of the environment says. Raises ConfigInvalid: it says none."""
    text = os.environ.get(variable) or str(default)
    if not text.isdecimal():
        raise ConfigInvalid(f"{variable} is a number from 0 on, got {text!r}")
    return int(text)


def reserve(root: Path, part: int, size: int, most: int, *, ahead: bool) -> bool:
    """Makes room in a cache of at most `most` bytes for a locked part, and gives it that size; returns whether it has.

    Always if not `ahead`: the cache may then exceed its bound. What nobody waits for displaces only what was read.
    """
    with locked(root / ".lock"):
        total, copies = 0, []
        for folder in root.iterdir():
            for path, found in files_in(folder) if folder.is_dir() and not folder.is_symlink() else ():
                if path.name.endswith(PART_SUFFIX):
                    if drop(path):
                        continue
                elif not (ahead and found.st_atime_ns == _UNREAD):
                    copies.append((path, found))
                total += found.st_size
        copies.sort(key=lambda copy: (copy[1].st_atime_ns == _UNREAD, copy[1].st_mtime_ns))
        total = evict(copies, total, most - size, drop)
        if total + size > most:
            if ahead:
                return False
            if str(root) not in _told:
                _told.add(str(root))
                what = f"{root}: {total + size} bytes of chunks are being read on this node, more than the {most} that"
                what += " the cache may take; it grows past that, and chunks may have to be fetched again: let it have"
                what += " room for all chunks that the ranks of a node read at a time (their shuffle windows), with"
                _log.warning("%s %s", what, BYTES_VARIABLE)
        os.ftruncate(part, size)
    return True


def note_use(fd: int, *, read: bool) -> None:
    """Notes that a copy is used now; `read`: opened, not just fetched."""
    now = time.time_ns()
    os.utime(fd, ns=(now if read else _UNREAD, now))


def is_at(fd: int, path: Path) -> bool:
    """Returns whether an open file still has this name."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    return False


def drop(path: Path) -> bool:
    """Removes a file of the cache that nobody reads or fetches; returns whether it was removed."""
    try:
        file = _file(path)
    except OSError:
        return False
    if not lock(file.fd, shared=False) or not is_at(file.fd, path):
        return False
    remove(path)
    del file
    # The last one of a stream leaves an empty folder.
    with contextlib.suppress(OSError):
        path.parent.rmdir()
    return True


def _may_be(path: UrlPath, sealed: Seal | SealedArrays) -> bool:
    """Returns whether an object may be what is sealed: what is large is not fetched to learn that it is not."""
    return sealed.size <= PART_BYTES or size_of(path) == sealed.size


def _download(fd: int, begin: int, path: UrlPath, sealed: Seal | SealedArrays) -> bool:
    """Fetches an object of a chunk to its place in a copy; returns whether it is what is sealed."""
    start, size = 0, sealed.size
    while start < size:
        # One byte more than there should be, to see that there are no more.
        wanted = min(PART_BYTES, size + 1 - start)
        data = path.store.get_range(path.key, start, start + wanted)
        write_all(fd, data, begin + start)
        start += len(data)
        if len(data) < wanted:
            break
    return start == size and _rows_are(fd, begin, sealed)


def _rows_are(fd: int, begin: int, sealed: Seal | SealedArrays) -> bool:
    with os.fdopen(os.dup(fd), "rb", 8 << 20) as file:
        file.seek(begin)
        rows = zip(pairwise(sealed.offsets.tolist()), sealed.digests.tolist(), strict=True)
        return all(xxhash.xxh3_64_intdigest(file.read(stop - start)) == digest for (start, stop), digest in rows)


def guess_next(opened: Sequence[int], count: int) -> list[int]:
    """Returns the chunks that will be opened next, by those opened last; none as long as there was only one.

    A rank's chunks are a fixed distance apart, and a window of them is opened in any order.
    """
    chunks = sorted(set(opened))
    if len(chunks) < 2:
        return []
    step = min(after - before for before, after in pairwise(chunks))
    return [chunks[-1] + step * (number + 1) for number in range(count)]
