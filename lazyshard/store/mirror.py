"""Copies of the chunks of a stream in an object store, on this node: fetched when they are asked for, and ahead.

One cache serves all processes of a node (`lazyshard.store.room`). Of those that want the same chunk at a time one
fetches it, under a temporary name that is locked while it does; the others wait for it, as long as it gets on. It gets
its name once it is whole and its rows are those that its seal tells; by then its seal and side file are there. A kill
leaves at the most a part that nobody has locked, which the next one removes.
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
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import xxhash

from lazyshard.errors import LazyShardError, SealInvalid
from lazyshard.format.names import arrays_name, chunk_name, seal_name
from lazyshard.format.seal import Seal, SealedArrays
from lazyshard.store.durable import create, remove, write_all, write_at
from lazyshard.store.files import PART_BYTES, OpenFile, read_file
from lazyshard.store.room import (
    BYTES_VARIABLE,
    FOLDER_VARIABLE,
    HELD,
    PART_SUFFIX,
    cache_bytes,
    drop,
    folder_of,
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

_LOOK_S: Final = 0.02
"""How often to look whether another process has fetched what this one waits for."""

_STALLED_S: Final = 60.0
"""One that fetches and gets no byte for so long has failed many times, or was stopped, and is not waited for."""

_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW

_Copy = tuple[Seal, int, int | None]
"""Of a chunk: its seal, and descriptors of its data file and of its side file, if it has one."""


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

    def open(self, chunk: int) -> tuple[Seal, OpenFile, OpenFile | None]:
        """Opens a chunk's copy, fetched if it is not there yet: its data file, and its side file if it has one.

        A data object that is not what its seal tells is fetched twice, and then opened as it is, for this process
        alone: what is wrong with it is found where its rows are read.

        Raises:
            FileNotFoundError: an object of it is not there (yet); its `filename` is the URL.
            SealInvalid, StreamMismatch: the seal is; another stream is at the URL now.
            StoreRefused, StoreUnavailable, OSError: the store does not give it; the copy cannot be written here.
        """
        found = self._get(chunk, ahead=False)
        assert found is not None
        seal, fd, side = found
        rows = OpenFile(fd, self._directory / chunk_name(chunk), os.fstat(fd).st_size)
        arrays = self._directory / arrays_name(chunk)
        return seal, rows, None if side is None else OpenFile(side, arrays, os.fstat(side).st_size)

    def fetch(self, chunk: int) -> None:
        """Sees to it that a copy is there when it is asked for, unless there is no room. Raises as `open` does."""
        if (self.folder / chunk_name(chunk)).exists():
            return
        copy = self._get(chunk, ahead=True)
        if copy is not None:
            _close(copy[1:])

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
            HELD.add(fd)
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
                HELD.discard(fd)
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
                    _close([side])
                    return None
                if os.fstat(fd).st_size == seal.size:
                    if read:
                        note_use(fd, read=True)
                    copy, fd = fd, -1
                    return seal, copy, side
                _close([side])
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
            seal, sealed = self._seal(chunk)
            wanted: list[tuple[int, str, Seal | SealedArrays]] = [(fd, chunk_name(chunk), seal)]
            if seal.arrays is not None:
                # In place, as the seal: nobody looks at them before the data has its name.
                side = _make(self.folder / arrays_name(chunk))
                wanted.append((side, arrays_name(chunk), seal.arrays))
            others = [self._is_other_size(*one) for one in wanted]
            if any(others):
                self._drop_part(part, chunk, side)
                for one, other in zip(wanted, others, strict=True):
                    if not other:
                        self._download(*one)
                return seal, fd, side
            size = sum(one.size for _, _, one in wanted)
            if not reserve(self.folder.parent, fd, size + len(sealed), self._most, ahead=ahead):
                self._drop_part(part, chunk, side)
                _close([side])
                return None
            if side is not None and seal.arrays is not None:
                # Each file has what it takes from here on, so that nothing is counted twice.
                os.ftruncate(side, seal.arrays.size)
                os.ftruncate(fd, seal.size + len(sealed))
            whole = [self._download(*one) for one in wanted]
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
        except BaseException as error:
            self._drop_part(part, chunk, side)
            _close([side])
            if not isinstance(error, OSError) or error.errno != errno.ENOSPC:
                raise
            raise OSError(
                errno.ENOSPC,
                f"no space left for a copy of chunk {chunk} of {self._directory}: free some, or set {BYTES_VARIABLE}, "
                f"or {FOLDER_VARIABLE} to a folder on another disk",
                str(self.folder),
            ) from error

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
        seal, _ = self._seal(chunk)
        fds: list[int] = []
        try:
            parts: tuple[tuple[str, Seal | SealedArrays | None], ...]
            parts = ((chunk_name(chunk), seal), (arrays_name(chunk), seal.arrays))
            for name, sealed in parts:
                if sealed is not None:
                    path = self.folder / f".{name}.{os.getpid()}{PART_SUFFIX}"
                    fds.append(os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600))
                    remove(path)
                    if not self._is_other_size(fds[-1], name, sealed):
                        self._download(fds[-1], name, sealed)
            self._check_identity()
        except BaseException:
            _close(fds)
            raise
        return seal, fds[0], fds[1] if len(fds) > 1 else None

    def _seal(self, chunk: int) -> tuple[Seal, bytes]:
        """Returns a chunk's seal, and its bytes. Raises FileNotFoundError, SealInvalid, and what stores raise."""
        path = self._directory / seal_name(chunk)
        data = read_file(path)
        return Seal.decode(data, chunk, str(path)), data

    def _is_other_size(self, fd: int, name: str, seal: Seal | SealedArrays) -> bool:
        """Looks whether a large object has another size than the seal tells, which the file gets then."""
        if seal.size <= PART_BYTES:
            return False
        path = self._directory / name
        found = path.store.size(path.key)
        if found != seal.size:
            os.ftruncate(fd, found)
        return found != seal.size

    def _download(self, fd: int, name: str, seal: Seal | SealedArrays) -> bool:
        """Fetches an object of a chunk; returns whether it is what the seal tells."""
        path = self._directory / name
        for _ in range(2):
            start = 0
            while start < seal.size:
                # One byte more than there should be, to see that there are no more.
                wanted = min(PART_BYTES, seal.size + 1 - start)
                data = path.store.get_range(path.key, start, start + wanted)
                write_at(fd, data, start)
                start += len(data)
                if len(data) < wanted:
                    break
            self.fetched += isinstance(seal, Seal)
            if start == seal.size and _rows_are(fd, seal):
                return True
        # So that who opens it says what it has found.
        os.ftruncate(fd, path.store.size(path.key) if start != seal.size else start)
        return False


def _rows_are(fd: int, seal: Seal | SealedArrays) -> bool:
    """Returns whether a file's rows are those of which a seal has the digests."""
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


def _make(path: Path) -> int:
    """Makes an empty file, in place of any of its name, to be written and read."""
    remove(path)
    return os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)


def _close(fds: Iterable[int | None]) -> None:
    for fd in fds:
        if fd is not None:
            os.close(fd)


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
        """Leaves the thread behind."""
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
