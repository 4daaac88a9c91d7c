"""Compressed text: what is in gzip and zstd files, in blocks, read from the start to a clean end.

All members or frames are read, one after another. A file that ends within one was cut or is still being written, and a
wrong checksum tells damage: both are refused with the byte, after the text before. Memory: a few MiB at any ratio.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, Final

from lazyshard.memory import raise_if_short
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.sources.source import load_extra, open_regular, refuse_source, refusing

BLOCK_BYTES: Final = 1 << 20  # text is given in blocks of about this size; the bytes read at a time are fewer
_AHEAD_BYTES: Final = 4 * BLOCK_BYTES  # compressed size from which on a thread is worth its start
_AHEAD_BLOCKS: Final = 4  # blocks that wait: enough to ride over a publish, some MiB
_SLICE_BYTES: Final = 256 << 10
_FIRST_SLICE_BYTES: Final = 4096
"""What is left of a slice at the end of a gzip member is read once more, so the first slices of a member are small."""

_GZIP_MAGIC: Final = b"\x1f\x8b"
_ZSTD_MAGIC: Final = 0xFD2FB528
_ZSTD_SKIPPABLE: Final = 0x184D2A50
_ZSTD_BLOCK_MAX: Final = 128 << 10  # text in one block of a zstd frame at the most, by the format
_CHECKS: Final = {"incorrect data check": "a wrong checksum (CRC)", "incorrect length check": "a wrong length"}
"""What gzip's library calls its checks, and what they are."""


class _CompressedText:
    """The text of a compressed file that is open, with a buffer, at its start; `consumed` bytes of it were read."""

    _what: str

    def __init__(self, file: BinaryIO, path: str) -> None:
        self.consumed = 0
        self._file = file
        self._path = path
        self._begin = -1  # of the member or frame in hand, or the last one
        self._ended = False
        self._failure: SourceRefused | None = None

    def read(self) -> bytes:
        """Returns the next block of text; nothing at the clean end of the file."""
        parts: list[bytes] = []
        size = 0
        # The end is met once: what is appended after that is nothing that `consumed` may count.
        while not self._ended and size < BLOCK_BYTES // 2:
            try:
                part = self._part()
            except SourceRefused as error:
                self._failure, part = error, None
            self._ended = part is None
            parts.append(part or b"")
            size += len(part or b"")
            self.consumed = self._file.tell()
        if self._failure is not None and not size:
            raise self._failure
        return b"".join(parts)

    def _part(self) -> bytes | None:
        """Returns some text, possibly none, or None at the end of the file."""
        raise NotImplementedError

    def _take(self, count: int) -> bytes:
        with refusing(self._path):
            return self._file.read(count)

    def _back(self, count: int) -> None:
        """Takes back the last bytes that were read; they are in the file's buffer still, so this costs nothing."""
        if count:
            self._file.seek(-count, 1)

    def _refuse(self, expected: str, actual: str) -> SourceRefused:
        where = f"byte {self._file.tell()} of the compressed file: "
        hint = "; what was published of it stays, and a sound file is gone on with"
        return refuse_source(self._path, expected, actual, hint, where=where)

    def _cut(self) -> SourceRefused:
        expected = f"the rest of the {self._what} that begins at byte {self._begin}"
        return self._refuse(expected, "the end of the file: cut, or still being written")

    def _damaged(self, reason: str) -> SourceRefused:
        return self._refuse(f"a sound {self._what} (it begins at byte {self._begin})", reason)

    def _other(self, start: bytes) -> SourceRefused:
        self._back(self._file.tell() - self._begin)
        return self._refuse(f"the end of the file or another {self._what}", f"a part beginning {start[:8]!r}")


def open_text(file: BinaryIO, path: str) -> _CompressedText:
    """Returns the text of a file that is open, with a buffer, at its start. Its first bytes tell the kind."""
    text = _CompressedText(file, path)
    start = text._take(4)
    text._back(len(start))
    if start.startswith(_GZIP_MAGIC):
        return _GzipText(file, path)
    if len(start) == 4 and _is_zstd(int.from_bytes(start, "little")):
        return _ZstdText(file, path)
    found = f"a file that begins with {start!r}" if start else "an empty file: cut, or still being written"
    raise text._refuse("a file compressed by gzip or zstd", found)


