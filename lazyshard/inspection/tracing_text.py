"""Search for a text in the published rows of a stream: chunk by chunk, row by row, without parsing them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Final

from lazyshard.stream.stream import Stream

_BUDGET_BYTES: Final = 4 << 20
"""Bytes that are read at a time."""


def find_text(
    stream: Stream, chunks: range, text: str, report: Callable[[str, int, int], None] = lambda phase, done, total: None
) -> Iterator[int]:
    r"""Yields the samples whose rows hold a text, in order.

    It is looked for as it is and as JSON writes it within a string: in UTF-8, and in ASCII with escapes. Not found is a
    text that is escaped in another way, "\/" for "/" for instance, or that goes over the end of a string.

    Args:
        stream: the stream.
        chunks: those that are there.
        text: the text.
        report: is told a phase, how many chunks of it are done, and how many there are.

    Raises:
        ChunkCorrupt, RowInvalid, FileNotFoundError, OSError: a chunk cannot be read; those before it are searched.
    """
    wanted = _spellings(text)
    for number, chunk in enumerate(chunks):
        report("searching", number, len(chunks))
        opened = stream.open_chunk(chunk)
        row, rows = 0, len(opened)
        while row < rows:
            lines = opened.lines(row, rows, 1, _BUDGET_BYTES)
            for at, line in enumerate(lines, row):
                if any(spelling in line for spelling in wanted):
                    yield chunk * stream.samples_per_chunk + at
            row += len(lines)
    report("searching", len(chunks), len(chunks))


def _spellings(text: str) -> list[bytes]:
    r"""Returns how a text may stand in a row.

    >>> _spellings('a"b'), len(_spellings("\u00e4")), len(_spellings("plain"))
    ([b'a"b', b'a\\"b'], 2, 1)
    """
    raw = text.encode("utf-8", "surrogateescape")
    try:
        escaped = [json.dumps(text, ensure_ascii=ascii_only)[1:-1].encode() for ascii_only in (False, True)]
    except UnicodeEncodeError:
        escaped = []
    return list(dict.fromkeys([raw, *escaped]))
