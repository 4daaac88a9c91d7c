"""A user's Python function as a source: `python:MODULE:FUNCTION`, found as `python -m` finds modules.

It is called once per run, with the position of the last published row, and returns an iterator of pairs (row, position
after it). It runs in a separate thread, slightly ahead, and may block. If it does not return when the run stops, its
thread is abandoned after a moment.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import orjson

from lazyshard.errors import RowInvalid
from lazyshard.format.arrays import pack_row
from lazyshard.format.batch import EncodedRow
from lazyshard.format.row import encode_row
from lazyshard.lazy import name_error, name_value
from lazyshard.memory import raise_if_short
from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.errors import SourceRefused, load_function
from lazyshard_producer.position import plain_name, read_entry, refuse_position
from lazyshard_producer.sources import source
from lazyshard_producer.sources.source import PYTHON, Context, Line, Rows, Source, bad_row, line_size

AHEAD_ROWS: Final = 1024
"""Maximum rows that the thread reads ahead, and never more than a chunk: costly rows are not made too early."""

CLOSE_S: Final = 2.0  # how long `close` waits for the function: enough for a clean end, not for a hanging call


class FunctionPosition(NamedTuple):
    """A position between two rows: the number of rows in all runs, and their bytes as lines.

    `position` is the function's position after the last row, as the JSON text of an object with this key, because the
    function may change its own object later.
    """

    rows: int
    length: int
    position: bytes


class GeneratorSource(Source):
    """Rows of a function, which is called at the first `read` or `wait`. Live: the next row may come at any time."""

    live = True

    def __init__(self, settings: SourceSettings, position: dict[str, Any] | None, context: Context) -> None:
        self.name: Final = plain_name(settings.path)
        self.start = FunctionPosition(0, 0, encode_row({"position": None}))
        if position is not None:
            rows, length = read_entry(position, self.name, "python", rows=int, bytes=int)
            if "position" not in position:
                raise refuse_position(self.name, "a position", repr(position)[:120])
            self.start = FunctionPosition(rows, length, encode_row({"position": position["position"]}))
        self.reached, self.progress = self.start, (self.start.length, None)
        self._function = load_function(settings.path[len(PYTHON) :], f"--source {self.name}")
        self._most, self._arrays = context.max_row_bytes, context.arrays
        self._ahead_rows = min(AHEAD_ROWS, context.samples_per_chunk or AHEAD_ROWS)
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        # The following fields are shared with the thread, under the condition's lock.
        self._given: list[tuple[Line, FunctionPosition]] = []
        self._given_bytes = 0
        self._failure: BaseException | None = None
        self._finished = self._stopping = False
        self._requested_at: float | None = None

    def read(self) -> Rows | None:
        """Returns the rows available now, None when the function has ended."""
        self._begin()
        with self._changed:
            rows, self._given, self._given_bytes = self._given, [], 0
            failure, finished = self._failure, self._finished or self._stopping
            self._changed.notify_all()
        if rows:
            self.reached = rows[-1][1]
            self.progress = self.reached.length, None
            before = rows[0][1].rows - 1
            return source.number_rows([line for line, _ in rows], self.name, before, lambda index: rows[index][1])
        if failure is not None:
            raise failure
        return None if finished else Rows()

    def wait(self, seconds: float) -> None:
        """Waits until there are rows or the end, at most `seconds`."""
        self._begin()
        with self._changed:
            self._changed.wait_for(lambda: self._given or self._finished or self._stopping, seconds)

    def waits_for(self) -> str:
        """Returns in words what the source waits for."""
        asked = "" if self._requested_at is None else f", requested {time.monotonic() - self._requested_at:.0f} s ago"
        return f"the next row of {self.name}{asked}"

    def entry(self, position: FunctionPosition) -> dict[str, Any]:
        """Returns the entry of a position."""
        entry = {"kind": "python", "path": self.name, "rows": position.rows, "bytes": position.length}
        return {**entry, **orjson.loads(position.position)}

    def end(self) -> None:
        """Stops calling the function: rows that it has returned can still be read, then the source ends."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread, or abandons it if the function does not return in time."""
        self.end()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _begin(self) -> None:
        if self._thread is None and not self._stopping:
            # A daemon thread, so that a hanging function cannot keep the process from exiting.
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            rows = self._call(lambda: self._function(orjson.loads(self.start.position)["position"]))
            if not isinstance(rows, Iterator):
                raise self._refusal("it to return an iterator of pairs (row, position), as a generator does", rows)
            try:
                self._take_all(rows)
            finally:
                getattr(rows, "close", lambda: None)()
        except BaseException as error:
            self._failure = error
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def _take_all(self, rows: Iterator[Any]) -> None:
        """Reads the function's rows; each becomes a line of JSON or an error, with the position after it."""
        at = self.start
        # `self` marks the end, because the function might yield None, which is refused.
        while self._may_request() and (pair := self._call(lambda: next(rows, self))) is not self:
            line, written = self._examine(at.rows + 1, pair)
            size = line_size(line)
            at = FunctionPosition(at.rows + 1, at.length + size, written)
            with self._changed:
                self._given.append((line, at))
                self._given_bytes += len(written) + size
                self._changed.notify_all()

    def _may_request(self) -> bool:
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopping or (self._given_bytes < 1 << 20 and len(self._given) < self._ahead_rows)
            )
            self._requested_at = time.monotonic()
            return not self._stopping

    def _examine(self, number: int, pair: Any) -> tuple[Line, bytes]:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise self._refusal(f"a pair (row, position) as row {number}", pair)
        row, position = pair
        if not isinstance(row, (dict, bytes)):
            raise self._refusal(f"a dict or the bytes of one line as row {number}", row)
        try:
            written = encode_row({"position": position})
        except RowInvalid as error:
            expected = f"a value of JSON as the position after row {number}"
            raise self._refusal(expected, position, f" ({error.reason})") from None
        try:
            line = row if isinstance(row, bytes) else EncodedRow(*pack_row(row)) if self._arrays else encode_row(row)
        except RowInvalid as error:
            return error, written
        size = len(line.rstrip(b"\r\n")) if isinstance(line, bytes) else line_size(line) - 1
        return bad_row(source.too_long(self._most)) if size > self._most else line, written

    def _call(self, call: Callable[[], Any]) -> Any:
        """Calls the function; its errors are raised with its innermost lines: ``file:line (function)``."""
        try:
            return call()
        except BaseException as error:
            raise_if_short(error)
            frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename != __file__]
            # The line that raised, and its callers.
            lines = [f"{os.path.basename(one.filename)}:{one.lineno} ({one.name})" for one in frames[-3:]]
            where = f" at {', called from '.join(reversed(lines))}" if lines else ""
            hint = "fix it and run the same command again; nothing is lost"
            raise SourceRefused(f"{self.name}: raised {name_error(error)}{where}; {hint}", file=self.name) from error

    def _refusal(self, expected: str, value: Any, more: str = "") -> SourceRefused:
        return source.refuse_source(self.name, expected, name_value(value, 120) + more)
