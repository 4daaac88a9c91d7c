"""What rows are like, counted so that memory does not grow with their number: how long, with which keys and values.

Lengths below 2,048 are counted one by one; above that a bucket is as wide as a thousandth of what is in it:

```
length   0  1  2 ... 2047 | 2048-2049  2050-2051 ... 4094-4095 | 4096-4099 ... | 8192-8199 ...
bucket   0  1  2 ... 2047 |      2048       2049 ...      3071 |      3072 ... |      4096 ...
```

With the weights of a blend by tokens: shares of samples, from shares of tokens and the lengths of the samples.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lazyshard.errors import StreamInvalid
from lazyshard.format.arrays import DTYPES
from lazyshard.store.files import read_seal
from lazyshard.store.urls import stream_path
from lazyshard.stream.stream import open_now
from lazyshard.stream.token_lengths import lengths_missing

_STEPS: Final = 1024
"""Buckets between a power of two and the next."""

_EXACT: Final = 2 * _STEPS

_MAX: Final = 2**52
"""Up to here a float tells the power of two of an integer exactly. No row is as long: 4 PB."""

_BUCKETS: Final = _EXACT + _STEPS * (52 - 11 + 1)

_LADDERS: Final[tuple[tuple[float, ...], ...]] = ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1,))
"""Edges of the bins of a histogram within a power of ten, from fine to coarse."""

MAX_BINS: Final = 12


_KINDS: Final[dict[type, str]] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "true or false",
    dict: "object",
    list: "array",
    type(None): "null",
}

_LOOKED_AT: Final = 100
"""Values of an array whose kinds are told apart; a list of tokens has thousands, of one kind."""

_MOST_CHUNKS: Final = 256
"""Chunks that are looked at of a stream: the mean of some hundred chunks is that of all, within a percent or so."""


@dataclass(frozen=True, slots=True)
class Bin:
    """A bin of a histogram: so many lengths of the half-open range [low, high)."""

    low: int
    high: int
    count: int


class Lengths:
    """Lengths of rows, counted."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0
        self.smallest = 0
        self.largest = 0
        self._buckets: npt.NDArray[np.int64] = np.zeros(_BUCKETS, np.int64)

    def add(self, lengths: npt.NDArray[Any]) -> None:
        """Counts lengths: integers from 0 on."""
        if not len(lengths):
            return
        values = lengths.astype(np.int64)
        low, high = int(values.min()), int(values.max())
        self.smallest = low if not self.count else min(self.smallest, low)
        self.largest = max(self.largest, high)
        self.count += len(values)
        self.total += int(values.sum())
        self._buckets += np.bincount(_bucket(values), minlength=_BUCKETS)

    def merge(self, other: Lengths) -> None:
        """Counts what another has counted."""
        if not other.count:
            return
        self.smallest = other.smallest if not self.count else min(self.smallest, other.smallest)
        self.largest = max(self.largest, other.largest)
        self.count += other.count
        self.total += other.total
        self._buckets += other._buckets

    @property
    def mean(self) -> float:
        """The mean, 0 if there is none."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> int:
        """Returns the smallest length that at least this share of the lengths does not exceed.

        Exact below 2,048; above that it is too low by a thousandth at the most.
        """
        rank = max(1, math.ceil(share * self.count))
        bucket = int(np.searchsorted(np.cumsum(self._buckets), rank))
        return min(max(_lowest(bucket), self.smallest), self.largest)

    def spread(self, most: int) -> list[Bin]:
        """Returns at most `most` bins of one width, from the least length to the largest, for a picture.

        Exact as far as the buckets are: of lengths above 2,048 a thousandth may count in the bin beside theirs.
        """
        if not self.count:
            return []
        width = max(1, -(-(self.largest + 1 - self.smallest) // most))
        return self._bins(range(self.smallest, self.largest + width + 1, width))

    def histogram(self) -> list[Bin]:
        """Returns at most `MAX_BINS` bins, the more evenly spaced the logarithms of their edges, from the least on."""
        if not self.count:
            return []
        for ladder in _LADDERS:
            edges = _edges(self.smallest, self.largest, ladder)
            if len(edges) <= MAX_BINS + 1:
                break
        return self._bins(edges)

    def _bins(self, edges: Sequence[int]) -> list[Bin]:
        """Returns the bins between edges that enclose all lengths."""
        before = np.concatenate(([0], np.cumsum(self._buckets)))
        marks = [int(before[min(_BUCKETS, _first_bucket(edge))]) for edge in edges]
        # Of the first and the last bucket an edge may leave a part outside.
        marks[0], marks[-1] = 0, self.count
        return [
            Bin(low, high, after - start)
            for low, high, start, after in zip(edges, edges[1:], marks, marks[1:], strict=False)
        ]


def _bucket(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    values = np.minimum(values, _MAX)
    # frexp gives the power above the value, so of [2048, 4096) it is 12, which shifts by 1.
    shift = np.maximum(np.frexp(values.astype(np.float64))[1] - 11, 0)
    return np.where(values < _EXACT, values, shift * _STEPS + (values >> shift))


def _lowest(bucket: int) -> int:
    """Returns the least length of a bucket."""
    if bucket < _EXACT:
        return bucket
    shift, step = divmod(bucket - _STEPS, _STEPS)
    return (step + _STEPS) << shift


def _first_bucket(length: int) -> int:
    """Returns the first bucket that holds nothing below a length."""
    bucket = int(_bucket(np.array([length]))[0])
    return bucket if _lowest(bucket) >= length else bucket + 1


def _edges(smallest: int, largest: int, ladder: Sequence[float]) -> list[int]:
    """Returns edges of the ladder such that the first bin holds the smallest length and the last one the largest."""
    edges = [0]
    power = 1
    while edges[-1] <= largest:
        for step in ladder:
            edge = int(step * power)
            if edge > edges[-1]:
                edges.append(edge)
            if edge > largest:
                break
        power *= 10
    first = max(i for i, edge in enumerate(edges) if edge <= smallest)
    return edges[first:]


class Keys:
    """The keys of some rows.

    Attributes:
        rows: how many rows.
        rows_with: by key, how many rows have it, in the order in which they were met.
        kinds: by key, what kinds of values it has, in that order too.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.rows_with: dict[str, int] = {}
        self.kinds: dict[str, list[str]] = {}

    def add(self, row: dict[str, Any]) -> None:
        """Counts the keys of a row."""
        self.rows += 1
        for key, value in row.items():
            self.rows_with[key] = self.rows_with.get(key, 0) + 1
            kinds = self.kinds.setdefault(key, [])
            if (kind := _kind_of(value)) not in kinds:
                kinds.append(kind)


