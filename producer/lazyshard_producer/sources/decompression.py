"""Compressed text: what is in gzip and zstd files, in blocks, read from the start to a clean end.

All members of a gzip file and all frames of a zstd file are read, one after another. Where the file ends within one it
was cut or is still being written, and where a checksum is wrong it is damaged: both are refused with the byte, after
the text before it was given. Memory: a few MiB, however much the file expands to.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import zlib
from types import ModuleType
from typing import Any, BinaryIO, Final, Protocol

from lazyshard.memory import raise_if_short
from lazyshard_producer.errors import ExtraMissing, SourceRefused
from lazyshard_producer.sources.files import open_regular, refuse_os_error

BLOCK_BYTES: Final = 1 << 20
"""Text is given in blocks of about this size; the bytes read at a time are fewer."""

_AHEAD_BYTES: Final = 4 * BLOCK_BYTES
"""Compressed size from which on a thread is worth its start."""

_SLICE_BYTES: Final = 256 << 10
_FIRST_SLICE_BYTES: Final = 4096
"""What is left of a slice at the end of a gzip member is read once more, so the first slices of a member are small."""

_GZIP_MAGIC: Final = b"\x1f\x8b"
_ZSTD_MAGIC: Final = 0xFD2FB528
_ZSTD_SKIPPABLE: Final = 0x184D2A50
_ZSTD_BLOCK_MAX: Final = 128 << 10
"""Text in one block of a zstd frame at the most, by the format."""


_CHECKS: Final = {"incorrect data check": "a wrong checksum (CRC)", "incorrect length check": "a wrong length"}
"""What gzip's library calls its checks, and what they are."""


class CompressedText(Protocol):
    """The text of a compressed file."""

    @property
    def consumed(self) -> int:
        """Compressed bytes that were read."""

    def read(self) -> bytes:
        """Returns the next block of text; nothing at the clean end of the file.

        Raises:
            SourceRefused: the file is cut or damaged; all text before has been given.
        """


def open_text(file: BinaryIO, path: str) -> CompressedText:
    """Returns the text of a file that is open, with a buffer, at its start. Its first bytes tell the kind.

    Raises:
        SourceRefused: it is of neither kind, or cannot be read.
        ExtraMissing: the package for zstd is not installed.
    """
    start = _read(file, path, 4)
    _back(file, len(start))
    if start.startswith(_GZIP_MAGIC):
        return GzipText(file, path)
    if len(start) == 4 and _is_zstd(int.from_bytes(start, "little")):
        return ZstdText(file, path)
    found = f"a file that begins with {start!r}" if start else "an empty file: cut, or still being written"
    raise _refuse(path, 0, "a file compressed by gzip or zstd", found)


class _Text:
    """Gives parts as blocks: a failure after the parts before it."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self.consumed = 0
        self._file = file
        self._path = path
        self._failure: SourceRefused | None = None

    def read(self) -> bytes:
        """Returns the next block of text."""
        parts: list[bytes] = []
        size = 0
        while self._failure is None and size < BLOCK_BYTES // 2:
            try:
                part = self._part()
            except SourceRefused as error:
                self._failure = error
                break
            if part is None:
                break
            parts.append(part)
            size += len(part)
        self.consumed = self._file.tell()
        if self._failure is not None and not size:
            raise self._failure
        return b"".join(parts)

    def _part(self) -> bytes | None:
        """Returns some text, possibly none, or None at the end of the file."""
        raise NotImplementedError

    def _cut(self, begin: int, what: str) -> SourceRefused:
        return _refuse(
            self._path,
            self._file.tell(),
            f"the rest of the {what} that begins at byte {begin}",
            "the end of the file: cut, or still being written",
        )

    def _damaged(self, begin: int, what: str, reason: str) -> SourceRefused:
        return _refuse(self._path, self._file.tell(), f"a sound {what} (it begins at byte {begin})", reason)


class GzipText(_Text):
    """The text of a gzip file."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        super().__init__(file, path)
        self._begin = -1  # of the member in hand or the last one
        self._slice = _FIRST_SLICE_BYTES
        self._engine: zlib._Decompress | None = None

    def _part(self) -> bytes | None:
        if self._engine is None:
            if not self._find_member():
                return None
            self._engine = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
            self._slice = _FIRST_SLICE_BYTES
        engine = self._engine
        part = _read(self._file, self._path, self._slice)
        try:
            text = engine.decompress(part, BLOCK_BYTES)
        except zlib.error as cause:
            raise_if_short(cause)
            reason = f"{_words(cause)}, in the {len(part)} bytes before"
            raise self._damaged(self._begin, "gzip member", reason) from cause
        # At the end of a member the library may give the rest under both names.
        _back(self._file, len(engine.unused_data if engine.eof else engine.unconsumed_tail))
        if engine.eof:
            self._engine = None
        elif not part and not text:
            raise self._cut(self._begin, "gzip member")
        self._slice = min(2 * self._slice, _SLICE_BYTES)
        return text

    def _find_member(self) -> bool:
        """Goes to the start of the next member; returns False if there is none."""
        begun, rest = self._begin >= 0, b""
        while not rest:
            start = _read(self._file, self._path, _FIRST_SLICE_BYTES)
            if not start:
                return False
            # NUL bytes behind a member are padding: tapes had them, and a crash may leave some.
            rest = start.lstrip(b"\0") if begun else start
        _back(self._file, len(rest))
        self._begin = self._file.tell()
        if not rest.startswith(_GZIP_MAGIC) and rest != _GZIP_MAGIC[:1]:
            raise _refuse(
                self._path, self._begin, "the end of the file or another gzip member", f"a part beginning {rest[:8]!r}"
            )
        return True


