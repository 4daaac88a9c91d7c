"""A stream's manifest: found and compared, or made together with the directory's own durability."""

from __future__ import annotations

import contextlib
import os
import shlex
from pathlib import Path

from lazyshard.errors import StreamInvalid
from lazyshard.format import Encoding, Manifest, check_samples_per_chunk
from lazyshard.format.names import HEAD, MANIFEST
from lazyshard.store.durable import publish_new_bytes, sync_directory
from lazyshard.stream.listing import list_chunks
from lazyshard.stream.manifest import check_arrays, check_same_encoding, manifest_lost, read_manifest


def find_manifest(
    directory: Path, samples_per_chunk: int | None, arrays: bool = False, encoding: Encoding | None = None
) -> Manifest | None:
    """Returns a stream's manifest, None where there is none yet and one can be made. Changes nothing.

    Args:
        directory: the stream's directory, which may not be there.
        samples_per_chunk: what the caller asks for; None takes what the manifest says.
        arrays: whether the caller's rows may hold arrays.
        encoding: what the caller's rows are encoded with, None for rows that are not.

    Raises:
        StreamMismatch: the stream has another number of samples per chunk, or was made with other rows in mind.
        StreamInvalid: the directory holds chunks that somebody else made, or a manifest that this machine does not
            see yet.
        ValueError: samples_per_chunk is impossible, or missing for a new stream.
    """
    manifest = read_manifest(directory, samples_per_chunk)
    if manifest is None and not _is_new(directory, samples_per_chunk):
        # Made since by another producer, or what a network filesystem remembers as missing.
        manifest = read_manifest(directory, samples_per_chunk)
        if manifest is None:
            raise _unseen(directory)
    if manifest is not None:
        check_same_encoding(directory, manifest, encoding)
        check_arrays(directory, manifest, arrays)
    return manifest


def create_stream(directory: Path, manifest: Manifest, temporary: Path) -> None:
    """Publishes a new stream's manifest and makes the directory itself durable. The caller holds the writer's lock.

    Raises:
        StreamInvalid: there is a manifest, which this machine could not see yet.
        OSError: the filesystem refused.
    """
    _sync_parents(directory)
    try:
        publish_new_bytes(manifest.encode(), directory / MANIFEST, temporary)
    except FileExistsError as cause:
        raise _unseen(directory) from cause


def _is_new(directory: Path, samples_per_chunk: int | None) -> bool:
    """Returns whether a stream can be made there; False where a manifest is listed."""
    if samples_per_chunk is None:
        raise ValueError(f"{directory}: samples_per_chunk is needed to create a stream")
    check_samples_per_chunk(samples_per_chunk)
    with contextlib.suppress(FileNotFoundError):
        listing = list_chunks(directory)
        names = os.listdir(directory)
        if MANIFEST in names:
            return False
        if listing.data or listing.seals:
            if HEAD in names:
                raise manifest_lost(directory, HEAD)
            raise StreamInvalid(
                f"{directory}: holds chunk files but no {MANIFEST}, so somebody else made them; choose another "
                f"directory, or, to continue these chunks, first run "
                f"`lazyshard adopt {shlex.quote(str(directory))} --no-end`",
                directory=str(directory),
            )
    return True


def _unseen(directory: Path) -> StreamInvalid:
    """Returns the error for a manifest that a network filesystem remembers as missing."""
    return StreamInvalid(
        f"{directory}: somebody else has created a stream here, which this machine does not see yet; nothing of it was "
        f"changed. If no other producer is running, start this one again in a minute",
        directory=str(directory),
    )


def _sync_parents(directory: Path) -> None:
    """Makes the names of the directories above durable: some may be new, perhaps since before a crash."""
    path = directory.absolute()
    while not os.path.ismount(path):
        path = path.parent
        # One that this process may not even list is none that it has made.
        with contextlib.suppress(PermissionError):
            sync_directory(path)
