"""The steps for each row: select columns, filter, transform, encode, measure, in this order.

They run in this process or in workers, which keep the order of the rows. As a second argument, the user's functions may
take the number of the row among all rows read in all runs.

`--embed` puts media files into the rows that name them. A value under an embedded key is a path, a `data:` URL, an
object `{"bytes": base64 text, "path": name}` as Hugging Face stores media in tables, base64 text of a binary column,
null, or a list of these. It becomes bytes. Missing, empty and truncated media refuse the row.
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
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pybase64

from lazyshard.errors import FileRefused, RowInvalid
from lazyshard.format.arrays import fill_row, media_type, pack_row, refuse_array_key
from lazyshard.format.batch import EncodedRow
from lazyshard.format.row import check_row, encode_row, has_duplicate_keys
from lazyshard.store.files import read_file
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.errors import WorkerFailed, load_function
from lazyshard_producer.rows.encoding import Measure, call_user, encode, key_names, load_encoder, pad_row, read_document
from lazyshard_producer.rows.reader import Line, Size, by_length
from lazyshard_producer.sources.source import bad_row, line_size, too_long

_UNSIZED: Final = Size()


class MadeOfRow(NamedTuple):
    """The published rows made of one row with their sizes, or why it was refused; `duplicate`: it had a key twice."""

    rows: Sequence[tuple[Line, Size]]
    refused: RowInvalid | None = None
    duplicate: bool = False


class Maker:
    """Makes rows in this process, as `Workers` do in others. Raises SettingInvalid if a function cannot be loaded.

    `arrays`: rows of the sources may contain arrays, and so may the rows made of them.
    """

    most: Final = 1
    rows: Final = 1

    def __init__(self, settings: Settings, arrays: bool = False) -> None:
        self._columns, self._most, self._arrays = settings.columns, settings.max_row_bytes, arrays
        self._split, self._padding, self._embed = settings.split > 0, settings.padding, settings.embed
        self._measure = Measure(settings) if by_length(settings) or settings.measure else None
        self._where = _load(settings.where, "--where") if settings.where else None
        self._transform = _load(settings.transform, "--transform") if settings.transform else None
        self._encoder = load_encoder(settings)[0] if settings.encode else None

    def make(self, line: Line | RowInvalid, index: int) -> MadeOfRow:
        """Returns the rows made of a row; an error of the user's functions refuses the row."""
        duplicate = False
        try:
            if isinstance(line, RowInvalid):
                raise line
            text = line if isinstance(line, bytes) else line.line
            row = check_row(text)
            duplicate = has_duplicate_keys(text, row)
            if isinstance(line, EncodedRow) and self._arrays:
                # Writable, like the arrays of rows that are read for training.
                fill_row(row, np.frombuffer(bytearray(line.arrays), np.uint8))
            rows = self._rows(row, index)
            if self._embed:
                rows = [embed(one, self._embed, self._most) if isinstance(one, dict) else one for one in rows]
            return MadeOfRow([self._finish(one, self._encode(one, line)) for one in rows], None, duplicate)
        except RowInvalid as refused:
            return MadeOfRow([], refused, duplicate)

    def submit(self, lines: Sequence[Line | RowInvalid], index: int) -> list[MadeOfRow]:
        """Makes rows of `lines`, of which the first has this index."""
        return [self.make(line, index + number) for number, line in enumerate(lines)]

    def result(self, work: list[MadeOfRow], timeout: float) -> list[MadeOfRow] | None:
        """Returns the rows of `submit`."""
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
        """Returns the published form of a row made of a line, before splitting, padding and measuring."""
        if self._transform is None and not self._columns and not self._embed and self._encoder is None:
            if isinstance(line, EncodedRow):
                return line.line if not self._arrays and (self._split or self._padding) else line
            line = line.rstrip(b"\r\n") + b"\n"
            if not self._arrays:
                return line
            refuse_array_key(made)
            return EncodedRow(line, b"")
        if self._encoder is not None and isinstance(made, dict):
            return self._checked("--encode", encode(self._encoder, made))
        option = "--transform" if self._transform else "--columns" if self._columns else "--embed"
        try:
            line = EncodedRow(*pack_row(made)) if self._arrays else encode_row(made)
        except RowInvalid as cause:
            # Without the byte of the cause, which does not refer to the source line.
            raise bad_row(f"{option} returned an invalid row: {cause.reason}") from cause
        self._checked(option, line)
        if self._encoder is None:
            return line
        # The result of a transform may not be a dict of plain JSON values yet.
        return self._encode(check_row(line if isinstance(line, bytes) else line.line), line)

    def _finish(self, row: dict[str, Any], line: Line) -> tuple[Line, Size]:
        """Returns the published form of a row, and its size if it is needed."""
        if self._split:
            return read_document(row, line)
        if self._padding is not None:
            patches = line.patches or 0 if isinstance(line, EncodedRow) else 0
            line, tokens = pad_row(self._padding, row, line)
            return self._checked("--pad", line), Size(tokens, patches)
        if self._measure is None:
            return line, _UNSIZED
        size = self._measure.of(row, line)
        if isinstance(line, EncodedRow) and not self._arrays and self._encoder is None:
            line = line.line
        return line, size

    def _checked(self, option: str, line: Line) -> Line:
        if (size := line_size(line) - 1) > self._most:
            raise bad_row(f"{option} returned a row of {size} bytes, {too_long(self._most)}")
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
    """Returns the function with the signature (row, index), whether or not it takes an index."""
    function, wanted = load_function(name, option), 0
    with contextlib.suppress(TypeError, ValueError):
        for one in inspect.signature(function).parameters.values():
            wanted += one.kind <= one.POSITIONAL_OR_KEYWORD and (one.default is one.empty or one.name == "index")
    return function if wanted > 1 else lambda row, index: function(row)


