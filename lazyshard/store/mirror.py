"""Local copies of a stream's chunks from an object store, fetched on demand and prefetched.

If several processes of a node want the same chunk, one fetches it, into a temporary file that it locks meanwhile
(single-flight); the others wait as long as it makes progress. The file is renamed once it is complete and its rows
match the seal. A copy is one file: the rows, the arrays if the chunk has any, the seal, and its size in 8 bytes.

Large arrays of which only few will be read, for instance images of a stream whose samples are shuffled one by one, are
fetched when they are read, by ranges (`_Arrays`). In a copy they are a hole of the file at first, which the highest bit
of those 8 bytes says. Each row has a digest, so what was not fetched yet, or not completely, is known by it.

The cache serves all processes of a node, so its settings are environment variables. Its files: `.lock`, held (flock)
briefly while space is reserved; and in a folder per stream, for each chunk, its copy `chunk_N.jsonl`, or
`.chunk_N.jsonl.part` while it is being fetched. A process that reads a copy holds a shared flock on it; the process
that fetches it holds an exclusive flock on the part. So a file may be evicted if it can be locked, and locks end with
their process: a part that can be locked was left by a killed process. The modification time of a copy is when it was
last opened; its access time is `_UNREAD` if it was prefetched and not opened yet.
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
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

import xxhash

from lazyshard.errors import ChunkCorrupt, ChunkMissing, LazyShardError
from lazyshard.format.records import arrays_name, chunk_name, parse_arrays_name, seal_name
from lazyshard.format.seal import Seal, SealedArrays
from lazyshard.store import files
from lazyshard.store.durable import held, lock, locked, remove, this_boot, write_all
from lazyshard.store.files import PART_BYTES, OpenFile, UrlPath, evict, fetch, files_in, open_file, open_unread, size_of
from lazyshard.store.objects import number_of

BYTES_VARIABLE: Final = "LAZYSHARD_OBJECTS_CACHE_BYTES"
AHEAD_VARIABLE: Final = "LAZYSHARD_OBJECTS_AHEAD"
PART_SUFFIX: Final = ".part"
_UNREAD: Final = 0
_HOLES: Final = 1 << 63
RANGED_BYTES: Final = 64 << 10  # mean bytes of a row's arrays from which on a request for each row is worth it
MOST_SHARE: Final = 0.25  # of a chunk's rows; if more are read, fetching all takes fewer requests and hardly more bytes
_AHEAD_BYTES: Final = 8 << 20  # largest range that is fetched ahead of rows that are read in order

_POLL_S: Final = 0.02  # interval at which a waiting process checks whether another one has fetched the chunk

# A fetching process that gets no byte for this long has failed many times or was suspended; others stop waiting
_STALLED_S: Final = 60.0

_log = logging.getLogger("lazyshard")
_told: set[str] = set()

# A chunk's seal, data file, and side file if it has one. Files are closed with their last reference
_Copy: TypeAlias = tuple[Seal, OpenFile, OpenFile | None]


class Mirror:
    """The copies of one stream, in `folder`; `check_identity` raises if the URL now has another stream.

    A thread prefetches the next chunks. Its errors occur again in the process that opens the chunk.
    """

    def __init__(self, directory: UrlPath, stream_id: str, check_identity: Callable[[], None]) -> None:
        self._directory, self._check_identity = directory, check_identity
        # Affordable on a training machine, with room for some chunks of each of its ranks.
        self._most = number_of(BYTES_VARIABLE, 16 << 30)
        # One to be ready when the current chunk is finished, and one in case a fetch takes longer than usual.
        self._ahead = number_of(AHEAD_VARIABLE, 2)
        # A restart of the machine gives another name: the copies were never synced.
        name = f"3 {this_boot()} {directory} {stream_id}"
        self.folder = files.cache_folder() / xxhash.xxh3_128_hexdigest(name.encode())
        self.folder.mkdir(mode=0o700, exist_ok=True)
        # Chunks opened last, to guess their distance; a part of a larger window has the same distance.
        self._recent: deque[int] = deque(maxlen=16)
        self._queue: list[int] = []  # chunks that the thread has not started to fetch
        self._whole = True
        self._thread: threading.Thread | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_thread": None}

    def open(self, chunk: int, share: float = 0.0) -> _Copy:
        """Opens a chunk's copy, fetching it if needed: its data file, and its side file if it has one.

        `share`: of its rows that this node will read, from 0 to 1; large arrays are fetched whole if it is large.
        A chunk that does not match its seal is fetched once more, then opened as it is, for this process only. Raises
        FileNotFoundError: an object is missing (yet). ChunkCorrupt, StreamMismatch, AccessRefused, StoreUnavailable.
        """
        self._whole = share > MOST_SHARE
        try:
            found = self._get(chunk, ahead=False)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            what = f"no space left for a copy of chunk {chunk} of {self._directory}: free some, or set"
            way = f"{BYTES_VARIABLE}, or {files.FOLDER_VARIABLE} to a folder on another disk"
            raise OSError(errno.ENOSPC, f"{what} {way}", str(self.folder)) from error
        assert found is not None
        self._recent.append(chunk)
        self._queue = guess_next(self._recent, self._ahead)
        if self._queue and not (self._thread is not None and self._thread.is_alive()):
            # A daemon: if the process ends during a fetch, another process fetches the chunk again.
            self._thread = threading.Thread(target=self._fetch_ahead, name="lazyshard-read-ahead", daemon=True)
            self._thread.start()
        return found

    def _fetch_ahead(self) -> None:
        # Usually the chunk is not published yet. Opening it raises the same error.
        with contextlib.suppress(LazyShardError, OSError, IndexError):
            # `open` replaces the list when the reader advances: its next chunks are more urgent.
            while self._queue:
                self.fetch(self._queue.pop(0))

    def fetch(self, chunk: int) -> None:
        """Prefetches a copy, unless there is no room. Raises as `open`."""
        if not (self.folder / chunk_name(chunk)).exists():
            self._get(chunk, ahead=True)

    def drop(self, chunk: int) -> None:
        """Removes a copy that does not match its seal; processes that have it open keep it. Raises StreamMismatch."""
        remove(self.folder / chunk_name(chunk))
        # Arrays that are fetched later may be those of a recreated stream. Other errors must not replace the caller's.
        with contextlib.suppress(OSError):
            self._check_identity()

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
                # Its process is about to read it, or another one is removing it: this takes only a moment.
                time.sleep(_POLL_S)
                continue
            except FileNotFoundError:
                # A process that removes the last copy also removes the folder.
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                continue
            with held(file.fd):
                mine = lock(file.fd, shared=False)
                # It may have been fetched and renamed, or removed, since it was opened.
                if mine and is_at(file.fd, part):
                    if not copy.exists():
                        return self._fill(file, part, chunk, ahead=ahead) or (None if ahead else self._alone(chunk))
                    # Another process finished between the check and the lock.
                    remove(part)
            now, at = time.monotonic(), progress if mine else os.fstat(file.fd).st_mtime_ns
            del file  # with its lock, which would exclude this process too
            if at != progress:
                moved_at, progress = now, at
            if ahead:
                return None
            if now - moved_at > _STALLED_S:
                return self._alone(chunk)
            time.sleep(_POLL_S)

    def _opened(self, chunk: int, copy: Path, *, read: bool) -> _Copy | None:
        """Opens an existing copy; None if there is no complete one. Raises BlockingIOError: it is locked."""
        if not copy.exists():
            return None
        file = _file(copy)
        size = os.fstat(file.fd).st_size - 8
        holes, sealed = divmod(int.from_bytes(file.read(max(0, size), 8), "little"), _HOLES)
        if holes and self._whole and lock(file.fd, shared=False) and is_at(file.fd, copy):
            # No process reads it, so it is fetched anew. Otherwise what is missing is fetched by ranges.
            remove(copy)
            return None
        if not lock(file.fd, shared=True):
            raise BlockingIOError(errno.EAGAIN, "is locked", str(copy))
        if not is_at(file.fd, copy):
            return None
        with contextlib.suppress(ChunkCorrupt):
            seal = Seal.decode(file.read(size - sealed, sealed) if sealed <= size else b"", chunk)
            if sum(one.size for _, one in self._objects(seal)) + sealed == size:
                if read:
                    note_use(file.fd, read=True)
                return self._parts(file, seal)
        # No release of lazyshard writes such a file: another program has modified it.
        del file
        drop(copy)
        return None

    def _objects(self, seal: Seal) -> list[tuple[UrlPath, Seal | SealedArrays]]:
        """Returns the objects of a chunk except its seal, in their order in a copy."""
        objects: list[tuple[UrlPath, Seal | SealedArrays]] = [(self._directory / chunk_name(seal.chunk), seal)]
        return objects if seal.arrays is None else [*objects, (self._directory / arrays_name(seal.chunk), seal.arrays)]

    def _parts(self, file: OpenFile, seal: Seal) -> _Copy:
        """Returns the parts of a copy as separate files, which messages name by their objects."""
        data, *side = self._objects(seal)
        opened = OpenFile(os.dup(file.fd), data[0], seal.size)
        return seal, opened, _Arrays(os.dup(file.fd), side[0][0], side[0][1].size, seal.size) if side else None

    def _fill(self, file: OpenFile, part: Path, chunk: int, *, ahead: bool) -> _Copy | None:
        """Fetches a chunk into its locked part and renames it; None: no room, or it does not match its seal."""
        with contextlib.ExitStack() as undo:
            # The file stays open as long as an error refers to it, so free its space.
            undo.callback(os.ftruncate, file.fd, 0)
            undo.callback(remove, part)
            seal, sealed = self._seal(chunk)
            objects, side = self._objects(seal), seal.arrays
            holes = side is not None and not self._whole and side.size >= RANGED_BYTES * seal.samples
            end = sealed + (len(sealed) | _HOLES * holes).to_bytes(8, "little")
            size = sum(one.size for _, one in objects)
            if not all(_may_be(*one) for one in objects):
                return None
            if not reserve(self.folder.parent, file.fd, size + len(end), self._most, ahead=ahead):
                return None
            begins = (0,) if holes else (0, seal.size)
            whole = all(_download(file.fd, begin, *one) for begin, one in zip(begins, objects, strict=False))
            # After the fetch: a recreated stream writes its manifest before its chunks.
            self._check_identity()
            if not whole:
                return None
            write_all(file.fd, end, size)
            note_use(file.fd, read=not ahead)
            # From here on other processes may read it.
            undo.pop_all()
            os.rename(part, self.folder / chunk_name(chunk))
            lock(file.fd, shared=True)
            return self._parts(file, seal)

    def _alone(self, chunk: int) -> _Copy:
        """Opens a chunk for this process only, even if it does not match its seal."""
        seal, _ = self._seal(chunk)
        data, *side = [(open_file if _may_be(*one) else open_unread)(one[0]) for one in self._objects(seal)]
        self._check_identity()
        return seal, data, side[0] if side else None

    def _seal(self, chunk: int) -> tuple[Seal, bytes]:
        path = self._directory / seal_name(chunk)
        data = files.read_file(path)
        return Seal.decode(data, chunk, str(path)), data


@dataclass(eq=False, slots=True)
class _Arrays(OpenFile):
    """The arrays in a copy: `fetch` reads from the object what is not in the copy yet, and keeps it there.

    Rows that are read in order are fetched ahead: each range is twice as long as the one before, up to `_AHEAD_BYTES`.
    """

    _next: int = -1
    _ahead: int = 0

    def fetch(self, start: int, stop: int) -> bytes:
        assert isinstance(self.path, UrlPath)
        # The last range may have ended within this row. Other threads may read at the same time.
        self._ahead = ahead = min(_AHEAD_BYTES, 2 * max(self._ahead, stop - start)) if start <= self._next < stop else 0
        self._next = end = min(self.size, max(stop, start + ahead))
        try:
            data = self.path.store.get_range(self.path.key, start, end)
        except FileNotFoundError as cause:
            what = f"{self.path}: the object was deleted while its chunk was being read; restore it from a copy"
            raise ChunkMissing(what, file=str(self.path), chunk=parse_arrays_name(self.path.name)) from cause
        # Without space it is fetched again when it is read again.
        with contextlib.suppress(OSError):
            write_all(self.fd, data, self.begin + start)
        return data[: stop - start]


def _file(path: Path, flags: int = 0) -> OpenFile:
    return OpenFile(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600), path, 0)


def reserve(root: Path, part: int, size: int, most: int, *, ahead: bool) -> bool:
    """Makes room for a locked part in a cache of at most `most` bytes and sets its size; returns whether it did.

    Unless `ahead`, it always does, and the cache may exceed its limit. A prefetch only evicts copies that were read.
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
                what = f"{root}: {total + size} bytes of chunks are being read on this node, more than the limit of"
                what += f" {most} bytes; the cache exceeds it, and chunks may have to be fetched again: make room for"
                what += " all chunks that the ranks of a node read at a time (their shuffle windows), with"
                _log.warning("%s %s", what, BYTES_VARIABLE)
        os.ftruncate(part, size)
    return True


