"""What a source of rows is to the rest of the command, and the files of sources: opened, and known again.

Of a file that may grow the fingerprint covers the first and the last 4 KiB of the committed part. Of a complete file it
is the XXH3 of its name, its size, its first 4 KiB and its last 64 KiB, where Parquet and Arrow files keep their index.
Not noticed: a change in the middle that keeps the length.
"""

from __future__ import annotations

import contextlib
import importlib
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
from lazyshard_producer.errors import ExtraMissing, SourceRefused
from lazyshard_producer.position import FilePosition

PIECE_BYTES: Final = 1 << 20
"""How much is read at a time: enough for what a piece costs by itself, little beside all else in memory."""

PIECE_ROWS: Final = 512
"""As many rows of a table at the most: in Python small rows take many times their size, and more gains nothing."""

STANDARD_INPUT: Final = "-"  # path of the source that is standard input
PYTHON: Final = "python:"  # begins the path of a source that is a function of the user's: ``python:MODULE:FUNCTION``
Position: TypeAlias = Any  # where a source stands between two rows. Only the source that gave it can read it
Line: TypeAlias = bytes | EncodedRow | errors.RowInvalid
"""A row: the bytes of a line, with or without its line end, nothing checked; or an encoded row, where it comes with
arrays or its length in tokens is known; or why the source could not give it (it is longer than `max_row_bytes`), so
that the rows after it can still be had."""


class RowOrigin(NamedTuple):
    """Where a row comes from: path as the user gave it, line or row from 1, byte of the text from 0 if it has one."""

    file: str
    line: int
    byte: int | None


class Context(NamedTuple):
    """What sources are told about the run; `check_owner` raises `ProducerFenced` where another producer has the stream.

    `out` is the stream's directory, which may not be there yet. None `samples_per_chunk`: nothing is to be published.
    """

    out: Path
    max_row_bytes: int
    samples_per_chunk: int | None = None
    check_owner: Callable[[], object] = lambda: None


class Rows(NamedTuple):
    """Rows that were read in one go, in order; empty: there are none at the moment.

    `position` and `place` return where the source stands after the row of an index, and its origin; in O(index).
    """

    lines: Sequence[Line] = ()
    position: Callable[[int], Position] = lambda index: None
    place: Callable[[int], RowOrigin] = lambda index: RowOrigin("", 0, None)


def number_rows(lines: Sequence[Line], name: str, before: int, position: Callable[[int], Position]) -> Rows:
    """Returns rows of a source that knows their numbers alone: so many are before them."""
    return Rows(lines, position, lambda index: RowOrigin(name, before + index + 1, None))


class Source(ABC):
    """Gives rows in order. One thread, one process. Any call may raise SourceRefused: what was read is not as it was.

    Opened by its settings, the entry of a position (None for its start) and a `Context`.

    Attributes:
        name: how entries, messages and metrics call it: the path as given, in plain text.
        live: whether it may have nothing at the moment and more later.
        start, reached: where it stood when it was opened, and where after all that `read` gave and blank lines behind.
        blank: blank lines skipped so far, those of earlier runs included.
        progress: (bytes read, bytes there are or None) for what is shown, earlier runs included.
    """

    name: str
    live: bool = False
    start: Position
    reached: Position
    blank: int = 0
    progress: tuple[int, int | None] = (0, None)

    @abstractmethod
    def read(self) -> Rows | None:
        """Returns the next rows, about 1 MiB of them, or none where there are none *now*; None: finished, for ever.

        Never blocks for longer than the device takes; see `wait`.
        """

    def wait(self, seconds: float) -> None:  # noqa: B027 - nothing to wait for
        """Returns when there may be more rows, or when so many seconds have passed; at once if it is not `live`."""

    def waits_for(self) -> str:
        """Returns in words what a source waits for: ``new lines in DIR (12 files open)``."""
        return ""

    @abstractmethod
    def entry(self, position: Position) -> dict[str, Any]:
        """Returns what seals keep of a position: a JSON object with `kind`, `path`, and what continuing there takes.

        What the entry relies on is durable then. Called about once a chunk, with positions that never go back.
        """

    def end(self) -> None:  # noqa: B027 - those that are not live end by themselves
        """Asks a live source to finish: it gives what is there by now, and then None. Others need not care."""

    def close(self) -> None:  # noqa: B027 - not all hold anything
        """Lets go of what is open. May be called twice."""


def line_size(line: Line) -> int:
    """Returns the bytes of a row, its newline and its arrays included; 0 of one that could not be given."""
    if isinstance(line, bytes):
        return len(line)
    return len(line.line) + len(line.arrays) if isinstance(line, EncodedRow) else 0


def bad_row(reason: str, byte: int | None = None) -> errors.RowInvalid:
    """Returns why a source cannot give a row."""
    return errors.RowInvalid(f"not a row: {reason}", reason=reason, byte=byte)


def too_long(most: int, more: str = "") -> str:
    """Returns the reason for a row that is longer than is accepted."""
    return f"longer than the {most} bytes of --max-row-bytes{more}"


FINGERPRINT_BYTES: Final = 4096  # A page: read in one go, and long enough that two data sets hardly share one
_TAIL_BYTES: Final = 64 << 10  # more than the whole footer of most Parquet files

_PLAIN: Final = "a plain file (a restart has to find its place again)"
_PACKED: Final = (
    (b"\xfd7zXZ\0", "xz-compressed", "xz -dk"),
    (b"BZh", "bzip2-compressed", "bzip2 -dk"),
    (b"PK\x03\x04", "a zip archive", "unzip"),
)
"""How each kind of packed file begins that is not read, its name, and what unpacks it."""


