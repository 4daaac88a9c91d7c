"""The chunk that a writer is filling: rows go to a file under `.tmp/`, their offsets and digests stay in memory.

That file is created with the first row, so that a reader can see that there are rows which are not published. Files are
touched by steps alone, done in order in the caller's thread or in one of their own: Python's lock is let go while the
system works, so a thread can sync one chunk while the caller parses the rows of the next.
"""

from __future__ import annotations

import contextlib
import functools
import os
from array import array
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from lazyshard.format.batch import CheckedArrays, CheckedLines
from lazyshard.format.seal import Seal, SealedArrays
from lazyshard.store.durable import create, start_writing_back, sync, write_all

_BACKLOG_BYTES: Final = 8 << 20
"""Rows that may wait for the thread: what the caller makes while a chunk is synced, little beside other memory."""

BUFFER_BYTES: Final = 1 << 20  # pieces are of this size; more gains nothing, less costs calls

PIECE_BYTES: Final = 64 << 10
"""What comes together and is at least so much is a piece by itself: copying it would cost more."""


class OpenChunk:
    """A chunk under construction. Memory: one buffer, and 20 bytes a row.

    Rows are added by the writer's caller; the files belong to the steps until those have stopped. What adds rows raises
    OSError where the device refused earlier ones. Without `arrays` rows hold none.
    """

    def __init__(self, number: int, path: Path, steps: WriteSteps, arrays: OpenArrays | None = None) -> None:
        self.number = number
        self.path = path
        self.arrays = arrays
        self._file = PieceFile(path, steps)
        self._files = [self._file] if arrays is None else [self._file, arrays.file]
        self._offsets = array("Q", [0])
        self._digests = array("Q")
        self._tokens = array("I")
        self._end = 0

    def __len__(self) -> int:
        return len(self._digests)

    def append(self, line: bytes, tokens: int | None) -> None:
        """Adds a row, its newline included."""
        self._end += len(line)
        self._offsets.append(self._end)
        self._digests.append(xxhash.xxh3_64_intdigest(line))
        if tokens is not None:
            self._tokens.append(tokens)
        file = self._file
        file.buffer += line
        if len(file.buffer) >= file.limit:
            file.grown()

    def extend(self, rows: CheckedLines) -> None:
        """Adds rows."""
        self._offsets.frombytes((rows.ends + np.uint64(self._end)).tobytes())
        self._digests.frombytes(rows.digests.tobytes())
        if rows.tokens is not None:
            self._tokens.frombytes(rows.tokens.astype(np.uint32).tobytes())
        self._end += len(rows.data)
        if self.arrays is not None:
            self.arrays.extend(rows.arrays, len(rows))
        self._file.append(rows.data)

    def pass_on(self) -> None:
        """Hands what rows are left in memory to the files; after the last one, before `finish`."""
        for file in self._files:
            file.pass_on()

    def finish(self) -> None:
        """A step: brings the rows onto the device and closes the files. After an OSError they must be written anew."""
        for file in self._files:
            file.finish()

    def discard(self) -> None:
        """A step, or when all of them are done: closes the files and removes them, if it can."""
        for file in self._files:
            file.discard()

    def abandon(self) -> None:
        """Closes the files as they are."""
        for file in self._files:
            file.abandon()

    def seal(self, source: Any, now: float) -> Seal:
        """Returns the seal of the rows so far; lengths only if every row has one."""
        return Seal(
            chunk=self.number,
            offsets=np.asarray(self._offsets, dtype=np.uint64),
            digests=np.asarray(self._digests, dtype=np.uint64),
            tokens=np.asarray(self._tokens, dtype=np.uint32) if len(self._tokens) == len(self) else None,
            source=source,
            sealed_at=now,
            arrays=None if self.arrays is None else self.arrays.sealed(),
        )


class OpenArrays:
    """The arrays of a chunk under construction, written to `file`. Memory: one buffer, and 16 bytes a row."""

    def __init__(self, path: Path, steps: WriteSteps) -> None:
        self.file = PieceFile(path, steps)
        self._offsets = array("Q", [0])
        self._digests = array("Q")

    def append(self, data: bytes) -> None:
        """Adds the bytes of a row, which may be none."""
        self._offsets.append(self._offsets[-1] + len(data))
        self._digests.append(xxhash.xxh3_64_intdigest(data))
        self.file.append(data)

    def extend(self, rows: CheckedArrays | None, count: int) -> None:
        """Adds the bytes of so many rows; None where they have none."""
        if rows is None:
            self._offsets.extend([self._offsets[-1]] * count)
            self._digests.extend([xxhash.xxh3_64_intdigest(b"")] * count)
            return
        self._offsets.frombytes((rows.ends + np.uint64(self._offsets[-1])).tobytes())
        self._digests.frombytes(rows.digests.tobytes())
        self.file.append(rows.data)

    def sealed(self) -> SealedArrays:
        """Returns what the seal says of the rows so far."""
        return SealedArrays(np.asarray(self._offsets, dtype=np.uint64), np.asarray(self._digests, dtype=np.uint64))


