"""The two kinds of stream directory behind one face: what is published, and chunks opened by number.

`NativeStream` has a manifest and seals of ours. `ForeignStream` is what other people's scripts make: `chunk_*.jsonl`
beside empty `.completed` files, perhaps closed by an empty `stream.end`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lazyshard.errors import (
    EndInvalid,
    FileRefused,
    FormatInvalid,
    HeadInvalid,
    SealInvalid,
    StreamInvalid,
    StreamMismatch,
    StreamUnsealed,
)
from lazyshard.format import FORMAT, Encoding, End, Head, Manifest, Seal
from lazyshard.format.names import END, HEAD, MANIFEST, OWNER, chunk_name, seal_name
from lazyshard.storage.chunk import Chunk
from lazyshard.storage.chunk_opening import open_foreign, open_sealed
from lazyshard.storage.files import again_if_stale, list_names, read_file, read_replaced_file
from lazyshard.storage.listing import list_chunks
from lazyshard.storage.manifest import read_manifest
from lazyshard.storage.mirror_chunks import MirroredChunks
from lazyshard.storage.retire import list_kept, read_retired
from lazyshard.storage.urls import UrlPath


@dataclass(frozen=True, slots=True)
class Published:
    """What is published at one moment.

    Attributes:
        chunks: complete chunks: those of the half-open range [0, chunks).
        samples: rows in them.
        ended: nothing will follow.
        head: what the producer tells of itself, None where it does not.
        gap: a chunk that lacks its data or its marker although it should have both, None if there is no such chunk.
        short: rows of the newest chunk of a foreign stream where they are fewer than samples_per_chunk, so that it
            counts only once the stream has ended; None otherwise.
    """

    chunks: int
    samples: int
    ended: bool
    head: Head | None = None
    gap: int | None = None
    short: int | None = None


class Stream(Protocol):
    """A stream directory, or what is under a URL, for reading."""

    directory: Path
    stream_id: str | None
    samples_per_chunk: int
    arrays: bool
    encoding: Encoding | None
    mirrored: MirroredChunks | None

    def published(self) -> Published:
        """Looks what is published now.

        Raises:
            FileNotFoundError: the directory has gone.
            FormatInvalid, StreamInvalid: what is there contradicts itself.
        """

    def check_identity(self) -> None:
        """Looks whether this is still the stream that was opened.

        Raises:
            StreamMismatch: another one is in its place.
        """

    def open_chunk(self, chunk: int) -> Chunk:
        """Opens a published chunk, whose number of rows the caller checks.

        Raises:
            FileNotFoundError: a file of it is not there (yet).
            ChunkCorrupt, SealInvalid: it is not as it was sealed.
            FileRefused, FileUnreadable, OSError: it cannot be opened.
        """

    def retired(self) -> int:
        """Looks which chunks were deleted by the stream's own rules: those of the half-open range [0, n).

        Raises:
            RetiredInvalid: the mark that says so cannot be used.
            OSError: it cannot be read.
        """


def open_stream(directory: Path, samples_per_chunk: int | None) -> Stream | None:
    """Opens what is in a directory, or returns None if there is no stream in it yet.

    Args:
        directory: the stream's directory.
        samples_per_chunk: needed for a foreign directory; otherwise None or what the manifest says.

    Raises:
        StreamMismatch: the manifest has another samples_per_chunk.
        StreamUnsealed: chunk files without any marker.
        StreamInvalid: files of a producer of ours, but no manifest.
        ValueError: samples_per_chunk is needed or impossible.
        FileRefused: it is a file, not a directory.
        FileUnreadable, OSError: the directory cannot be read.
    """
    try:
        manifest = read_manifest(directory, samples_per_chunk)
    except NotADirectoryError as cause:
        raise FileRefused(
            f"{directory}: expected the directory of a stream, found a file", file=str(directory), kind="a file"
        ) from cause
    if manifest is None:
        return _open_foreign(directory, samples_per_chunk)
    return NativeStream(directory, manifest)


def _open_foreign(directory: Path, samples_per_chunk: int | None) -> ForeignStream | None:
    try:
        listing = list_chunks(directory)
        names = list_names(directory)
    except FileNotFoundError:
        return None
    # A manifest that is listed was made just now, or the filesystem still remembers that it was not there.
    if MANIFEST in names or (not listing.data and not listing.seals):
        return None
    # An adoption that was interrupted leaves an owner too, and the directory as it was, for those who know its numbers.
    ours = HEAD if HEAD in names else OWNER if OWNER in names and samples_per_chunk is None else None
    if ours is not None:
        again = "" if ours == HEAD else "; or, if `lazyshard adopt` was interrupted, run that again"
        raise StreamInvalid(
            f"{directory}: there are chunks and {ours}, but {MANIFEST} is missing; restore it from a copy{again}",
            directory=str(directory),
        )
    if not listing.seals:
        raise StreamUnsealed(
            f"{directory}: {len(listing.data)} chunk files, but no .completed marker, so nothing tells which of them "
            f"are complete. If nobody writes to them any more, mark them: "
            f"`lazyshard adopt {directory}`; a producer should make each marker when its chunk is complete",
            directory=str(directory),
        )
    if isinstance(directory, UrlPath):
        raise StreamInvalid(
            f"{directory}: there is no {MANIFEST}, and in an object store only streams of ours are read, not what "
            f"other programs put there. Copy it into a directory, run `lazyshard adopt` on that, and copy that back",
            directory=str(directory),
        )
    if samples_per_chunk is None:
        raise ValueError(
            f"{directory}: there is no {MANIFEST}, so samples_per_chunk must be given: how many rows every chunk but "
            f"the last holds"
        )
    return ForeignStream(directory, samples_per_chunk)


class NativeStream:
    """A stream with a manifest. Looking costs one open and one read, or one request, however long the stream.

    Attributes:
        arrays: whether its rows may hold arrays.
        encoding: what its rows are encoded with; None where they are not.
        mirrored: its chunks, where they are in an object store; None for a directory.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.arrays = manifest.arrays
        self.encoding = manifest.encoding
        self.stream_id: str | None = manifest.stream_id
        self.samples_per_chunk = manifest.samples_per_chunk
        self.mirrored: MirroredChunks | None = None
        if isinstance(directory, UrlPath):
            self.mirrored = MirroredChunks(directory, manifest.stream_id, self.check_identity)
        else:
            self._manifest = os.path.join(directory, MANIFEST)
            self._manifest_file = self._identify()

    def _identify(self) -> tuple[int, int, int]:
        status = again_if_stale(lambda: os.stat(self._manifest))
        return status.st_dev, status.st_ino, status.st_mtime_ns

    def published(self) -> Published:
        """Looks what is published now, by `head.json`; by listing the seals where that is lost."""
        path = self.directory / HEAD
        try:
            head = read_replaced_file(path, lambda data: Head.decode(data, str(path)))
        except (FileNotFoundError, HeadInvalid):
            return self._listed()
        self._check_samples(path, HeadInvalid, head.chunks, head.samples, head.ended)
        return Published(head.chunks, head.samples, head.ended, head)

    def _check_samples(self, path: Path, error: type[FormatInvalid], chunks: int, samples: int, ended: bool) -> None:
        short = chunks * self.samples_per_chunk - samples
        if not 0 <= short < self.samples_per_chunk or (short and not ended):
            self.check_identity()
            raise error(
                f"{path}: expected {chunks} chunks of {self.samples_per_chunk} samples, found {samples} samples in "
                f"all; start the producer again, or restore the file from a copy",
                file=str(path),
                field="samples",
                expected=str(chunks * self.samples_per_chunk),
                actual=str(samples),
            )

    def _listed(self) -> Published:
        listing = list_kept(self.directory, self.stream_id)
        try:
            path = self.directory / END
            end = End.decode(read_file(path), str(path))
        except FileNotFoundError:
            # The last seal may be that of a partial chunk whose stream.end is still to come.
            chunks = listing.complete
            gap = listing.gap
            if chunks > listing.first:
                try:
                    rows = len(self.open_chunk(chunks - 1))
                except FileNotFoundError:
                    # Listed, but the filesystem still remembers that it was not there.
                    rows, gap = 0, chunks - 1
                if rows < self.samples_per_chunk:
                    chunks -= 1
            return Published(chunks, chunks * self.samples_per_chunk, False, gap=gap)
        self._check_samples(path, EndInvalid, end.chunks, end.samples, True)
        return Published(end.chunks, end.samples, True)

    def check_identity(self) -> None:
        """Compares the manifest."""
        path = self.directory / MANIFEST
        found = Manifest.decode(read_file(path), str(path))
        if found.stream_id != self.stream_id:
            raise StreamMismatch(
                f"{self.directory}: stream {self.stream_id} was replaced by stream {found.stream_id} while it was "
                f"being read; open the directory again to read the new one",
                directory=str(self.directory),
                expected=str(self.stream_id),
                actual=found.stream_id,
            )

    def open_chunk(self, chunk: int) -> Chunk:
        """Opens a published chunk by its seal. Looks first whether the stream is still the one that was opened."""
        if self.mirrored is not None:
            return self._of_this_format(self.mirrored.open(chunk))
        found = self._identify()
        if found != self._manifest_file:
            self.check_identity()
            self._manifest_file = found
        path = self.directory / seal_name(chunk)
        try:
            seal = Seal.decode(read_file(path), chunk, str(path))
        except SealInvalid as error:
            error.args = (f"{error}; restore the file from a copy",)
            raise
        return self._of_this_format(open_sealed(self.directory / chunk_name(chunk), seal))

    def _of_this_format(self, chunk: Chunk) -> Chunk:
        """Returns the chunk, unless its seal is of another format than the manifest: its rows would be read wrongly."""
        if (chunk.arrays is not None) is self.arrays:
            return chunk
        path = self.directory / seal_name(chunk.number)
        expected, found = FORMAT + self.arrays, FORMAT + (not self.arrays)
        raise SealInvalid(
            f"{path}: field 'format': expected {expected}, as {MANIFEST} says, found {found}; restore the file from a "
            f"copy",
            file=str(path),
            field="format",
            expected=f"{expected}, as {MANIFEST} says",
            actual=str(found),
            chunk=chunk.number,
        )

    def retired(self) -> int:
        """Reads the retired mark."""
        return read_retired(self.directory, self.stream_id)


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
