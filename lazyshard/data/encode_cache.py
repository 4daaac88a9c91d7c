"""Encoded samples kept on this node, for all of its processes, for later epochs and for restarts.

Who comes to a row that a peer is encoding continues with the next one of its batch, and comes back. The cache is never
needed: where it fails it is left alone from then on, and rows are encoded as without it.

Files, in a folder of the user's choice, `lazyshard-kept-1/`: for each chunk one, `KEY.kept` (its bytes are in
`lazyshard.format.arrays`), read without a lock and never synced: what is read is checked by digests. `.room`, locked
by who adds or removes, holds the bytes that all take; who encodes a row holds a record lock on a byte of `.claims`.
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
from lazyshard.data.samples import BUSY, SampleMaker, pack, unpack
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
KEPT_SUFFIX: Final = ".kept"  # of the file of a chunk, behind its key
# What has another name is not ours, and neither counted nor removed
_NAME: Final = re.compile(rf"[0-9a-f]{{32}}{re.escape(KEPT_SUFFIX)}")
_OPEN_FILES: Final = 64
# How long to wait for another process to encode a row: one that takes longer was stopped, or has died of it.
_WAIT_S: Final = 60.0

_Place = tuple[bytes, int, int, int]  # Key and rows of a sample's chunk, its row there, and the digest of its line


class CachedSampleMaker(SampleMaker):
    """Makes samples of rows, and keeps them for all processes of the node, by all that decides about them.

    The arguments behind `encode_fn` are those of `SampleMaker`. Raises ValueError: nothing is encoded, it is not known
    by what, or it is no place for a cache.
    """

    def __init__(
        self, settings: EncodeCache, encode_fn: EncodeFn | None, reader: StreamReader, pipeline: RowSteps, *rest: Any
    ) -> None:
        super().__init__(reader, pipeline, *rest)
        if not pipeline:
            raise ValueError("an encode cache keeps what encode_fn or steps make of rows, and neither is given")
        place = cache_place(settings.directory, reader.directory)
        given, what = settings.fingerprint, "the fingerprint of an encode cache"
        steps = "; ".join(step.describe(whole=True) for step in pipeline.steps)
        told = {"lazyshard.steps": steps} if steps else {}
        if given is None:
            given, what = getattr(encode_fn, "fingerprint", None), "the attribute fingerprint of encode_fn"
            if given is None or steps:
                both = "encode_fn or steps" if steps else "encode_fn"
                text = f"facts that change whenever {both} would make another sample"
                raise ValueError(f"an encode cache needs EncodeCache(fingerprint={{...}}): {text}, as the tokenizer")
            name = getattr(encode_fn, "__qualname__", type(encode_fn).__qualname__)
            told = {"function": f"{getattr(encode_fn, '__module__', '')}:{name}"}
        facts = check_encoding(given, what)
        for name in told.keys() & facts:
            raise ValueError(f"a fingerprint has no fact {name!r}, which lazyshard tells itself: give another name")
        self._node, self._encoding = KeptSamples(place, settings.most_bytes), {**facts, **told}
        self._keys: dict[int, tuple[bytes, int]] = {}
        self._told = set[str]()
        # Given up, and only read.
        self._off = self._full = False

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_keys": {}, "_told": set(), "_off": False, "_full": False}

    def _made(self, sample: int, line: bytes, *, wait: bool = True) -> tuple[Any, Exception | None]:
        """Returns what is kept of a line or made of it, or why it cannot be trained; `BUSY` as `_ask`."""
        place = self._place(sample, line)
        found = self._ask(place, wait)
        if found is BUSY:
            return BUSY, None
        if found is not None:
            self._counts["from_cache"] += 1
            return (unpack(found.sample), None) if found.dropped is None else (None, SkipSample(found.dropped))
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
        # What was looked up is taken: another thread may clear them at any time.
        if (known := self._keys.get(number)) is None:
            chunk = self._reader.chunk(number)
            if len(self._keys) >= 4096:
                self._keys.clear()
            rows = len(chunk)
            known = self._keys[number] = arrays.chunk_key(self._encoding, number, size, rows, chunk.identity()), rows
        return *known, row, xxhash.xxh3_64_intdigest(line)

    def _ask(self, place: _Place, wait: bool) -> Any:
        """Returns what is kept, `BUSY`, or None where this process is to encode the row, and to release it then."""
        due, pause = time.monotonic() + _WAIT_S, 0.001
        try:
            # Nobody waits for what is not kept.
            while (found := None if self._off else self._find(place)) is None and not self._full:
                if self._node.claim(place[0], place[2]):
                    # Between the look and the claim another one may have come to its end.
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
            self._tell("off", f"the cache cannot be used, and all rows are encoded from here on: {error}")
            return None

    def _find(self, place: _Place) -> Kept | None:
        damaged, found = self._node.damaged, self._node.find(*place)
        if self._node.damaged > damaged:
            self._tell("damaged", "a cached sample has been changed or lost since it was written; it is encoded anew")
        return found

    def _keep(self, place: _Place, made: Any, dropped: SkipSample | None) -> None:
        """Keeps what was made of a sample, if that comes back as it is, or the reason for which it was dropped."""
        key, rows, row, digest = place
        if dropped is not None and (type(dropped) is not SkipSample or [*map(type, dropped.args)] != [str]):
            return  # More was said of it than a reason
        kind, why = "large", ""
        try:
            given = pack(made) if dropped is None else dropped.args[0]
            record = arrays.encode_sample(given, key, row, digest, dropped=dropped is not None)
            if not self._full and self._node.keep(*place, record):
                return
            if len(record) > MAX_RECORD_BYTES or slot_at(rows) + len(record) > self._node.most:
                why = f"{len(record)} bytes, of {rows} rows of a chunk, are larger than the whole cache or a sample is"
        except OSError as error:
            self._full = True
            self._tell("full", f"nothing more is cached, what is there is still read: {error}")
        except Exception as cause:
            raise_if_short(cause)
            # Whatever a value of somebody else's class, or a tensor of a kind that we do not know, may raise.
            reason = cause.reason if isinstance(cause, RowInvalid) else str(cause)
            kind, why = "odd", f"it holds what would not come back as it is: {reason:.200}"
        if dropped is None:
            self._counts["not_cached"] += 1
            if why:
                self._tell(kind, f"a sample is not cached: {why}")

    def _tell(self, kind: str, what: str) -> None:
        """Says something, once in a process."""
        if kind not in self._told:
            self._told.add(kind)
            log.warning("%s: %s", self._node.folder, what)


def cache_place(directory: Any, stream: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of a cache. Raises ValueError: it is none, in the stream, or a file is in its place."""
    path = os.fspath(directory) if isinstance(directory, os.PathLike) else directory
    if not isinstance(path, str) or not path or "\0" in path or is_url(path):
        got = f"the URL {redact(path)!r}" if isinstance(path, str) and is_url(path) else repr(directory)
        raise ValueError(f"an encode cache is the path of a directory of this node, got {got}")
    place = Path(os.path.abspath(os.path.expanduser(path)))
    if not is_url(stream) and Path(os.path.realpath(place)).is_relative_to(os.path.realpath(stream)):
        raise ValueError(f"the encode cache {path!r} lies in the stream's own directory: name one outside of it")
    # A folder that is not there yet is made when something is kept.
    one = next(one for one in (place, *place.parents) if os.path.lexists(one))
    if not one.is_dir():
        what = f"a link to {os.readlink(one)}" if one.is_symlink() else "a file"
        raise ValueError(f"the encode cache {path!r} cannot be a directory: {one} is {what}; name another one")
    return place


