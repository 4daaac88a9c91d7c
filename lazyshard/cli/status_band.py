"""The band of a stream's chunks, what each consumer reads of it, and the mixture of its sources, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lazyshard.cli.wording import chunk_range, count, one_line
from lazyshard.format.blend_share import BlendShare
from lazyshard.format.mixed import MixedSource
from lazyshard.inspection.band import Band, ChunkState, OpenWindow

SIGNS: Final[dict[ChunkState, str]] = {
    "deleted": ".",
    "done": "-",
    "taken": "=",
    "reading": "#",
    "ready": "+",
    "awaited": "?",
}
_PRECEDENCE: Final[tuple[ChunkState, ...]] = ("deleted", "done", "taken", "ready", "awaited", "reading")
"""Of several that share a column, the last of these is shown: what is read now is seen, however long the stream is."""

_SHOWN_RANKS: Final = 8
_SHOWN_CHUNKS: Final = 32
"""The chunks of each rank are listed where there are no more of either."""


def band_line(band: Band, width: int) -> str:
    """Returns the band in characters, at most `width`.

    >>> from lazyshard.inspection.band import Stretch
    >>> band_line(Band(10, (Stretch(0, 6, "done"), Stretch(6, 7, "reading"), Stretch(7, 10, "ready")), (), {}), 5)
    '---#+'
    """
    columns = min(width, band.stop)
    shown = [0] * columns
    for one in band.stretches:
        first, last = one.first * columns // band.stop, (one.stop - 1) * columns // band.stop
        for column in range(first, last + 1):
            shown[column] = max(shown[column], _PRECEDENCE.index(one.state))
    return "".join(SIGNS[_PRECEDENCE[number]] for number in shown)


def legend(band: Band) -> str:
    """Returns what the characters of its line mean, of the states that are in it."""
    there = {one.state for one in band.stretches}
    words = {"reading": "read now"}
    return ", ".join(f"{sign} {words.get(state, state)}" for state, sign in SIGNS.items() if state in there)


def window_words(window: OpenWindow, published: int) -> str:
    """Returns which chunks a consumer reads now, and which rank which of them; or which it waits for, to read those.

    Args:
        window: what it reads or waits for.
        published: chunks that are.
    """
    chunks = range(window.first, window.stop)
    words = chunk_range(chunks.start, chunks.stop)
    if window.first < published < window.stop:
        words = f"{chunk_range(published, window.stop)}, to read {words}"
    if len(chunks) > _SHOWN_CHUNKS:
        return f"{words}, by {count(window.dp, 'rank')}"
    by_rank: dict[int | None, list[int]] = {}
    for chunk in chunks:
        by_rank.setdefault(window.rank(chunk), []).append(chunk)
    if len(by_rank) > _SHOWN_RANKS:
        return f"{words}, by {count(window.dp, 'rank')}"
    shared = by_rank.pop(None, [])
    parts = [
        f"rank {rank}: {_numbers(found)}" for rank, found in sorted(by_rank.items(), key=lambda item: item[0] or 0)
    ]
    if shared:
        parts.append(f"shared by ranks: {_numbers(shared)}")
    return f"{words} ({'; '.join(parts)})"


def source_words(source: MixedSource) -> str:
    """Returns how much of the rows a source has given, against its weight."""
    share = "none yet" if source.share is None else f"{source.share:.1%}, {count(source.rows, 'row')}"
    aim = "finished" if source.finished else f"weight {source.weight:.1%}"
    return f"{one_line(source.name)}: {share}; {aim}"


def share_words(one: BlendShare, given: float | None) -> str:
    """Returns how much of a consumer's samples a stream of its blend has given so far, against its weight now."""
    share = "none yet" if given is None else f"{given:.1%}, {count(one.consumed, 'sample')}"
    return f"{one_line(one.stream)}: {share}; weight {one.weight:.1%}"


def _numbers(chunks: Sequence[int]) -> str:
    return ", ".join(f"{chunk:,}" for chunk in chunks)
