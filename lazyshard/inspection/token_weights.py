"""Weights of a blend by tokens: from shares of tokens to shares of samples, by the lengths of their samples."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

from lazyshard.errors import StreamInvalid
from lazyshard.inspection.tracing_facts import facts_of
from lazyshard.store.urls import stream_path
from lazyshard.stream.opening import open_now
from lazyshard.stream.token_lengths import chunk_tokens, lengths_missing

__all__ = ["mean_tokens", "weights_by_tokens"]

_MOST_CHUNKS: Final = 256
"""Chunks that are looked at of a stream: the mean of some hundred chunks is that of all, within a percent or so."""


def mean_tokens(directory: str | os.PathLike[str], most_chunks: int = _MOST_CHUNKS) -> float:
    """Returns how many tokens a sample of a stream has in the mean, as far as it is published.

    Lengths that `lazyshard measure` has found count for more than what the producer has sealed.

    Args:
        directory: the stream's directory.
        most_chunks: how many chunks to look at at the most, evenly spaced over the chunks that are there.

    Raises:
        StreamMissing: there is no stream.
        StreamInvalid: no chunk is there, or its samples have no tokens.
        LengthsMissing: how many tokens the samples of a chunk have is not known.
        SealInvalid, TokensInvalid, OSError: a file cannot be read.
    """
    path = stream_path(directory)
    facts = facts_of(open_now(path))
    chunks = range(facts.retired, facts.chunks)
    if not chunks or facts.stream_id is None:
        why = "no chunk is there yet" if facts.stream_id is not None else "another program fills it"
        raise StreamInvalid(f"{path}: {why}, so how long its samples are is not known", directory=str(path))
    count = min(len(chunks), most_chunks)
    samples = tokens = 0
    for number in range(count):
        chunk = chunks[(2 * number + 1) * len(chunks) // (2 * count)]
        lengths = chunk_tokens(path, chunk).lengths
        if lengths is None:
            raise lengths_missing(path, chunk)
        samples += len(lengths)
        tokens += int(lengths.sum(dtype="u8"))
    if not tokens:
        raise StreamInvalid(f"{path}: its samples have no tokens at all", directory=str(path))
    return tokens / samples


def weights_by_tokens(
    shares: Iterable[tuple[str | os.PathLike[str], float]], most_chunks: int = _MOST_CHUNKS
) -> tuple[float, ...]:
    """Returns the weights, in samples, that give each stream of a blend its share of the tokens.

    What ranks ask of streams that are still produced may differ from one to the next, and a resumed run may see other
    means: ask once, and give the numbers to all.

    Args:
        shares: directories of streams, and what each should have of all tokens.
        most_chunks: as of `mean_tokens`.

    Returns:
        Weights for `lazyshard.BlendedDataset`, in order, rounded to 4 digits: shape (streams,).

    Raises: as `mean_tokens`; ValueError if a share is not above 0.
    """
    weights = []
    for directory, share in shares:
        if not share > 0:
            raise ValueError(f"{stream_path(directory)}: a share is a number above 0, got {share!r}")
        weights.append(share / mean_tokens(directory, most_chunks))
    total = sum(weights)
    return tuple(float(f"{weight / total:.4g}") for weight in weights)
