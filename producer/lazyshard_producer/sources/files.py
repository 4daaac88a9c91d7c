"""Source files on disk: opening them without ever blocking, telling their kind, and knowing them again after a restart.

Of a file that may grow, the fingerprint covers the first and the last 4 KiB of the committed part, so checking it costs
the same however long the file is; bytes after that part may change. Of a complete file it is the XXH3 of its name, its
size, its first 4 KiB and its last 64 KiB, where Parquet and Arrow files keep their index. Not noticed: a change in the
middle that keeps the length.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final

import xxhash

from lazyshard.errors import FileRefused
from lazyshard.memory import raise_if_short
from lazyshard.store.files import open_inside
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.position import FilePosition, LinePosition
from lazyshard_producer.sources.source import STANDARD_INPUT

FINGERPRINT_BYTES: Final = 4096
"""A page: read in one go, and long enough that two data sets hardly share one."""

_READ_BYTES: Final = 1 << 20

_MAGIC: Final = (
    (b"\x1f\x8b", "gzip-compressed", "gzip -dk"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed", "zstd -dk"),
    (b"\xfd7zXZ\0", "xz-compressed", "xz -dk"),
    (b"BZh", "bzip2-compressed", "bzip2 -dk"),
    (b"PK\x03\x04", "a zip archive", "unzip"),
)
"""How each kind of packed file begins, its name, and what unpacks it."""

_KINDS: Final = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(
    path: str, buffer_bytes: int = _READ_BYTES, *, links_out: bool = True, expected: str = "a plain file"
) -> BinaryIO:
    """Opens a plain file for reading.

    Args:
        path: the file.
        buffer_bytes: size of its buffer, 0 for none.
        links_out: whether a link may lead out of the file's directory: to wherever the user wants it to, but not where
            somebody else makes the names.
        expected: what to say is expected where it is none.

    Raises:
        SourceRefused: there is no such file, it is something else, or this process may not read it.
    """
    try:
        # O_NONBLOCK: opening a named pipe that nobody writes to would block for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK) if links_out else open_inside(Path(path))
    except OSError as cause:
        raise refuse_os_error(path, cause) from cause
    kind = stat.S_IFMT(os.fstat(fd).st_mode)
    if kind != stat.S_IFREG:
        os.close(fd)
        raise refuse_source(path, expected, _KINDS.get(kind, "something else"))
    return os.fdopen(fd, "rb", buffering=buffer_bytes)


def open_source_file(path: str) -> BinaryIO:
    """Opens a plain file of text for reading.

    Raises:
        SourceRefused: as `open_regular`, or it is compressed.
    """
    file = open_regular(path, expected="a plain file (a restart has to find its place again)")
    try:
        start = read_at(file, path, 8, 0)
        for magic, packed, unpack in _MAGIC:
            if start.startswith(magic):
                raise refuse_source(path, "JSON lines in plain text", packed, f"; unpack it first with `{unpack}`")
    except BaseException:
        file.close()
        raise
    return file


def check_distinct(paths: Sequence[str], out: str) -> None:
    """Checks that no file or directory is given twice, and that none lies in the stream's own directory.

    Raises:
        SourceRefused: one of them is not so.
    """
    seen: dict[tuple[int, int], str] = {}
    stream = Path(out).resolve()
    for path in paths:
        try:
            status = os.fstat(0) if path == STANDARD_INPUT else os.stat(path)
        except (OSError, ValueError):
            continue  # no file, or none that can be had: opening it says so
        identity = (status.st_dev, status.st_ino)
        if identity in seen:
            raise refuse_source(path, "every source once", f"the same file as {seen[identity]}")
        seen[identity] = path
        if path != STANDARD_INPUT and stream in (Path(path).resolve(), *Path(path).resolve().parents):
            raise refuse_source(path, f"a file outside the stream's directory {out}", "one inside it")


def read_magic(path: str) -> bytes:
    """Returns the first bytes of a plain file, eight at the most; none of anything else.

    Raises:
        SourceRefused: it cannot be opened or read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return os.pread(fd, 8, 0) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
        finally:
            os.close(fd)
    except OSError as cause:
        raise refuse_os_error(path, cause) from cause


def file_size(path: str) -> int:
    """Returns a file's size in bytes, 0 where it cannot be found out: for what is shown, not for what is done."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def read_at(file: BinaryIO, path: str, count: int, offset: int) -> bytes:
    """Returns `count` bytes from an offset, fewer at the end of the file.

    Raises:
        SourceRefused: the filesystem failed.
    """
    parts = []
    try:
        while count > 0 and (part := os.pread(file.fileno(), count, offset)):
            parts.append(part)
            offset, count = offset + len(part), count - len(part)
    except OSError as cause:
        raise refuse_os_error(path, cause) from cause
    return b"".join(parts)


def committed_ends(file: BinaryIO, path: str, offset: int) -> tuple[bytes, bytes]:
    """Returns the first and the last bytes of the part [0, offset), which may overlap.

    Raises:
        SourceRefused: the file is shorter.
    """
    count = min(offset, FINGERPRINT_BYTES)
    head, tail = read_at(file, path, count, 0), read_at(file, path, count, offset - count)
    if len(head) < count or len(tail) < count:
        raise refuse_truncated(path, offset, os.fstat(file.fileno()).st_size)
    return head, tail


def digest(part: bytes) -> str:
    """Returns the XXH3 (64 bits) in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(part)


