"""The chunk that a writer is filling, and how it and the stream's end are published.

Rows, and the side file of their arrays if any, go to files under `.tmp/`. These are created with the first row, so that
a reader can see that there are unpublished rows. The order of steps gives the guarantee: the files are synced and
renamed, and the directory synced; then the same for the seal. The seal is the commit: before it, nothing of the chunk
counts; after it, nothing of the chunk changes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import xxhash

from lazyshard.errors import ProducerFenced, WriterFailed
from lazyshard.format.arrays import BLOB_IN_LINE
from lazyshard.format.batch import CheckedLines
from lazyshard.format.records import END, End, arrays_name, chunk_name, seal_name
from lazyshard.format.seal import Seal, SealBytes, SealedArrays
from lazyshard.part import UInt64Array
from lazyshard.store import durable
from lazyshard.store.durable import create, publish_bytes, rename, start_writing_back, sync, sync_directory, write_all
from lazyshard.store.files import MAX_PLAIN_BYTES
from lazyshard.stream.chunk import damaged

if TYPE_CHECKING:
    from lazyshard.stream.lock import WriterLock

# Bytes of rows that may wait for the thread: what the caller makes while a chunk is synced, little next to other memory
_BACKLOG_BYTES: Final = 8 << 20
BUFFER_BYTES: Final = 1 << 20  # size of the pieces written; larger ones gain nothing, smaller ones take more calls
PIECE_BYTES: Final = 64 << 10  # data of at least this size is written as its own piece: copying it would cost more

_MAX_TOKENS: Final = 2**32 - 1  # lengths are sealed as 32 bits each

_digest = xxhash.xxh3_64_intdigest
_log = logging.getLogger("lazyshard")


class WriteSteps:
    """Runs the steps that touch files, in order: at once, or with `overlap` in a thread that runs until `stop`."""

    def __init__(self, *, overlap: bool = False) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="lazyshard-writer") if overlap else None
        self._pending: deque[tuple[int, int, Future[None]]] = deque()
        self._bytes = self._number = 0
        self._failed = False
        self._stopped = None if overlap else True

    def do(self, step: Callable[[], object], size: int = 0) -> int:
        """Runs or schedules a step that holds `size` bytes; returns its number. Raises what a step has raised."""
        if self._executor is None:
            step()
            return 0
        while self._pending and (self._pending[0][2].done() or self._bytes + size > _BACKLOG_BYTES):
            self._take()
        self._number += 1
        try:
            self._pending.append((self._number, size, self._executor.submit(self._run, step)))
            self._bytes += size
        except RuntimeError as cause:
            if "shutdown" not in str(cause):  # no thread can be started
                raise
            # The interpreter is exiting, for instance in an `atexit` function: its threads have finished.
            self.wait()
            self._run(step)
        return self._number

    def wait(self, number: int | None = None) -> None:
        """Returns when the steps up to `number` are done, or all of them if it is None. Raises as `do`."""
        while self._pending and (number is None or self._pending[0][0] <= number):
            self._take()

    def stop(self) -> bool:
        """Waits for all steps and accepts no more; returns False if an interrupt has ended the wait."""
        if self._executor is not None and self._stopped is None:
            self._stopped = False
            self._executor.shutdown(wait=True)
            self._stopped = True
        return bool(self._stopped)

    def _take(self) -> None:
        _, size, done = self._pending[0]
        try:
            done.result()
        finally:
            if done.done():
                self._pending.popleft()
                self._bytes -= size

    def _run(self, step: Callable[[], object]) -> None:
        if not self._failed:
            self._failed = True
            step()
            self._failed = False


class RowFile:
    """The file to which rows, or their arrays, are appended. Memory: one buffer, and 16 bytes per row."""

    def __init__(self, path: Path, steps: WriteSteps) -> None:
        self.path, self._steps = path, steps
        self.offsets, self.digests = array("Q", [0]), array("Q")
        self._buffer = bytearray()
        self._limit = 1  # buffered bytes that trigger the next action: creating the file, then passing the buffer on
        self._fd: int | None = None
        self._written = self._begun = 0  # `_begun`: bytes whose write-back to the device has started

    def append(self, row: bytes) -> None:
        """Adds the bytes of a row."""
        self.offsets.append(self.offsets[-1] + len(row))
        self.digests.append(_digest(row))
        self._add(row)

    def extend(self, data: bytes, ends: UInt64Array, digests: UInt64Array) -> None:
        """Adds the bytes of rows; `ends` are relative to these bytes."""
        self.offsets.frombytes((ends + np.uint64(self.offsets[-1])).tobytes())
        self.digests.frombytes(digests.tobytes())
        self._add(data)

    def sealed(self) -> tuple[UInt64Array, UInt64Array]:
        """Returns the offsets and digests of the rows so far."""
        return np.asarray(self.offsets, dtype=np.uint64), np.asarray(self.digests, dtype=np.uint64)

    def pass_on(self, more: bytes = b"") -> None:
        """Hands the buffered bytes to the steps, followed by `more`."""
        pieces: tuple[bytes | bytearray, ...] = self._buffer, more
        self._buffer = bytearray()
        for piece in pieces:
            if piece:
                self._steps.do(functools.partial(self._write, piece), len(piece))

    def finish(self) -> None:
        """A step: syncs and closes the file; creates an empty one if there was no piece."""
        sync(self._create())
        self._close()

    def discard(self, *, remove: bool = True) -> None:
        """A step, or called after all steps: closes the file, and removes it if possible."""
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            if remove:
                self.path.unlink(missing_ok=True)

    def _add(self, data: bytes) -> None:
        if len(data) >= PIECE_BYTES:
            self.pass_on(data)
            return
        self._buffer += data
        if len(self._buffer) < self._limit:
            return
        if self._limit < BUFFER_BYTES:
            self._limit = BUFFER_BYTES
            self._steps.do(self._create)
        if len(self._buffer) >= BUFFER_BYTES:
            self.pass_on()

    def _create(self) -> int:
        if self._fd is None:
            self._fd = create(self.path)
        return self._fd

    def _write(self, piece: bytes | bytearray) -> None:
        fd = self._create()
        write_all(fd, piece)
        self._written += len(piece)
        if self._written - self._begun >= BUFFER_BYTES:
            start_writing_back(fd, self._begun, self._written - self._begun)
            self._begun = self._written

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


class OpenChunk:
    """A chunk under construction; with `arrays` it has a side file."""

    def __init__(self, number: int, path: Callable[[str], Path], steps: WriteSteps, *, arrays: bool) -> None:
        self.number = number
        self.rows = RowFile(path(chunk_name(number)), steps)
        self.arrays = RowFile(path(arrays_name(number)), steps) if arrays else None
        self.files = [self.rows] if self.arrays is None else [self.rows, self.arrays]
        self._tokens, self._patches = array("I"), array("I")
        self._blobs = False  # whether a row holds bytes

    def __len__(self) -> int:
        return len(self.rows.digests)

    def append(self, line: bytes, arrays: bytes, tokens: int | None) -> None:
        """Adds a row, newline included, with the bytes of its arrays."""
        if self.arrays is not None:
            self.arrays.append(arrays)
            self._blobs = self._blobs or BLOB_IN_LINE in line
        if tokens is not None:
            self._tokens.append(tokens)
        self._patches.append(0)
        self.rows.append(line)

    def extend(self, rows: CheckedLines) -> None:
        """Adds a batch of checked rows."""
        if rows.tokens is not None:
            self._tokens.frombytes(rows.tokens.astype(np.uint32).tobytes())
        patches = np.zeros(len(rows)) if rows.patches is None else rows.patches
        self._patches.frombytes(patches.astype(np.uint32).tobytes())
        if self.arrays is not None and rows.arrays is not None:
            self.arrays.extend(rows.arrays.data, rows.arrays.ends, rows.arrays.digests)
            self._blobs = self._blobs or BLOB_IN_LINE in rows.data
        elif self.arrays is not None:
            nothing = np.zeros(len(rows), np.uint64)
            self.arrays.extend(b"", nothing, nothing + np.uint64(_digest(b"")))
        self.rows.extend(rows.data, rows.ends, rows.digests)

    def finish(self) -> None:
        """A step: syncs the rows and closes the files. After an OSError the rows must be written again."""
        for file in self.files:
            file.finish()

    def discard(self, *, remove: bool = True) -> None:
        """As `RowFile.discard`."""
        for file in self.files:
            file.discard(remove=remove)

    def warn_unpublished(self, directory: Path, pid: int) -> None:
        """Logs rows that are lost because their writer was dropped, or the interpreter exits, before it was closed."""
        if len(self) and os.getpid() == pid:
            what = "a ChunkWriter was dropped without close(): %d rows are not published; use it in a with statement"
            _log.warning(f"%s: {what}", directory, len(self))

    def seal(self, source: Any, now: float) -> bytes:
        """Returns the seal of the rows so far, with lengths only if every row has one."""
        tokens = np.asarray(self._tokens, dtype=np.uint32) if len(self._tokens) == len(self) else None
        side = None if self.arrays is None else SealedArrays(*self.arrays.sealed(), self._blobs)
        patches = np.asarray(self._patches, dtype=np.uint32)
        return Seal(self.number, *self.rows.sealed(), tokens, source, now, side, patches).encode()


class SealedPiece(NamedTuple):
    """A published chunk of another stream on this filesystem, to be published as a chunk of this one."""

    folder: Path  # of the other stream
    seal: SealBytes
    source: Any  # the position after it, for the seal here

    def check(self, samples_per_chunk: int, *, arrays: bool) -> None:
        """Checks that it can be a chunk of a stream.

        Raises:
            ChunkCorrupt, FileNotFoundError: a file of it has another length than its seal says, or is not there.
            ValueError: it has another number of rows, or it has arrays and the stream does not, or the reverse.
        """
        number = self.seal.chunk
        if self.seal.samples != samples_per_chunk or (self.seal.arrays_size is not None) is not arrays:
            raise ValueError(f"{self.folder}: chunk {number} has {self.seal.samples} rows, or other arrays")
        for name, size in ((chunk_name, self.seal.size), (arrays_name, self.seal.arrays_size)):
            path = self.folder / name(number)
            if size is not None and (found := os.stat(path, follow_symlinks=False).st_size) != size:
                raise damaged(path, number, None, None, f"{size} bytes as sealed", f"{found} bytes")


class LinkedChunk:
    """A piece as a chunk to be published; see `OpenChunk`.

    Its files get a second name: no byte of them is read. Where there are no hard links they are copied.
    """

    def __init__(self, number: int, path: Callable[[str], Path], piece: SealedPiece) -> None:
        self.number, self._seal = number, piece.seal
        names = [chunk_name] if piece.seal.arrays_size is None else [chunk_name, arrays_name]
        self.files = [PieceFile(piece.folder / name(piece.seal.chunk), path(name(number))) for name in names]

    def __len__(self) -> int:
        return self._seal.samples

    def finish(self) -> None:
        """A step: gives the files their second name, or makes durable copies."""
        for file in self.files:
            durable.remove(file.path)
            if not durable.link(file.first, file.path):
                durable.copy(file.first, file.path)

    def discard(self, *, remove: bool = True) -> None:
        """Removes the second names if it can."""
        for file in self.files:
            with contextlib.suppress(OSError):
                durable.remove(file.path)

    def seal(self, source: Any, now: float) -> bytes:
        """Returns the seal of the chunk."""
        return self._seal.encode(self.number, source, now)


class PieceFile(NamedTuple):
    """One of a piece's files: `path` is its second name."""

    first: Path
    path: Path


