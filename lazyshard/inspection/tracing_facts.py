"""What a stream's directory says that tracing a run depends on: identity, how much is published, what is deleted."""

from __future__ import annotations

from dataclasses import dataclass

from lazyshard.stream.stream import Stream


@dataclass(frozen=True, slots=True)
class Facts:
    """What a stream's directory says at one moment.

    Attributes:
        stream_id: the stream's identity, None for a foreign directory.
        samples_per_chunk: rows in every chunk but possibly the last.
        chunks: published chunks.
        samples: rows in them.
        ended: nothing will follow.
        retired: the chunks of the half-open range [0, retired) are deleted.
    """

    stream_id: str | None
    samples_per_chunk: int
    chunks: int
    samples: int
    ended: bool
    retired: int = 0


def facts_of(stream: Stream) -> Facts:
    """Looks what is published now. Raises as `Stream.published` and `Stream.retired` do."""
    published = stream.published()
    return Facts(
        stream.stream_id,
        stream.samples_per_chunk,
        published.chunks,
        published.samples,
        published.ended,
        stream.retired(),
    )


def total_of(facts: Facts, max_total_samples: int | None) -> int | None:
    """Returns the end of the samples to draw, None as long as it is open."""
    if facts.ended:
        return facts.samples if max_total_samples is None else min(facts.samples, max_total_samples)
    if max_total_samples is not None and facts.samples >= max_total_samples:
        return max_total_samples
    return None
