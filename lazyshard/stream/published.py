"""What is published of a stream at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from lazyshard.format.records import Head


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