class ZstdText(_Text):
    """The text of a zstd file.

    The frames are taken apart here (RFC 8878, 3.1.1) and handed to the library block by block: so no call can expand
    without bound, and the end of a file within a frame is seen, which the library's own readers take for a clean one.
    """

    def __init__(self, file: BinaryIO, path: str) -> None:
        super().__init__(file, path)
        self._library = _import_zstandard(path)
        self._decompressor = self._library.ZstdDecompressor()
        self._engine: Any = None
        self._begin = 0
        self._checksum = False

    def _part(self) -> bytes | None:
        if self._engine is None:
            return self._begin_frame()
        head = self._need(3)
        field = int.from_bytes(head, "little")
        last, kind, size = field & 1, field >> 1 & 3, field >> 3
        if kind == 3 or size > _ZSTD_BLOCK_MAX:
            raise self._damaged(self._begin, "zstd frame", f"a block header {head.hex()}")
        block = head + self._need(1 if kind == 1 else size)
        if last and self._checksum:
            block += self._need(4)
        text = self._decompress(block)
        if last:
            self._engine = None
        return text

    def _begin_frame(self) -> bytes | None:
        self._begin = self._file.tell()
        start = _read(self._file, self._path, 4)
        if not start:
            return None
        magic = int.from_bytes(start, "little")
        if not _is_zstd(magic) or len(start) < 4:
            raise _refuse(
                self._path, self._begin, "the end of the file or another zstd frame", f"a part beginning {start!r}"
            )
        if magic != _ZSTD_MAGIC:
            left = int.from_bytes(self._need(4), "little")
            while left:
                left -= len(self._need(min(left, _SLICE_BYTES)))
            return b""
        descriptor = self._need(1)
        flags = descriptor[0]
        self._checksum = bool(flags & 4)
        single = bool(flags & 32)
        size_bytes = (1 if single else 0, 2, 4, 8)[flags >> 6]
        header = start + descriptor + self._need((not single) + (0, 1, 2, 4)[flags & 3] + size_bytes)
        self._engine = self._decompressor.decompressobj()
        return self._decompress(header)

    def _decompress(self, data: bytes) -> bytes:
        assert self._engine is not None
        try:
            text: bytes = self._engine.decompress(data)
        except self._library.ZstdError as cause:
            raise_if_short(cause)
            reason = f"{cause}, in the {len(data)} bytes before"
            raise self._damaged(self._begin, "zstd frame", reason) from cause
        return text

    def _need(self, count: int) -> bytes:
        """Returns so many bytes of the frame."""
        data = _read(self._file, self._path, count)
        if len(data) < count:
            raise self._cut(self._begin, "zstd frame")
        return data


