"""`ForeignStream`: what other people's scripts make, for reading: `chunk_*.jsonl` beside empty `.completed` files.

It may be closed by an empty `stream.end`.
"""

from __future__ import annotations

from pathlib import Path

from lazyshard.errors import StreamInvalid
from lazyshard.format import Encoding
from lazyshard.format.names import END, chunk_name
from lazyshard.storage.chunk import Chunk
from lazyshard.storage.chunk_opening import open_foreign
from lazyshard.storage.files import again_if_stale
from lazyshard.storage.listing import list_chunks
from lazyshard.storage.mirror_chunks import MirroredChunks
from lazyshard.storage.published import Published


class ForeignStream:
    """A directory that somebody else fills. Looking lists it; opening a chunk scans it once."""

    def __init__(self, directory: Path, samples_per_chunk: int) -> None:
        self.directory = directory
        self.stream_id: str | None = None
        self.samples_per_chunk = samples_per_chunk
        self.arrays = False
        self.encoding: Encoding | None = None
        self.mirrored: MirroredChunks | None = None
        self._names: dict[int, str] = {}
        self._newest: tuple[int, int] | None = None

    def published(self) -> Published:
        """Lists the markers, and counts the rows of the newest chunk once."""
        ended = again_if_stale((self.directory / END).exists)
        listing = list_chunks(self.directory)
        gap = listing.gap
        if ended and gap is None and len(listing.data) > listing.complete:
            # Rows that were written but never marked complete: the end must not drop them in silence.
            gap = listing.complete
        ended = ended and gap is None
        self._names = listing.data
        chunks = listing.complete
        rows = self.samples_per_chunk
        if chunks:
            try:
                rows = self._rows_of_newest(chunks - 1)
            except FileNotFoundError:
                # Listed, but the filesystem still remembers that it was not there.
                return Published(chunks - 1, (chunks - 1) * self.samples_per_chunk, False, gap=chunks - 1)
        short = rows if rows < self.samples_per_chunk and not ended else None
        if short is not None:
            # The marker of the last chunk comes before `stream.end`; until that is there, a short one does not count.
            chunks, rows = chunks - 1, self.samples_per_chunk
        samples = chunks * self.samples_per_chunk - (self.samples_per_chunk - rows)
        return Published(chunks, samples, ended, gap=gap, short=short)

    def check_identity(self) -> None:
        """Does nothing: a foreign stream has no identity."""

    def open_chunk(self, chunk: int) -> Chunk:
        """Opens a published chunk and finds its rows."""
        if chunk not in self._names:
            self._names = list_chunks(self.directory).data
        return open_foreign(self.directory / self._names.get(chunk, chunk_name(chunk)), chunk)

    def retired(self) -> int:
        """Returns 0: nobody deletes chunks of a foreign stream by rules that a reader could know."""
        return 0

    def _rows_of_newest(self, chunk: int) -> int:
        if self._newest is None or self._newest[0] != chunk:
            opened = self.open_chunk(chunk)
            if len(opened) > self.samples_per_chunk:
                raise StreamInvalid(
                    f"{opened.path}: expected at most {self.samples_per_chunk} rows (samples_per_chunk), found "
                    f"{len(opened)}",
                    directory=str(self.directory),
                    chunk=chunk,
                )
            self._newest = (chunk, len(opened))
        return self._newest[1]