def check_committed(file: BinaryIO, path: str, position: FilePosition) -> None:
    """Checks that the part of a file whose rows are published is still what it was.

    Raises:
        SourceRefused: the file was truncated or replaced, or its last line was continued.
    """
    head, tail = committed_ends(file, path, position.offset)
    if position.offset == 0:
        return
    for where, expected, part in (("first", position.head, head), ("last", position.tail, tail)):
        if digest(part) != expected:
            raise SourceRefused(
                f"{path}: not the file whose rows are published: expected XXH3 {expected} of the {where} {len(part)} "
                f"bytes of the part read ({position.offset} bytes, {position.line} lines), found {digest(part)}; "
                f"put the old file back (appending is fine), or choose another --out",
                file=path,
                expected=expected,
                actual=digest(part),
            )
    rest = read_at(file, path, 2, position.offset) if position.open_end else b""
    if rest and rest != b"\r" and not rest.startswith((b"\n", b"\r\n")):
        raise refuse_continued(path, position.lines, rest)


_HEAD_BYTES: Final = 4 << 10
_TAIL_BYTES: Final = 64 << 10
"""More than the whole footer of most Parquet files."""


class KnownFile:
    """A complete file, known again by its fingerprint.

    Attributes:
        path: the file.
        digest: its fingerprint.

    Raises:
        SourceRefused: it cannot be read.
    """

    def __init__(self, path: str) -> None:
        self.path: Final = path
        self.digest, self._version = _fingerprint(path)

    def check(self) -> None:
        """Checks that it is what it was: cheaply, unless its size or time of change differ.

        Raises:
            SourceRefused: it was changed or replaced, or is gone.
        """
        try:
            status = os.stat(self.path)
        except OSError as cause:
            raise refuse_os_error(self.path, cause) from cause
        if (status.st_size, status.st_mtime_ns) == self._version:
            return
        digest, version = _fingerprint(self.path)
        if digest != self.digest:
            raise refuse_changed(self.path)
        self._version = version


def _fingerprint(path: str) -> tuple[int, tuple[int, int]]:
    """Returns a file's fingerprint, and its size and time of change in nanoseconds."""
    with open_regular(path, 0) as file:
        status = os.fstat(file.fileno())
        tail = max(0, status.st_size - _TAIL_BYTES)
        parts = (read_at(file, path, _HEAD_BYTES, 0), read_at(file, path, _TAIL_BYTES, tail))
    digest = xxhash.xxh3_64(os.fsencode(os.path.basename(path)))
    digest.update(b"\0%d\0" % status.st_size)
    for part in parts:
        digest.update(part)
    return digest.intdigest(), (status.st_size, status.st_mtime_ns)


def refuse_truncated(path: str, offset: int, size: int) -> SourceRefused:
    """Returns the error for a file that is shorter, at `size` bytes, than what was read of it."""
    actual = f"{size}: the file was truncated or replaced"
    return refuse_source(path, f"at least the {offset} bytes that were read", actual)


def refuse_os_error(path: str, cause: OSError, expected: str = "a readable file") -> SourceRefused:
    """Returns the error for what the filesystem does not give. Raises MemoryError where memory is what there is not."""
    raise_if_short(cause)
    if isinstance(cause, PermissionError):
        hint = "check its permissions and those of the directories above it"
        return refuse_source(path, expected, f"uid {os.geteuid()} may not read it", f"; {hint}")
    if isinstance(cause, FileRefused):
        return refuse_source(path, "a plain file", str(cause.kind))
    return refuse_source(path, expected, (cause.strerror or str(cause)).lower())


def refuse_source(path: str, expected: str, actual: str, hint: str = "") -> SourceRefused:
    """Returns the error for a source that is not what it should be; `hint` says what to do."""
    return SourceRefused(
        f"{path}: expected {expected}, found {actual}{hint}", file=path, expected=expected, actual=actual
    )


def refuse_changed(path: str) -> SourceRefused:
    """Returns the error for a file that is no longer the one of which rows were read."""
    hint = "; put the old file back, or choose another --out"
    return refuse_source(path, "the file whose rows were read", "another one: it was changed or replaced", hint)


def refuse_continued(name: str, at: LinePosition, rest: bytes) -> SourceRefused:
    """Returns the error for a last line that was taken without a line end, and that goes on with `rest` now."""
    return SourceRefused(
        f"{name}:{at.line}: the row was taken as it stood at the end, byte {at.offset}; expected a line end there, "
        f"found {rest[:1]!r}: the line was continued since",
        file=name,
        expected="a line end",
        actual=repr(rest[:1]),
    )
