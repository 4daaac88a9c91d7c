"""What a process does that measures: rows of the chunks it is told, piece after piece, until nothing more comes.

Settings and pieces come as lines of JSON on stdin, answers go as lines of JSON to what was stdout. Whatever a user's
function, or a library, prints goes to stderr, which may be shown to the user.

```
-> {"directory": ..., "samples_per_chunk": ..., "measure": {...}, "zero": false}     <- {"measure": "..."}
-> {"chunk": 3, "first": 0, "stop": 1000}                                         <- {"lengths": "...", ...}
-> {"chunk": 3, "first": 1000, "stop": 2000}                                      <- {"error": {...}}
```
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import orjson

from lazyshard import errors
from lazyshard.errors import ChunkCorrupt, LazyShardError, MeasureRefused, RowInvalid, SkipSample
from lazyshard.format.fields import pack
from lazyshard.measure.measures import Loaded, Measure
from lazyshard.memory import raise_if_short
from lazyshard.stream.chunk import Chunk
from lazyshard.stream.stream import Stream, open_stream

_PR_SET_PDEATHSIG: Final = 1

_ERROR_CHARACTERS: Final = 500

_BLOCK_BYTES: Final = 1 << 20
"""Rows are read in pieces of about this size; more gains nothing."""


def serve(parent: int) -> None:
    """Does the work of a process that measures.

    Args:
        parent: the process that has started it, with which it ends.
    """
    follow(parent)
    answers = _take_stdout()
    questions = io.BufferedReader(io.FileIO(0, closefd=False))
    with contextlib.suppress(BrokenPipeError):
        settings = orjson.loads(questions.readline())
        try:
            work = _Work(settings)
        except (LazyShardError, OSError) as error:
            _answer(answers, {"error": error_values(error)})
            return
        _answer(answers, {"measure": work.text})
        for line in iter(questions.readline, b""):
            _answer(answers, work.answer(**orjson.loads(line)))


def follow(parent: int) -> None:
    """Has the system end this process when its parent ends, however that ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # It was killed before that was said.
        os._exit(1)


def _take_stdout() -> int:
    """Returns a descriptor of what is stdout, in whose place stderr is put."""
    answers = os.dup(1)
    os.dup2(2, 1)
    # What was printed is there before the answer, however this process ends.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    return answers


def _answer(answers: int, values: dict[str, Any]) -> None:
    data = orjson.dumps(values, option=orjson.OPT_APPEND_NEWLINE)
    while data:
        data = data[os.write(answers, data) :]


class _Work:
    """A measure, and the stream whose rows are measured."""

    def __init__(self, settings: dict[str, Any]) -> None:
        loaded: Loaded = Measure(**settings["measure"]).open()
        self.text = loaded.text
        self._measure = loaded.measure
        self._zero: bool = settings["zero"]
        stream = open_stream(Path(settings["directory"]), settings["samples_per_chunk"])
        assert stream is not None
        self._stream: Stream = stream
        self._chunk: Chunk | None = None
        self._dropped = self._bad = 0
        self._why = ""

    def answer(self, chunk: int, first: int, stop: int) -> dict[str, Any]:
        """Measures rows of the half-open range [first, stop) of a chunk.

        Returns:
            `lengths` (packed u32), `dropped` (rows of which no sample is made), `bad` (rows that cannot be measured)
            and `why` the first of them cannot; `gone` if a file of the chunk is not there; or `error`.
        """
        self._dropped = self._bad = 0
        self._why = ""
        try:
            if self._chunk is None or self._chunk.number != chunk:
                self._chunk = self._stream.open_chunk(chunk)
            lengths = list(self._lengths(self._chunk, first, stop))
        except (LazyShardError, OSError, MemoryError) as error:
            if isinstance(error, FileNotFoundError) and not isinstance(error, LazyShardError):
                return {"gone": True}
            return {"error": error_values(error)}
        return {"lengths": pack(lengths, "<u4"), "dropped": self._dropped, "bad": self._bad, "why": self._why}

    def _lengths(self, chunk: Chunk, first: int, stop: int) -> Iterator[int]:
        row = first
        while row < stop:
            try:
                lines = chunk.lines(row, stop, 1, _BLOCK_BYTES)
                rows = chunk.parse(lines, row)
            except (ChunkCorrupt, RowInvalid) as error:
                # Of a file that was cut no row can be told.
                if not self._zero or (isinstance(error, ChunkCorrupt) and error.row is None):
                    raise
                yield self._no_length(str(error))
                row += 1
                continue
            for value in rows:
                yield self._length(chunk, row, value)
                row += 1

    def _length(self, chunk: Chunk, row: int, value: dict[str, Any]) -> int:
        try:
            return self._measure(value)
        except SkipSample:
            self._dropped += 1
            return 0
        except Exception as cause:
            raise_if_short(cause)
            where = f"{chunk.path}: row {row} (byte {chunk.offset(row)})"
            why = _told(cause)
            if self._zero:
                return self._no_length(f"{where}: {why}")
            raise MeasureRefused(
                f"{where} cannot be measured: {why}; mend the measure, or have such rows count 0 with --on-bad-row "
                f"zero",
                directory=str(chunk.path.parent),
                chunk=chunk.number,
                row=row,
            ) from cause

    def _no_length(self, why: str) -> int:
        self._bad += 1
        self._why = self._why or _readable(why)
        return 0


def error_values(error: LazyShardError | OSError | MemoryError) -> dict[str, Any]:
    """Returns an error as JSON can hold it; see `error_of`."""
    if isinstance(error, MemoryError):
        return {"kind": "MemoryError", "text": _readable(str(error))}
    if isinstance(error, LazyShardError):
        return {"kind": type(error).__name__, "text": _readable(str(error)), "fields": _plain(error._fields())}
    file = None if error.filename is None else _readable(os.fsdecode(error.filename))
    return {"kind": "OSError", "errno": error.errno, "text": error.strerror or _readable(str(error)), "file": file}


def error_of(values: dict[str, Any]) -> LazyShardError | OSError | MemoryError:
    """Returns the error that `error_values` has told of."""
    if values["kind"] == "MemoryError":
        return MemoryError(values["text"])
    if values["kind"] == "OSError":
        if values["errno"] is None:
            return OSError(values["text"])
        return OSError(values["errno"], values["text"], values["file"])
    kind = getattr(errors, values["kind"], LazyShardError)
    made: LazyShardError = kind(values["text"], **values["fields"])
    return made


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if isinstance(value, (str, int, float, type(None)))}


def _told(error: Exception) -> str:
    """Returns the kind and the text of an error of the user's; its text may be endless, or raise itself."""
    try:
        text = str(error)
    except Exception as cause:
        text = f"(not shown: writing it raised {type(cause).__name__})"
    return _readable(f"{type(error).__name__}: {text}"[:_ERROR_CHARACTERS])


def _readable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def main() -> None:
    """Runs with the parent's process id as the only argument."""
    serve(int(sys.argv[1]))
