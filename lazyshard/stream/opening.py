"""Opens what is in a directory now: a stream of ours or a foreign one, without waiting for either."""

from __future__ import annotations

from pathlib import Path

from lazyshard.errors import StreamInvalid
from lazyshard.format.names import OWNER
from lazyshard.store.files import is_there
from lazyshard.stream.chunk import open_foreign
from lazyshard.stream.listing import scan_chunks
from lazyshard.stream.manifest import read_manifest, stream_missing
from lazyshard.stream.stream import Stream, open_stream


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