Filled: TypeAlias = tuple[OpenChunk | LinkedChunk, Any]  # a chunk, and the position after it


def publish_chunks(directory: Path, chunks: Sequence[Filled], now: float, lock: WriterLock) -> None:
    """Publishes chunks whose rows were all passed on, each with its position. All are published if this returns.

    They share the sync of the names of their data. Seals appear in order, each one durable before the next: after a
    power cut there is no gap. Checks the lock before each visible step. Raises ProducerFenced: another producer has
    taken the stream over, or has published one of these chunks.
    """
    targets = [directory / seal_name(chunk.number) for chunk, _ in chunks]
    for chunk, _ in chunks:
        chunk.finish()
    lock.check()
    if (taken := next(filter(os.path.lexists, targets), None)) is not None:
        # Most likely by a producer that has taken over since the last check.
        lock.check()
        what = f"{taken}: another program has published this chunk; this producer stops, nothing was changed"
        raise ProducerFenced(what, directory=str(directory))
    for chunk, _ in chunks:
        for number in reversed(range(len(chunk.files))):  # the rows last
            rename(chunk.files[number].path, directory / (chunk_name, arrays_name)[number](chunk.number))
    sync_directory(directory)
    for (chunk, source), target in zip(chunks, targets, strict=True):
        seal = chunk.seal(source, now)
        lock.check()
        publish_bytes(seal, target, lock.path(target.name))


def publish_end(directory: Path, chunks: int, samples: int, source: Any, temporary: Path) -> None:
    """Ends the stream after `chunks` published chunks; `source` is the position after everything that was read."""
    # Readers refuse a file that is too large, and do not need the position.
    data = next(data for one in (source, None) if len(data := End(chunks, samples, one).encode()) <= MAX_PLAIN_BYTES)
    publish_bytes(data, directory / END, temporary)


def check_tokens(tokens: int) -> int:
    """Returns a valid length of a sample in tokens. Raises TypeError, ValueError."""
    if not 0 <= (tokens := operator.index(tokens)) <= _MAX_TOKENS:
        raise ValueError(f"tokens is from 0 to {_MAX_TOKENS}, got {tokens}")
    return tokens


def write_failed(directory: Path, samples: int, reason: str, remedy: str) -> WriterFailed:
    """Returns the error of a write that failed; the first `samples` rows are published."""
    what = f"{directory}: {reason}. {samples:,} samples are published and safe, the rows after them are not; {remedy}"
    way = "the stream again, or start its producer again: it continues from there"
    return WriterFailed(f"{what} {way}", directory=str(directory), published_samples=samples)
