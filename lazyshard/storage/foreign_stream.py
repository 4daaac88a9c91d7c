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
from lazyshard.storage.listing import Scan, scan_chunks
from lazyshard.storage.mirror_chunks import MirroredChunks
from lazyshard.storage.published import Published
from lazyshard.storage.urls import UrlPath


def look_foreign(directory: Path) -> tuple[bool, Scan]:
    """Returns whether there is an end, and what is listed after that look. Raises as `scan_chunks`."""
    # What is in an object store is refused, or not there yet.
    ended = not isinstance(directory, UrlPath) and again_if_stale((directory / END).exists)
    return ended, scan_chunks(directory)


class ForeignStream:
    """A directory that somebody else fills. Looking lists it; a chunk is looked up, and scanned once when it is opened.

    Nothing tells how many chunks are there but a listing: others may make them in any order, and leave gaps. Nor may
    names be tried that are not there yet, since network filesystems remember for long that they were not.

    Args:
        directory: the stream's directory.
        samples_per_chunk: rows in every chunk but the last.
        found: whether there was an end, and what was listed after that; what the first look goes by.
    """

    def __init__(self, directory: Path, samples_per_chunk: int, found: tuple[bool, Scan] | None = None) -> None:
        self.directory = directory
        self.stream_id: str | None = None
        self.samples_per_chunk = samples_per_chunk
        self.arrays = False
        self.encoding: Encoding | None = None
        self.mirrored: MirroredChunks | None = None
        self._found = found
        self._odd: dict[int, str] = {}
        self._newest: tuple[int, int] | None = None

    def published(self) -> Published:
        """Lists the markers, and counts the rows of the newest chunk once."""
        found, self._found = self._found, None
        ended, scan = look_foreign(self.directory) if found is None else found
        gap = scan.gap
        if ended and gap is None and scan.data > scan.complete:
            # Rows that were written but never marked complete: the end must not drop them in silence.
            gap = scan.complete
        ended = ended and gap is None
        self._odd = scan.odd
        chunks = scan.complete
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
        name = self._odd.get(chunk, chunk_name(chunk))
        try:
            return open_foreign(self.directory / name, chunk)
        except FileNotFoundError:
            scan = scan_chunks(self.directory)
            self._odd = scan.odd
            if scan.data_name(chunk) == name:
                raise
            return open_foreign(self.directory / scan.data_name(chunk), chunk)

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
