"""Writes Megatron's IndexedDataset, `PREFIX.bin` with `PREFIX.idx`: both appear whole, or neither is there.

Files, beside those two:

    .NAME.export/    while an export is at work, and after one that was killed until the next of this name
        lock         held by the process that writes; a second one is refused
        data         what becomes PREFIX.bin
        lengths, boundaries, modes
                     the parts of the index, as they grow: so memory does not grow with the data set
        index        what becomes PREFIX.idx

The data get their name first and the index gets its last, each durably: readers look for both, so they see nothing
before the whole is there. Where an older pair is replaced, its index goes first. Not guaranteed: that a reader which
opens the older pair in that very moment gets both files of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lazyshard.conversion.indexed import (
    BOUNDARY,
    DATA_SUFFIX,
    DTYPES,
    INDEX_SUFFIX,
    LENGTH,
    MODE,
    POINTER,
    IndexHeader,
    Ints,
    pointers_of,
)
from lazyshard.errors import ConfigInvalid, ProducerFenced
from lazyshard.store import durable
from lazyshard.store.files import check_folder

_BUFFER_BYTES: Final = 1 << 20
_COPY_ITEMS: Final = 1 << 16  # Numbers that are read at a time
_LOCK: Final = "lock"
_DATA: Final = "data"
_INDEX: Final = "index"
_PARTS: Final = (_DATA, "lengths", "boundaries", "modes")


class IndexedWriter:
    """A pair of files that is being written; a context manager. Leaving it without `finish` leaves nothing behind.

    `prefix` is the path of the files without `.bin` and `.idx`; its directory is there. With `replace` a pair of this
    name may be there, and is replaced. Raises ConfigInvalid: one of the two files is there; ProducerFenced: another
    process of this machine writes to this prefix; FileRefused: somebody has made a link where the temporary files are
    to be; OSError: the filesystem refused; any method may raise this.
    """

    def __init__(self, prefix: Path, dtype: str, *, has_modes: bool, replace: bool = False) -> None:
        self.prefix: Final = prefix
        self.dtype = dtype
        self.sequences = self.documents = self.tokens = 0
        self._has_modes = has_modes
        self._replace = replace
        self._folder: Final = prefix.parent / f".{prefix.name}.export"
        self._targets: Final = {name: prefix.parent / (prefix.name + name) for name in (DATA_SUFFIX, INDEX_SUFFIX)}
        self._parts: dict[str, _GrowingFile] = {}
        self._check_free()
        self._lock = self._acquire()
        try:
            # Again: another may have held the lock until now.
            self._check_free()
            self._take_over()
            for name in _PARTS:
                self._parts[name] = _GrowingFile(self._folder / name)
            self._parts["boundaries"].add(np.zeros(1, BOUNDARY).tobytes())
        except BaseException:
            self._close()
            raise

    def add_sequence(self, tokens: npt.NDArray[np.generic], mode: int | None = None) -> None:
        """Adds a sequence of fewer than 2**31 tokens, each of which `dtype` can hold, to the document that is open."""
        self._parts[_DATA].add(tokens.astype(DTYPES[self.dtype]).tobytes())
        self._parts["lengths"].add(np.array([len(tokens)], LENGTH).tobytes())
        if self._has_modes:
            assert mode is not None
            self._parts["modes"].add(np.array([mode], MODE).tobytes())
        self.sequences += 1
        self.tokens += len(tokens)

    def end_document(self) -> None:
        """Ends the document of all sequences since the one before it ended; it may have none."""
        self.documents += 1
        self._parts["boundaries"].add(np.array([self.sequences], BOUNDARY).tobytes())

    def widen(self, dtype: str) -> None:
        """Goes on with another type of tokens, which holds all that the one so far does; copies what is there."""
        old = self._parts[_DATA]
        old.flush()
        new = _GrowingFile(self._folder / "wider")
        try:
            for tokens in _read_numbers(old.path, DTYPES[self.dtype]):
                new.add(tokens.astype(DTYPES[dtype]).tobytes())
            new.flush()
            durable.rename(new.path, old.path)
        except BaseException:
            new.close()
            raise
        old.close()
        new.path = old.path
        self._parts[_DATA] = new
        self.dtype = dtype

    def finish(self) -> IndexHeader:
        """Makes both files appear, durably; raises ConfigInvalid if somebody else has made one of them meanwhile."""
        for part in self._parts.values():
            part.flush()
        self._parts[_DATA].sync()
        header = IndexHeader(self.dtype, self.sequences, self.documents, self._has_modes and self.sequences > 0)
        self._write_index(header)
        # From here on a killed one leaves an index and no data in the folder: so the data are known to be its own.
        durable.sync_directory(self._folder)
        self._check_free()
        if self._replace and os.path.lexists(self._targets[INDEX_SUFFIX]):
            durable.remove(self._targets[INDEX_SUFFIX])
            durable.sync_directory(self.prefix.parent)
        for name, suffix in ((_DATA, DATA_SUFFIX), (_INDEX, INDEX_SUFFIX)):
            durable.rename(self._folder / name, self._targets[suffix])
            durable.sync_directory(self.prefix.parent)
        return header

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def _write_index(self, header: IndexHeader) -> None:
        index = _GrowingFile(self._folder / _INDEX)
        try:
            index.add(header.encode())
            for lengths in _read_numbers(self._folder / "lengths", LENGTH):
                index.add(lengths.tobytes())
            begin = 0
            for lengths in _read_numbers(self._folder / "lengths", LENGTH):
                wide: Ints = lengths.astype(np.int64)
                index.add(pointers_of(wide, begin, self.dtype).astype(POINTER).tobytes())
                begin += int(wide.sum()) * header.token.itemsize
            for name in ("boundaries", "modes"):
                for numbers in _read_numbers(self._folder / name, np.dtype("u1")):
                    index.add(numbers.tobytes())
            index.sync()
        finally:
            index.close()

    def _check_free(self) -> None:
        there = [suffix for suffix, path in self._targets.items() if os.path.lexists(path)]
        if self._replace or not there or (there == [DATA_SUFFIX] and self._was_killed_at_the_end()):
            return
        path = str(self._targets[there[0]])
        message = f"{path}: is there already; choose another name, or have it replaced with --force"
        raise ConfigInvalid(message, file=path)

    def _was_killed_at_the_end(self) -> bool:
        """Whether an export has given its data their name and got no further."""
        names = (self._targets[INDEX_SUFFIX], self._folder / _DATA)
        return os.path.lexists(self._folder / _INDEX) and not any(map(os.path.lexists, names))

    def _acquire(self) -> int:
        while True:
            self._folder.mkdir(exist_ok=True)
            check_folder(self._folder)
            # An export that ends removes its folder, perhaps between these lines: then once more.
            with contextlib.suppress(FileNotFoundError):
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                fd = os.open(self._folder / _LOCK, flags, durable.NEW_FILE_MODE)
                if self._take_lock(fd):
                    return fd

    def _take_lock(self, fd: int) -> bool:
        """Takes the lock for as long as the file is open; returns False, the file closed, where it has no name left."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                return True
        except BlockingIOError as cause:
            os.close(fd)
            raise ProducerFenced(
                f"{self.prefix}: another process is exporting to it; wait for that, or choose another name",
                directory=str(self.prefix),
            ) from cause
        os.close(fd)
        return False

    def _take_over(self) -> None:
        """Removes what an export of this name has left that was killed. To be called with the lock held."""
        data = self._targets[DATA_SUFFIX]
        if self._was_killed_at_the_end() and os.path.lexists(data):
            # Before the index: that is what tells whose the data are.
            durable.remove(data)
            durable.sync_directory(data.parent)
        self._clear()

    def _clear(self) -> None:
        for name in (*_PARTS, _INDEX, "wider"):
            durable.remove(self._folder / name)

    def _close(self) -> None:
        for part in self._parts.values():
            part.close()
        # What cannot be removed now is removed by the next export of this name.
        with contextlib.suppress(OSError):
            self._clear()
            durable.remove(self._folder / _LOCK)
            os.rmdir(self._folder)
        os.close(self._lock)


class _GrowingFile:
    """A new file that grows at its end; what had the name loses it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = durable.create(path)
        self._buffer = bytearray()

    def add(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) >= _BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        durable.write_all(self._fd, self._buffer)
        self._buffer.clear()

    def sync(self) -> None:
        """Waits until all bytes are on the device."""
        self.flush()
        durable.sync(self._fd)

    def close(self) -> None:
        """Closes the file; what is not flushed is dropped."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _read_numbers(path: Path, kind: np.dtype[Any]) -> Iterator[npt.NDArray[Any]]:
    """Yields the numbers of a file, some at a time."""
    with path.open("rb") as file:
        while data := file.read(_COPY_ITEMS * kind.itemsize):
            yield np.frombuffer(data, kind)
