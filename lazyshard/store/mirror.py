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
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import xxhash

from lazyshard.errors import LazyShardError, SealInvalid
from lazyshard.format.names import arrays_name, chunk_name, seal_name
from lazyshard.format.seal import Seal, SealedArrays
from lazyshard.store.durable import remove, write_at, write_new
from lazyshard.store.files import PART_BYTES, OpenFile, read_file, size_of
from lazyshard.store.room import (
    BYTES_VARIABLE,
    FOLDER_VARIABLE,
    PART_SUFFIX,
    cache_bytes,
    drop,
    folder_of,
    held,
    is_at,
    lock,
    note_use,
    part_of,
    reserve,
)
from lazyshard.store.urls import UrlPath

_CHECK_BYTES: Final = 8 << 20

_REMEMBERED: Final = 16
"""Chunks opened last, of which the distance is guessed; a window of more is opened in parts that tell the same."""

_LOOK_S: Final = 0.02  # how often to look whether another process has fetched what this one waits for

_STALLED_S: Final = 60.0
"""One that fetches and gets no byte for so long has failed many times, or was stopped, and is not waited for."""

_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW

_Copy = tuple[Seal, OpenFile, OpenFile | None]
"""Of a chunk: its seal, its data file and its side file, if it has one. Files are closed with their last reference."""


class Mirror:
    """The copies of one stream; `check_identity` raises if another stream is at the URL now.

    Attributes:
        folder: where they lie; made if it was not there.
        fetched: how many data files of chunks this process has fetched.
    """

    def __init__(self, directory: UrlPath, stream_id: str, check_identity: Callable[[], None]) -> None:
        self._directory = directory
        self._check_identity = check_identity
        self._most = cache_bytes()
        self.folder = folder_of(str(directory), stream_id)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self.fetched = 0

    def open(self, chunk: int) -> _Copy:
        """Opens a chunk's copy, fetched if it is not there yet: its data file, and its side file if it has one.

        A data object that is not what its seal tells is fetched twice, and then opened as it is, for this process
        alone: what is wrong with it is found where its rows are read. Raises FileNotFoundError: an object of it is not
        there (yet). SealInvalid, StreamMismatch, StoreRefused, StoreUnavailable, OSError.
        """
        found = self._get(chunk, ahead=False)
        assert found is not None
        for file in found[1:]:
            if file is not None:
                file.size = os.fstat(file.fd).st_size
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
        part = part_of(data)
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
            file = self._part(part, data.name)
            with held(file.fd):
                mine = lock(file.fd, shared=False)
                # Since it was opened it may have been fetched and renamed, or removed.
                if mine and is_at(file.fd, part):
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

    def _file(self, local: Path, name: str, flags: int = 0) -> OpenFile:
        return OpenFile(os.open(local, _FLAGS | flags, 0o600), self._directory / name, 0)

    def _part(self, part: Path, name: str) -> OpenFile:
        try:
            return self._file(part, name, os.O_CREAT)
        except FileNotFoundError:
            # Whoever removed the last copy has removed the folder.
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return self._file(part, name, os.O_CREAT)

    def _opened(self, chunk: int, *, read: bool) -> _Copy | None:
        """Opens a copy that is there, None if there is none that is whole. Raises BlockingIOError: it is locked."""
        data, side = self.folder / chunk_name(chunk), None
        try:
            file = self._file(data, data.name)
        except FileNotFoundError:
            return None
        if not lock(file.fd, shared=True):
            raise BlockingIOError(errno.EAGAIN, "is locked", str(data))
        if not is_at(file.fd, data):
            return None
        with contextlib.suppress(FileNotFoundError, SealInvalid):
            sealed = self.folder / seal_name(chunk)
            seal = Seal.decode(read_file(sealed), chunk, str(self._directory / sealed.name))
            whole = os.fstat(file.fd).st_size == seal.size
            if seal.arrays is not None:
                side = self._file(self.folder / arrays_name(chunk), arrays_name(chunk))
                whole &= os.fstat(side.fd).st_size == seal.arrays.size
                if not is_at(file.fd, data):
                    # Found to be damaged by another process, and fetched again since: the side file may be the new one.
                    return None
            if whole:
                if read:
                    note_use(file.fd, read=True)
                return seal, file, side
        # Nobody of ours has left it so; another program has been here.
        del file
        drop(data)
        return None

    def _fill(self, file: OpenFile, part: Path, chunk: int, *, ahead: bool) -> _Copy | None:
        """Fetches a chunk into its part, which is locked, and gives it its name; None if there is no room for it."""
        side: OpenFile | None = None
        try:
            seal, sealed = self._seal(chunk)
            wanted: list[tuple[OpenFile, Seal | SealedArrays]] = [(file, seal)]
            if seal.arrays is not None:
                # In place, as the seal: nobody looks at them before the data has its name.
                remove(self.folder / arrays_name(chunk))
                side = self._file(self.folder / arrays_name(chunk), arrays_name(chunk), os.O_CREAT | os.O_EXCL)
                wanted.append((side, seal.arrays))
            others = [self._is_other_size(*one) for one in wanted]
            if any(others):
                self._drop_part(part, chunk, side)
                for one, other in zip(wanted, others, strict=True):
                    if not other:
                        self._download(*one)
                return seal, file, side
            size = sum(one.size for _, one in wanted)
            if not reserve(self.folder.parent, file.fd, size + len(sealed), self._most, ahead=ahead):
                self._drop_part(part, chunk, side)
                return None
            if side is not None and seal.arrays is not None:
                # Each file has what it takes from here on, so that nothing is counted twice.
                os.ftruncate(side.fd, seal.arrays.size)
                os.ftruncate(file.fd, seal.size + len(sealed))
            whole = [self._download(*one) for one in wanted]
            # After all was fetched: a stream that was made anew in the same place has its manifest before its chunks.
            self._check_identity()
            if whole[0]:
                os.ftruncate(file.fd, seal.size)
            if not all(whole):
                self._drop_part(part, chunk, side)
                return seal, file, side
            write_new(self.folder / seal_name(chunk), sealed)
            note_use(file.fd, read=not ahead)
            os.rename(part, self.folder / chunk_name(chunk))
            lock(file.fd, shared=True)
            return seal, file, side
        except BaseException as error:
            if is_at(file.fd, self.folder / chunk_name(chunk)):
                raise  # it is whole, and others may read it already
            self._drop_part(part, chunk, side)
            for opened in (file, side):
                # The error keeps them open as long as somebody keeps it.
                if opened is not None:
                    os.ftruncate(opened.fd, 0)
            if not isinstance(error, OSError) or error.errno != errno.ENOSPC:
                raise
            raise OSError(
                errno.ENOSPC,
                f"no space left for a copy of chunk {chunk} of {self._directory}: free some, or set {BYTES_VARIABLE}, "
                f"or {FOLDER_VARIABLE} to a folder on another disk",
                str(self.folder),
            ) from error

    def _drop_part(self, part: Path, chunk: int, side: OpenFile | None) -> None:
        """Takes a part's name away, and before that the name of the side file beside it, if one was made."""
        if side is not None:
            remove(self.folder / arrays_name(chunk))
        remove(part)

    def _alone(self, chunk: int) -> _Copy:
        """Fetches a chunk for this process alone, into files without a name."""
        seal, _ = self._seal(chunk)
        files: list[OpenFile] = []
        parts: tuple[tuple[str, Seal | SealedArrays | None], ...]
        parts = ((chunk_name(chunk), seal), (arrays_name(chunk), seal.arrays))
        for name, sealed in parts:
            if sealed is not None:
                path = self.folder / f".{name}.{os.getpid()}{PART_SUFFIX}"
                files.append(self._file(path, name, os.O_CREAT | os.O_EXCL))
                remove(path)
                if not self._is_other_size(files[-1], sealed):
                    self._download(files[-1], sealed)
        self._check_identity()
        return seal, files[0], files[1] if len(files) > 1 else None

    def _seal(self, chunk: int) -> tuple[Seal, bytes]:
        path = self._directory / seal_name(chunk)
        data = read_file(path)
        return Seal.decode(data, chunk, str(path)), data

    def _is_other_size(self, file: OpenFile, seal: Seal | SealedArrays) -> bool:
        """Looks whether a large object has another size than the seal tells, which the file gets then."""
        if seal.size <= PART_BYTES:
            return False
        found = size_of(file.path)
        if found != seal.size:
            os.ftruncate(file.fd, found)
        return found != seal.size

    def _download(self, file: OpenFile, seal: Seal | SealedArrays) -> bool:
        """Fetches an object of a chunk; returns whether it is what the seal tells."""
        path = file.path
        assert isinstance(path, UrlPath)
        for _ in range(2):
            start = 0
            while start < seal.size:
                # One byte more than there should be, to see that there are no more.
                wanted = min(PART_BYTES, seal.size + 1 - start)
                data = path.store.get_range(path.key, start, start + wanted)
                write_at(file.fd, data, start)
                start += len(data)
                if len(data) < wanted:
                    break
            self.fetched += isinstance(seal, Seal)
            if start == seal.size and _rows_are(file.fd, seal):
                return True
        # So that who opens it says what it has found.
        os.ftruncate(file.fd, size_of(path) if start != seal.size else start)
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


