"""Adoption: makes a stream of ours out of a directory of chunk files that another program has filled.

The data files are opened for reading only. They are read twice: once to check every row before anything is changed, and
once to seal what is on the device, which must then be the same. Memory: 16 bytes a row of one chunk.

The order of steps keeps every moment, and so every place where a crash can stop it, free of contradiction:

1. **Seals**, from chunk 0 on, each in place of any marker. There is no manifest yet, so the directory is still a
   foreign one, of which readers see names only: markers that were there stay, and in a directory without any they see a
   prefix of the chunks that grows.
2. **`stream.end`**, if the stream is to end, while readers still look no further than whether it is there. From here on
   a shorter last chunk counts.
3. **`stream.json`**: from one moment to the next this is a stream of ours, whole. Not earlier: a producer that opens a
   stream clears away data files that have no seal; a directory without a manifest it refuses.
4. **`head.json`**. Not earlier: readers take a head without a manifest for a damaged stream. Until it is there they
   list the seals, and read the last one of a stream that has not ended: only a partial chunk is left out.

To run it again after a crash is to go on: a seal that says what the data file holds stays, one that says otherwise is
never replaced.

Not guaranteed: to notice another program that is still at work on the directory. What it does to a chunk that was
checked, or to the names, between the first look and the manifest is noticed and refused; what comes later is not.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lazyshard.conversion.adoption_names import (
    check_markers,
    check_names,
    check_names_unchanged,
    check_numbers,
    read_end,
    refuse,
)
from lazyshard.conversion.adoption_publishing import Publisher, restore_head, seal_all
from lazyshard.conversion.adoption_rows import Report, check_last, check_rows
from lazyshard.errors import ProducerLocked
from lazyshard.format import End, Manifest, check_samples_per_chunk
from lazyshard.format.names import END, HEAD, MANIFEST, seal_name
from lazyshard.stream.listing import Listing, list_chunks
from lazyshard.stream.lock import WriterLock
from lazyshard.stream.manifest import read_manifest
from lazyshard.stream.native_stream import NativeStream


@dataclass(frozen=True, slots=True)
class Adopted:
    """The stream that a directory now is.

    Attributes:
        stream_id: its identity.
        samples_per_chunk: rows in every chunk but possibly the last.
        chunks: chunks published.
        samples: rows in them.
        size: bytes in their data files, None where `new` is False.
        ended: nothing can be added to it.
        new: False if it was a stream of ours before.
    """

    stream_id: str
    samples_per_chunk: int
    chunks: int
    samples: int
    size: int | None
    ended: bool
    new: bool


def adopt(
    directory: Path,
    samples_per_chunk: int | None = None,
    *,
    end: bool = True,
    clock: Callable[[], float] = time.time,
    report: Report = lambda phase, done, total: None,
) -> Adopted:
    """Makes a stream out of a directory of `chunk_*.jsonl` files, with markers or without any.

    Args:
        directory: the directory; its files must be complete, and nobody may be writing to them.
        samples_per_chunk: rows in every chunk but the last; None for those of chunk 0.
        end: whether nothing will be added to it. Otherwise a `ChunkWriter` can go on.
        clock: returns seconds since 1970.
        report: is told how far it is.

    Raises:
        RowInvalid: a line cannot be a row of a stream; nothing was changed.
        StreamInvalid: names or numbers of rows are not those of a stream, and nothing was changed; or the directory
            has changed meanwhile, and nothing but seals was written.
        ChunkCorrupt, SealInvalid, EndInvalid: there is a seal or an end of ours that says otherwise.
        ManifestInvalid, StreamMismatch: there is a stream already, damaged or with another samples_per_chunk.
        VersionUnsupported: a file of a later format.
        ProducerLocked, ProducerFenced: another process is writing to it.
        FileRefused, FileUnreadable, OSError: a file cannot be read or written.
        ValueError: samples_per_chunk is impossible.
    """
    if samples_per_chunk is not None:
        check_samples_per_chunk(samples_per_chunk)
    if (manifest := read_manifest(directory, samples_per_chunk)) is not None:
        return _already(directory, manifest, clock)
    listing = list_chunks(directory)
    check_names(directory, listing, os.listdir(directory))
    check_numbers(directory, listing)
    check_markers(directory, listing)
    old_end = read_end(directory, end)
    chunks = check_rows(directory, listing, samples_per_chunk, report)
    per_chunk = samples_per_chunk or chunks[0].rows
    check_last(directory, chunks, per_chunk, end)
    found = End(len(chunks), sum(chunk.rows for chunk in chunks))
    if old_end not in (None, found):
        raise refuse(
            directory,
            f"{directory / END}: says {old_end.chunks} chunks with {old_end.samples} samples, there are "
            f"{found.chunks} with {found.samples}; restore what is missing from a copy, or remove {END}",
        )
    lock = WriterLock(directory)
    lock.acquire(clock())
    publisher = Publisher(directory, lock, clock)
    try:
        if (manifest := read_manifest(directory, samples_per_chunk)) is None:
            check_names_unchanged(directory, listing)
            seal_all(publisher, chunks, report)
            # Only seals were added.
            check_names_unchanged(directory, Listing(listing.data, {n: seal_name(n) for n in listing.data}, 0, 0))
            if end:
                publisher.publish(END, found.encode())
            manifest = Manifest(uuid.uuid4().hex, per_chunk, clock())
            publisher.publish(MANIFEST, manifest.encode())
            publisher.publish_head(found, end)
            size = sum(chunk.size for chunk in chunks)
            return Adopted(manifest.stream_id, per_chunk, found.chunks, found.samples, size, end, new=True)
    finally:
        publisher.clear()
        lock.release()
    # Somebody else has adopted it since the first look.
    return _already(directory, manifest, clock)


def _already(directory: Path, manifest: Manifest, clock: Callable[[], float]) -> Adopted:
    if not os.path.lexists(directory / HEAD):
        # A producer that is at work writes it by itself.
        with contextlib.suppress(ProducerLocked):
            restore_head(directory, manifest, clock)
    published = NativeStream(directory, manifest).published()
    return Adopted(
        manifest.stream_id,
        manifest.samples_per_chunk,
        published.chunks,
        published.samples,
        None,
        published.ended,
        new=False,
    )
