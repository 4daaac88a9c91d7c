"""Statistics of rows in bounded memory: their lengths, keys and kinds of values.

Lengths below 2,048 are counted exactly; above that, the width of a bucket is a thousandth of the lengths in it. Also
the weights of a blend by tokens, and refused rows by reason, without a last line that is not complete yet.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from lazyshard.errors import StreamInvalid
from lazyshard.format.arrays import DTYPES, media_type
from lazyshard.format.records import QUARANTINE
from lazyshard.memory import loads
from lazyshard.part import Array, Int64Array
from lazyshard.store.files import UrlPath, open_file, read_file, read_seal, stream_path
from lazyshard.stream.stream import open_now, sealed_tokens

OTHERS: Final = "other reasons"
MOST_TOLD_APART: Final = 200  # distinct reasons for which rows were refused, and distinct sources for each
_MOST_BYTES: Final = 64 << 20  # read of the quarantine file, unless all of it is requested

# The lower bound of each bucket: 1,024 buckets between a power of two and the next
_LOWEST: Final = np.concatenate([np.arange(2048), *(np.arange(1024, 2048) << shift for shift in range(1, 43))])
# Edges of the bins of a histogram within a power of ten, from fine to coarse
_LADDERS: Final[tuple[tuple[float, ...], ...]] = ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1,))
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

_MOST_CHUNKS: Final = 256  # chunks to read: the mean of a few hundred chunks is that of all, within a percent


@dataclass(frozen=True, slots=True)
class Bin:
    """A bin of a histogram: the number of lengths in the half-open range [low, high)."""

    low: int
    high: int
    count: int


class Lengths:
    """A histogram of row lengths, with the given ones counted."""

    def __init__(self, *given: Array) -> None:
        self.count = self.total = self.smallest = self.largest = 0
        self._buckets: Int64Array = np.zeros(len(_LOWEST), np.int64)
        for lengths in given:
            self.add(lengths)

    def add(self, lengths: Array) -> None:
        """Counts lengths: integers from 0."""
        if len(values := lengths.astype(np.int64)):
            least = int(values.min())
            self.smallest = min(self.smallest, least) if self.count else least
            self.largest = max(self.largest, int(values.max()))
            self.count += len(values)
            self.total += int(values.sum())
            self._buckets += np.bincount(np.searchsorted(_LOWEST, values, "right") - 1, minlength=len(_LOWEST))

    @property
    def mean(self) -> float:
        """The mean, 0 if there are no lengths."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> int:
        """Returns the smallest length that this share does not exceed; above 2,048 at most a thousandth too low."""
        bucket = int(np.searchsorted(np.cumsum(self._buckets), max(1, math.ceil(share * self.count))))
        return min(max(int(_LOWEST[min(bucket, len(_LOWEST) - 1)]), self.smallest), self.largest)

    def spread(self, most: int) -> list[Bin]:
        """Returns at most `most` bins of equal width, from the smallest length to the largest, for a picture."""
        if not self.count:
            return []
        width = max(1, -(-(self.largest + 1 - self.smallest) // most))
        return self._bins(range(self.smallest, self.largest + width + 1, width))

    def histogram(self) -> list[Bin]:
        """Returns at most `MAX_BINS` bins with edges on a roughly logarithmic scale, from the smallest length."""
        if not self.count:
            return []
        powers = [10**power for power in range(len(str(self.largest)) + 1)]
        for ladder in _LADDERS:
            edges = sorted({0, *(int(step * power) for power in powers for step in ladder)})
            # The first bin holds the smallest length and the last one the largest.
            edges = edges[bisect_right(edges, self.smallest) - 1 : bisect_right(edges, self.largest) + 1]
            if len(edges) <= MAX_BINS + 1:
                break
        return self._bins(edges)

    def _bins(self, edges: Sequence[int]) -> list[Bin]:
        """Returns the bins between edges that enclose all lengths."""
        marks = np.concatenate(([0], np.cumsum(self._buckets)))[np.searchsorted(_LOWEST, edges)].tolist()
        # An edge may cut off part of the first and the last bucket.
        marks[0], marks[-1] = 0, self.count
        return [Bin(*one) for one in zip(edges, edges[1:], np.diff(marks).tolist(), strict=False)]


class Keys:
    """The keys of rows, in the order of first use: how many rows have a value of each kind there."""

    def __init__(self) -> None:
        self.rows = 0
        self.kinds = defaultdict[str, Counter[str]](Counter)

    def add(self, row: dict[str, Any]) -> None:
        """Counts the keys of a row."""
        self.rows += 1
        for key, value in row.items():
            self.kinds[key][_kind_of(value)] += 1


def _kind_of(value: Any, *, inner: bool = False) -> str:
    """Returns the kind of a JSON value; for an `inner` list, not the kinds of its items.

    >>> _kind_of(1), _kind_of([{}, "x"]), _kind_of([])
    ('integer', 'array of object, string', 'array')
    """
    if isinstance(value, bytes):
        return media_type(value) or "bytes"
    if isinstance(value, np.ndarray):
        return f"{next((name for name, dtype in DTYPES.items() if dtype == value.dtype), value.dtype)} array"
    if inner or type(value) is not list or not value:
        return _KINDS[type(value)]
    # A list of tokens has thousands of items, all of one kind.
    return f"array of {', '.join(dict.fromkeys(_kind_of(item, inner=True) for item in value[:100]))}"


class RefusedRow(NamedTuple):
    """A refused row: its source, its line there from 1, and the reason."""

    source: str
    line: int
    reason: str


@dataclass(slots=True)
class RefusedFor:
    """Rows refused for reasons that differ only in their numbers, with at most `MOST_TOLD_APART` sources."""

    reason: str  # of the first row
    first: RefusedRow
    rows: int = 0
    sources: set[str] = field(default_factory=set)


class RefusedRows(NamedTuple):
    """The content of the quarantine file: refused rows, most frequent reasons first, and invalid lines."""

    rows: int
    reasons: tuple[RefusedFor, ...]
    unreadable: int
    complete: bool  # whether all of the file was read


def read_refusals(directory: Path, *, whole: bool = False) -> RefusedRows | None:
    """Counts the refused rows, of the whole file if `whole`, however large; None if there is no such file.

    Raises FileRefused: it is not a plain file, or an object of more than 64 MiB; LazyShardError, OSError from reading.
    """
    path = directory / QUARANTINE
    try:
        if isinstance(path, UrlPath):
            return count_refusals(io.BytesIO(read_file(path, _MOST_BYTES)), complete=True)
        opened = open_file(path)
    except FileNotFoundError:
        return None
    with os.fdopen(os.dup(opened.fd), "rb") if whole else io.BytesIO(opened.read(0, _MOST_BYTES)) as lines:
        return count_refusals(lines, complete=whole or opened.size <= _MOST_BYTES)


def count_refusals(lines: Iterable[bytes], *, complete: bool) -> RefusedRows:
    """Counts the rows in lines of the file, line ends included; `complete` if they are the whole file."""
    groups: dict[str, RefusedFor] = {}
    unreadable = 0
    for line in lines:
        if not line.endswith(b"\n"):
            continue
        if (one := _decode(line)) is None:
            unreadable += 1
            continue
        # A reason may contain a position or a value of the row.
        key = re.sub(r"\d+", "0", one.reason)
        if key not in groups and len(groups) >= MOST_TOLD_APART:
            key = OTHERS
        group = groups.get(key) or groups.setdefault(key, RefusedFor(OTHERS if key == OTHERS else one.reason, one))
        group.rows += 1
        if len(group.sources) < MOST_TOLD_APART:
            group.sources.add(one.source)
    ordered = sorted(groups.values(), key=lambda group: (group.reason == OTHERS, -group.rows, group.reason))
    return RefusedRows(sum(group.rows for group in ordered), tuple(ordered), unreadable, complete)


def _decode(line: bytes) -> RefusedRow | None:
    with contextlib.suppress(ValueError):
        match loads(line):
            case {"source": str(source), "line": int(number), "reason": str(reason)} if not isinstance(number, bool):
                return RefusedRow(source, number, reason)
    return None


def mean_tokens(directory: str | os.PathLike[str], most_chunks: int = _MOST_CHUNKS) -> float:
    """Returns the mean tokens per sample of a stream, from at most `most_chunks` evenly spaced chunks.

    Raises StreamMissing; StreamInvalid: there is no chunk, or its samples have no tokens; LengthUnknown: a chunk has no
    lengths; ChunkCorrupt, OSError: a file cannot be read.
    """
    path = stream_path(directory)
    stream = open_now(path)
    published = stream.published()
    chunks = range(stream.retired(), published.chunks)
    if not chunks or stream.stream_id is None:
        why = "no chunk is there yet" if stream.stream_id is not None else "another program fills it"
        raise StreamInvalid(f"{path}: {why}, so the lengths of its samples are unknown", directory=str(path))
    count, samples, tokens = min(len(chunks), most_chunks), 0, 0
    for chunk in (chunks[(2 * number + 1) * len(chunks) // (2 * count)] for number in range(count)):
        lengths = sealed_tokens(path, read_seal(path, chunk))
        samples += len(lengths)
        tokens += int(lengths.sum(dtype="u8"))
    if not tokens:
        raise StreamInvalid(f"{path}: its samples have no tokens at all", directory=str(path))
    return tokens / samples


def weights_by_tokens(shares: Iterable[tuple[str | os.PathLike[str], float]]) -> tuple[float, ...]:
    """Returns the weights, in samples, that give each stream of a blend its share of the tokens.

    While streams are still produced, ranks may compute different weights, and a resumed run may see other means: call
    this once, and give the result to all ranks.

    Args:
        shares: directories of streams, and the share of all tokens that each should have.

    Returns:
        Weights for `lazyshard.BlendedDataset`, in order, rounded to 4 digits: shape (streams,).

    Raises: as `mean_tokens`; ValueError if a share is not above 0.
    """
    weights = []
    for directory, share in shares:
        if not share > 0:
            raise ValueError(f"{stream_path(directory)}: a share is a number above 0, got {share!r}")
        weights.append(share / mean_tokens(directory))
    total = sum(weights)
    return tuple(float(f"{weight / total:.4g}") for weight in weights)
