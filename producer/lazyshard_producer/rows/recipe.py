"""What is made of each row: columns chosen, filtered, transformed, encoded, measured. In this order, row by row.

Rows are made in this process, or by workers: they come back in the order in which they went in. The functions of the
user's may take the number of the row among all that were read, over all runs, as a second argument.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as NotReady
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from typing import Any, Final, NamedTuple

import numpy as np

from lazyshard.errors import RowInvalid
from lazyshard.format.arrays import fill_row, pack_row, refuse_array_key
from lazyshard.format.batch import EncodedRow
from lazyshard.format.row import check_row, encode_row, has_duplicate_keys
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.errors import WorkerFailed, load_function
from lazyshard_producer.rows.encoding import Measure, call_user, encode, key_names, load_encoder, pad_row, read_document
from lazyshard_producer.rows.reader import Line, by_length
from lazyshard_producer.sources.source import bad_row, line_size, too_long


class MadeOfRow(NamedTuple):
    """The rows made of one row as they are published, or why it was refused; `duplicate`: it named a key twice.

    `tokens`: the length of each; empty where nobody asks for them.
    """

    lines: Sequence[Line]
    refused: RowInvalid | None = None
    duplicate: bool = False
    tokens: Sequence[int] = ()


class Maker:
    """Makes rows of rows, as `Workers` do in others. Raises SettingInvalid: a function cannot be had.

    `arrays`: rows of the sources may hold arrays, and with them those that are made.
    """

    most: Final = 1
    rows: Final = 1

    def __init__(self, settings: Settings, arrays: bool = False) -> None:
        self._columns, self._most, self._arrays = settings.columns, settings.max_row_bytes, arrays
        self._split, self._padding = settings.split > 0, settings.padding
        self._measure = Measure(settings) if by_length(settings) or settings.measure else None
        self._where = _load(settings.where, "--where") if settings.where else None
        self._transform = _load(settings.transform, "--transform") if settings.transform else None
        self._encoder = load_encoder(settings)[0] if settings.encode else None

    def make(self, line: Line | RowInvalid, index: int) -> MadeOfRow:
        """Returns what becomes of a row; what the user's functions raise is a reason to refuse it."""
        duplicate = False
        try:
            if isinstance(line, RowInvalid):
                raise line
            text = line if isinstance(line, bytes) else line.line
            row = check_row(text)
            duplicate = has_duplicate_keys(text, row)
            if isinstance(line, EncodedRow) and self._arrays:
                # Writable, as the arrays of rows that are read for training.
                fill_row(row, np.frombuffer(bytearray(line.arrays), np.uint8))
            made = [self._finish(one, self._encode(one, line)) for one in self._rows(row, index)]
            lengths = [length for _, length in made if length is not None]
            return MadeOfRow([row for row, _ in made], None, duplicate, lengths or ())
        except RowInvalid as refused:
            return MadeOfRow([], refused, duplicate)

    def submit(self, lines: Sequence[Line | RowInvalid], index: int) -> list[MadeOfRow]:
        """Makes rows; the first has this index."""
        return [self.make(line, index + number) for number, line in enumerate(lines)]

    def result(self, work: list[MadeOfRow], timeout: float) -> list[MadeOfRow] | None:
        """Returns what was made of them."""
        return work

    def _rows(self, row: dict[str, Any], index: int) -> Sequence[Any]:
        if self._columns:
            try:
                row = {new: row[old] for new, old in self._columns}
            except KeyError as missing:
                raise bad_row(f"--columns: no {missing.args[0]!r} among its keys ({key_names(row)})") from None
        if self._where is not None and not call_user("--where", self._where, row, index):
            return ()
        if (transform := self._transform) is None:
            return (row,)
        made: list[Any] = call_user("--transform", lambda: _as_rows(transform(row, index)))
        return made

    def _encode(self, made: Any, line: Line) -> Line:
        """Returns a row that was made of a line as it is published, unless it is cut, padded or measured."""
        if self._transform is None and not self._columns and self._encoder is None:
            if isinstance(line, EncodedRow):
                return line.line if not self._arrays and (self._split or self._padding) else line
            line = line.rstrip(b"\r\n") + b"\n"
            if not self._arrays:
                return line
            refuse_array_key(made)
            return EncodedRow(line, b"")
        if self._encoder is not None and isinstance(made, dict):
            return self._checked("--encode", encode(self._encoder, made))
        option = "--columns" if self._transform is None else "--transform"
        try:
            line = EncodedRow(*pack_row(made)) if self._arrays else encode_row(made)
        except RowInvalid as cause:
            # What is wrong is not the line that it was made of.
            raise bad_row(f"{option} made what is no row: {cause.reason}") from cause
        self._checked(option, line)
        if self._encoder is None:
            return line
        # What a transform has made need not be JSON yet, but a dict.
        return self._encode(check_row(line if isinstance(line, bytes) else line.line), line)

    def _finish(self, row: dict[str, Any], line: Line) -> tuple[Line, int | None]:
        """Returns a row as it is published, and its length if somebody asks for that."""
        if self._split:
            return read_document(row, line)
        if self._padding is not None:
            line, tokens = pad_row(self._padding, row, line)
            return self._checked("--pad", line), tokens
        if self._measure is None:
            return line, None
        tokens = self._measure.of(row, line)
        if isinstance(line, EncodedRow) and not self._arrays and self._encoder is None:
            line = line.line
        return line, tokens

    def _checked(self, option: str, line: Line) -> Line:
        if (size := line_size(line) - 1) > self._most:
            raise bad_row(f"{option} made a row of {size} bytes, {too_long(self._most)}")
        return line


