"""What the seals of evenly spaced chunks tell for a report: lengths, sizes, times, and how rows were made.

At most so many chunks are looked at, and the tokens of at most `KEPT_ROWS` rows are kept one by one, so neither time
nor memory grows with the stream. What cannot be read is counted, with the first reason; the others are told all the
same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshard.errors import LazyShardError
from lazyshard.format.names import SEAL_SUFFIX
from lazyshard.format.source_rows import SourceRows, form_made
from lazyshard.inspection.disk_use import sampled_chunks
from lazyshard.inspection.inspection import SAMPLED_ROWS, SCANNED_ROWS, ShownChunk, describe_chunk
from lazyshard.inspection.row_facts import Lengths
from lazyshard.store.files import modified_at
from lazyshard.stream.stream import Stream
from lazyshard.stream.token_lengths import chunk_tokens

KEPT_ROWS: Final = 100_000
"""Lengths that are kept one by one, to be packed: some tenths of a second, and shares good to a thousandth."""

_GIVE_UP_CHUNKS: Final = 100
"""After so many chunks in turn that cannot be read, the others count as such too."""


class ChunkPoint(NamedTuple):
    """A chunk that was looked at.

    Attributes:
        chunk: its number.
        rows: rows in it.
        size: bytes of its data file.
        at: when it was published, in seconds since 1970; by its marker's last change where no seal tells.
    """

    chunk: int
    rows: int
    size: int
    at: float


@dataclass(frozen=True, slots=True)
class Made:
    """How the rows of the newest chunk that was looked at were made, as its seal tells.

    Attributes:
        form: "pack", "split" or "pad"; None for rows as they are.
        size: tokens of a pack or sequence; None where rows are as they are, or the seal does not tell.
        shuffled: whether the producer has shuffled the rows.
        source_rows: source rows up to its end; None where its seal does not tell.
    """

    form: str | None = None
    size: int | None = None
    shuffled: bool = False
    source_rows: SourceRows | None = None


@dataclass(slots=True)
class ChunkFacts:
    """What the chunks tell that were looked at.

    Attributes:
        there: how many there are.
        unread: how many could not be looked at, and the first reason.
        lengths: bytes of the rows, newlines included.
        tokens: lengths of the rows in tokens, as far as they were sealed or measured.
        kept: the same of some chunks, evenly spread, row by row: at most `KEPT_ROWS`.
        points: the chunks, in order.
        made: how the rows were made.
    """

    there: int = 0
    unread: int = 0
    reason: str = ""
    lengths: Lengths = field(default_factory=Lengths)
    tokens: Lengths = field(default_factory=Lengths)
    kept: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    points: list[ChunkPoint] = field(default_factory=list)
    made: Made = Made()

    @property
    def looked_at(self) -> int:
        """How many chunks were looked at."""
        return len(self.points)


def look_at_chunks(
    stream: Stream, first: int, stop: int, most: int, progress: Callable[[int, int], object]
) -> ChunkFacts:
    """Looks at some of the chunks of the half-open range [first, stop).

    Args:
        stream: the stream.
        first: the first chunk that is there.
        stop: the one after the last that is published.
        most: how many to look at, 2 or more; fewer where they hold millions of rows.
        progress: takes how many are done, and of how many.
    """
    rows = SCANNED_ROWS if stream.stream_id is None else SAMPLED_ROWS
    numbers = sampled_chunks(first, stop, max(2, min(most, rows // stream.samples_per_chunk)))
    found = ChunkFacts(there=stop - first)
    # Whole chunks, as samples that lie together go together.
    room = max(1, KEPT_ROWS // stream.samples_per_chunk)
    keep = set(sampled_chunks(0, len(numbers), max(2, room)))
    kept: list[npt.NDArray[np.int64]] = []
    failed = 0
    source: Any = None
    for index, number in enumerate(numbers):
        progress(index, len(numbers))
        try:
            shown = describe_chunk(stream, number)
            at = _published_at(shown)
            tokens = chunk_tokens(stream.directory, number).lengths if index in keep and shown.tokens.count else None
        except (LazyShardError, OSError) as error:
            if deleted_since(stream, number, error):
                found.there -= 1
                continue
            found.unread += 1
            found.reason = found.reason or told(error)
            failed += 1
            if failed >= _GIVE_UP_CHUNKS:
                found.unread += len(numbers) - 1 - index
                break
            continue
        failed = 0
        found.lengths.merge(shown.lengths)
        found.tokens.merge(shown.tokens)
        found.points.append(ChunkPoint(number, shown.rows, shown.size, at))
        if tokens is not None:
            kept.append(tokens[:KEPT_ROWS].astype(np.int64))
        source = shown.seal.source if shown.seal is not None else None
    progress(len(numbers), len(numbers))
    found.kept = np.concatenate(kept)[:KEPT_ROWS] if kept else found.kept
    found.made = read_made(source)
    return found


def deleted_since(stream: Stream, chunk: int, error: Exception) -> bool:
    """Returns whether a chunk cannot be read because its producer has deleted it, by the stream's own rules."""
    if not isinstance(error, FileNotFoundError):
        return False
    with contextlib.suppress(LazyShardError, OSError):
        return chunk < stream.retired()
    return False


def told(error: LazyShardError | OSError) -> str:
    """Returns what went wrong, and with which file."""
    if isinstance(error, LazyShardError) or error.filename is None:
        return str(error)
    return f"{error.filename}: {error.strerror or error}"


def read_made(source: Any) -> Made:
    """Returns how rows were made, as the field `source` of their chunk's seal says.

    >>> read_made({"recipe": {"pad": {"size": 512}, "shuffle": 1000}})
    Made(form='pad', size=512, shuffled=True, source_rows=None)
    """
    recipe = source.get("recipe") if isinstance(source, dict) else None
    if not isinstance(recipe, dict):
        return Made(source_rows=SourceRows.read_source(source))
    form = form_made(source)
    told = recipe[form] if form is not None else None
    size = told.get("size") if isinstance(told, dict) else told
    return Made(
        form=form,
        size=size if type(size) is int and 0 < size < 2**32 else None,
        shuffled=bool(recipe.get("shuffle")),
        source_rows=SourceRows.read_source(source),
    )


def _published_at(shown: ShownChunk) -> float:
    if shown.seal is not None:
        return shown.seal.sealed_at
    return modified_at(shown.file.with_name(f"{shown.file.name}{SEAL_SUFFIX}"))
