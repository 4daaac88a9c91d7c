"""The two kinds of stream directory behind one face, which of them a directory is, and what is in it now."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from lazyshard.errors import FileRefused, StreamInvalid, StreamUnsealed
from lazyshard.format.names import HEAD, MANIFEST, OWNER
from lazyshard.format.records import Encoding
from lazyshard.store.files import is_there
from lazyshard.store.urls import UrlPath
from lazyshard.stream.chunk import Chunk, open_foreign
from lazyshard.stream.foreign_stream import ForeignStream, is_usual, look_foreign
from lazyshard.stream.listing import Published, scan_chunks
from lazyshard.stream.manifest import how_to_mark, manifest_lost, read_manifest, stream_missing
from lazyshard.stream.native_stream import MirroredChunks, NativeStream


class Stream(Protocol):
    """A stream directory, or what is under a URL, for reading."""

    directory: Path
    stream_id: str | None
    samples_per_chunk: int
    arrays: bool
    encoding: Encoding | None
    mirrored: MirroredChunks | None

    def published(self, wanted: int | None = None) -> Published:
        """Looks what is published now.

        Args:
            wanted: how many samples the caller needs to know of. Of a foreign directory more may be there, or a chunk
                may be missing among those that are counted. None for all, exactly, at the cost of a listing.

        Raises:
            FileNotFoundError: the directory has gone.
            FormatInvalid, StreamInvalid: what is there contradicts itself.
        """

    def check_identity(self) -> None:
        """Looks whether this is still the stream that was opened.

        Raises:
            StreamMismatch: another one is in its place.
        """

    def check_end(self) -> None:
        """Looks, if it has ended, whether nothing lies behind what was counted: before its last rows are left out.

        Raises:
            StreamInvalid: there is more, or less.
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
            FileInvalid: the mark that says so cannot be used.
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


def open_now(directory: Path, samples_per_chunk: int | None = None) -> Stream:
    """Opens the stream in a directory.

    Args:
        directory: the stream's directory.
        samples_per_chunk: of a foreign directory, rows in every chunk but the last; None for those of its first one.

    Raises:
        StreamMissing: there is none.
        StreamInvalid: the first chunk of a foreign directory does not tell how many rows each has; or as `open_stream`.
        StreamUnsealed, OSError: as `open_stream`.
    """
    if samples_per_chunk is None:
        samples_per_chunk = rows_of_first_chunk(directory)
    stream = open_stream(directory, samples_per_chunk)
    if stream is None:
        raise stream_missing(directory)
    return stream


def rows_of_first_chunk(directory: Path) -> int | None:
    """Returns how many rows the first chunk of a foreign directory has; None if it is none, or has no marker at all.

    One with an owner counts as none: it may have been a stream of ours that has lost its manifest.

    Raises:
        StreamInvalid: its first chunk is not complete, or has no rows.
        FileInvalid, OSError: its files cannot be read.
    """
    try:
        if read_manifest(directory, None) is not None or is_there(directory / OWNER):
            return None
        scan = scan_chunks(directory)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not scan.seals:
        return None
    if not scan.complete:
        raise StreamInvalid(
            f"{directory}: chunk 0 is not complete, so nothing tells how many samples a chunk has; give their number",
            directory=str(directory),
            chunk=0,
        )
    path = directory / scan.data_name(0)
    rows = len(open_foreign(path, 0))
    if not rows:
        raise StreamInvalid(
            f"{path}: holds no rows, so nothing tells how many samples each chunk has; give their number",
            directory=str(directory),
            chunk=0,
        )
    return rows


def _open_foreign(directory: Path, samples_per_chunk: int | None) -> ForeignStream | None:
    if samples_per_chunk is not None and not isinstance(directory, UrlPath) and is_usual(directory):
        return ForeignStream(directory, samples_per_chunk)
    try:
        found = look_foreign(directory)
    except FileNotFoundError:
        return None
    # A manifest that is listed was made just now, or the filesystem still remembers that it was not there.
    scan = found[1]
    if MANIFEST in scan.ours or not (scan.data or scan.seals):
        return None
    # Earlier releases could leave an owner in a directory that stayed foreign, for those who know its numbers.
    ours = HEAD if HEAD in scan.ours else OWNER if OWNER in scan.ours and samples_per_chunk is None else None
    if ours is not None:
        raise manifest_lost(directory, ours)
    if not scan.seals:
        raise StreamUnsealed(
            f"{directory}: {scan.data} chunk files, but no .completed marker, so nothing tells which of them "
            f"are complete; {how_to_mark(directory)}",
            directory=str(directory),
        )
    if isinstance(directory, UrlPath):
        raise StreamInvalid(
            f"{directory}: there is no {MANIFEST}, and in an object store only streams of ours are read, not what "
            f"other programs put there. Copy it into a directory, and make a stream of that: "
            f"`lazyshard-producer run --source DIR --out URL`",
            directory=str(directory),
        )
    if samples_per_chunk is None:
        raise ValueError(
            f"{directory}: there is no {MANIFEST}, so samples_per_chunk must be given: how many rows every chunk but "
            f"the last holds"
        )
    return ForeignStream(directory, samples_per_chunk, found)
