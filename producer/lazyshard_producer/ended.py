"""A stream that has ended: recognised without taking its lock and without touching any of its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lazyshard.errors import LazyShardError, StreamMismatch
from lazyshard.format import End, Manifest, Seal
from lazyshard.format.names import END, MANIFEST, seal_name
from lazyshard.storage.files import read_file
from lazyshard_producer.position import FilePosition, compare_sources, decode_positions, plain_name
from lazyshard_producer.source_file import file_size
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


def notes_on_end(out: str, end: End, sources: Sequence[str]) -> list[str]:
    """Returns what somebody should know who wants the stream to take these sources, a sentence each; mostly nothing.

    A hint only: what cannot be found out is left out, and nothing raises.
    """
    try:
        positions = _last_positions(out, end)
    except (LazyShardError, OSError):
        return []
    difference = compare_sources(positions, sources)
    if end.chunks and difference is not None:
        number, expected, actual = difference
        return [f"the stream was made from other sources: source {number} was {expected}, now it is {actual}"]
    added = [f"{path}: not in the stream" for path in sources[len(positions) :] if end.chunks or file_size(path)]
    return leftovers(positions, sources) + added


def leftovers(positions: Sequence[FilePosition], sources: Sequence[str]) -> list[str]:
    """Returns a sentence for each file that holds more than was read of it; `sources` are their paths."""
    found = []
    for position, path in zip(positions, sources, strict=False):
        more = file_size(path) - position.offset
        if more > 0:
            added = count(more, "byte")
            found.append(f"{plain_name(path)}: has grown by {added} since its end was read; they are not in the stream")
    return found


def _last_positions(out: str, end: End) -> tuple[FilePosition, ...]:
    if not end.chunks:
        return ()
    path = Path(out, seal_name(end.chunks - 1))
    return decode_positions(Seal.decode(read_file(path), end.chunks - 1, str(path)).source, out)
