"""Files of sources: opened without blocking, and known again.

Of a file that may grow the fingerprint covers the first and the last 4 KiB of the committed part. Of a complete file it
is the XXH3 of its name, its size, its first 4 KiB and its last 64 KiB, where Parquet and Arrow files keep their index.
Not noticed: a change in the middle that keeps the length.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import xxhash

from lazyshard import errors
from lazyshard.memory import raise_if_short
from lazyshard.store.files import KINDS, open_inside
from lazyshard_producer.errors import ExtraMissing, SourceRefused
from lazyshard_producer.position import FilePosition

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
    path: str,
    buffer: int = 1 << 20,
    *,
    links_out: bool = True,
    expected: str = "a plain file",
    pipe: bool = False,
    text: bool = False,
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
            raise refuse_source(path, expected, KINDS.get(kind, "something else"))
        start = read_at(fd, path, 8, 0) if text else b""
        for magic, packed, unpack in _PACKED:
            if start.startswith(magic):
                raise refuse_source(path, "JSON lines in plain text", packed, f"; unpack it first with `{unpack}`")
        return os.fdopen(fd, "rb", buffering=buffer)
    except BaseException:
        os.close(fd)
        raise


def open_source_file(path: str) -> BinaryIO:
    """Opens a plain file of text for reading."""
    return open_regular(path, expected=_PLAIN, text=True)


def read_magic(path: str) -> bytes:
    """Returns the first bytes of a plain file, eight at the most."""
    with open_regular(path, 0, expected=_PLAIN) as file:
        return read_at(file.fileno(), path, 8, 0)


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


def digest(part: bytes) -> str:
    """Returns the XXH3 (64 bits) in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(part)


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
    if position.offset == 0:
        return
    for where, expected, part in (("first", position.head, head), ("last", position.tail, tail)):
        if digest(part) != expected:
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
        self.digest = xxhash.xxh3_64_intdigest(name + b"\0%d\0" % status.st_size + head + tail)
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


def refuse_truncated(path: str, offset: int, size: int) -> SourceRefused:
    """Returns the error for a file that is shorter, at `size` bytes, than what was read of it."""
    actual = f"{size}: the file was truncated or replaced"
    return refuse_source(path, f"at least the {offset} bytes that were read", actual)


def refuse_changed(path: str) -> SourceRefused:
    """Returns the error for a file that is no longer the one of which rows were read."""
    hint = "; put the old file back, or choose another --out"
    return refuse_source(path, "the file whose rows were read", "another one: it was changed or replaced", hint)
