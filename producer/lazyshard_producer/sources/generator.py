"""A Python function of the user's as a source: `python:MODULE:FUNCTION`, found as `python -m` finds modules.

What the function has to give is in `function_rows`. It may block for as long as it likes: it runs on a thread of its
own, a little ahead of what is read, so signals are answered all the while. When the run stops, its iterator is closed
(a generator gets its `finally`); one that does not come back is left alone after a moment.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from lazyshard.errors import RowInvalid
from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.position import plain_name, refuse_position
from lazyshard_producer.sources.function_rows import FunctionMark, decode_position, encode_position, function_rows
from lazyshard_producer.sources.source import Context, Place
from lazyshard_producer.user_functions import load_function

PREFIX: Final = "python:"

AHEAD_BYTES: Final = 1 << 20
AHEAD_ROWS: Final = 1024
"""How far the thread runs ahead: enough that the two do not wait for each other at every row. But never more than a
chunk: where rows are dear to make, and the producer is held back, they are not made long before anybody needs them."""

CLOSE_S: Final = 2.0
"""How long `close` waits for the function: for a clean end, not for a call that hangs."""

_Given = tuple[bytes | RowInvalid, FunctionMark]


class GeneratorRows:
    """Rows in order: see `lazyshard_producer.sources.source.Rows`."""

    __slots__ = ("_marks", "_name", "lines")

    def __init__(self, name: str, given: Sequence[_Given] = ()) -> None:
        self.lines = [line for line, _ in given]
        self._marks = [mark for _, mark in given]
        self._name = name

    def mark(self, index: int) -> FunctionMark:
        """Returns where the function stands after the row of this index."""
        return self._marks[index]

    def place(self, index: int) -> Place:
        """Returns the function, and the row's number from 1."""
        return Place(self._name, self._marks[index].rows, None)


class GeneratorSource:
    """A source of rows: see `lazyshard_producer.sources.source.Source`. Live: nobody knows when the next row comes.

    The function is called at the first `read` or `wait`.

    Args:
        settings: of which only the path counts.
        position: where to go on, None at the start.
        context: what sources are told about the run.

    Raises:
        SettingInvalid: there is no such module or function, or importing it raised.
        SourceRefused: the position is none of such a source.
    """

    live: Final = True
    blank: Final = 0

    def __init__(self, settings: SourceSettings, position: dict[str, Any] | None, context: Context) -> None:
        self.name: Final = plain_name(settings.path)
        self.start = FunctionMark(0, 0, encode_position(None)) if position is None else self._decode(position)
        self._function = load_function(settings.path[len(PREFIX) :], f"--source {self.name}")
        self._max_row_bytes = context.max_row_bytes
        self._ahead_rows = min(AHEAD_ROWS, context.samples_per_chunk or AHEAD_ROWS)
        self._reached = self.start
        self._bytes = self.start.length
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        # All below is shared with the thread, under the condition's lock.
        self._given: deque[_Given] = deque()
        self._given_bytes = 0
        self._failure: BaseException | None = None
        self._finished = False
        self._stopping = False
        self._asked_at: float | None = None

    @property
    def reached(self) -> FunctionMark:
        """Where it stands after all that was given."""
        return self._reached

    @property
    def progress(self) -> tuple[int, int | None]:
        """(bytes read, None)."""
        return self._bytes, None

    def read(self) -> GeneratorRows | None:
        """Returns what rows there are; None when the function has no more.

        Raises:
            GeneratorFailed: it raised or broke the protocol, after the rows that it had given.
        """
        self._begin()
        with self._changed:
            given, self._given, self._given_bytes = self._given, deque(), 0
            failure, finished = self._failure, self._finished or self._stopping
            self._changed.notify_all()
        if given:
            self._reached = given[-1][1]
            self._bytes = self._reached.length
            return GeneratorRows(self.name, given)
        if failure is not None:
            raise failure
        return None if finished else GeneratorRows(self.name)

    def wait(self, seconds: float) -> None:
        """Returns when there are rows, or none will come, or so many seconds have passed."""
        self._begin()
        with self._changed:
            self._changed.wait_for(lambda: self._given or self._finished or self._stopping, seconds)

    def waits_for(self) -> str:
        """Returns in words what it waits for."""
        with self._changed:
            since = self._asked_at
        asked = "" if since is None else f", asked {time.monotonic() - since:.0f} s ago"
        return f"the next row of {self.name}{asked}"

    def position(self, mark: FunctionMark) -> dict[str, Any]:
        """Returns the position at a mark."""
        position = decode_position(mark.position)
        return {"kind": "python", "path": self.name, "rows": mark.rows, "bytes": mark.length, "position": position}

    def end(self) -> None:
        """Asks no more of the function: what it has given can be read, and then comes the end."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread, and leaves it alone if the function does not come back."""
        self.end()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _begin(self) -> None:
        if self._thread is None and not self._stopping:
            # A daemon: a function that hangs must not keep the process from ending.
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        failure: BaseException | None = None
        rows = function_rows(self.name, self._function, self.start, self._max_row_bytes)
        try:
            while self._may_ask() and (given := next(rows, None)) is not None:
                self._give(given)
            rows.close()
        except BaseException as error:
            failure = error
        with self._changed:
            self._failure, self._finished = failure, True
            self._changed.notify_all()

    def _may_ask(self) -> bool:
        """Waits until another row is wanted; returns False where none will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or not self._is_full())
            self._asked_at = time.monotonic()
            return not self._stopping

    def _is_full(self) -> bool:
        return self._given_bytes >= AHEAD_BYTES or len(self._given) >= self._ahead_rows

    def _give(self, given: _Given) -> None:
        line, mark = given
        with self._changed:
            self._given.append(given)
            self._given_bytes += len(mark.position) + (len(line) if isinstance(line, bytes) else 0)
            self._changed.notify_all()

    def _decode(self, position: dict[str, Any]) -> FunctionMark:
        for field, expected in (("kind", "python"), ("path", self.name)):
            if position.get(field) != expected:
                raise refuse_position(self.name, f"{field} {expected!r}", repr(position.get(field))[:120])
        rows, length = position.get("rows"), position.get("bytes")
        if type(rows) is not int or type(length) is not int or rows < 0 or length < 0 or "position" not in position:
            raise refuse_position(self.name, "numbers of rows and bytes, and a position", repr(position)[:120])
        return FunctionMark(rows, length, encode_position(position["position"]))
