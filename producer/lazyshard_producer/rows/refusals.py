"""Bad rows: the policy for them, the file in which they are kept, and the summary that `quarantine` shows.

`quarantine.jsonl` is synced before the seal whose position contains its size. A restart replaces the file by a copy
truncated to that size, so a fenced producer that resumes writes to a file that is no longer read.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import orjson
import pybase64

from lazyshard.errors import LazyShardError, RowInvalid
from lazyshard.format.batch import EncodedRow
from lazyshard.format.records import QUARANTINE
from lazyshard.inspection.row_facts import MOST_TOLD_APART, read_refusals
from lazyshard.inspection.row_facts import RefusedRows as QuarantineSummary
from lazyshard.memory import loads
from lazyshard.store.durable import create, open_own, rename, sync, sync_directory, write_all
from lazyshard.store.files import open_file
from lazyshard_producer.errors import count, one_line
from lazyshard_producer.sources.source import RowOrigin

_BUFFER_BYTES: Final = 1 << 20


class Quarantine:
    """The file of refused rows, created for the first row. Raises ProducerFenced, OSError.

    `committed` is its size in the last seal, `size` its size with all rows so far. `check_owner` raises if another
    producer has the stream, and returns the directory from which to rename into it.
    """

    def __init__(self, out: Path, committed: int, *, check_owner: Callable[[], Path]) -> None:
        self._path: Final = out / QUARANTINE
        self._check_owner = check_owner
        self._fd: int | None = None
        self._buffer, self._dirty = bytearray(), False
        found = 0  # also if a user has moved the file away
        with contextlib.suppress(FileNotFoundError):
            found = os.lstat(self._path).st_size
        self.size = self._kept = min(committed, found)
        if found > self._kept:
            self._take()

    def add(self, place: RowOrigin, reason: str, line: bytes | None) -> None:
        """Adds a row; its line is None if unknown."""
        # Reasons may come from the user's functions, and JSON cannot contain lone surrogates.
        reason = reason.encode("utf-8", "backslashreplace").decode("utf-8")
        entry: dict[str, Any] = {"source": place.file, "line": place.line, "byte": place.byte, "reason": reason}
        text = (line or b"").rstrip(b"\r\n")
        try:
            entry["row"] = text.decode()
        except UnicodeDecodeError:
            entry["row_base64"] = pybase64.b64encode(text).decode()
        entry["at"] = int(time.time())
        # Not by orjson, which needs many times the memory of a long row, and aborts if it cannot allocate it.
        written = json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        self._buffer += written
        self.size += len(written)
        if len(self._buffer) >= _BUFFER_BYTES:
            self._flush()

    def sync(self) -> None:
        """Makes all rows so far durable."""
        self._flush()
        if self._dirty and self._fd is not None:
            sync(self._fd)
            self._dirty = False

    def close(self) -> None:
        """Closes the file; the next run removes rows that no seal counts, and refuses them again."""
        with contextlib.suppress(OSError, LazyShardError):
            self._flush()
        self._buffer.clear()
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None

    def _flush(self) -> None:
        if self._buffer:
            self._check_owner()
            # Emptied before writing: after an error, nothing may follow a torn line.
            data, self._buffer = self._buffer, bytearray()
            fd = self._take() if self._fd is None else self._fd
            self._dirty = True
            write_all(fd, data)

    def _take(self) -> int:
        """Replaces the file by a copy of its committed part, owned by this run, and returns its descriptor."""
        temporary, left = self._check_owner() / QUARANTINE, self._kept
        try:
            fd = create(temporary)
            try:
                if os.path.lexists(self._path):
                    with os.fdopen(open_own(self._path), "rb", buffering=0) as before:
                        while left and (data := before.read(min(left, _BUFFER_BYTES))):
                            write_all(fd, data)
                            left -= len(data)
                sync(fd)
                rename(temporary, self._path)
            except BaseException:
                os.close(fd)
                raise
            sync_directory(self._path.parent)
        except OSError:
            self._check_owner()
            raise
        self._fd = fd
        # Less than before if a user has moved the file away meanwhile.
        self.size, self._kept = self.size - left, self._kept - left
        return fd


@dataclass
class Refusals:
    """Handles refused rows, and ends the run if there are more than `most` in all runs (None: no limit).

    `count` rows are refused so far, earlier runs kept `quarantine_bytes`. `tell` is called for each refused row that
    does not end the run.
    """

    policy: Literal["fail", "skip", "quarantine"]
    most: int | None
    quarantine: Quarantine | None
    count: int
    quarantine_bytes: int = 0
    tell: Callable[[RowInvalid, RowOrigin, bytes | None], None] = lambda error, place, text: None
    first: tuple[RowInvalid, RowOrigin] | None = None

    @property
    def kept_bytes(self) -> int:
        """Size of the file with all rows so far; rows kept by earlier runs stay under any policy."""
        return self.quarantine.size if self.quarantine is not None else self.quarantine_bytes

    def take(self, error: RowInvalid, place: RowOrigin, line: bytes | EncodedRow | RowInvalid | None) -> None:
        """Handles a refused row; raises RowInvalid if the run is to end. Keeps the line if it is the complete row."""
        if self.policy == "fail":
            torn = isinstance(line, bytes) and error.byte == len(line) and place.file != "-"  # Without a line end
            hint = "The file ends within this line: if it is still being written, read its directory with --follow"
            hint += "; else fix the line and run the same command again. Nothing is lost"
            raise locate(error, place, hint=hint if torn else None, way=", or add --on-bad-row quarantine") from error
        if self.most is not None and self.count >= self.most:
            before = f"more than {count(self.most, 'bad row')} (--max-bad-rows), the last one: "
            hint = "Find their common cause, or allow more; nothing is lost"
            raise locate(error, place, before, hint) from error
        self.count += 1
        self.first = self.first or (error, place)
        if isinstance(line, EncodedRow) and not line.arrays:
            line = line.line
        text = line if isinstance(line, bytes) else None
        if self.quarantine is not None:
            self.quarantine.add(place, error.reason or str(error), text)
        self.tell(error, place, text)

    def check_empty(self, rows: int) -> None:
        """Raises RowInvalid if a stream would end without any row because rows were refused."""
        if self.first is None:
            return
        why = f"all {rows:,} rows were refused" if rows > 1 else "the only row was refused"
        if self.count != rows:
            why = f"of {rows:,} rows {self.count:,} were refused, and the others were left out"
        hint = "Find their common cause, fix it, and run the same command again"
        where = "so nothing is published, and the stream is not ended; the first bad row: "
        raise locate(*self.first, f"{why}, {where}", f"{hint}; nothing is lost") from self.first[0]

    def sync(self) -> None:
        """Makes all kept rows durable. Raises as `Quarantine.sync` does."""
        if self.quarantine is not None:
            self.quarantine.sync()

    def close(self) -> None:
        """Closes the file."""
        if self.quarantine is not None:
            self.quarantine.close()


def warn_of_refused(warn: Callable[[str], None], fate: str) -> Callable[[RowInvalid, RowOrigin, bytes | None], None]:
    """Returns a `tell` that warns of the first ten rows, the hundredth, thousandth and so on, with their fate."""
    numbers = itertools.count(1)

    def tell(error: RowInvalid, place: RowOrigin, line: bytes | None) -> None:
        number = next(numbers)
        if number <= 10 or str(number).strip("0") == "1":
            warn(f"{_describe(error, place)[0]}; the row is {fate} (refused by this run: {number:,})")

    return tell


def locate(error: RowInvalid, place: RowOrigin, before: str = "", hint: str | None = None, way: str = "") -> RowInvalid:
    """Returns the error for a refused row with its location: file, line, and byte in the file."""
    text, byte, of_line = _describe(error, place)
    fix = "Fix that line" if of_line else "Fix the row, or the step that refuses it,"
    if text.endswith("found an array"):
        fix = "Write each row on a line of its own, as `jq -c '.[]'` does for a file that is one array,"
    hint = hint or f"{fix} and run the same command again{way}; nothing is lost"
    message = f"{before}{text}{'' if text.endswith('?') else '.'} {hint}"
    return RowInvalid(message, reason=error.reason, file=place.file, line=place.line, byte=byte)


def _describe(error: RowInvalid, place: RowOrigin) -> tuple[str, int | None, bool]:
    """Returns location and reason of a refused row in words, its byte, and whether the line itself is bad."""
    byte, reason = None if place.byte is None else place.byte + (error.byte or 0), error.reason or str(error)
    name, text = ("standard input", "input") if place.file == "-" else (place.file, "file")
    # A row made from the line may have been refused, so the line itself may be right.
    of_line = byte is not None and not reason.startswith("--")
    where = f" byte {byte} of the {text}:" if of_line else ""
    return f"{name}:{place.line}:{where} {reason}", byte, of_line


MAX_SHOWN: Final = 20  # reasons in the summary, the most frequent first


def read_refused(stream: str) -> Iterator[bytes | None]:
    """Yields the refused rows of a stream, without line ends; None for each line that cannot be decoded."""
    try:
        opened = open_file(Path(stream, QUARANTINE))
    except FileNotFoundError:
        return
    with os.fdopen(os.dup(opened.fd), "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield _decode(line)


def summarize(stream: str) -> QuarantineSummary:
    """Returns a summary of a stream's quarantine by reason. Memory is bounded by 200 reasons."""
    return read_refusals(Path(stream), whole=True) or QuarantineSummary(0, (), 0, complete=True)