class _GzipText(_CompressedText):
    _what = "gzip member"
    _slice = _FIRST_SLICE_BYTES
    _engine: zlib._Decompress | None = None

    def _part(self) -> bytes | None:
        if self._engine is None:
            if not self._find_member():
                return None
            self._engine = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
            self._slice = _FIRST_SLICE_BYTES
        engine = self._engine
        part = self._take(self._slice)
        try:
            text = engine.decompress(part, BLOCK_BYTES)
        except zlib.error as cause:
            raise_if_short(cause)
            reason = str(cause).rpartition(": ")[2]  # without the library's number for it
            raise self._damaged(f"{_CHECKS.get(reason, reason)}, in the {len(part)} bytes before") from cause
        # At the end of a member the library may give the rest under both names.
        self._back(len(engine.unused_data if engine.eof else engine.unconsumed_tail))
        if engine.eof:
            self._engine = None
        elif not part and not text:
            raise self._cut()
        self._slice = min(2 * self._slice, _SLICE_BYTES)
        return text

    def _find_member(self) -> bool:
        begun, rest = self._begin >= 0, b""
        while not rest:
            start = self._take(_FIRST_SLICE_BYTES)
            if not start:
                return False
            # NUL bytes behind a member are padding: tapes had them, and a crash may leave some.
            rest = start.lstrip(b"\0") if begun else start
        self._back(len(rest))
        self._begin = self._file.tell()
        if not rest.startswith(_GZIP_MAGIC) and rest != _GZIP_MAGIC[:1]:
            raise self._other(rest)
        return True


class _ZstdText(_CompressedText):
    """The frames are taken apart here (RFC 8878, 3.1.1) and handed to the library block by block.

    So no call can expand without bound, and the end of a file within a frame is seen, which the library's own readers
    take for a clean one.
    """

    _what = "zstd frame"

    def __init__(self, file: BinaryIO, path: str) -> None:
        super().__init__(file, path)
        self._library = load_extra(path, "zstandard", "producer")
        self._engine: Any = None
        self._checksum = False

    def _part(self) -> bytes | None:
        if self._engine is None:
            return self._begin_frame()
        head = self._need(3)
        field = int.from_bytes(head, "little")
        last, kind, size = field & 1, field >> 1 & 3, field >> 3
        if kind == 3 or size > _ZSTD_BLOCK_MAX:
            raise self._damaged(f"a block header {head.hex()}")
        block = head + self._need(1 if kind == 1 else size)
        if last and self._checksum:
            block += self._need(4)
        text = self._decompress(block)
        if last:
            self._engine = None
        return text

    def _begin_frame(self) -> bytes | None:
        self._begin = self._file.tell()
        start = self._take(4)
        if not start:
            return None
        magic = int.from_bytes(start, "little")
        if not _is_zstd(magic) or len(start) < 4:
            raise self._other(start)
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
        self._engine = self._library.ZstdDecompressor().decompressobj()
        return self._decompress(header)

    def _decompress(self, data: bytes) -> bytes:
        try:
            text: bytes = self._engine.decompress(data)
        except self._library.ZstdError as cause:
            raise_if_short(cause)
            raise self._damaged(f"{cause}, in the {len(data)} bytes before") from cause
        return text

    def _need(self, count: int) -> bytes:
        data = self._take(count)
        if len(data) < count:
            raise self._cut()
        return data


def _is_zstd(magic: int) -> bool:
    return magic == _ZSTD_MAGIC or magic & ~15 == _ZSTD_SKIPPABLE


class PackedText:
    """A compressed file that is open: its text, read ahead by a thread where the file is large enough for one."""

    def __init__(self, path: str, *, links_out: bool = True) -> None:
        self._file = open_regular(path, links_out=links_out)
        with contextlib.ExitStack() as stack:
            stack.callback(self._file.close)
            self.size: Final = os.fstat(self._file.fileno()).st_size
            self._text: Final = open_text(self._file, path)
            stack.pop_all()
        self.is_zstd: Final = isinstance(self._text, _ZstdText)
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: deque[Future[bytes]] = deque()

    @property
    def consumed(self) -> int:
        """Compressed bytes that were read, ahead of what was taken."""
        return self._text.consumed

    def read(self) -> bytes:
        """Returns the next block of text; see `_CompressedText`."""
        if self.size <= _AHEAD_BYTES:
            return self._text.read()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "lazyshard-decompress")
        while len(self._ahead) < _AHEAD_BLOCKS:
            self._ahead.append(self._thread.submit(self._text.read))
        return self._ahead.popleft().result()

    def close(self) -> None:
        """Closes the file. May be called twice."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._file.close()
