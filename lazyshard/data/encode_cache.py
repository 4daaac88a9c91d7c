"""Caches encoded samples on this node, for all of its processes, for later epochs and for restarts.

A process that reaches a row that a peer is encoding continues with the rest of its batch first. The cache is optional:
if it fails, it is no longer used, and rows are encoded as without it.

Files, in the folder `lazyshard-kept-1/` of the user's directory: one file per chunk, `KEY.kept` (layout in
`lazyshard.format.arrays`), read without a lock and never synced, as digests validate what is read. `.room`, locked
while records are added or removed, holds the total size. A process that encodes a row holds a record lock on a byte of
`.claims`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from lazyshard.data.rank import log
from lazyshard.data.samples import BUSY, SampleMaker, from_stored, to_stored
from lazyshard.data.settings import EncodeCache, EncodeFn, RowSteps
from lazyshard.errors import RowInvalid, SkipSample, redact
from lazyshard.format import arrays
from lazyshard.format.arrays import MAX_RECORD_BYTES, SLOT, Kept, slot_at
from lazyshard.format.records import check_encoding
from lazyshard.memory import raise_if_short
from lazyshard.store.durable import locked, open_own, refused, remove, this_boot, write_all
from lazyshard.store.files import OpenFile, evict, files_in, is_url
from lazyshard.stream import StreamReader

FOLDER: Final = f"lazyshard-kept-{arrays.KEPT_VERSION}"
KEPT_SUFFIX: Final = ".kept"  # of the file of a chunk, after its key
# Files with other names are not the cache's, and neither counted nor removed
_NAME: Final = re.compile(rf"[0-9a-f]{{32}}{re.escape(KEPT_SUFFIX)}")
_OPEN_FILES: Final = 64
# How long to wait for another process to encode a row: one that takes longer is suspended, or hangs on the row.
_WAIT_S: Final = 60.0

_Place = tuple[bytes, int, int, int]  # Key and number of rows of the sample's chunk, the row, the digest of its line


class CachedSampleMaker(SampleMaker):
    """Makes samples from rows and caches them for all processes of the node, by everything that decides their content.

    The arguments after `encode_fn` are those of `SampleMaker`. Raises ValueError: nothing is encoded, the fingerprint
    is unknown, or the directory is not suitable for a cache.
    """

    def __init__(
        self, settings: EncodeCache, encode_fn: EncodeFn | None, reader: StreamReader, pipeline: RowSteps, *rest: Any
    ) -> None:
        super().__init__(reader, pipeline, *rest)
        if not pipeline:
            raise ValueError("an encode cache keeps the results of encode_fn or steps, and neither is given")
        place = cache_place(settings.directory, reader.directory)
        given, what = settings.fingerprint, "the fingerprint of an encode cache"
        steps = "; ".join(step.describe(whole=True) for step in pipeline.steps)
        own = {"lazyshard.steps": steps} if steps else {}
        if given is None:
            given, what = getattr(encode_fn, "fingerprint", None), "the attribute fingerprint of encode_fn"
            if given is None or steps:
                both = "encode_fn or steps" if steps else "encode_fn"
                text = f"values, such as the tokenizer, that change whenever {both} would make another sample"
                raise ValueError(f"an encode cache needs EncodeCache(fingerprint={{...}}): {text}")
            name = getattr(encode_fn, "__qualname__", type(encode_fn).__qualname__)
            own = {"function": f"{getattr(encode_fn, '__module__', '')}:{name}"}
        facts = check_encoding(given, what)
        for name in own.keys() & facts:
            raise ValueError(f"a fingerprint must not have the key {name!r}, which lazyshard sets: use another name")
        self._node, self._encoding = KeptSamples(place, settings.most_bytes), {**facts, **own}
        self._keys: dict[int, tuple[bytes, int]] = {}
        self._warned = set[str]()
        # `_off`: no longer used at all. `_full`: only read.
        self._off = self._full = False

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_keys": {}, "_warned": set(), "_off": False, "_full": False}

    def _made(self, sample: int, line: bytes, *, wait: bool = True) -> tuple[Any, Exception | None]:
        """Returns the cached or newly made sample of a line, or why it cannot be trained; `BUSY` as in `_look_up`."""
        place = self._place(sample, line)
        found = self._look_up(place, wait)
        if found is BUSY:
            return BUSY, None
        if found is not None:
            self._counts["from_cache"] += 1
            return (from_stored(found.sample), None) if found.dropped is None else (None, SkipSample(found.dropped))
        self._counts["encoded"] += 1
        try:
            made, failed = super()._made(sample, line)
            if failed is None or isinstance(failed, SkipSample):
                self._keep(place, made, failed)
            return made, failed
        finally:
            self._node.release(place[0], place[2])

    def _place(self, sample: int, line: bytes) -> _Place:
        size = self._reader.samples_per_chunk
        number, row = divmod(sample, size)
        # Uses the value just looked up, as another thread may clear the keys at any time.
        if (known := self._keys.get(number)) is None:
            chunk = self._reader.chunk(number)
            if len(self._keys) >= 4096:
                self._keys.clear()
            rows = len(chunk)
            known = self._keys[number] = arrays.chunk_key(self._encoding, number, size, rows, chunk.identity()), rows
        return *known, row, xxhash.xxh3_64_intdigest(line)

    def _look_up(self, place: _Place, wait: bool) -> Any:
        """Returns the cached sample, `BUSY`, or None if this process is to encode the row and then release it."""
        due, pause = time.monotonic() + _WAIT_S, 0.001
        try:
            # If nothing is added to the cache, there is no point in waiting.
            while (found := None if self._off else self._find(place)) is None and not self._full:
                if self._node.claim(place[0], place[2]):
                    # Another process may have finished between the look-up and the claim.
                    if (found := self._find(place)) is not None:
                        self._node.release(place[0], place[2])
                    return found
                if not wait:
                    return BUSY
                if time.monotonic() >= due:
                    return None
                time.sleep(pause)
                pause = min(2 * pause, 0.02)
            return found
        except OSError as error:
            self._off = self._full = True
            self._warn_once("off", f"the cache cannot be used, so all rows are encoded from now on: {error}")
            return None

    def _find(self, place: _Place) -> Kept | None:
        damaged, found = self._node.damaged, self._node.find(*place)
        if self._node.damaged > damaged:
            self._warn_once("damaged", "a cached sample was changed or lost since it was written; it is encoded again")
        return found

    def _keep(self, place: _Place, made: Any, dropped: SkipSample | None) -> None:
        """Caches the sample of a row, if it can be restored exactly, or the reason for which the row was dropped."""
        key, rows, row, digest = place
        if dropped is not None and (type(dropped) is not SkipSample or [*map(type, dropped.args)] != [str]):
            return  # The exception holds more than a reason
        kind, why = "large", ""
        try:
            given = to_stored(made) if dropped is None else dropped.args[0]
            record = arrays.encode_sample(given, key, row, digest, dropped=dropped is not None)
            if not self._full and self._node.keep(*place, record):
                return
            if len(record) > MAX_RECORD_BYTES or slot_at(rows) + len(record) > self._node.most:
                why = f"{len(record)} bytes, of {rows} rows of a chunk, exceed the size of the cache or of a sample"
        except OSError as error:
            self._full = True
            self._warn_once("full", f"nothing more is cached, existing samples are still read: {error}")
        except Exception as cause:
            raise_if_short(cause)
            # Values of unknown classes, or unknown kinds of tensors, may raise anything.
            reason = cause.reason if isinstance(cause, RowInvalid) else str(cause)
            kind, why = "odd", f"it holds a value that would not be restored exactly: {reason:.200}"
        if dropped is None:
            self._counts["not_cached"] += 1
            if why:
                self._warn_once(kind, f"a sample is not cached: {why}")

    def _warn_once(self, kind: str, what: str) -> None:
        """Logs a warning, once per process and kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("%s: %s", self._node.folder, what)


