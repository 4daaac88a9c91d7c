"""Streams whose rows have lengths in tokens: in their seals, or measured afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from lazyshard import ChunkWriter
from lazyshard.format import Tokens, seal_digest
from lazyshard.format.names import seal_name, tokens_name
from lazyshard.stream.opening import open_now
from lazyshard.stream.token_lengths import read_lengths, write_tokens
from tests.stream.damage import Damage, copy, cut, edit, put

HOSTILE: Final[dict[str, Damage]] = {
    "empty": put(tokens_name(1)),
    "torn": cut(tokens_name(1), 100),
    "a length changed": edit(tokens_name(1), tokens="AwAAAAUAAAA="),
    "of another chunk": copy(tokens_name(0), tokens_name(1)),
    "not json": put(tokens_name(1), b"\x80\n"),
    "too few": edit(tokens_name(1), samples=1, tokens="AwAAAA=="),
    "too many": edit(tokens_name(1), samples=10**8),
}
"""Files of lengths that are not as they were written."""


def sealed(directory: Path, lengths: list[int], per_chunk: int = 2, *, end: bool = True) -> Path:
    writer = ChunkWriter(directory, per_chunk)
    for number, length in enumerate(lengths):
        writer.write({"id": number}, tokens=length)
    writer.close(end)
    return directory


def measured(directory: Path, *lengths: list[int], measure: str = "by hand", first: int = 0) -> Path:
    """Puts files of lengths beside seals."""
    (directory / ".measure").mkdir(exist_ok=True)
    stream_id = open_now(directory).stream_id
    assert stream_id is not None
    for chunk, values in enumerate(lengths, first):
        digest = seal_digest((directory / seal_name(chunk)).read_bytes())
        assert write_tokens(directory, Tokens(chunk, digest, np.array(values, np.uint32), measure), stream_id)
    return directory


def lengths_of(directory: Path) -> list[int]:
    stream = open_now(directory)
    return [int(length) for length in read_lengths(stream, stream.published().samples)]
