"""A process that reads a stream all the time while others write to it and are killed. Its death is a violation."""

import contextlib
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

from lazyshard import StreamReader
from lazyshard.errors import WaitTimeout
from lazyshard.format.state import Cursor
from lazyshard.stream import write_cursor
from tests.harness.points.sealed import SealedChunks
from tests.harness.processes.nursery import Answering, Silent
from tests.harness.scenes.table import CONSUMER

_ANSWER_S: Final = 60.0


class Watched(NamedTuple):  # A stream to be read: the arguments of `SealedChunks`, and of a consumer
    out: Path
    lines: list[str]
    arrays: list[bytes] | None
    per_chunk: int
    ordered: bool
    behind: int | None  # chunks that it has read and does not acknowledge yet; None if it never acknowledges
    acknowledged: int  # chunks that are acknowledged already


class Read(NamedTuple):
    looks: int  # how often it has looked since the last time
    samples: int  # rows that it has read, in order from the first that was not acknowledged when it began
    acknowledged: int  # chunks
    ended: bool  # whether it was told that the stream has ended
    violation: str | None  # what is wrong; None if nothing is


class Reader:  # A context manager: the process. Each method raises AssertionError where it has died or says nothing.
    def __enter__(self) -> "Reader":
        self._answering = Answering("tests.harness.points.reader")
        return self

    def __exit__(self, *_: object) -> None:
        self._answering.close()

    def watch(self, stream: Watched) -> None:
        """Has it read this stream from now on; starts it anew if it has died, which was told then."""
        if self._answering.process.poll() is not None:
            self._answering.close()
            self.__enter__()
        self._ask(stream)

    def report(self) -> Read:
        read: Read = self._ask(None)
        assert read.looks, "the reader has not looked at the stream"
        return read

    def _ask(self, request: Watched | None) -> Any:
        try:
            return self._answering.ask(request, _ANSWER_S)
        except Silent as error:
            raise AssertionError(f"the reader has died or is silent: {error}") from error


class _Consumer:  # Reads a stream: whatever is sealed, as any program could, and what readers are told of, as ours do
    def __init__(self, stream: Watched) -> None:
        self._stream = stream
        self._sealed = SealedChunks(
            stream.out, stream.lines, stream.per_chunk, ordered=stream.ordered, known={}, arrays=stream.arrays
        )
        self._reader: StreamReader | None = None
        self._read: list[int] = []
        self._first = stream.acknowledged * stream.per_chunk
        self._registered = False
        self.acknowledged = stream.acknowledged
        self.looks = 0
        self.violation: str | None = None

    def look(self) -> None:
        if self.violation is not None:
            return
        try:
            self._sealed.look(self.acknowledged)
            try:
                self._follow()
            except Exception:
                self._sealed.look(self.acknowledged)  # Its files tell more than our reader makes of them
                raise
            self.looks += 1
        except AssertionError as error:
            self.violation = str(error)
        except Exception as error:
            self.violation = f"the reader has failed: {type(error).__name__}: {error}"

    def report(self) -> Read:
        self.look()
        looks, self.looks = self.looks, 0
        ended = self._reader is not None and self._reader.seen.ended
        looks = looks or int(self.violation is not None)
        return Read(looks, len(self._read), self.acknowledged, ended, self.violation)

    def _follow(self) -> None:
        if self._reader is None:
            try:
                self._reader = StreamReader(self._stream.out, max_wait=0)
            except WaitTimeout:
                return
        published = self._reader.refresh().samples
        while self._first + len(self._read) < published:
            place = self._sealed.check_sample(self._first + len(self._read), self._reader)
            assert place not in self._read, f"the reader was given row {place} again"
            self._read.append(place)
        if self._stream.behind is not None:
            self._acknowledge(self._reader, self._stream.behind)

    def _acknowledge(self, reader: StreamReader, behind: int) -> None:
        per_chunk = self._stream.per_chunk
        done = max(self.acknowledged, (self._first + len(self._read)) // per_chunk - behind)
        if self._registered and done == self.acknowledged:
            return
        self.acknowledged = done  # Before the cursor is written: from then on the chunks may go at any moment
        write_cursor(self._stream.out, Cursor(CONSUMER, reader.stream_id, done * per_chunk, done, {}, time.time()))
        self._registered = True


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    consumer: _Consumer | None = None
    while True:
        if not pipe.poll(None if consumer is None else 0.003):
            assert consumer is not None
            consumer.look()
            continue
        request: Watched | None = pipe.recv()
        if request is not None:
            consumer = _Consumer(request)
        pipe.send(None if consumer is None or request is not None else consumer.report())


if __name__ == "__main__":
    from tests.harness.points import reader  # The classes of the module that who asks has

    with contextlib.suppress(EOFError):
        reader.main()