def cache_place(directory: Any, stream: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of a cache. Raises ValueError: it is no path, in the stream, or blocked by a file."""
    path = os.fspath(directory) if isinstance(directory, os.PathLike) else directory
    if not isinstance(path, str) or not path or "\0" in path or is_url(path):
        got = f"the URL {redact(path)!r}" if isinstance(path, str) and is_url(path) else repr(directory)
        raise ValueError(f"an encode cache must be the path of a directory of this node, got {got}")
    place = Path(os.path.abspath(os.path.expanduser(path)))
    if not is_url(stream) and Path(os.path.realpath(place)).is_relative_to(os.path.realpath(stream)):
        raise ValueError(f"the encode cache {path!r} lies in the stream's own directory: choose one outside of it")
    # A missing directory is created when the first sample is cached.
    one = next(one for one in (place, *place.parents) if os.path.lexists(one))
    if not one.is_dir():
        what = f"a link to {os.readlink(one)}" if one.is_symlink() else "a file"
        raise ValueError(f"the encode cache {path!r} cannot be a directory: {one} is {what}; choose another one")
    return place


class _Gone(Exception):
    """The file of a chunk was truncated for removal: its name is free, or another file has it."""


class KeptSamples:
    """Samples cached in a folder, which is created at its first use. Raises FileRefused if it belongs to another user.

    Safe under fork, and picklable (open files are not included). Threads may share one; rows they encode at the same
    time may be encoded twice. Bytes are counted before they are written, so a process killed in between has counted too
    many; if the count is not valid, also after a reboot, the sizes of the files are summed.

    Args:
        directory: where the folder is created; `_check` must accept it.
        most: maximum total size of the files of chunks in bytes.

    Attributes:
        damaged: records read by this process that differ from what was written.
    """

    def __init__(self, directory: Path, most: int) -> None:
        self.folder = directory / FOLDER
        self.damaged = 0
        self.most = most
        self._boot: str | None = None  # set once the folder exists
        self._claims: OpenFile | None = None
        # In the order of use, each with the time at which its use was last recorded on disk.
        self._files: dict[bytes, tuple[OpenFile, float]] = {}
        self._not_before = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"damaged": 0, "_boot": None, "_claims": None, "_files": {}, "_not_before": 0.0}

    def find(self, key: bytes, rows: int, row: int, line: int) -> Kept | None:
        """Returns the record of one of the `rows` rows of a chunk, if it was made from a line with this digest."""
        while (file := self._file(key, rows)) is not None:
            try:
                return self._read(file, key, row, line)
            except _Gone:
                self._files.pop(key, None)
        return None

    def keep(self, key: bytes, rows: int, row: int, line: int, record: bytes) -> bool:
        """Adds the record of a row, unless one exists; returns whether one exists now. Arguments as for `find`."""
        if len(record) > MAX_RECORD_BYTES or time.monotonic() < self._not_before:
            return False
        self._open()
        path = self._path(key)
        with locked(self.folder / ".room") as counted:
            if counted is None:
                # The process that holds the lock is suspended.
                self._not_before = time.monotonic() + 60.0
                return False
            if key in self._files and not os.fstat(self._files[key][0].fd).st_nlink:
                self._files.pop(key, None)
            if self.find(key, rows, row, line) is not None:
                return True
            file = self._file(key, rows)
            if not self._reserve(counted, len(record) + (0 if file is not None else slot_at(rows)), path):
                return False
            if file is None:
                # Replaces a file whose header is not as expected.
                _drop(path)
                file = OpenFile(open_own(path, os.O_CREAT | os.O_EXCL), path, 0)
                os.ftruncate(file.fd, slot_at(rows))
                write_all(file.fd, arrays.encode_head(key, rows), 0)
                self._files[key] = file, time.monotonic()
            _append(file.fd, row, record)
        return True

    def claim(self, key: bytes, row: int) -> bool:
        """Claims the right to encode a row; returns whether it was free. Ends with `release` or with this process."""
        if self._claims is None:
            self._open()
            path = self.folder / ".claims"
            self._claims = OpenFile(open_own(path), path, 0)
        with contextlib.suppress(BlockingIOError, PermissionError):
            fcntl.lockf(self._claims.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _place(key, row))
            return True
        return False

    def release(self, key: bytes, row: int) -> None:
        """Gives up the claim."""
        if self._claims is not None:
            with contextlib.suppress(OSError):
                fcntl.lockf(self._claims.fd, fcntl.LOCK_UN, 1, _place(key, row))

    def _open(self) -> None:
        if self._boot is None:
            self.folder.parent.parent.mkdir(parents=True, exist_ok=True)
            for folder in (self.folder.parent, self.folder):
                # Never world-writable, whatever the umask is.
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(mode=0o775)
                _check(folder, own=folder == self.folder)
            self._boot = this_boot()

    def _path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}{KEPT_SUFFIX}"

    def _read(self, file: OpenFile, key: bytes, row: int, line: int) -> Kept | None:
        """Returns the record of a row; None if there is none."""
        data = os.pread(file.fd, SLOT.size, slot_at(row))
        if len(data) < SLOT.size:
            raise _Gone
        offset, size, digest = SLOT.unpack(data)
        if not offset:
            return None
        found = None
        if 0 < size <= MAX_RECORD_BYTES and offset < 1 << 62:
            record = np.empty(size, np.uint8)
            if os.preadv(file.fd, [record.data], offset) == size:
                found = arrays.decode_record(record, digest, key, row, line)
        if found is None and not os.fstat(file.fd).st_size:
            raise _Gone
        self.damaged += found is None
        return found

    def _reserve(self, counted: int, size: int, keep: Path) -> bool:
        """Reserves `size` bytes for the file `keep`, after making room for them; returns whether there was room."""
        data = os.pread(counted, 25, 0)  # one byte more than the expected length
        taken = int.from_bytes(data[:8], "little")
        if data != self._count(taken) or taken + size > self.most:
            files = [file for file in files_in(self.folder) if _NAME.fullmatch(file[0].name)]
            taken = sum(found.st_size for _, found in files)
            if taken + size > self.most >= size:
                others = sorted((file for file in files if file[0] != keep), key=lambda one: one[1].st_mtime_ns)
                # Free a bit more than needed, so that the files are not listed for each sample.
                taken = evict(others, taken, self.most - self.most // 16 - size, _drop)
        fits = taken + size <= self.most
        os.pwrite(counted, self._count(taken + size * fits), 0)
        return fits

    def _count(self, taken: int) -> bytes:
        # Followed by a digest of the count and the boot of the machine.
        data = taken.to_bytes(8, "little")
        return data + xxhash.xxh3_128_digest(data + str(self._boot).encode())

    def _file(self, key: bytes, rows: int) -> OpenFile | None:
        """Returns the file of a chunk, or None if there is no complete one."""
        now, (file, noted) = time.monotonic(), self._files.pop(key, (None, float("-inf")))
        if file is None:
            self._open()
            with contextlib.suppress(FileNotFoundError):
                file = OpenFile(open_own(self._path(key), 0), self._path(key), 0)
            head = arrays.encode_head(key, rows)
            if file is None or os.pread(file.fd, len(head), 0) != head or os.fstat(file.fd).st_size < slot_at(rows):
                return None
        if now - noted >= 60.0:
            noted = now
            # Its modification time decides the order of eviction.
            with contextlib.suppress(OSError):
                os.utime(file.fd)
        self._files[key] = file, noted
        for old in list(self._files)[:-_OPEN_FILES] if len(self._files) > _OPEN_FILES else ():
            self._files.pop(old, None)
        return file


def _append(fd: int, row: int, record: bytes) -> None:
    """Appends the record of a row; there is room, and the folder is locked. On an OSError nothing is added."""
    end = os.fstat(fd).st_size
    try:
        write_all(fd, record, end)
        write_all(fd, arrays.encode_slot(record, end), slot_at(row))
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, end)
        raise


def _drop(path: Path) -> bool:
    """Removes the file of a chunk. Truncates it first, so that its space is free even if it is open."""
    with contextlib.suppress(FileNotFoundError):
        file = OpenFile(open_own(path, 0), path, 0)
        os.ftruncate(file.fd, 0)
    remove(path)
    return True


def _place(key: bytes, row: int) -> int:
    """Returns the byte that represents a row, one of 2**62, so two rows hardly ever share a byte."""
    return xxhash.xxh3_64_intdigest(key + row.to_bytes(8, "little")) >> 2


def _check(folder: Path, *, own: bool) -> None:
    """Refuses the cache's `own` folder, or its parent directory, if other users could plant samples there.

    The owner of the directory could, and so could any user with write access, unless the directory is sticky like /tmp
    and /dev/shm. Members of its group are trusted. Directories above it are not checked.
    """
    uid, link = os.geteuid(), folder.lstat()
    found = link if own else folder.stat()
    trusted = (uid,) if own else (0, uid)
    kind = f"one of uid {found.st_uid} with mode {stat.filemode(found.st_mode)}"
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in trusted:
        kind = f"a link of uid {link.st_uid}"
    elif not stat.S_ISDIR(found.st_mode):
        kind = kind if own else "no directory"
    elif found.st_uid in trusted and (not found.st_mode & stat.S_IWOTH or (not own and found.st_mode & stat.S_ISVTX)):
        return
    expected = f"a folder of uid {uid}{'' if own else ' or of root'} that is not world-writable"
    way = "; choose another directory for encoded samples"
    raise refused(folder, expected if own else f"{expected}, unless it is sticky", kind, way)
