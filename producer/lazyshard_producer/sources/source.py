"""The interface of sources of rows; opening the files of sources, and checking their fingerprints.

For a file that may grow, the fingerprint covers the first and the last 4 KiB of the committed part. For a complete
file, it is the XXH3 of its name, its size, its first 4 KiB and its last 64 KiB, where Parquet and Arrow files keep
their index. A change in the middle that keeps the length is not detected.
"""

from __future__ import annotations

import contextlib
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, TypeAlias

from xxhash import xxh3_64_hexdigest as digest
from xxhash import xxh3_64_intdigest

from lazyshard import errors
from lazyshard.format.batch import EncodedRow
from lazyshard.memory import raise_if_short
from lazyshard.store.files import KINDS, open_inside
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.position import FilePosition

PIECE_BYTES: Final = 1 << 20
"""Size of one read: large enough to amortize the overhead per piece, small compared with all other memory."""

PIECE_ROWS: Final = 512
"""Maximum rows of a table in one piece: small rows take many times their size in Python; more rows gain nothing."""

STANDARD_INPUT: Final = "-"  # path of the source that is standard input
PYTHON: Final = "python:"  # prefix of the path of a source that is a user's function: ``python:MODULE:FUNCTION``
Position: TypeAlias = Any  # position of a source between two rows; opaque to everything but this source
Line: TypeAlias = bytes | EncodedRow | errors.RowInvalid
"""A row: the unchecked bytes of a line, with or without its line end; or an encoded row, if it has arrays or a known
length in tokens; or the error for a row that cannot be read (for example, it is longer than `max_row_bytes`), so that
the rows after it can still be read."""


class RowOrigin(NamedTuple):
    """The origin of a row: path as the user gave it, line or row from 1, byte in the text from 0, None without one."""

    file: str
    line: int
    byte: int | None


class Context(NamedTuple):
    """The run's settings for sources. `check_owner` raises `ProducerFenced` if another producer has the stream.

    `out` is the stream's directory, which may not exist yet. `samples_per_chunk` None: nothing is to be published.
    `arrays`: rows of Python objects may hold arrays and bytes.
    """

    out: Path
    max_row_bytes: int
    samples_per_chunk: int | None = None
    check_owner: Callable[[], object] = lambda: None
    arrays: bool = False


class Rows(NamedTuple):
    """Rows of one read, in order; empty if there are none now.

    `position` and `place` return the source's position after the row of an index, and its origin, in O(index).
    """

    lines: Sequence[Line] = ()
    position: Callable[[int], Position] = lambda index: None
    place: Callable[[int], RowOrigin] = lambda index: RowOrigin("", 0, None)


def number_rows(lines: Sequence[Line], name: str, before: int, position: Callable[[int], Position]) -> Rows:
    """Returns rows whose origins are only row numbers; `before` rows precede them."""
    return Rows(lines, position, lambda index: RowOrigin(name, before + index + 1, None))


class Source(ABC):
    """Reads rows in order, in one thread. Any call may raise SourceRefused, if the part already read has changed.

    Opened with its settings, the entry of a position (None for its start) and a `Context`.

    Attributes:
        name: name in entries, messages and metrics: the path as given, in plain text.
        live: whether it may have no rows now and more later.
        start, reached: the position when opened, and the one after all rows that `read` returned and following blanks.
        blank: blank lines skipped so far, including earlier runs.
        progress: (bytes read, total bytes or None) for display, including earlier runs.
    """

    name: str
    live: bool = False
    start: Position
    reached: Position
    blank: int = 0
    progress: tuple[int, int | None] = (0, None)

    @abstractmethod
    def read(self) -> Rows | None:
        """Returns the next rows, about 1 MiB, empty if there are none *now*; None if the source is finished.

        Blocks only for I/O; see `wait`.
        """

    def wait(self, seconds: float) -> None:  # noqa: B027 - nothing to wait for
        """Waits until there may be more rows, at most `seconds`; returns immediately if the source is not `live`."""

    def waits_for(self) -> str:
        """Returns in words what the source waits for: ``new lines in DIR/*.jsonl (12 files unfinished)``."""
        return ""

    @abstractmethod
    def entry(self, position: Position) -> dict[str, Any]:
        """Returns the entry of a position for seals: a JSON object with `kind`, `path`, and the data to continue there.

        All data that the entry relies on is durable then. Called about once per chunk, with positions that never
        decrease.
        """

    def end(self) -> None:  # noqa: B027 - sources that are not live end anyway
        """Requests the end of a live source: `read` returns the rows that exist now, then None. Others ignore it."""

    def close(self) -> None:  # noqa: B027 - not all have anything open
        """Closes all files. May be called twice."""


