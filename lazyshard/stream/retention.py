"""Retention: deletes the oldest chunks of a stream, so that it takes no more room than its readers need.

The order of steps is the guarantee. First `retired.json` is durable: from then on the chunks below its number are gone
for everybody. Then come the files, for each chunk its seal, its data and its side file, in this order, so that no
moment shows a seal without data; the directory is synced once at the end. A kill in between, or a power cut that brings
deleted files back, leaves files below the number, which the next start of a producer removes.

The newest chunk never goes: its seal holds the position from which a producer goes on.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lazyshard.format.names import MANIFEST, RETIRED, TEMPORARY, arrays_name, chunk_name, seal_name, tokens_name
from lazyshard.format.records import Retired
from lazyshard.store.durable import publish_bytes, remove, sync_directory
from lazyshard.store.files import check_folder, read_record
from lazyshard.stream.listing import Listing, invalid, list_chunks, read_manifest


def retire(
    directory: Path, chunks_before: int, published_chunks: int, *, check: Callable[[], Path | None] = lambda: None
) -> int:
    """Deletes the chunks of the half-open range [0, chunks_before), but never the newest one; returns how many.

    What was begun by an earlier call and has failed is completed; after an OSError, by the next call or start.

    Args:
        directory: the stream's directory, whose writer's lock the caller holds.
        chunks_before: no consumer needs the chunks below this number.
        published_chunks: how many chunks have ever been published, the retired ones included.
        check: is called before anything is changed; raises if the stream is another producer's now, and returns the
            directory from which this one may publish. None for who keeps others away by himself.
    """
    manifest = read_manifest(directory, None)
    if manifest is None:
        raise invalid(directory, f"there is no {MANIFEST}, so this is no stream of which chunks can be deleted")
    marked = read_retired(directory, manifest.stream_id)
    first, target = marked, max(marked, min(chunks_before, published_chunks - 1))
    while first > 0 and _is_there(directory, first - 1, manifest.arrays):
        first -= 1
    if first == target:
        return 0
    folder = check()
    if target > marked:
        _write_mark(directory, folder, Retired(manifest.stream_id, target, time.time()))
    else:
        # The mark may be that of a call which has failed after the rename: seen here, but not on the device yet.
        sync_directory(directory)
    for chunk in range(first, target):
        for name in (tokens_name, seal_name, chunk_name, arrays_name)[: 3 + manifest.arrays]:
            remove(directory / name(chunk))
    sync_directory(directory)
    return target - first


def read_retired(directory: Path, stream_id: str | None = None) -> int:
    """Returns how many chunks of a stream are retired: those of the half-open range [0, n).

    Costs one failed open as long as nothing was ever deleted. Without `stream_id` the manifest is read. Raises
    FileInvalid, VersionUnsupported, OSError: a file cannot be used or read.
    """
    try:
        mark = read_record(directory / RETIRED, Retired.decode)
    except FileNotFoundError:
        return 0
    if stream_id is None and (manifest := read_manifest(directory, None)) is not None:
        stream_id = manifest.stream_id
    # Who removes a stream to make another one in its place may overlook this file. It must not delete the new chunks.
    return mark.chunks_before if mark.stream_id == stream_id else 0


def list_kept(directory: Path, stream_id: str | None = None, *, arrays: bool = True) -> Listing:
    """Lists the chunks of a stream of ours, those that are retired left out. Raises as `list_chunks`, `read_retired`.

    Without `arrays` what has the name of a side file is none of the stream's: it is not listed, nor a leftover.
    """
    found = list_chunks(directory)
    if not arrays:
        found = replace(found, arrays={})
    # After the listing: the mark comes before each deletion, so whatever was missing above is below it now.
    return found.starting_at(read_retired(directory, stream_id))


def complete_retirement(directory: Path, listing: Listing) -> None:
    """Removes what is still there, or there again, of retired chunks. The caller holds the writer's lock."""
    for name in listing.leftovers:
        remove(directory / name)
    if listing.leftovers:
        sync_directory(directory)


def _is_there(directory: Path, chunk: int, arrays: bool) -> bool:
    kinds = (chunk_name, seal_name, arrays_name)[: 2 + arrays]
    return any(os.path.lexists(directory / name(chunk)) for name in kinds)


def _write_mark(directory: Path, folder: Path | None, mark: Retired) -> None:
    temporary = (folder or directory / TEMPORARY) / RETIRED
    if folder is None:
        temporary.parent.mkdir(exist_ok=True)
        temporary = check_folder(temporary.parent) / f"{RETIRED}.{secrets.token_hex(8)}"
    try:
        publish_bytes(mark.encode(), directory / RETIRED, temporary)
    finally:
        with contextlib.suppress(OSError):
            remove(temporary)