def _kind_of(value: Any) -> str:
    """Returns what a value of JSON is.

    >>> _kind_of(1), _kind_of([{}, "x"]), _kind_of([])
    ('integer', 'array of object, string', 'array')

    Of a numpy array, which a row of a stream with arrays may hold, its dtype too.
    """
    if type(value) is not list or not value:
        return _simple_kind(value)
    return f"array of {', '.join(dict.fromkeys(_simple_kind(item) for item in value[:_LOOKED_AT]))}"


def _simple_kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{next((name for name, dtype in DTYPES.items() if dtype == value.dtype), value.dtype)} array"
    return _KINDS[type(value)]


def mean_tokens(directory: str | os.PathLike[str], most_chunks: int = _MOST_CHUNKS) -> float:
    """Returns how many tokens a sample of a stream has in the mean, as far as it is published.

    Args:
        directory: of the stream.
        most_chunks: how many chunks to look at at the most, evenly spaced over the chunks that are there.

    Raises:
        StreamMissing: there is no stream.
        StreamInvalid: no chunk is there, or its samples have no tokens.
        LengthsMissing: how many tokens the samples of a chunk have is not known.
        SealInvalid, OSError: a file cannot be read.
    """
    path = stream_path(directory)
    stream = open_now(path)
    published = stream.published()
    chunks = range(stream.retired(), published.chunks)
    if not chunks or stream.stream_id is None:
        why = "no chunk is there yet" if stream.stream_id is not None else "another program fills it"
        raise StreamInvalid(f"{path}: {why}, so how long its samples are is not known", directory=str(path))
    count = min(len(chunks), most_chunks)
    samples = tokens = 0
    for number in range(count):
        chunk = chunks[(2 * number + 1) * len(chunks) // (2 * count)]
        lengths = read_seal(path, chunk).tokens
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
