"""JSON lines in a text that can only be read from its start: a compressed file, a named pipe or standard input.

To continue from a position, the text before it is read again and its digest compared. Bytes read from a pipe are gone,
so a restart expects the same input again, or reads all input as new (`resume`). A compressed file that ends within a
member or frame, or has a wrong checksum, is refused with the byte, after all text before that place was returned.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from lazyshard.memory import raise_if_short
from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.errors import SourceRefused, load_extra
from lazyshard_producer.position import PACKED_SIZE, TEXT_FIELDS, FilePosition, plain_name, read_entry
from lazyshard_producer.sources import source
from lazyshard_producer.sources.lines import DigestedText, TextPosition, TextSource
from lazyshard_producer.sources.source import PIECE_BYTES, STANDARD_INPUT, Context, open_regular, refusing

_SLICE_BYTES: Final = 256 << 10
_FIRST_SLICE_BYTES: Final = 4096
"""The rest of a slice after the end of a gzip member is read again, so the first slices of a member are small."""

_GZIP_MAGIC: Final = b"\x1f\x8b"
_ZSTD_SKIPPABLE: Final = range(0x184D2A50, 0x184D2A60)
_CHECKS: Final = {"incorrect data check": "a wrong checksum (CRC)", "incorrect length check": "a wrong length"}
"""Messages of zlib for failed checks, and what they mean."""


class PackedText:
    """Reads the text of a compressed file in blocks; for a large file a thread reads ahead.

    Memory is a few MiB at any compression ratio. `consumed` is the number of compressed bytes read so far.
    """

    def __init__(self, path: str, *, links_out: bool = True) -> None:
        self._path = path
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: deque[Future[bytes]] = deque()
        self._begin = -1  # start of the current or last member or frame
        self._failure: SourceRefused | None = None
        self._ended, self.consumed = False, 0
        with contextlib.ExitStack() as stack:
            self._file = stack.enter_context(open_regular(path, links_out=links_out))
            self.size: Final = os.fstat(self._file.fileno()).st_size
            self._back(len(start := self._take(4)))
            self.is_zstd: Final = _is_zstd(start)
            self._what: Final = "zstd frame" if self.is_zstd else "gzip member"
            if self.is_zstd:
                self._parts = self._zstd(load_extra(f"{path}: reading it", "zstandard", "producer"))
            elif start.startswith(_GZIP_MAGIC):
                self._parts = self._gzip()
            else:
                found = f"a file that begins with {start!r}" if start else "an empty file: truncated or incomplete"
                raise self._refuse("a file compressed by gzip or zstd", found)
            stack.pop_all()

    def read(self) -> bytes:
        """Returns the next block of text, empty at the clean end of the file."""
        # A smaller file is not worth a thread.
        if self.size <= 4 * PIECE_BYTES:
            return self._block()
        self._thread = self._thread or ThreadPoolExecutor(1, "lazyshard-decompress")
        # Some MiB: enough to bridge a publish.
        while len(self._ahead) < 4:
            self._ahead.append(self._thread.submit(self._block))
        return self._ahead.popleft().result()

    def close(self) -> None:
        """Closes the file. May be called twice."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._file.close()

    def _block(self) -> bytes:
        block = bytearray()
        # Nothing is read after the end, so `consumed` does not count bytes that are appended later.
        while not self._ended and len(block) < PIECE_BYTES // 2:
            try:
                block += next(self._parts)
            except StopIteration:
                self._ended = True
            except SourceRefused as error:
                self._failure, self._ended = error, True
            self.consumed = self._file.tell()
        if self._failure is not None and not block:
            raise self._failure
        return bytes(block)

    def _gzip(self) -> Iterator[bytes]:
        while self._find_member():
            engine, size = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), _FIRST_SLICE_BYTES
            while not engine.eof:
                part = self._take(size)
                try:
                    text = engine.decompress(part, PIECE_BYTES)
                except zlib.error as cause:
                    raise_if_short(cause)
                    reason = str(cause).rpartition(": ")[2]  # without zlib's error number
                    raise self._damaged(f"{_CHECKS.get(reason, reason)}, in the {len(part)} bytes before") from cause
                # At the end of a member zlib may return the rest in both attributes.
                self._back(len(engine.unused_data if engine.eof else engine.unconsumed_tail))
                if not (engine.eof or part or text):
                    raise self._cut()
                size = min(2 * size, _SLICE_BYTES)
                yield text

    def _find_member(self) -> bool:
        begun, rest = self._begin >= 0, b""
        while not rest:
            if not (start := self._take(_FIRST_SLICE_BYTES)):
                return False
            # NUL bytes after a member are padding: tapes have it, and a crash may leave some.
            rest = start.lstrip(b"\0") if begun else start
        self._back(len(rest))
        self._begin = self._file.tell()
        if not rest.startswith(_GZIP_MAGIC) and rest != _GZIP_MAGIC[:1]:
            raise self._other(rest)
        return True

    def _zstd(self, library: Any) -> Iterator[bytes]:
        """Parses frames (RFC 8878, 3.1.1) and decompresses them block by block.

        So the output of each call is bounded, and the end of a file within a frame is detected.
        """
        while True:
            self._begin = self._file.tell()
            if not (start := self._take(4)):
                return
            if not _is_zstd(start):
                raise self._other(start)
            if int.from_bytes(start, "little") in _ZSTD_SKIPPABLE:
                left = int.from_bytes(self._need(4), "little")
                while left:
                    left -= len(self._need(min(left, _SLICE_BYTES)))
                continue
            engine = library.ZstdDecompressor().decompressobj()
            descriptor, last = self._need(1), 0
            flags, single = descriptor[0], descriptor[0] >> 5 & 1
            size_bytes = (single, 2, 4, 8)[flags >> 6]
            block = start + descriptor + self._need(1 - single + (0, 1, 2, 4)[flags & 3] + size_bytes)
            while True:
                try:
                    yield engine.decompress(block)
                except library.ZstdError as cause:
                    raise_if_short(cause)
                    raise self._damaged(f"{cause}, in the {len(block)} bytes before") from cause
                if last:
                    break
                head = self._need(3)
                field = int.from_bytes(head, "little")
                last, kind, size = field & 1, field >> 1 & 3, field >> 3
                # A block contains at most 128 KiB of text.
                if kind == 3 or size > 128 << 10:
                    raise self._damaged(f"a block header {head.hex()}")
                block = head + self._need(1 if kind == 1 else size)
                if last and flags & 4:  # a checksum
                    block += self._need(4)

    def _take(self, size: int) -> bytes:
        with refusing(self._path):
            return self._file.read(size)

    def _need(self, size: int) -> bytes:
        if len(data := self._take(size)) < size:
            raise self._cut()
        return data

    def _back(self, size: int) -> None:
        """Un-reads the last bytes; they are still in the file's buffer, so this costs nothing."""
        if size:
            self._file.seek(-size, 1)

    def _refuse(self, expected: str, actual: str) -> SourceRefused:
        where = f"byte {self._file.tell()} of the compressed file: "
        hint = "; published rows stay, and a run with an intact file continues after them"
        return source.refuse_source(self._path, expected, actual, hint, where=where)

    def _cut(self) -> SourceRefused:
        expected = f"the rest of the {self._what} that begins at byte {self._begin}"
        return self._refuse(expected, "the end of the file: truncated, or still being written")

    def _damaged(self, reason: str) -> SourceRefused:
        return self._refuse(f"an intact {self._what} (it begins at byte {self._begin})", reason)

    def _other(self, start: bytes) -> SourceRefused:
        self._back(self._file.tell() - self._begin)
        return self._refuse(f"the end of the file or another {self._what}", f"a part beginning {start[:8]!r}")


