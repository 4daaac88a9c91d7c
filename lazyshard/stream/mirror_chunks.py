"""The chunks of a stream in an object store, opened from their copies on this node, with the next ones on their way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lazyshard.errors import SealInvalid
from lazyshard.store.mirror import Mirror, ReadAhead
from lazyshard.store.mirror_room import chunks_ahead
from lazyshard.store.urls import UrlPath
from lazyshard.stream.chunk import Chunk, open_copy


class MirroredChunks:
    """Opens chunks by number; each is fetched once for all processes of the node.

    Args:
        directory: the stream's URL.
        stream_id: its identity.
        check_identity: raises if another stream is at the URL now.
    """

    def __init__(self, directory: UrlPath, stream_id: str, check_identity: Callable[[], None]) -> None:
        self._mirror = Mirror(directory, stream_id, check_identity)
        self._ahead = ReadAhead(self._mirror.fetch, chunks_ahead())

    @property
    def folder(self) -> Path:
        """Where the copies lie: a folder of this node that is this stream's alone."""
        return self._mirror.folder

    @property
    def fetched(self) -> int:
        """How many chunks this process has fetched, those ahead included."""
        return self._mirror.fetched

    def open(self, number: int) -> Chunk:
        """Opens a published chunk. Raises as `Mirror.open` and `Chunk` do."""
        try:
            seal, file, arrays = self._mirror.open(number)
        except SealInvalid as error:
            error.args = (f"{error}; restore the file from a copy",)
            raise
        self._ahead.opened(number)
        return open_copy(file, seal, arrays)

    def distrust(self, number: int) -> None:
        """Removes the copy of a chunk that was found to be damaged: the object may be whole."""
        self._mirror.drop(number)
