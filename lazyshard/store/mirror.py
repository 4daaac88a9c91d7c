"""Copies of the chunks of a stream in an object store, on this node: fetched when they are asked for, and ahead.

Of the processes of a node that want the same chunk at a time one fetches it, under a temporary name that is locked
while it does; the others wait for it, as long as it gets on. It gets its name once it is whole and its rows are those
that its seal tells; by then its seal and side file are there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

import xxhash

from lazyshard.errors import LazyShardError, SealInvalid
from lazyshard.format.names import arrays_name, chunk_name, seal_name
from lazyshard.format.seal import Seal, SealedArrays
from lazyshard.store import room
from lazyshard.store.durable import remove, write_at, write_new
from lazyshard.store.files import PART_BYTES, OpenFile, read_file, size_of
from lazyshard.store.urls import UrlPath

_CHECK_BYTES: Final = 8 << 20

_REMEMBERED: Final = 16
"""Chunks opened last, of which the distance is guessed; a window of more is opened in parts that tell the same."""

_LOOK_S: Final = 0.02  # how often to look whether another process has fetched what this one waits for

_STALLED_S: Final = 60.0
"""One that fetches and gets no byte for so long has failed many times, or was stopped, and is not waited for."""

_Copy: TypeAlias = tuple[Seal, OpenFile, OpenFile | None]
"""Of a chunk: its seal, its data file and its side file, if it has one. Files are closed with their last reference."""


class Mirror:
    """The copies of one stream; `check_identity` raises if another stream is at the URL now.

    A thread, one in each process that opens chunks, fetches so many `ahead`; it ends with this object. What is raised
    there is met again by who asks for that chunk.

    Attributes:
        folder: where they lie; made if it was not there.
    """

    def __init__(
        self, directory: UrlPath, stream_id: str, check_identity: Callable[[], None], *, ahead: int = 0
    ) -> None:
        self._directory = directory
        self._check_identity = check_identity
        self._most = room.cache_bytes()
        self.folder = room.folder_of(str(directory), stream_id)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._ahead = ahead
        self._recent: deque[int] = deque(maxlen=_REMEMBERED)
        self._wanted: queue.SimpleQueue[list[int] | None] | None = None
        self._pid = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_wanted": None, "_pid": 0}

    def open(self, chunk: int) -> _Copy:
        """Opens a chunk's copy, fetched if it is not there yet: its data file, and its side file if it has one.

        A data object that is not what its seal tells is fetched twice, and then opened as it is, for this process
        alone: what is wrong with it is found where its rows are read. Raises FileNotFoundError: an object of it is not
        there (yet). SealInvalid, StreamMismatch, AccessRefused, StoreUnavailable, OSError.
        """
        found = self._get(chunk, ahead=False)
        assert found is not None
        for file in filter(None, found[1:]):
            file.size = os.fstat(file.fd).st_size
        self._recent.append(chunk)
        if wanted := guess_next(self._recent, self._ahead):
            if self._wanted is None or self._pid != os.getpid():
                self._pid, self._wanted = os.getpid(), queue.SimpleQueue()
                weakref.finalize(self, self._wanted.put, None)
                # A daemon: what it is fetching when the process ends is fetched anew by whoever wants it.
                given = (self._wanted, weakref.ref(self))
                threading.Thread(target=_run, args=given, name="lazyshard-read-ahead", daemon=True).start()
            self._wanted.put(wanted)
        return found

    def fetch(self, chunk: int) -> None:
        """Sees to it that a copy is there when it is asked for, unless there is no room. Raises as `open` does."""
        if not (self.folder / chunk_name(chunk)).exists():
            self._get(chunk, ahead=True)

    def drop(self, chunk: int) -> None:
        """Removes a copy that is not what its seal tells; who has it open keeps it."""
        remove(self.folder / chunk_name(chunk))

    def _get(self, chunk: int, *, ahead: bool) -> _Copy | None:
        data = self.folder / chunk_name(chunk)
        part = room.part_of(data)
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
            try:
                file = self._file(data.name, os.O_CREAT, local=part)
            except FileNotFoundError:
                # Whoever removed the last copy has removed the folder.
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                continue
            with room.held(file.fd):
                mine = room.lock(file.fd, shared=False)
                # Since it was opened it may have been fetched and renamed, or removed.
                if mine and room.is_at(file.fd, part):
                    if not data.exists():
                        return self._fill(file, part, chunk, ahead=ahead)
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

    def _file(self, name: str, flags: int = 0, *, local: Path | None = None) -> OpenFile:
        flags |= os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        return OpenFile(os.open(local or self.folder / name, flags, 0o600), self._directory / name, 0)

    def _opened(self, chunk: int, *, read: bool) -> _Copy | None:
        """Opens a copy that is there, None if there is none that is whole. Raises BlockingIOError: it is locked."""
        data, side = self.folder / chunk_name(chunk), None
        try:
            file = self._file(data.name)
        except FileNotFoundError:
            return None
        if not room.lock(file.fd, shared=True):
            raise BlockingIOError(errno.EAGAIN, "is locked", str(data))
        if not room.is_at(file.fd, data):
            return None
        with contextlib.suppress(FileNotFoundError, SealInvalid):
            sealed = seal_name(chunk)
            seal = Seal.decode(read_file(self.folder / sealed), chunk, str(self._directory / sealed))
            whole = os.fstat(file.fd).st_size == seal.size
            if seal.arrays is not None:
                side = self._file(arrays_name(chunk))
                whole &= os.fstat(side.fd).st_size == seal.arrays.size
                if not room.is_at(file.fd, data):
                    # Found to be damaged by another process, and fetched again since: the side file may be the new one.
                    return None
            if whole:
                if read:
                    room.note_use(file.fd, read=True)
                return seal, file, side
        # Nobody of ours has left it so; another program has been here.
        del file
        room.drop(data)
        return None

    def _fill(self, file: OpenFile, part: Path, chunk: int, *, ahead: bool) -> _Copy | None:
        """Fetches a chunk into its part, which is locked, and gives it its name; None if there is no room for it."""
        data, beside = self.folder / chunk_name(chunk), self.folder / arrays_name(chunk)
        side: OpenFile | None = None

        def give_up() -> None:
            # Before the part's name that of the side file beside it, if one was made.
            if side is not None:
                remove(beside)
            remove(part)

        try:
            seal, sealed = self._seal(chunk)
            wanted: list[tuple[OpenFile, Seal | SealedArrays]] = [(file, seal)]
            if seal.arrays is not None:
                # In place, as the seal: nobody looks at them before the data has its name.
                remove(beside)
                side = self._file(beside.name, os.O_CREAT | os.O_EXCL)
                wanted.append((side, seal.arrays))
            tries = [_tries(*one) for one in wanted]
            if not all(tries):
                give_up()
                for one, most in zip(wanted, tries, strict=True):
                    _download(*one, most)
                return seal, file, side
            size = sum(one.size for _, one in wanted)
            if not room.reserve(self.folder.parent, file.fd, size + len(sealed), self._most, ahead=ahead):
                give_up()
                return None
            if side is not None and seal.arrays is not None:
                # Each file has what it takes from here on, so that nothing is counted twice.
                os.ftruncate(side.fd, seal.arrays.size)
                os.ftruncate(file.fd, seal.size + len(sealed))
            whole = [_download(*one, 2) for one in wanted]
            # After all was fetched: a stream that was made anew in the same place has its manifest before its chunks.
            self._check_identity()
            if whole[0]:
                os.ftruncate(file.fd, seal.size)
            if not all(whole):
                give_up()
                return seal, file, side
            write_new(self.folder / seal_name(chunk), sealed)
            room.note_use(file.fd, read=not ahead)
            os.rename(part, data)
            room.lock(file.fd, shared=True)
            return seal, file, side
        except BaseException as error:
            if room.is_at(file.fd, data):
                raise  # it is whole, and others may read it already
            give_up()
            for opened in filter(None, (file, side)):
                # The error keeps them open as long as somebody keeps it.
                os.ftruncate(opened.fd, 0)
            if not isinstance(error, OSError) or error.errno != errno.ENOSPC:
                raise
            what = f"no space left for a copy of chunk {chunk} of {self._directory}: free some, or set"
            way = f"{room.BYTES_VARIABLE}, or {room.FOLDER_VARIABLE} to a folder on another disk"
            raise OSError(errno.ENOSPC, f"{what} {way}", str(self.folder)) from error

    def _alone(self, chunk: int) -> _Copy:
        """Fetches a chunk for this process alone, into files without a name."""
        seal, _ = self._seal(chunk)
        files: list[OpenFile | None] = []
        parts: list[tuple[str, Seal | SealedArrays | None]]
        parts = [(chunk_name(chunk), seal), (arrays_name(chunk), seal.arrays)]
        for name, sealed in parts:
            if sealed is not None:
                path = self.folder / f".{name}.{os.getpid()}{room.PART_SUFFIX}"
                files.append(file := self._file(name, os.O_CREAT | os.O_EXCL, local=path))
                remove(path)
                _download(file, sealed, _tries(file, sealed))
        self._check_identity()
        data, side = (*files, None)[:2]
        assert data is not None
        return seal, data, side

    def _seal(self, chunk: int) -> tuple[Seal, bytes]:
        path = self._directory / seal_name(chunk)
        data = read_file(path)
        return Seal.decode(data, chunk, str(path)), data


def _tries(file: OpenFile, seal: Seal | SealedArrays) -> int:
    """Returns how often to fetch an object: what is large is not fetched to learn that it has another size."""
    return 2 if seal.size <= PART_BYTES or size_of(file.path) == seal.size else 0


def _download(file: OpenFile, seal: Seal | SealedArrays, tries: int) -> bool:
    """Fetches an object of a chunk; returns whether it is what the seal tells."""
    path, size = file.path, seal.size
    assert isinstance(path, UrlPath)
    for _ in range(tries):
        start = 0
        while start < size:
            # One byte more than there should be, to see that there are no more.
            wanted = min(PART_BYTES, size + 1 - start)
            data = path.store.get_range(path.key, start, start + wanted)
            write_at(file.fd, data, start)
            start += len(data)
            if len(data) < wanted:
                break
        if start == size and _rows_are(file.fd, seal):
            return True
    # So that who opens it says what it has found.
    os.ftruncate(file.fd, size_of(path))
    return False


def _rows_are(fd: int, seal: Seal | SealedArrays) -> bool:
    offsets, digests = seal.offsets.tolist(), seal.digests.tolist()
    row, rows = 0, len(digests)
    while row < rows:
        start = offsets[row]
        stop = row + 1
        while stop < rows and offsets[stop + 1] - start <= _CHECK_BYTES:
            stop += 1
        data = memoryview(os.pread(fd, offsets[stop] - start, start))
        for at in range(row, stop):
            if xxhash.xxh3_64_intdigest(data[offsets[at] - start : offsets[at + 1] - start]) != digests[at]:
                return False
        row = stop
    return True


def _run(wanted: queue.SimpleQueue[list[int] | None], owner: weakref.ref[Mirror]) -> None:
    # Held while it fetches, and not while it waits: the reader may be gone by then.
    while (chunks := wanted.get()) is not None:
        mirror = owner()
        # Not published yet, most often. Whoever comes to it meets the same.
        with contextlib.suppress(LazyShardError, OSError):
            for chunk in chunks:
                # The reader is on: what it comes to next is more urgent.
                if mirror is None or not wanted.empty():
                    break
                mirror.fetch(chunk)
        mirror = None


def guess_next(opened: Sequence[int], count: int) -> list[int]:
    """Returns the chunks that will be opened next, by those opened last; none as long as there was only one.

    A rank's chunks are a fixed distance apart, and a window of them is opened in any order: so what comes is behind the
    last of them, at the smallest distance that two of them have, or a multiple of the true one.
    """
    chunks = sorted(set(opened))
    if len(chunks) < 2:
        return []
    step = min(after - before for before, after in pairwise(chunks))
    return [chunks[-1] + step * (number + 1) for number in range(count)]