class ReadAhead:
    """A thread that fetches so many chunks ahead. One for each process; a fork begins with none.

    What `fetch` raises is met again by who asks for that chunk.
    """

    def __init__(self, fetch: Callable[[int], None], count: int) -> None:
        self._fetch = fetch
        self._count = count
        self._opened: deque[int] = deque(maxlen=_REMEMBERED)
        self._wanted: queue.SimpleQueue[list[int] | None] | None = None
        self._pid = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_wanted": None, "_pid": 0}

    def opened(self, chunk: int) -> None:
        """Notes that a chunk was opened, and has those fetched that come next."""
        self._opened.append(chunk)
        wanted = guess_next(self._opened, self._count)
        if not wanted:
            return
        if self._wanted is None or self._pid != os.getpid():
            self._pid, self._wanted = os.getpid(), queue.SimpleQueue()
            # It ends with its reader.
            weakref.finalize(self, self._wanted.put, None)
            # A daemon: what it is fetching when the process ends is fetched anew by whoever wants it.
            run = partial(_run, self._wanted, weakref.ref(self))
            threading.Thread(target=run, name="lazyshard-read-ahead", daemon=True).start()
        self._wanted.put(wanted)

    def fetch(self, chunk: int) -> bool:
        """Fetches a chunk; returns whether that went well."""
        try:
            self._fetch(chunk)
        except (LazyShardError, OSError):
            # Not published yet, most often. Whoever comes to it meets the same.
            return False
        return True


def _run(wanted: queue.SimpleQueue[list[int] | None], owner: weakref.ref[ReadAhead]) -> None:
    # Held while it fetches, and not while it waits: the reader may be gone by then.
    while (chunks := wanted.get()) is not None:
        ahead = owner()
        for chunk in chunks:
            # The reader is on: what it comes to next is more urgent.
            if ahead is None or not wanted.empty() or not ahead.fetch(chunk):
                break
        ahead = None


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