def open_regular(
    path: str, buffer: int = 1 << 20, *, links_out: bool = True, pipe: bool = False, text: bool = False
) -> BinaryIO:
    """Opens a plain file for reading, or a `pipe`. Raises SourceRefused; also of packed files if a `text` is wanted.

    `links_out`: whether a link may lead out of the file's directory; not where somebody else makes the names.
    """
    with refusing(path):
        # O_NONBLOCK: opening a named pipe that nobody writes to would block for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK) if links_out else open_inside(Path(path))
    try:
        kind = stat.S_IFMT(os.fstat(fd).st_mode)
        if kind != (stat.S_IFIFO if pipe else stat.S_IFREG):
            plain = _PLAIN if links_out else "the plain file that it was"
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
    """Returns a file's size in bytes, 0 where it cannot be found out: for what is shown, not for what is done."""
    try:
        return os.stat(path).st_size
    except OSError:
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
    """Checks that the part of a file that was read is still what it was, by its first and its last bytes."""
    for where, expected, part in (("first", position.head, head), ("last", position.tail, tail)):
        if position.offset and digest(part) != expected:
            of = f"of the {where} {len(part)} bytes of the part read ({position.offset} bytes, {position.line} lines)"
            hint = "; put the old file back (appending is fine), or choose another --out"
            where = "not the file whose rows are published: "
            raise refuse_source(path, f"XXH3 {expected} {of}", digest(part), hint, where=where)


class KnownFile:
    """A complete file, known again by its fingerprint, an integer. Raises SourceRefused where it cannot be read."""

    def __init__(self, path: str) -> None:
        self.path: Final = path
        with open_regular(path, 0) as file:
            status = os.fstat(file.fileno())
            head = read_at(file.fileno(), path, FINGERPRINT_BYTES, 0)
            tail = read_at(file.fileno(), path, _TAIL_BYTES, max(0, status.st_size - _TAIL_BYTES))
        name = os.fsencode(os.path.basename(path))
        self.digest = xxh3_64_intdigest(name + b"\0%d\0" % status.st_size + head + tail)
        self._version = status.st_size, status.st_mtime_ns

    def check(self) -> None:
        """Checks that it is what it was: cheaply, unless its size or time of change differ."""
        with refusing(self.path):
            status = os.stat(self.path)
        if (status.st_size, status.st_mtime_ns) != self._version:
            now = KnownFile(self.path)
            if now.digest != self.digest:
                raise refuse_changed(self.path)
            self._version = now._version


def load_extra(what: str, module: str, extra: str | None) -> Any:
    """Returns a module that need not be installed, by its whole name, for what needs it. Raises ExtraMissing."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as cause:
        missing = isinstance(cause, ModuleNotFoundError) and (cause.name or "").partition(".")[0] == package
        found = "it is not installed" if missing else f"importing it failed: {cause}"
        install = package if extra is None else f"'lazyshard[{extra}]'"
        message = f"{what} needs {package}, and {found}: pip install {install}"
        raise ExtraMissing(message, package=package, extra=extra) from cause


@contextlib.contextmanager
def refusing(path: str, expected: str = "a readable file") -> Iterator[None]:
    """Has what a filesystem, a stream or an index raises say that a source is refused; what a store raises stays."""
    try:
        yield
    except (SourceRefused, errors.ConfigInvalid, errors.StoreUnavailable):
        raise
    except (errors.LazyShardError, OSError) as cause:
        if isinstance(cause, errors.AccessRefused) and cause.url is not None:
            raise
        raise refuse_os_error(path, cause, expected) from cause


def refuse_os_error(path: str, cause: Exception, expected: str = "a readable file") -> SourceRefused:
    """Returns the error for what the filesystem does not give. Raises MemoryError where memory is what there is not."""
    raise_if_short(cause)
    if isinstance(cause, errors.FileRefused | errors.AccessRefused | errors.FileInvalid):
        path = cause.file or path
    if isinstance(cause, errors.FileRefused):
        return refuse_source(path, "a plain file", str(cause.kind))
    if isinstance(cause, errors.LazyShardError) and not isinstance(cause, errors.AccessRefused):
        facts = {field: getattr(cause, field, None) for field in ("expected", "actual")}
        return SourceRefused(str(cause), file=path, **facts)
    if isinstance(cause, PermissionError):
        hint = "; check its permissions and those of the directories above it"
        return refuse_source(path, expected, f"uid {os.geteuid()} may not read it", hint)
    return refuse_source(path, expected, (getattr(cause, "strerror", None) or str(cause)).lower())


def refuse_source(path: str, expected: str, actual: str, hint: str = "", *, where: str = "") -> SourceRefused:
    """Returns the error for a source that is not what it should be; `where` in it, and `hint` what to do."""
    message = f"{path}: {where}expected {expected}, found {actual}{hint}"
    return SourceRefused(message, file=path, expected=expected, actual=actual)


def refuse_truncated(path: str, offset: int, size: int, hint: str = "") -> SourceRefused:
    """Returns the error for a file that is shorter, at `size` bytes, than what was read of it."""
    expected = f"at least the {offset} bytes that were read"
    return refuse_source(path, expected, f"{size}: it was truncated or replaced", hint)


def refuse_changed(path: str) -> SourceRefused:
    """Returns the error for a file that is no longer the one of which rows were read."""
    hint = "; put the old file back, or choose another --out"
    return refuse_source(path, "the file whose rows were read", "another one: it was changed or replaced", hint)