def note_use(fd: int, *, read: bool) -> None:
    """Records that a copy is used now; `read`: it was opened, not just fetched."""
    now = time.time_ns()
    os.utime(fd, ns=(now if read else _UNREAD, now))


def is_at(fd: int, path: Path) -> bool:
    """Returns whether an open file still has this name."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    return False


def drop(path: Path) -> bool:
    """Removes a file of the cache that no process reads or fetches; returns whether it was removed."""
    try:
        file = _file(path)
    except OSError:
        return False
    if not lock(file.fd, shared=False) or not is_at(file.fd, path):
        return False
    remove(path)
    del file
    # After the last copy of a stream its folder is empty.
    with contextlib.suppress(OSError):
        path.parent.rmdir()
    return True


def _may_be(path: UrlPath, sealed: Seal | SealedArrays) -> bool:
    """Returns whether an object may match the seal; checks the size of large objects before they are fetched."""
    return sealed.size <= PART_BYTES or size_of(path) == sealed.size


def _download(fd: int, begin: int, path: UrlPath, sealed: Seal | SealedArrays) -> bool:
    """Fetches an object of a chunk to its place in a copy; returns whether it matches the seal."""
    # Request one byte more than expected, to detect an object that is too large.
    if fetch(path, fd, begin, sealed.size + 1) != sealed.size:
        return False
    with os.fdopen(os.dup(fd), "rb", 8 << 20) as file:
        file.seek(begin)
        rows = zip(pairwise(sealed.offsets.tolist()), sealed.digests.tolist(), strict=True)
        return all(xxhash.xxh3_64_intdigest(file.read(stop - start)) == digest for (start, stop), digest in rows)


def guess_next(opened: Sequence[int], count: int) -> list[int]:
    """Returns the chunks that will probably be opened next, from those opened last; none after only one.

    A rank's chunks are a fixed distance apart, and those of a window are opened in any order.
    """
    chunks = sorted(set(opened))
    if len(chunks) < 2:
        return []
    step = min(after - before for before, after in pairwise(chunks))
    return [chunks[-1] + step * (number + 1) for number in range(count)]
