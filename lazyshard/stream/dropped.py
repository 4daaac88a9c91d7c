"""A writer that is dropped while it holds rows: nobody would notice that they are not published."""

from __future__ import annotations

import logging
import os
import weakref
from pathlib import Path

from lazyshard.stream.open_chunk import OpenChunk

_log = logging.getLogger("lazyshard")


class HeldRows:
    """The rows that a writer holds, known also when the writer is gone.

    Args:
        directory: the stream's directory.
        chunk: the chunk that the writer is filling.

    Attributes:
        chunk: as above; to be kept up to date.
    """

    def __init__(self, directory: Path, chunk: OpenChunk) -> None:
        self.chunk = chunk
        self._directory = directory
        self._pid = os.getpid()
        self._finalizer: weakref.finalize[..., object] | None = None

    def watch(self, writer: object) -> None:
        """Sees to it that it is logged when the writer is dropped, or the interpreter ends, while there are rows."""
        self._finalizer = weakref.finalize(writer, self._warn)

    def release(self) -> None:
        """Ends the watch: the writer was closed."""
        if self._finalizer is not None:
            self._finalizer.detach()

    def _warn(self) -> None:
        if len(self.chunk) and os.getpid() == self._pid:
            _log.warning(
                "%s: a ChunkWriter was dropped without close(): %d rows of its open chunk are not published; use it "
                "in a with statement, or call close()",
                self._directory,
                len(self.chunk),
            )
