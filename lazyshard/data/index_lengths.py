"""The lengths of samples in tokens, by the indices of a data set: what samplers that group by length ask for."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lazyshard.data.index_space import IndexSpace
from lazyshard.errors import LengthsMissing, StreamMismatch
from lazyshard.stream import StreamReader
from lazyshard.stream.stream import open_now
from lazyshard.stream.token_lengths import lengths_not_ours, read_lengths

__all__ = ["lengths_by_index", "lengths_by_sample"]

_POSITIONS: Final = 1 << 20
"""Drawn at a time: their samples take 8 MB."""


def lengths_by_sample(reader: StreamReader, total: int | None) -> npt.NDArray[np.uint32]:
    """Reads the lengths of all samples, from the seals.

    Args:
        reader: the stream.
        total: how many samples there are to draw; None as long as that is open.

    Returns:
        u32 of shape (total,).

    Raises:
        LengthsMissing: the end is open; or lengths are not known, or deleted.
        StreamMismatch: another stream took the place of this one.
        FormatInvalid, OSError: a file cannot be read.
    """
    directory = reader.directory
    if total is None:
        raise LengthsMissing(
            f"{directory}: the stream is still being produced ({reader.seen.samples} samples so far), so not all "
            f"lengths are known; ask once it has ended",
            directory=str(directory),
        )
    if reader.stream_id is None:
        raise lengths_not_ours(directory)
    stream = open_now(directory)
    if stream.stream_id != reader.stream_id:
        raise StreamMismatch(
            f"{directory}: stream {reader.stream_id} was replaced by stream {stream.stream_id}",
            directory=str(directory),
            expected=reader.stream_id,
            actual=stream.stream_id,
        )
    return read_lengths(stream, total)


def lengths_by_index(space: IndexSpace, by_sample: npt.NDArray[np.uint32]) -> npt.NDArray[np.signedinteger[Any]]:
    """Returns the length of what each index draws.

    Args:
        space: the indices.
        by_sample: the lengths of all samples: u32 of shape (total,).

    Returns:
        int32 of shape (indices,), int64 if a sample is longer than that can say: torch has no reductions of unsigned
        numbers.
    """
    total = len(by_sample)
    kind = np.int32 if not total or by_sample.max() <= np.iinfo(np.int32).max else np.int64
    found: npt.NDArray[np.signedinteger[Any]] = np.zeros(space.layout.size, kind)
    block = space.layout.block
    for lane in range(space.layout.dp):
        indices = space.layout.lane_indices(lane)
        lengths = found[indices.start : indices.stop : indices.step]
        for first in range(0, block, _POSITIONS):
            stop = min(first + _POSITIONS, block)
            samples = space.course.draws(lane, np.arange(first, stop), total)[1]
            lengths[first:stop] = by_sample[samples]
    return found
