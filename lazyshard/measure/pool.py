"""The processes that measure, each with one piece of work at a time; lines of JSON go to and fro.

They come to an end with this process, however it ends: they wait on a pipe that nobody else holds, and the system ends
the one that is at work. They have a session of their own, so that a Ctrl-C on the terminal is answered here alone.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt
import orjson
import pybase64

from lazyshard.measure.measures import Measure
from lazyshard.measure.process import error_of
from lazyshard.stream.stream import Stream

_PROGRAM: Final = """
import sys
sys.path[:] = {path!r}
from lazyshard.measure.process import main
main()
"""

_ENVIRONMENT: Final = {
    # There are as many processes as are wanted, and each has one core.
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # Each would tell the same: what is loaded, and what is not installed.
    "LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""Of the processes, where the user has not said otherwise."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [first, stop) of a chunk."""

    chunk: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What was found of a piece.

    Attributes:
        piece: the piece.
        lengths: u32 of shape (rows,): tokens of each row, 0 where no sample is made of it; None where a file of the
            chunk is not there.
        dropped: rows of which no sample is made.
        bad: rows that cannot be measured.
        why: why the first of those cannot.
    """

    piece: Piece
    lengths: npt.NDArray[np.uint32] | None
    dropped: int = 0
    bad: int = 0
    why: str = ""


class Pool:
    """Processes that measure. A context manager: leaving it ends them, those at work too.

    Args:
        stream: whose rows are measured.
        measure: how.
        zero: whether a row that cannot be measured counts as 0 tokens, and is no error.

    Attributes:
        text: the measure's text, once there is a process.
    """

    def __init__(self, stream: Stream, measure: Measure, *, zero: bool) -> None:
        self._settings = {
            "directory": str(stream.directory),
            "samples_per_chunk": stream.samples_per_chunk,
            "measure": measure.values(),
            "zero": zero,
        }
        self._processes: list[_Process] = []
        self.text = ""

    def __enter__(self) -> Pool:
        """Returns the pool."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.end()

    def grow(self, count: int) -> None:
        """Starts processes until there are so many, and returns when they are ready.

        Raises:
            MeasureRefused: the measure cannot be used.
            ChildProcessError: a process has ended.
            LazyShardError, OSError: the stream cannot be read.
        """
        new = [_Process(self._settings) for _ in range(count - len(self._processes))]
        self._processes += new
        for process in new:
            self.text = process.take()["measure"]

    def measure(self, pieces: Iterable[Piece]) -> Iterator[Answer]:
        """Yields what is found of each piece, in the order in which it is found.

        Raises:
            MeasureRefused, ChunkCorrupt, LazyShardError, OSError: a row cannot be measured or read.
            ChildProcessError: a process has ended.
        """
        left = iter(pieces)
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                if (piece := next(left, None)) is None:
                    break
                process.give(piece)
                selector.register(process, selectors.EVENT_READ, process)
            while selector.get_map():
                for key, _ in selector.select():
                    process = key.data
                    answer = process.answer()
                    if (piece := next(left, None)) is None:
                        selector.unregister(process)
                    else:
                        process.give(piece)
                    yield answer


class _Process:
    """A process, with one piece at a time."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._popen = subprocess.Popen(  # noqa: S603 - this Python, and a program that is a constant
            [sys.executable, "-c", _PROGRAM.format(path=sys.path), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=_ENVIRONMENT | os.environ,
        )
        self._piece: Piece | None = None
        self._say(settings)

    def fileno(self) -> int:
        return self._answers.fileno()

    @property
    def _answers(self) -> IO[bytes]:
        assert self._popen.stdout is not None
        return self._popen.stdout

    def give(self, piece: Piece) -> None:
        self._piece = piece
        self._say({"chunk": piece.chunk, "first": piece.first, "stop": piece.stop})

    def answer(self) -> Answer:
        assert self._piece is not None
        values = self.take()
        if values.get("gone"):
            return Answer(self._piece, None)
        lengths = np.frombuffer(pybase64.b64decode(values["lengths"]), "<u4").astype(np.uint32)
        return Answer(self._piece, lengths, values["dropped"], values["bad"], values["why"])

    def take(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line.endswith(b"\n"):
            raise self._ended()
        values: dict[str, Any] = orjson.loads(line)
        if "error" in values:
            raise error_of(values["error"])
        return values

    def end(self) -> None:
        self._popen.kill()
        # Unlike wait, it closes the pipes as well.
        self._popen.communicate()

    def _say(self, values: dict[str, Any]) -> None:
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(orjson.dumps(values, option=orjson.OPT_APPEND_NEWLINE))
            self._popen.stdin.flush()
        except BrokenPipeError as cause:
            raise self._ended() from cause

    def _ended(self) -> ChildProcessError:
        code = self._popen.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return ChildProcessError(
            f"a process that measured rows {how}; what is measured stays. If memory was short, use fewer --workers"
        )


def pieces_of(chunk: int, rows: int, size: int) -> Iterator[Piece]:
    """Yields the pieces of a chunk, of so many rows at the most.

    >>> [(piece.first, piece.stop) for piece in pieces_of(0, 5, 2)]
    [(0, 2), (2, 4), (4, 5)]
    """
    for first in range(0, rows, size):
        yield Piece(chunk, first, min(rows, first + size))