def summary_lines(stream: str, summary: QuarantineSummary) -> Iterator[str]:
    """Yields a summary for users, line by line."""
    if not summary.rows and not summary.unreadable:
        yield one_line(f"{stream}: no rows in quarantine")
        return
    # It is unknown which rows were fixed and given again as another source.
    yield one_line(f"{stream}: {count(summary.rows, 'row')} refused so far, including rows fixed since")
    for group in summary.reasons[:MAX_SHOWN]:
        where = f"at {group.first.source}:{group.first.line}"
        if group.rows > 1:
            told_apart = len(group.sources) < MOST_TOLD_APART
            more = count(len(group.sources), "source") if told_apart else f"{MOST_TOLD_APART} or more sources"
            where = f"first {where}, in {more}"
        yield one_line(f"  {group.rows:>9,}  {group.reason}; {where}")
    if others := summary.reasons[MAX_SHOWN:]:
        rest, them = sum(group.rows for group in others), "it" if len(others) == 1 else "them"
        yield f"  {rest:>9,}  for {count(len(others), 'other reason')}; --json lists {them}"
    if summary.unreadable:
        yield f"  {count(summary.unreadable, 'line')} of {QUARANTINE} could not be read"


def summary_json(summary: QuarantineSummary) -> str:
    """Returns a summary as one line of JSON."""
    names = ("reason", "rows", "sources", "source", "line")
    each = [(one.reason, one.rows, len(one.sources), one.first.source, one.first.line) for one in summary.reasons]
    reasons = [dict(zip(names, one, strict=True)) for one in each]
    return orjson.dumps({"rows": summary.rows, "reasons": reasons, "unreadable_lines": summary.unreadable}).decode()


def _decode(line: bytes) -> bytes | None:
    try:
        entry: Any = loads(line)
        valid = isinstance(entry["source"], str) and isinstance(entry["reason"], str) and type(entry["line"]) is int
        row: bytes = entry["row"].encode() if "row" in entry else pybase64.b64decode(entry["row_base64"], validate=True)
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return row if valid else None
