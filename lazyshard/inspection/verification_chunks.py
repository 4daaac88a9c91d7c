"""What a verification finds in chunks: the data of each against its seal, row by row, by several processes at a time.

What is wrong with a chunk is returned, not raised, so that the chunks after it are looked at too. Processes and not
threads, since parsing holds the interpreter's lock. They end with this one, however it ends, and hold Ctrl-C
back: this process alone answers it. Memory of each: 16 bytes for each row of a chunk, and a block of rows.
"""

from __future__ import annotations

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
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, Literal

from lazyshard import errors
from lazyshard.errors import ChunkCorrupt, LazyShardError, RowInvalid
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
_BLOCK_BYTES: Final = 1 << 20  # Rows are read in pieces of about this size; more gains nothing
_MEND: Final = "restore the file from a copy, or have its producer make it anew: readers refuse this row"
_ALONE_S: Final = 0.5  # So long this process works alone: to start another one takes about as long


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a file: as a whole, or of a field, or of `rows` rows of which the first begins at a byte of the file.

    `kind` is a word for programs; `docs/checking.md` lists them.
    """

    kind: str
    file: str
    expected: str
    found: str
    remedy: str = RESTORE
    chunk: int | None = None
    severity: Severity = "damage"
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


leftover: Final = partial(Fault, severity="leftover")


@dataclass(frozen=True, slots=True)
class ChunkFiles:
    """Names of the files of a chunk that is to be looked at; of a foreign one no seal, as its marker says nothing."""

    chunk: int
    data: str
    seal: str | None
    arrays: str | None = None


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


def check_chunk(directory: Path, quick: bool, files: ChunkFiles) -> ChunkVerdict:
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
            samples, size = seal.samples, seal.size
            if (seal.arrays is None) is not (files.arrays is None):
                expected, actual = FORMAT, FORMAT_WITH_ARRAYS
                if seal.arrays is None:
                    expected, actual = actual, expected
                raise errors.SealInvalid(field="format", expected=f"{expected}, as {MANIFEST} says", actual=str(actual))
            opened = open_unread if quick else open_file
            name, side = files.data, None
            rows = opened(directory / name)
            if seal.arrays is not None and files.arrays is not None:
                name, size = files.arrays, size + seal.arrays.size
                side = opened(directory / name)
                ChunkArrays(side, files.chunk, seal.arrays)
                name = files.data
            chunk = open_copy(rows, seal, side)
        faults = () if quick else _bad_rows(files, chunk)
    except FileNotFoundError:
        return ChunkVerdict(files.chunk, files.data, samples, size, (), name)
    except (LazyShardError, OSError) as error:
        faults = (file_fault(name, error, files.chunk),)
    return ChunkVerdict(files.chunk, files.data, samples, size, faults)


def _bad_rows(files: ChunkFiles, chunk: Chunk) -> tuple[Fault, ...]:
    """Returns the first bad row of each kind, and how many there are of it."""
    first: dict[tuple[str, str], Fault] = {}
    for row, error in _faults(chunk, sealed=files.seal is not None):
        found = _row_fault(files, error, row, chunk.offset(row))
        before = first.get(key := (found.file, found.kind), found)
        first[key] = replace(before, rows=before.rows + 1)
    return tuple(first.values())


def _faults(chunk: Chunk, *, sealed: bool) -> Iterator[tuple[int, RowInvalid | ChunkCorrupt]]:
    """Yields each bad row with what is wrong with it. Raises ChunkCorrupt where the file was cut meanwhile."""
    row, budget = 0, _BLOCK_BYTES
    while row < len(chunk):
        try:
            lines = chunk.lines(row, len(chunk), 1, budget)
        except (ChunkCorrupt, RowInvalid) as error:
            yield row, _of_row(error)
            row += 1
            # The whole block is read again for each bad row in it, so after one they are read singly for a while.
            budget = 0
            continue
        budget = min(_BLOCK_BYTES, max(2 * budget, 4096))
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
            yield from _bad_arrays(chunk.arrays, lines, row)
        row += len(lines)


def _bad_arrays(arrays: ChunkArrays, lines: list[bytes], first: int) -> Iterator[tuple[int, RowInvalid | ChunkCorrupt]]:
    """Yields each row whose arrays are not what was sealed, or are described wrongly. Raises as `_faults`."""
    for row, line in enumerate(lines, first):
        try:
            data = arrays.read_rows(row, row + 1)
            # Of what is no JSON object it was told before.
            if may_hold_arrays(line) and parse_lines([line]):
                fill_row(parse_row(line), data)
        except (ChunkCorrupt, RowInvalid) as error:
            yield row, _of_row(error)


def _of_row(error: RowInvalid | ChunkCorrupt) -> RowInvalid | ChunkCorrupt:
    """Returns an error that is one of a row; raises one that is of the whole file."""
    if isinstance(error, ChunkCorrupt) and error.row is None:
        raise error
    return error


def _row_fault(files: ChunkFiles, error: RowInvalid | ChunkCorrupt, row: int, start: int) -> Fault:
    if isinstance(error, RowInvalid):
        # Of a sealed row it is told where in the row, of another one where in the file.
        byte = (error.byte or 0) + (start if error.file is None else 0)
        found = f"{str(error.reason).removeprefix('expected a JSON object, found ')} (byte {byte})"
        return Fault("row", files.data, "a JSON object on a line", found, _MEND, files.chunk, row=row, byte=start)
    file = files.data
    if files.arrays is not None and error.file is not None and error.file.endswith(files.arrays):
        file, start = files.arrays, error.byte or 0
    return Fault("digest", file, str(error.expected), str(error.actual), chunk=files.chunk, row=row, byte=start)


def file_fault(file: str, error: LazyShardError | OSError, chunk: int | None = None) -> Fault:
    """Returns the fault of a file that cannot be opened, read or used as a whole."""
    expected, found = str(getattr(error, "expected", None)), str(getattr(error, "actual", None))
    if isinstance(error, errors.VersionUnsupported):
        way = "install a newer lazyshard"
        return Fault("version", file, f"stream format {expected}", f"format {found}", way, chunk)
    if isinstance(error, errors.FormatInvalid):
        return Fault("invalid", file, expected, found, chunk=chunk, field=error.field)
    if isinstance(error, ChunkCorrupt):
        return Fault("size", file, expected, found, chunk=chunk)
    if isinstance(error, errors.FileRefused):
        return Fault("not-a-file", file, "a plain file", str(error.kind), chunk=chunk)
    found, mend = getattr(error, "strerror", None) or str(error), "mend the filesystem"
    if isinstance(error, errors.FileUnreadable):
        found, mend = f"that uid {error.uid} may not read it", "check the permissions"
    way = f"{mend}, and run the same command again"
    return Fault("unreadable", file, "a readable file", found, way, chunk, "unchecked")


Batch = Sequence[ChunkFiles]


def _check_batch(directory: Path, quick: bool, batch: Batch) -> list[ChunkVerdict]:
    return [check_chunk(directory, quick, files) for files in batch]


def check_in_order(
    directory: Path, quick: bool, batches: Sequence[Batch], jobs: int, alone_s: float = _ALONE_S
) -> Iterator[list[ChunkVerdict]]:
    """Yields what is found in each batch, in their order, by at most so many processes at a time.

    This one works alone for `alone_s` seconds before it starts others. Raises ChildProcessError: a process has ended
    before its work was done; MemoryError: there is not enough memory for a row.
    """
    check, started, done = partial(_check_batch, directory, quick), time.monotonic(), 0
    while done < len(batches) and (jobs == 1 or time.monotonic() - started < alone_s):
        yield check(batches[done])
        done += 1
    if done == len(batches):
        return
    # Spawned, since a fork of a process with threads may hang.
    others, jobs = set(multiprocessing.active_children()), min(jobs, len(batches) - done)
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin_work)
    waiting: deque[Future[list[ChunkVerdict]]] = deque()
    ready: SimpleQueue[Future[list[ChunkVerdict]]] = SimpleQueue()
    known: set[Future[list[ChunkVerdict]]] = set()
    try:
        while waiting or done < len(batches):
            # So many batches a process may be done before their turn.
            if done < len(batches) and len(waiting) < 4 * jobs:
                # What is started meanwhile holds Ctrl-C back as long as it runs.
                before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                try:
                    waiting.append(pool.submit(check, batches[done]))
                    waiting[-1].add_done_callback(ready.put)
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
                done += 1
                continue
            # An interrupt within a wait for a future may leave its lock held, and the pool's own thread would wait for
            # that for ever. This queue has no such lock, and of a future that is done nobody else wants it any more.
            while waiting[0] not in known:
                known.add(ready.get())
            known.remove(waiting[0])
            yield waiting.popleft().result()
        others = set(multiprocessing.active_children())
    except BrokenProcessPool as cause:
        raise ChildProcessError(
            "a process that looked at chunks ended before its work was done; if memory was short, use fewer --jobs"
        ) from cause
    finally:
        # Unless all is done, nobody wants what they do, and a share that gives no answer would hold them up.
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        pool.shutdown(cancel_futures=True)


def _begin_work() -> None:
    """Has a process that looks at chunks end with the one that started it."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with(process: Any) -> None:
        process.join()
        os._exit(1)

    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