def line_size(line: Line) -> int:
    """Returns the bytes of a row with its newline and its arrays; 0 for an error in place of a row."""
    if isinstance(line, bytes):
        return len(line)
    return len(line.line) + len(line.arrays) if isinstance(line, EncodedRow) else 0


def bad_row(reason: str, byte: int | None = None) -> errors.RowInvalid:
    """Returns the error for a row that a source cannot read."""
    return errors.RowInvalid(f"not a row: {reason}", reason=reason, byte=byte)


def too_long(most: int, more: str = "") -> str:
    """Returns the reason to refuse a row of more than `most` bytes."""
    return f"longer than the {most} bytes of --max-row-bytes{more}"


FINGERPRINT_BYTES: Final = 4096  # A page: one read, and long enough that two data sets hardly share one
_TAIL_BYTES: Final = 64 << 10  # more than the footer of most Parquet files

_PLAIN: Final = "a plain file (a restart has to seek in it)"
_PACKED: Final = (
    (b"\xfd7zXZ\0", "xz-compressed", "xz -dk"),
    (b"BZh", "bzip2-compressed", "bzip2 -dk"),
    (b"PK\x03\x04", "a zip archive", "unzip"),
)
"""Compressed files that are not supported: magic number, name, and the command that unpacks them."""


def open_regular(
    path: str, buffer: int = 1 << 20, *, links_out: bool = True, pipe: bool = False, text: bool = False
) -> BinaryIO:
    """Opens a plain file for reading, or a `pipe`. Raises SourceRefused, with `text` also for compressed files.

    `links_out`: whether a link may point out of the file's directory; False if other programs choose the names.
    """
    with refusing(path):
        # O_NONBLOCK: opening a named pipe without a writer would block forever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK) if links_out else open_inside(Path(path))
    try:
        kind = stat.S_IFMT(os.fstat(fd).st_mode)
        if kind != (stat.S_IFIFO if pipe else stat.S_IFREG):
            plain = _PLAIN if links_out else "the plain file from before"
            raise refuse_source(path, "a named pipe" if pipe else plain, KINDS.get(kind, "something else"))
        start = read_at(fd, path, 8, 0) if text else b""
        for magic, packed, unpack in _PACKED:
            if start.startswith(magic):
                raise refuse_source(path, "JSON lines in plain text", packed, f"; unpack it first with `{unpack}`")
        return os.fdopen(fd, "rb", buffering=buffer)
    except BaseException:
        os.close(fd)
        raise


def file_size(path: str) -> int:
    """Returns a file's size in bytes, 0 if unknown: for display only."""
    with contextlib.suppress(OSError):
        return os.stat(path).st_size
    return 0


def read_at(fd: int, path: str, count: int, offset: int) -> bytes:
    """Returns `count` bytes from an offset, fewer at the end of the file."""
    parts = []
    with refusing(path):
        while count > 0 and (part := os.pread(fd, count, offset)):
            parts.append(part)
            offset, count = offset + len(part), count - len(part)
    return b"".join(parts)


def committed_ends(fd: int, path: str, offset: int) -> tuple[bytes, bytes]:
    """Returns the first and the last bytes of the part [0, offset), which may overlap."""
    count = min(offset, FINGERPRINT_BYTES)
    head = read_at(fd, path, count, 0)
    tail = head if offset == count else read_at(fd, path, count, offset - count)
    if len(head) < count or len(tail) < count:
        raise refuse_truncated(path, offset, os.fstat(fd).st_size)
    return head, tail