class _Gone(Exception):
    """The file of a chunk was cut: another one has its name now, or none."""


class KeptSamples:
    """The samples kept in a folder, made when it is first needed: FileRefused is raised if it is somebody else's.

    Safe under fork, and can be pickled (open files stay behind). Several threads may share one; what they encode at a
    time may be encoded twice. Bytes are counted before they are written, so who is killed in between has counted too
    many; where the count cannot be believed, after a restart of the machine too, the files are looked at.

    Args:
        directory: where the folder is to be; held to what `_check` says.
        most: bytes that all files of chunks may take together.

    Attributes:
        damaged: records met by this process that were not what was kept.
    """

    def __init__(self, directory: Path, most: int) -> None:
        self.folder = directory / FOLDER
        self.damaged = 0
        self.most = most
        self._boot: str | None = None  # once the folder is there
        self._claims: OpenFile | None = None
        # In the order of use, each with when it was noted to be in use.
        self._files: dict[bytes, tuple[OpenFile, float]] = {}
        self._not_before = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"damaged": 0, "_boot": None, "_claims": None, "_files": {}, "_not_before": 0.0}

    def find(self, key: bytes, rows: int, row: int, line: int) -> Kept | None:
        """Returns what is kept of one of so many rows of a chunk, made of a line with this digest."""
        while (file := self._file(key, rows)) is not None:
            try:
                return self._read(file, key, row, line)
            except _Gone:
                self._files.pop(key, None)
        return None

    def keep(self, key: bytes, rows: int, row: int, line: int, record: bytes) -> bool:
        """Keeps the record of a row, unless one is kept already; returns whether one is now. Arguments as of `find`."""
        if len(record) > MAX_RECORD_BYTES or time.monotonic() < self._not_before:
            return False
        self._open()
        path = self._path(key)
        with locked(self.folder / ".room") as counted:
            if counted is None:
                # Its holder was stopped.
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
                # One that begins otherwise than it should.
                _drop(path)
                file = OpenFile(open_own(path, os.O_CREAT | os.O_EXCL), path, 0)
                os.ftruncate(file.fd, slot_at(rows))
                write_all(file.fd, arrays.encode_head(key, rows), 0)
                self._files[key] = file, time.monotonic()
            _append(file.fd, row, record)
        return True

    def claim(self, key: bytes, row: int) -> bool:
        """Takes the right to encode a row; returns whether it was free. It ends by `release`, or with this process."""
        if self._claims is None:
            self._open()
            path = self.folder / ".claims"
            self._claims = OpenFile(open_own(path), path, 0)
        with contextlib.suppress(BlockingIOError, PermissionError):
            fcntl.lockf(self._claims.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _place(key, row))
            return True
        return False

    def release(self, key: bytes, row: int) -> None:
        """Gives that right back."""
        if self._claims is not None:
            with contextlib.suppress(OSError):
                fcntl.lockf(self._claims.fd, fcntl.LOCK_UN, 1, _place(key, row))

    def _open(self) -> None:
        if self._boot is None:
            self.folder.parent.parent.mkdir(parents=True, exist_ok=True)
            for folder in (self.folder.parent, self.folder):
                # Not writable to everybody, whatever the umask says.
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(mode=0o775)
                _check(folder, own=folder == self.folder)
            self._boot = this_boot()

    def _path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}{KEPT_SUFFIX}"

    def _read(self, file: OpenFile, key: bytes, row: int, line: int) -> Kept | None:
        """Returns what is kept of a row; None where nothing is."""
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
        """Counts so many bytes of the file `keep` as taken, once there is room for them; returns whether there was."""
        data = os.pread(counted, 25, 0)  # one byte more than there should be
        taken = int.from_bytes(data[:8], "little")
        if data != self._count(taken) or taken + size > self.most:
            files = [file for file in files_in(self.folder) if _NAME.fullmatch(file[0].name)]
            taken = sum(found.st_size for _, found in files)
            if taken + size > self.most >= size:
                others = sorted((file for file in files if file[0] != keep), key=lambda one: one[1].st_mtime_ns)
                # A part of it is left free, so that the files are not looked at for each sample.
                taken = evict(others, taken, self.most - self.most // 16 - size, _drop)
        fits = taken + size <= self.most
        os.pwrite(counted, self._count(taken + size * fits), 0)
        return fits

    def _count(self, taken: int) -> bytes:
        # With a digest of it and of which start of the machine it was.
        data = taken.to_bytes(8, "little")
        return data + xxhash.xxh3_128_digest(data + str(self._boot).encode())

    def _file(self, key: bytes, rows: int) -> OpenFile | None:
        """Returns the file of a chunk, None where there is none that is whole."""
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
            # Its time of modification decides what goes first.
            with contextlib.suppress(OSError):
                os.utime(file.fd)
        self._files[key] = file, noted
        for old in list(self._files)[:-_OPEN_FILES] if len(self._files) > _OPEN_FILES else ():
            self._files.pop(old, None)
        return file


def _append(fd: int, row: int, record: bytes) -> None:
    """Adds the record of a row, for which there is room; the folder is locked. On an OSError nothing is added."""
    end = os.fstat(fd).st_size
    try:
        write_all(fd, record, end)
        write_all(fd, arrays.encode_slot(record, end), slot_at(row))
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, end)
        raise


def _drop(path: Path) -> bool:
    """Removes the file of a chunk. It is cut before, so its room is free at once, whoever has it open."""
    with contextlib.suppress(FileNotFoundError):
        file = OpenFile(open_own(path, 0), path, 0)
        os.ftruncate(file.fd, 0)
    remove(path)
    return True


def _place(key: bytes, row: int) -> int:
    """Returns the byte that stands for a row: one of 2**62, so that hardly ever two rows have the same."""
    return xxhash.xxh3_64_intdigest(key + row.to_bytes(8, "little")) >> 2


def _check(folder: Path, *, own: bool) -> None:
    """Refuses our `own` folder, or the directory that it lies in, where other users could put other samples there.

    The directory's owner could, and whoever may write to it, unless it is sticky, as /tmp and /dev/shm are: there only
    owners rename and remove. Those of its group are trusted. The directories above it are not looked at.
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
    expected = f"a folder of uid {uid}{'' if own else ' or of root'} to which not everybody may write"
    way = "; name another place for encoded samples"
    raise refused(folder, expected if own else f"{expected}, unless it is sticky", kind, way)
