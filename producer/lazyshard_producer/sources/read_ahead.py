"""Blocks of text, made in a thread ahead of whoever takes them: decompressors run without Python's lock."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Final

from lazyshard_producer.sources.decompression import CompressedText

_BLOCKS: Final = 4
"""Blocks that wait: enough to ride over a publish, some MiB."""

_LOOK_S: Final = 0.5
"""How soon the thread of a reader that was closed ends, where closing could not wake it."""


class ReadAhead:
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
