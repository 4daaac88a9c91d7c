"""What a verification finds in chunks: the data of each against its seal, row by row, by several processes at a time.

What is wrong with a chunk is returned, not raised, so that the chunks after it are looked at too. Processes and not
threads, since parsing holds the interpreter's lock. They end with this one, however it ends, and hold Ctrl-C
back: this process alone answers it. Memory of each: 16 bytes for each row of a chunk, and a block of rows.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, Literal

from lazyshard.errors import (
    ChunkCorrupt,
    FileRefused,
    FileUnreadable,
    FormatInvalid,
    LazyShardError,
    RowInvalid,
    VersionUnsupported,
)
from lazyshard.format.arrays import fill_row, may_hold_arrays
from lazyshard.format.batch import check_lines
from lazyshard.format.fields import FORMAT, FORMAT_WITH_ARRAYS
from lazyshard.format.names import MANIFEST
from lazyshard.format.row import check_row, parse_lines, parse_row
from lazyshard.format.seal import Seal
from lazyshard.store.files import open_file, open_unread, read_file
from lazyshard.stream.chunk import Chunk, open_copy, open_foreign
from lazyshard.stream.chunk_files import ChunkArrays

# damage: what is published is not as it was published; unchecked: this process could not look; leftover: what a crash
# leaves behind, and a producer's next start puts right
Severity = Literal["damage", "unchecked", "leftover"]

RESTORE: Final = "restore the file from a copy"
REMOVED: Final = "nothing to do: the producer's next start removes it"


_BLOCK_BYTES: Final = 1 << 20  # Rows are read in pieces of about this size; more gains nothing
_SMALL_BLOCK_BYTES: Final = 4096

_MEND: Final = "restore the file from a copy, or have its producer make it anew: readers refuse this row"
_ALONE_S: Final = 0.5  # So long this process works alone: to start another one takes about as long
_AHEAD: Final = 4  # Batches a process that may be done before their turn


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a file: as a whole, or of a field, or of `rows` rows of which the first begins at a byte of the file.

    `kind` is a word for programs; `docs/checking.md` lists them.
    """

    severity: Severity
    kind: str
    file: str
    expected: str
    found: str
    remedy: str
    chunk: int | None = None
    field: str | None = None
    row: int | None = None
    byte: int | None = None
    rows: int = 0

    def __str__(self) -> str:
        where = self.file
        if self.row is not None:
            more = f" and {self.rows - 1:,} more" if self.rows > 1 else ""
            where += f": row {self.row} (byte {self.byte}){more}"
        elif self.field is not None:
            where += f": field {self.field!r}"
        return f"{where}: expected {self.expected}, found {self.found}; {self.remedy}"


def damage(kind: str, file: str, expected: str, found: str, remedy: str = RESTORE, chunk: int | None = None) -> Fault:
    """Returns a fault of what is published."""
    return Fault("damage", kind, file, expected, found, remedy, chunk)


def leftover(kind: str, file: str, expected: str, found: str, remedy: str, chunk: int | None = None) -> Fault:
    """Returns a fault that harms nobody."""
    return Fault("leftover", kind, file, expected, found, remedy, chunk)


@dataclass(frozen=True, slots=True)
class ChunkFiles:
    """Names of the files of a chunk that is to be looked at; of a foreign one no seal, as its marker says nothing."""

    chunk: int
    data: str
    seal: str | None
    arrays: str | None = None


@dataclass(frozen=True, slots=True)
class ChunkBatch:
    """Chunks that one process looks at, one after the other; if `quick`, it leaves their rows unread."""

    directory: Path
    files: tuple[ChunkFiles, ...]
    quick: bool


@dataclass(frozen=True, slots=True)
class ChunkVerdict:
    """What was found in a chunk; `missing` is the name of a file that was not there.

    Rows and bytes are those that its seal says (of a foreign chunk: that were counted); None where nothing can tell.
    """

    chunk: int
    data: str
    samples: int | None
    size: int | None
    findings: tuple[Fault, ...]
    missing: str | None = None


