"""A stream that has ended: recognised without taking its lock, and not touched unless a crash has left something."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from lazyshard.errors import LazyShardError, ProducerLocked, StreamEnded, StreamMismatch
from lazyshard.format import End, Head, Manifest, Seal
from lazyshard.format.names import END, HEAD, MANIFEST, TEMPORARY, seal_name
from lazyshard.storage import ChunkWriter
from lazyshard.storage.files import read_file
from lazyshard.storage.manifest import read_manifest
from lazyshard.storage.retire import list_kept
from lazyshard_producer.following.journal import DIRECTORY, remove_journals
from lazyshard_producer.position import RunPosition, compare_sources, decode_position, plain_name, source_names
from lazyshard_producer.sources.source_file import file_size
from lazyshard_producer.wording import count


def find_end(out: str, samples_per_chunk: int) -> End | None:
    """Returns how much an ended stream holds, None where there is no stream or it has not ended.

    Raises:
        StreamMismatch: it has another number of samples per chunk.
        FormatInvalid, OSError: its files cannot be read.
    """
    try:
        data = read_file(Path(out, END))
        manifest = Manifest.decode(read_file(Path(out, MANIFEST)), str(Path(out, MANIFEST)))
    except FileNotFoundError:
        return None
    if manifest.samples_per_chunk != samples_per_chunk:
        raise StreamMismatch(
            f"{out}: the stream has {manifest.samples_per_chunk} samples per chunk, asked for {samples_per_chunk}, and "
            f"it has ended; choose another directory",
            directory=out,
            expected=str(samples_per_chunk),
            actual=str(manifest.samples_per_chunk),
        )
    return End.decode(data, str(Path(out, END)))


def complete_end(out: str, end: End) -> None:
    """Does what may be left to be done behind the end: readers are told of it, `.tmp/`, retired chunks and journals go.

    Nothing is touched where all is done, which is so as good as always.

    Raises:
        LazyShardError, OSError: as `ChunkWriter` raises them.
    """
    manifest = read_manifest(Path(out), None)
    assert manifest is not None
    if not _is_complete(Path(out), end, manifest.arrays):
        # Opening does it. One that holds the lock is at it.
        with contextlib.suppress(StreamEnded, ProducerLocked):
            ChunkWriter(out, arrays=manifest.arrays, encoding=manifest.encoding)
    clear_journals(out)


def clear_journals(out: str) -> None:
    """Removes the journals of followed directories from a stream that has ended: nobody goes on from them."""
    with contextlib.suppress(OSError):
        remove_journals(Path(out, DIRECTORY))


def _is_complete(out: Path, end: End, arrays: bool) -> bool:
    try:
        head = Head.decode(read_file(out / HEAD), str(out / HEAD))
    except (FileNotFoundError, LazyShardError):
        return False
    told = head.ended and (head.chunks, head.samples) == (end.chunks, end.samples)
    # Deleting may have failed as the run was ending, which has told of it and gone on.
    return told and not os.path.lexists(out / TEMPORARY) and not list_kept(out, arrays=arrays).leftovers


def notes_on_end(out: str, end: End, sources: Sequence[str]) -> list[str]:
    """Returns what somebody should know who wants the stream to take these sources, a sentence each; mostly nothing.

    A hint only: what cannot be found out is left out, and nothing raises.
    """
    try:
        position, names = _last_position(out, end)
    except (LazyShardError, OSError):
        return []
    difference = compare_sources(names, sources)
    if end.chunks and difference is not None:
        number, expected, actual = difference
        return [f"the stream was made from other sources: source {number} was {expected}, now it is {actual}"]
    added = [f"{path}: not in the stream" for path in sources[len(names) :] if end.chunks or file_size(path)]
    return leftovers(position, sources) + added


def leftovers(position: RunPosition, sources: Sequence[str]) -> list[str]:
    """Returns a sentence for each plain file that holds more than was read of it; `sources` are the paths."""
    found = []
    for entry, path in zip(position.sources, sources, strict=False):
        if entry is None or entry["kind"] != "jsonl":
            continue
        more = file_size(path) - entry["offset"]
        if more > 0:
            added = count(more, "byte")
            found.append(f"{plain_name(path)}: has grown by {added} since its end was read; they are not in the stream")
    return found


def _last_position(out: str, end: End) -> tuple[RunPosition, list[str]]:
    if not end.chunks:
        return RunPosition(sources=()), []
    path = Path(out, seal_name(end.chunks - 1))
    source = Seal.decode(read_file(path), end.chunks - 1, str(path)).source
    return decode_position(source, out), source_names(source)