def check_ends(path: str, position: FilePosition, head: bytes, tail: bytes) -> None:
    """Checks by its first and last bytes that the part of a file that was read has not changed."""
    for where, expected, part in (("first", position.head, head), ("last", position.tail, tail)):
        if position.offset and digest(part) != expected:
            of = f"of the {where} {len(part)} bytes of the part read ({position.offset} bytes, {position.line} lines)"
            hint = "; restore the old file (appending is fine), or choose another --out"
            where = "not the file whose rows are published: "
            raise refuse_source(path, f"XXH3 {expected} {of}", digest(part), hint, where=where)


class KnownFile:
    """A complete file, identified by its fingerprint, an integer. Raises SourceRefused if it cannot be read."""

    def __init__(self, path: str) -> None:
        self.path: Final = path
        with open_regular(path, 0) as file:
            status = os.fstat(file.fileno())
            head = read_at(file.fileno(), path, FINGERPRINT_BYTES, 0)
            tail = read_at(file.fileno(), path, _TAIL_BYTES, max(0, status.st_size - _TAIL_BYTES))
        name = os.fsencode(os.path.basename(path))
        self.digest: Final = xxh3_64_intdigest(name + b"\0%d\0" % status.st_size + head + tail)
        self._version: Final = status.st_size, status.st_mtime_ns

    def check(self) -> None:
        """Checks that the file has not changed; reads it only if its size or modification time differ."""
        with refusing(self.path):
            status = os.stat(self.path)
        if (status.st_size, status.st_mtime_ns) != self._version and KnownFile(self.path).digest != self.digest:
            raise refuse_changed(self.path)


@contextlib.contextmanager
def refusing(path: str, expected: str = "a readable file") -> Iterator[None]:
    """Converts errors of a filesystem, a stream or an index to SourceRefused; errors of a store stay unchanged."""
    try:
        yield
    except (SourceRefused, errors.ConfigInvalid, errors.StoreUnavailable):
        raise
    except (errors.LazyShardError, OSError) as cause:
        if isinstance(cause, errors.AccessRefused) and cause.url is not None:
            raise
        raise refuse_os_error(path, cause, expected) from cause


def refuse_os_error(path: str, cause: Exception, expected: str = "a readable file") -> SourceRefused:
    """Returns the SourceRefused for an error of the filesystem or a stream. Raises MemoryError for lack of memory."""
    raise_if_short(cause)
    if isinstance(cause, errors.FileRefused | errors.AccessRefused | errors.FileInvalid):
        path = cause.file or path
    if isinstance(cause, errors.FileRefused):
        return refuse_source(path, "a plain file", str(cause.kind))
    if isinstance(cause, errors.LazyShardError) and not isinstance(cause, errors.AccessRefused):
        return SourceRefused(str(cause), file=path, expected=cause.expected, actual=cause.actual)
    if isinstance(cause, PermissionError):
        hint = "; check its permissions and those of the directories above it"
        return refuse_source(path, expected, f"uid {os.geteuid()} may not read it", hint)
    return refuse_source(path, expected, (getattr(cause, "strerror", None) or str(cause)).lower())


def refuse_source(path: str, expected: str, actual: str, hint: str = "", *, where: str = "") -> SourceRefused:
    """Returns the error for a source that is not as expected; `where` is the place in it, `hint` is advice."""
    message = f"{path}: {where}expected {expected}, found {actual}{hint}"
    return SourceRefused(message, file=path, expected=expected, actual=actual)


def refuse_truncated(path: str, offset: int, size: int, hint: str = "") -> SourceRefused:
    """Returns the error for a file that, with `size` bytes, is shorter than the part already read."""
    expected = f"at least the {offset} bytes that were read"
    return refuse_source(path, expected, f"{size}: it was truncated or replaced", hint)


def refuse_changed(path: str) -> SourceRefused:
    """Returns the error for a file that has changed since its rows were read."""
    hint = "; restore the old file, or choose another --out"
    return refuse_source(path, "the file whose rows were read", "another one: it was changed or replaced", hint)