def check_chunk(directory: Path, files: ChunkFiles, *, quick: bool) -> ChunkVerdict:
    """Looks at a chunk; `quick` compares sizes with the seal alone, but counts the rows of a foreign chunk too."""
    name = files.data
    samples = size = None
    try:
        if files.seal is None:
            chunk = open_foreign(directory / name, files.chunk)
            samples, size = len(chunk), chunk.offset(len(chunk))
        else:
            name = files.seal
            seal = Seal.decode(read_file(directory / name), files.chunk, name)
            if (seal.arrays is None) is not (files.arrays is None):
                return _of_another_format(files, seal)
            name = files.data
            samples, size = seal.samples, seal.size
            how = open_unread if quick else open_file
            rows, side = how(directory / name), None
            if seal.arrays is not None and files.arrays is not None:
                name, size = files.arrays, size + seal.arrays.size
                side = how(directory / name)
                ChunkArrays(side, files.chunk, seal.arrays)
                name = files.data
            chunk = open_copy(rows, seal, side)
        faults = () if quick else _bad_rows(files, chunk)
    except FileNotFoundError:
        return ChunkVerdict(files.chunk, files.data, samples, size, (), name)
    except (LazyShardError, OSError) as error:
        faults = (file_finding(name, error, files.chunk),)
    return ChunkVerdict(files.chunk, files.data, samples, size, faults)


def _of_another_format(files: ChunkFiles, seal: Seal) -> ChunkVerdict:
    expected, found = (FORMAT_WITH_ARRAYS, FORMAT) if seal.arrays is None else (FORMAT, FORMAT_WITH_ARRAYS)
    fault = damage("invalid", str(files.seal), f"{expected}, as {MANIFEST} says", str(found), chunk=files.chunk)
    return ChunkVerdict(files.chunk, files.data, seal.samples, seal.size, (replace(fault, field="format"),))


def _bad_rows(files: ChunkFiles, chunk: Chunk) -> tuple[Fault, ...]:
    """Returns the first bad row of each kind, and how many there are of it."""
    first: dict[str, Fault] = {}
    for row, error in _faults(chunk, sealed=files.seal is not None):
        found = _row_finding(files, error, row, chunk.offset(row))
        kind = f"{found.file} {found.kind}"
        before = first.get(kind, found)
        first[kind] = replace(before, rows=before.rows + 1)
    return tuple(first.values())


def _faults(chunk: Chunk, *, sealed: bool) -> Iterator[tuple[int, LazyShardError]]:
    """Yields each bad row with what is wrong with it. Raises ChunkCorrupt where the file was cut meanwhile."""
    row = 0
    budget = _BLOCK_BYTES
    while row < len(chunk):
        try:
            lines = chunk.lines(row, len(chunk), 1, budget)
        except (ChunkCorrupt, RowInvalid) as error:
            if isinstance(error, ChunkCorrupt) and error.row is None:
                raise
            yield row, error
            row += 1
            # The whole block is read again for each bad row in it, so after one they are read singly for a while.
            budget = 0
            continue
        budget = min(_BLOCK_BYTES, max(2 * budget, _SMALL_BLOCK_BYTES))
        # Without digests the reader has held the rows to the rules already.
        if sealed and not (all(line.endswith(b"\n") for line in lines) and check_lines(lines).refused is None):
            for at, line in enumerate(lines, row):
                try:
                    if not line.endswith(b"\n"):
                        raise RowInvalid(reason="no newline at its end", byte=len(line))
                    check_row(line)
                except RowInvalid as error:
                    yield at, error
        if chunk.arrays is not None:
            yield from _bad_arrays(chunk, lines, row)
        row += len(lines)


def _bad_arrays(chunk: Chunk, lines: list[bytes], first: int) -> Iterator[tuple[int, LazyShardError]]:
    """Yields each row whose arrays are not what was sealed, or are described wrongly. Raises as `_faults`."""
    assert chunk.arrays is not None
    for row, line in enumerate(lines, first):
        try:
            data = chunk.arrays.read(row)
            # Of what is no JSON object it was told before.
            if may_hold_arrays(line) and parse_lines([line]):
                fill_row(parse_row(line), data)
        except (ChunkCorrupt, RowInvalid) as error:
            if isinstance(error, ChunkCorrupt) and error.row is None:
                raise
            yield row, error


