"""`ForeignStream`: what other people's scripts make, for reading: `chunk_*.jsonl` beside empty `.completed` files.

It may be closed by an empty `stream.end`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from lazyshard.errors import StreamInvalid
from lazyshard.format import Encoding
from lazyshard.format.names import END, chunk_name, seal_name
from lazyshard.store.files import again_if_stale
from lazyshard.store.urls import UrlPath
from lazyshard.stream.chunk import Chunk
from lazyshard.stream.chunk_opening import open_foreign
from lazyshard.stream.listing import Scan, scan_chunks
from lazyshard.stream.mirror_chunks import MirroredChunks
from lazyshard.stream.published import Published

_LISTING_SHARE: Final = 0.05
"""The share of the time between two listings that the first of them may take; in between, names are looked up."""

_LISTED_AGAIN_S: Final = 60.0
"""No listing is older, however long it took: only a listing finds what is otherwise named or out of order."""


class ForeignLook(NamedTuple):
    """What a listing of a foreign directory says.

    Attributes:
        ended: whether there was an end before the listing.
        scan: what is there.
        again_at: when it may be listed again, in seconds of `time.monotonic`.
    """

    ended: bool
    scan: Scan
    again_at: float


def look_foreign(directory: Path) -> ForeignLook:
    """Returns whether there is an end, and what is listed after that look. Raises as `scan_chunks`."""
    started = time.monotonic()
    # What is in an object store is refused, or not there yet.
    ended = not isinstance(directory, UrlPath) and _has_end(directory)
    scan = scan_chunks(directory)
    took = time.monotonic() - started
    return ForeignLook(ended, scan, started + took + min(took / _LISTING_SHARE, _LISTED_AGAIN_S))


def _has_end(directory: Path) -> bool:
    return again_if_stale((directory / END).exists)


class ForeignStream:
    """A directory that somebody else fills. A chunk is looked up, and scanned once when it is opened.

    Nothing tells how many chunks are there but a listing: others may make them in any order, and leave gaps, and a
    network filesystem may remember for long that a name was not there. So the first look lists the directory, and so
    does the one that finds the end. Looks in between look up the next chunk's names, and list as often as 5 % of the
    time allows: what costs a fifth of a second once among 200,000 chunks is not repeated at every poll.

    Args:
        directory: the stream's directory.
        samples_per_chunk: rows in every chunk but the last.
        found: what the first look goes by.
    """

    def __init__(self, directory: Path, samples_per_chunk: int, found: ForeignLook | None = None) -> None:
        self.directory = directory
        self.stream_id: str | None = None
        self.samples_per_chunk = samples_per_chunk
        self.arrays = False
        self.encoding: Encoding | None = None
        self.mirrored: MirroredChunks | None = None
        self._found, self._known = found, found
        self._odd: dict[int, str] = {}
        self._newest: tuple[int, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leaves behind what was listed: another machine has another clock."""
        return self.__dict__ | {"_found": None, "_known": None}

    def published(self) -> Published:
        """Looks how many chunks are complete, and counts the rows of the newest one once."""
        found, self._found = self._found, None
        self._known = self._look() if found is None else found
        ended, scan = self._known.ended, self._known.scan
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

    def _look(self) -> ForeignLook:
        known = self._known
        if known is None or time.monotonic() >= known.again_at:
            return look_foreign(self.directory)
        found = self._look_up(known.scan)
        if known.ended != _has_end(self.directory) or (known.ended and found is not known.scan):
            # Only a listing tells that nothing lies behind the last chunk.
            return look_foreign(self.directory)
        return known._replace(scan=found)

    def _look_up(self, scan: Scan) -> Scan:
        """Returns the scan with the chunks that have been completed next; the same where there are none."""
        chunk = scan.complete
        while all((self.directory / name).exists() for name in (seal_name(chunk), scan.data_name(chunk))):
            chunk += 1
        if chunk == scan.complete:
            return scan
        return replace(scan, complete=chunk, data=max(scan.data, chunk), seals=max(scan.seals, chunk))

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