class Workers:
    """A pool of processes. The caller should keep `most` tasks of `rows` rows each in progress."""

    def __init__(self, settings: Settings, count: int, arrays: bool = False) -> None:
        _start_tracker()
        spawn = multiprocessing.get_context("spawn")  # not fork: this process may have threads
        self._pool = ProcessPoolExecutor(count, spawn, _begin, (settings, arrays, os.getpid()))
        self.most: Final = 2 * count  # for each worker a running task and a waiting one
        self.rows = 1

    def submit(self, lines: Sequence[Line | RowInvalid], index: int) -> Future[tuple[list[MadeOfRow], float]]:
        """Sends rows to a worker; the first has this index."""
        try:
            return self._pool.submit(_make, list(lines), index)
        except BrokenProcessPool as cause:
            raise _died() from cause

    def result(self, work: Future[tuple[list[MadeOfRow], float]], timeout: float) -> list[MadeOfRow] | None:
        """Returns the result of `submit`, None if it is not ready within `timeout` seconds."""
        try:
            made, seconds = work.result(timeout)
        except NotReady:
            return None
        except BrokenProcessPool as cause:
            raise _died() from cause
        # A task takes about 50 ms: far more than the transfer, and too short to notice. At most 256 rows bound the
        # memory.
        self.rows = max(1, min(256, 2 * self.rows, int(0.05 * len(made) / max(seconds, 1e-9))))
        return made

    def close(self) -> None:
        """Kills the processes, busy ones too, and returns when the pool is gone."""
        # The pool's thread must end before the interpreter does: Python 3.11 wakes it at exit without holding its lock.
        for process in list((self._pool._processes or {}).values()):
            with contextlib.suppress(OSError, ValueError):
                process.kill()
        # With this end of the workers' pipe open, the thread would wait for the rest of a killed worker's message.
        if (writer := getattr(self._pool._result_queue, "_writer", None)) is not None:
            writer.close()
        self._pool.shutdown(wait=True)


def _start_tracker() -> None:
    """Starts the process that removes semaphores of a killed pool, without its warning for each semaphore."""
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
    # Terminals and service managers signal all processes of a group; the parent handles these signals.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # End this process when the parent is killed.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        # The parent was killed before prctl.
        os._exit(1)
    _maker = Maker(settings, arrays)