def _row_finding(files: ChunkFiles, error: LazyShardError, row: int, start: int) -> Fault:
    file = files.data
    if isinstance(error, RowInvalid):
        # Of a sealed row it is told where in the row, of another one where in the file.
        byte = (error.byte or 0) + (start if error.file is None else 0)
        reason = str(error.reason).removeprefix("expected a JSON object, found ")
        kind, expected, found, remedy = "row", "a JSON object on a line", f"{reason} (byte {byte})", _MEND
    else:
        assert isinstance(error, ChunkCorrupt)
        kind, expected, found, remedy = "digest", str(error.expected), str(error.actual), RESTORE
        if files.arrays is not None and error.file is not None and error.file.endswith(files.arrays):
            file, start = files.arrays, error.byte or 0
    return replace(damage(kind, file, expected, found, remedy, files.chunk), row=row, byte=start)


def file_finding(file: str, error: LazyShardError | OSError, chunk: int | None = None) -> Fault:
    """Returns the finding for a file that cannot be opened, read or used as a whole."""
    expected, found = str(getattr(error, "expected", None)), str(getattr(error, "actual", None))
    if isinstance(error, VersionUnsupported):
        to_do = "install a newer lazyshard"
        return damage("version", file, f"stream format {expected}", f"format {found}", to_do, chunk)
    if isinstance(error, FormatInvalid):
        return replace(damage("invalid", file, expected, found, chunk=chunk), field=error.field)
    if isinstance(error, ChunkCorrupt):
        return damage("size", file, expected, found, chunk=chunk)
    if isinstance(error, FileRefused):
        return damage("not-a-file", file, "a plain file", str(error.kind), chunk=chunk)
    found, mend = getattr(error, "strerror", None) or str(error), "mend the filesystem"
    if isinstance(error, FileUnreadable):
        found, mend = f"that uid {error.uid} may not read it", "check the permissions"
    remedy = f"{mend}, and run the same command again"
    return Fault("unchecked", "unreadable", file, "a readable file", found, remedy, chunk)


def _check_batch(batch: ChunkBatch) -> list[ChunkVerdict]:
    return [check_chunk(batch.directory, files, quick=batch.quick) for files in batch.files]


def check_in_order(batches: Sequence[ChunkBatch], jobs: int, alone_s: float = _ALONE_S) -> Iterator[list[ChunkVerdict]]:
    """Yields what is found in each batch, in their order, by at most so many processes at a time.

    This one works alone for `alone_s` seconds before it starts others. Raises ChildProcessError: a process has ended
    before its work was done; MemoryError: there is not enough memory for a row.
    """
    started = time.monotonic()
    done = 0
    while done < len(batches) and (jobs == 1 or time.monotonic() - started < alone_s):
        yield _check_batch(batches[done])
        done += 1
    if done < len(batches):
        yield from _check_by_others(batches[done:], min(jobs, len(batches) - done))


def _check_by_others(batches: Sequence[ChunkBatch], jobs: int) -> Iterator[list[ChunkVerdict]]:
    # Spawned, since a fork of a process with threads may hang.
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin_work)
    waiting: deque[Future[list[ChunkVerdict]]] = deque()
    ready: SimpleQueue[Future[list[ChunkVerdict]]] = SimpleQueue()
    known: set[Future[list[ChunkVerdict]]] = set()

    def first() -> list[ChunkVerdict]:
        # An interrupt within a wait for a future may leave its lock held, and the pool's own thread would wait for that
        # for ever. This queue has no such lock, and of a future that is done nobody else wants it any more.
        while waiting[0] not in known:
            known.add(ready.get())
        known.remove(waiting[0])
        return waiting.popleft().result()

    done = False
    try:
        for batch in batches:
            with _interrupt_held():
                waiting.append(pool.submit(_check_batch, batch))
                waiting[-1].add_done_callback(ready.put)
            if len(waiting) == _AHEAD * jobs:
                yield first()
        while waiting:
            yield first()
        done = True
    except BrokenProcessPool as cause:
        raise ChildProcessError(
            "a process that looked at chunks ended before its work was done; if memory was short, use fewer --jobs"
        ) from cause
    finally:
        if not done:
            # Nobody wants what they do, and a share that gives no answer would hold them up.
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _interrupt_held() -> Iterator[None]:
    """Holds Ctrl-C back; what is started meanwhile does so as long as it runs."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_work() -> None:
    """Has a process that looks at chunks end with the one that started it."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with(process: Any) -> None:
        process.join()
        os._exit(1)

    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