def _is_zstd(start: bytes) -> bool:
    magic = int.from_bytes(start, "little")
    return len(start) == 4 and (magic == 0xFD2FB528 or magic in _ZSTD_SKIPPABLE)


GZIP: Final = "jsonl.gz"
ZSTD: Final = "jsonl.zst"
STDIN: Final = "stdin"


class CompressedJsonLines(TextSource):
    """One compressed file. Memory: blocks of 1 MiB that are read ahead, and the current row."""

    def __init__(self, settings: SourceSettings, position: dict[str, Any] | None, context: Context) -> None:
        self.name = plain_name(settings.path)
        at = FilePosition.decode(position, self.name, TEXT_FIELDS, GZIP, ZSTD)
        remedy = "; restore the old file (appending is fine), or choose another --out"
        self._begin(DigestedText(self.name, context.max_row_bytes, at, remedy))
        self._packed = PackedText(settings.path)
        self.progress = 0, self._packed.size

    def _next(self) -> tuple[bytes, bool, bool]:
        block = self._packed.read()
        self.progress = self._packed.consumed, self._packed.size
        return block, not block, True

    def entry(self, position: TextPosition) -> dict[str, Any]:
        """Returns the entry of a position."""
        kind = ZSTD if self._packed.is_zstd else GZIP
        entry = {"kind": kind, "path": self.name} | position.digested().encode(TEXT_FIELDS)
        return entry | {PACKED_SIZE: self._packed.consumed} if self._finished and position == self.reached else entry

    def close(self) -> None:
        """Closes the file."""
        self._packed.close()