class PieceFile:
    """A file to which pieces are appended, created with the first byte. It belongs to the steps.

    What adds bytes raises OSError where the device refused those before. `buffer` is not handed over yet, and to be
    added to; with `limit` bytes in it `grown` is to be called.
    """

    def __init__(self, path: Path, steps: WriteSteps) -> None:
        self.path = path
        self.buffer = bytearray()
        self.limit = 1
        self._steps = steps
        self._fd: int | None = None
        self._written = 0
        self._begun = 0  # bytes that are on their way to the device

    def append(self, data: bytes) -> None:
        """Adds bytes: to the buffer, or as a piece by themselves."""
        if len(data) < PIECE_BYTES:
            self.buffer += data
            if len(self.buffer) >= self.limit:
                self.grown()
        else:
            self.pass_on()
            self._hand_over(data)

    def grown(self) -> None:
        """Creates the file with its first bytes, and passes the buffer on once it is full."""
        if self.limit < BUFFER_BYTES:
            self.limit = BUFFER_BYTES
            self._steps.do(self._create)
        if len(self.buffer) >= BUFFER_BYTES:
            self.pass_on()

    def pass_on(self) -> None:
        """Hands what is left in memory to the steps."""
        if self.buffer:
            piece, self.buffer = self.buffer, bytearray()
            self._hand_over(piece)

    def finish(self) -> None:
        """A step: brings the file onto the device and closes it; an empty one if there was no piece."""
        sync(self._create())
        self._close()

    def discard(self) -> None:
        """A step, or when all of them are done: closes the file and removes it, if it can."""
        self.abandon()
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def abandon(self) -> None:
        """Closes the file as it is."""
        with contextlib.suppress(OSError):
            self._close()

    def _hand_over(self, piece: bytes | bytearray) -> None:
        self._steps.do(functools.partial(self._write, piece), len(piece))

    def _create(self) -> int:
        """Returns the descriptor of the file, which is created if it is not there yet."""
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


class WriteSteps:
    """Does steps in order: here each at once, in the caller's thread."""

    def do(self, step: Callable[[], object], size: int = 0) -> int:
        """Does a step that holds so many bytes, or sees to it that it will be done; returns its number.

        Raises what this step raised, or an earlier one; no other will be done.
        """
        step()
        return 0

    def wait(self, number: int | None = None) -> None:
        """Returns when the steps up to that number are done, all of them if it is None. Raises as `do`."""

    def stop(self) -> bool:
        """Waits until no step is left, does none from then on; returns False where an interrupt has ended the wait."""
        return True


class StepsInThread(WriteSteps):
    """Does them in a thread that lives until `stop`, at the latest until the interpreter ends."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="lazyshard-writer")
        self._pending: deque[tuple[int, int, Future[None]]] = deque()
        self._bytes = 0
        self._number = 0
        self._failed = False
        self._stopping = False
        self._stopped = False

    def do(self, step: Callable[[], object], size: int = 0) -> int:
        """Hands a step to the thread, as soon as no more than `_BACKLOG_BYTES` wait for it."""
        while self._pending and (self._pending[0][2].done() or self._bytes + size > _BACKLOG_BYTES):
            self._take()
        self._number += 1
        try:
            self._pending.append((self._number, size, self._executor.submit(self._run, step)))
            self._bytes += size
        except RuntimeError as cause:
            if "shutdown" not in str(cause):  # no thread can be started
                raise
            # The interpreter is ending, in an `atexit` function for instance: its threads are gone, their work is done.
            self.wait()
            self._run(step)
        return self._number

    def wait(self, number: int | None = None) -> None:
        """Waits for the thread, up to a step."""
        while self._pending and (number is None or self._pending[0][0] <= number):
            self._take()

    def stop(self) -> bool:
        """Ends the thread once all is done."""
        if not self._stopping:
            self._stopping = True
            self._executor.shutdown(wait=True)
            self._stopped = True
        return self._stopped

    def _take(self) -> None:
        _, size, done = self._pending[0]
        try:
            done.result()
        finally:
            if done.done():
                self._pending.popleft()
                self._bytes -= size

    def _run(self, step: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            step()
        except BaseException:
            self._failed = True
            raise
