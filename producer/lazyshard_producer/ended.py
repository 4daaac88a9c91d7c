"""A stream that has ended: recognised without taking its lock, and not touched unless a crash has left something."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lazyshard.errors import LazyShardError, ProducerLocked, StreamEnded, StreamMismatch
from lazyshard.format import Encoding, End, Head, Manifest, Seal
from lazyshard.format.names import END, HEAD, MANIFEST, RETIRED, TEMPORARY, seal_name
from lazyshard.storage import ChunkWriter
from lazyshard.storage.creation import find_manifest
from lazyshard.storage.files import read_file
from lazyshard.storage.listing import list_chunks
from lazyshard.storage.manifest import read_manifest
from lazyshard.storage.retire import list_kept
from lazyshard_producer.configuration.problems import is_url
from lazyshard_producer.errors import SettingInvalid
from lazyshard_producer.following.journal import DIRECTORY, remove_journals
from lazyshard_producer.position import RunPosition, compare_sources, decode_position, plain_name, source_names
from lazyshard_producer.rows.pipeline import changes
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


def check_made_alike(
    out: str,
    end: End,
    samples_per_chunk: int,
    encoding: Encoding | None,
    described: dict[str, Any],
    warn: Callable[[str], None],
) -> None:
    """Compares how the rows of an ended stream were made with how they would be: nobody is to take it for another one.

    Args:
        out: its directory.
        end: as `find_end` has found it.
        samples_per_chunk: what is asked for.
        encoding: what rows would be encoded with, None for no encoding.
        described: the settings by which they would be made, as positions keep them.
        warn: is told where sources would be mixed otherwise, as on a stream that goes on.

    Raises:
        StreamMismatch: they were encoded otherwise.
        SettingInvalid: they were made or ordered otherwise.
    """
    find_manifest(Path(out), samples_per_chunk, encoding is not None, encoding)
    if not end.chunks:
        return
    try:
        position, _ = _last_position(out, end)
    except (LazyShardError, OSError):
        # Of another program, or deleted.
        return
    changed = changes(position.recipe, described)
    names = ", ".join(changed.values())
    if changed.keys() == {"weights"}:
        warn(f"the stream was mixed otherwise: {names}")
    elif changed:
        raise SettingInvalid(
            f"the stream has ended, and its rows were made in another way than is asked for: {names}; nothing can be "
            f"added to it. Go on with the settings of before, or choose another --out",
            option=f"--{next(iter(changed)).replace('_', '-')}",
        )


@contextlib.contextmanager
def telling_how_to_begin_anew(out: str) -> Iterator[None]:
    """Has the refusal of a stream that does not fit say what to do where no row is published in it.

    Its manifest is not replaced without being asked: a reader that waits for its first row has read it already, and
    would take rows for what they are not.

    Args:
        out: the stream's directory; of one in an object store nothing is said.
    """
    try:
        yield
    except StreamMismatch as error:
        files = [] if is_url(out) else _files_without_rows(Path(out))
        if files:
            error.args = (
                f"{error}. No row is published in it: to begin anew in the same place, stop what waits for its rows, "
                f"remove {' and '.join(files)} in it, and run the same command again",
            )
        raise


def _files_without_rows(out: Path) -> list[str]:
    """Returns the names of the files that make a directory a stream, if it is one into which no row has come."""
    try:
        listing = list_chunks(out)
        names = set(os.listdir(out))
    except (LazyShardError, OSError):
        return []
    if listing.data or listing.seals or RETIRED in names:
        return []
    return [name for name in (MANIFEST, HEAD, END) if name in names]


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