class StandardInput(TextSource):
    """Standard input or a named pipe. It ends when its last writer closes it, but not before one has opened it."""

    live = True

    def __init__(self, settings: SourceSettings, position: dict[str, Any] | None, context: Context) -> None:
        self.name, size, blank = plain_name(settings.path), 0, 0
        at = FilePosition.decode(position, self.name, TEXT_FIELDS, STDIN)
        if position is not None:
            size, blank = read_entry(position, self.name, STDIN, bytes_before=int, blank_before=int)
        if settings.resume == "append":
            size, blank, at = size + at.offset, blank + at.blank, FilePosition()
        again = "to read the input as new rows, give --resume append; to start over, choose another --out"
        remedy = f"; give the same input from its start, as in the first run; {again}"
        self._begin(DigestedText(self.name, context.max_row_bytes, at, remedy), blank)
        self._bytes_before, self.progress = size, (size + at.offset, None)
        self._pipe = None if settings.path == STANDARD_INPUT else open_regular(settings.path, 0, pipe=True)
        self._fd: Final = 0 if self._pipe is None else self._pipe.fileno()
        self._ended = self._ending = False
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        with contextlib.suppress(OSError):  # the default limit of Linux for unprivileged users
            fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, PIECE_BYTES)

    def wait(self, seconds: float) -> None:
        """Waits until there is input or it has ended, at most `seconds`."""
        if not self._finished:
            self._poll.poll(seconds * 1000)

    def entry(self, position: TextPosition) -> dict[str, Any]:
        """Returns the entry of a position."""
        before = {"bytes_before": self._bytes_before, "blank_before": self._blank_before}
        return {"kind": STDIN, "path": self.name} | position.digested().encode(TEXT_FIELDS) | before

    def end(self) -> None:
        """Requests the end: the input so far is still read; a last line only if it is complete."""
        self._ending = True

    def close(self) -> None:
        """Closes a named pipe."""
        if self._pipe is not None:
            self._pipe.close()

    def _next(self) -> tuple[bytes, bool, bool]:
        block = bytearray()
        with refusing(self.name), contextlib.suppress(BlockingIOError):
            while len(block) < PIECE_BYTES and not self._ended and self._poll.poll(0):
                # Does not block, even on a blocking standard input: poll has reported input or the end.
                part = os.read(self._fd, PIECE_BYTES - len(block))
                self._ended = not part
                block += part
        self.progress = self._bytes_before + max(self._lines.read + len(block), self.start.at.offset), None
        # When the end is requested, the last line may be incomplete.
        return bytes(block), not block and (self._ended or self._ending), self._ended