def _as_rows(made: Any) -> list[Any]:
    if made is None:
        return []
    if isinstance(made, Mapping):
        return [made if isinstance(made, dict) else dict(made)]
    if isinstance(made, str | bytes) or not isinstance(made, Iterable):
        raise TypeError(f"expected a row, None or rows, got {type(made).__name__}")
    return list(made)


def _load(name: str, option: str) -> Callable[[dict[str, Any], int], Any]:
    """Returns the function, taking (row, index) whatever it takes itself."""
    function, wanted = load_function(name, option), 0
    with contextlib.suppress(TypeError, ValueError):
        for one in inspect.signature(function).parameters.values():
            wanted += one.kind <= one.POSITIONAL_OR_KEYWORD and (one.default is one.empty or one.name == "index")
    return function if wanted > 1 else lambda row, index: function(row)


class Workers:
    """A pool of processes. `most` pieces of work, of `rows` rows each, are to be under way."""

    def __init__(self, settings: Settings, count: int, arrays: bool = False) -> None:
        _start_tracker()
        spawn = multiprocessing.get_context("spawn")  # not fork: this process may have threads
        self._pool = ProcessPoolExecutor(count, spawn, _begin, (settings, arrays, os.getpid()))
        self.most: Final = 2 * count  # for each worker one in hand, and one at the door
        self.rows = 1

    def submit(self, lines: Sequence[Line | RowInvalid], index: int) -> Future[tuple[list[MadeOfRow], float]]:
        """Sends rows off; the first has this index."""
        try:
            return self._pool.submit(_make, list(lines), index)
        except BrokenProcessPool as cause:
            raise _died() from cause

    def result(self, work: Future[tuple[list[MadeOfRow], float]], timeout: float) -> list[MadeOfRow] | None:
        """Returns what was made of rows that were sent off, None if that is not ready within so many seconds."""
        try:
            made, seconds = work.result(timeout)
        except NotReady:
            return None
        except BrokenProcessPool as cause:
            raise _died() from cause
        # 50 ms of work travel at a time: far more than the way takes, far less than anybody waits for. At most 256 rows
        # bound the memory.
        self.rows = max(1, min(256, 2 * self.rows, int(0.05 * len(made) / max(seconds, 1e-9))))
        return made

    def close(self) -> None:
        """Ends the processes, those that are at work too, and returns when nothing of the pool is left."""
        # Its thread must not be left to the end of the interpreter: in Python 3.11 that wakes it up without its lock.
        for process in list((self._pool._processes or {}).values()):
            with contextlib.suppress(OSError, ValueError):
                process.kill()
        # This end of the workers' pipe would keep the thread waiting for the rest of what one was sending.
        if (writer := getattr(self._pool._result_queue, "_writer", None)) is not None:
            writer.close()
        self._pool.shutdown(wait=True)


def _start_tracker() -> None:
    """Starts the process that removes the semaphores of a pool that is killed; it would warn of each."""
    before = {name: value for name, value in os.environ.items() if name == "PYTHONWARNINGS"}
    os.environ["PYTHONWARNINGS"] = ",".join([*filter(None, before.values()), "ignore:resource_tracker"])
    try:
        resource_tracker.ensure_running()
    finally:
        del os.environ["PYTHONWARNINGS"]
        os.environ.update(before)


_maker: Maker | None = None  # of a worker process


def _begin(settings: Settings, arrays: bool, parent: int) -> None:
    global _maker
    # The signals of a terminal and of service managers go to all processes of a group; the parent deals with them.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        # Linux: nobody is left behind when the parent is killed.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        # It was killed before that was said.
        os._exit(1)
    _maker = Maker(settings, arrays)


def _make(lines: Sequence[Line | RowInvalid], index: int) -> tuple[list[MadeOfRow], float]:
    assert _maker is not None
    started = time.perf_counter()
    made = _maker.submit(lines, index)
    # What a function has printed must not be lost where this process is killed with its parent.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    return made, time.perf_counter() - started


def _died() -> WorkerFailed:
    what = "a worker process has ended in the middle of its work: killed (out of memory?), or its modules cannot be"
    hint = "What is published is safe; run the same command again, with fewer --workers or --workers 0"
    return WorkerFailed(f"{what} imported there. {hint}")