def _words(cause: zlib.error) -> str:
    """Returns what is wrong, without the library's number for it."""
    text = str(cause).rpartition(": ")[2]
    return _CHECKS.get(text, text)


def _is_zstd(magic: int) -> bool:
    return magic == _ZSTD_MAGIC or magic & ~15 == _ZSTD_SKIPPABLE


def _import_zstandard(path: str) -> ModuleType:
    try:
        import zstandard
    except ImportError as cause:
        raise ExtraMissing(
            f"{path}: reading zstd files needs the package zstandard; install it with "
            f"`pip install 'lazyshard[producer]'`",
            package="zstandard",
            extra="producer",
        ) from cause
    return zstandard


def _read(file: BinaryIO, path: str, count: int) -> bytes:
    try:
        return file.read(count)
    except OSError as cause:
        raise refuse_os_error(path, cause) from cause


def _back(file: BinaryIO, count: int) -> None:
    """Takes back the last bytes that were read; they are in the file's buffer still, so this costs nothing."""
    if count:
        file.seek(-count, 1)


def _refuse(path: str, byte: int, expected: str, actual: str) -> SourceRefused:
    return SourceRefused(
        f"{path}: byte {byte} of the compressed file: expected {expected}, found {actual}; what was published of it "
        f"stays, and a sound file is gone on with",
        file=path,
        expected=expected,
        actual=actual,
    )


_BLOCKS: Final = 4
"""Blocks that wait: enough to ride over a publish, some MiB."""

_LOOK_S: Final = 0.5
"""How soon the thread of a reader that was closed ends, where closing could not wake it."""


class TextReadAhead:
    """Reads a text in a thread. To be used by one thread, and closed; it is a `CompressedText` itself.

    Args:
        text: what is read; nobody else may read it from now on.
    """

    def __init__(self, text: CompressedText) -> None:
        self._text = text
        self._blocks: queue.Queue[bytes | BaseException] = queue.Queue(_BLOCKS)
        self._closed = threading.Event()
        self._end: bytes | BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="lazyshard-decompress", daemon=True)
        self._thread.start()

    @property
    def consumed(self) -> int:
        """Compressed bytes that were read, ahead of what was taken."""
        return self._text.consumed

    def read(self) -> bytes:
        """Returns the next block of text, as soon as it is there; nothing at the end. Raises as the text does."""
        block = self._blocks.get() if self._end is None else self._end
        if isinstance(block, BaseException):
            self._end = block
            raise block
        if not block:
            self._end = block
        return block

    def close(self) -> None:
        """Ends the thread. May be called twice."""
        self._closed.set()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._blocks.get(timeout=0.01)
        self._thread.join()

    def _run(self) -> None:
        block: bytes | BaseException = b"-"
        while isinstance(block, bytes) and block and not self._closed.is_set():
            try:
                block = self._text.read()
            except BaseException as error:
                block = error
            self._put(block)

    def _put(self, block: bytes | BaseException) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._blocks.put(block, timeout=_LOOK_S)
                return


class PackedText:
    """A compressed file that is open: its text, read ahead by a thread where the file is large enough for one.

    Attributes:
        size: compressed bytes of the file.
        is_zstd: whether it is compressed by zstd.

    Raises:
        SourceRefused: it cannot be read, or is not compressed by gzip or zstd.
        ExtraMissing: the package for zstd is not installed.
    """

    def __init__(self, path: str, *, links_out: bool = True) -> None:
        self._file: BinaryIO = open_regular(path, links_out=links_out)
        try:
            self.size: Final = os.fstat(self._file.fileno()).st_size
            self._text = open_text(self._file, path)
        except BaseException:
            self._file.close()
            raise
        self.is_zstd: Final = isinstance(self._text, ZstdText)

    @property
    def consumed(self) -> int:
        """Compressed bytes that were read, ahead of what was taken."""
        return self._text.consumed

    def read(self) -> bytes:
        """Returns the next block of text; see `CompressedText`."""
        if self.size > _AHEAD_BYTES and not isinstance(self._text, TextReadAhead):
            self._text = TextReadAhead(self._text)
        return self._text.read()

    def close(self) -> None:
        """Closes the file. May be called twice."""
        if isinstance(self._text, TextReadAhead):
            self._text.close()
        self._file.close()