def _make(lines: Sequence[Line | RowInvalid], index: int) -> tuple[list[MadeOfRow], float]:
    assert _maker is not None
    started = time.perf_counter()
    made = _maker.submit(lines, index)
    # Flush, so that output of the user's functions is not lost if this process is killed.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    return made, time.perf_counter() - started


def _died() -> WorkerFailed:
    what = "a worker process died: it was killed (out of memory?), or it cannot import the modules of the functions"
    hint = "Published chunks are safe; run the same command again, with fewer --workers or --workers 0"
    return WorkerFailed(f"{what}. {hint}")


def embed(row: dict[str, Any], keys: Sequence[str], most: int) -> dict[str, Any]:
    """Returns a row with the media of some keys, if it has them, of at most `most` bytes each. Raises RowInvalid."""
    return {key: _media(value, key, most) if key in keys else value for key, value in row.items()}


def _media(value: Any, where: str, most: int) -> Any:
    if isinstance(value, list):
        return [_media(one, f"{where}[{number}]", most) for number, one in enumerate(value)]
    if isinstance(value, dict) and value.keys() <= {"bytes", "path"} and any(value.values()):
        data, path = value.get("bytes"), value.get("path")
        value = _decode(data, where) if isinstance(data, str) else path if data is None else data
    if value is None:
        return None
    name = f"{value}: " if isinstance(value, str) and len(value) < 200 else ""
    if isinstance(value, str):
        value = _read(value, where, most)
    if not isinstance(value, bytes):
        raise bad_row(f"--embed {where}: expected the path of a file, found {type(value).__name__}")
    if (fault := "is empty" if not value else _fault(value)) is not None:
        raise bad_row(f"--embed {where}: {name}the {media_type(value) or 'file'} {fault}")
    return value


def _read(text: str, where: str, most: int) -> bytes:
    if text.startswith("data:"):
        return _decode(text.partition(",")[2], where)
    if "://" in text or not text:
        raise bad_row(f"--embed {where}: {text[:200]!r} is no path of a file of this machine: give one")
    try:
        return read_file(Path(text), most)
    except FileRefused as cause:
        raise bad_row(f"--embed {where}: {cause}") from cause
    except (OSError, ValueError) as cause:
        # The text of a binary column is the media, and no path.
        if (data := _decoded(text)) is not None and media_type(data) is not None:
            return data
        raise bad_row(f"--embed {where}: {text:.200}: {getattr(cause, 'strerror', None) or cause}") from cause


def _decode(text: str, where: str) -> bytes:
    if (data := _decoded(text)) is None:
        raise bad_row(f"--embed {where}: expected base64 text, found {text[:40]!r}")
    return data


def _decoded(text: str) -> bytes | None:
    try:
        return pybase64.b64decode(text, validate=True)
    except ValueError:
        return None


def _fault(data: bytes) -> str | None:
    """Returns what is wrong with media whose format says where they end; None if nothing is, or it does not say."""
    kind = media_type(data)
    if kind == "image/jpeg":
        at = 2  # Segments have a marker and a size, up to the scan; one may hold a thumbnail, with an end of its own
        while data[at : at + 1] == b"\xff" and (marker := data[at + 1 : at + 2]) not in (b"\xda", b""):
            at += 1 if marker == b"\xff" else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if data.find(b"\xff\xd9", at) < 0:
            return "is truncated: it has no end marker"
    if kind == "image/png" and b"IEND\xaeB`\x82" not in data:
        return "is truncated: it has no IEND chunk"
    size = 8 + int.from_bytes(data[4:8], "little")
    if data[:4] == b"RIFF" and len(data) + 1 < size < 0x7FFFF000:  # programs that write to a pipe give more
        return f"is truncated: it has {len(data)} of {size} bytes"
    if data[4:8] == b"ftyp":
        at = 0
        while at + 8 <= len(data):
            size = int.from_bytes(data[at : at + 4], "big")
            size = int.from_bytes(data[at + 8 : at + 16], "big") if size == 1 else size or len(data) - at
            if size < 8 or at + size > len(data):
                return f"is truncated: a box at byte {at} has {size} bytes, {len(data) - at} follow"
            at += size
    return None
