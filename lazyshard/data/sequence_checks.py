"""What is looked at before anything is drawn: whether sequences can be made of a stream, by its first chunk."""

from __future__ import annotations

import copy

import numpy as np

from lazyshard.data.sequence_planner import TooLong, row_too_long
from lazyshard.errors import ChunkCorrupt, ChunkRetired, RowInvalid, StreamMismatch
from lazyshard.format import decode_pack, parse_row
from lazyshard.format.source_rows import form_made
from lazyshard.plan.sequences import Rule
from lazyshard.plan.splitting import SplitRule
from lazyshard.stream import StreamReader
from lazyshard.stream.window_lengths import WindowLengths

__all__ = ["check_beginning"]


def check_beginning(reader: StreamReader, rule: Rule, too_long: TooLong) -> bool:
    """Refuses a stream of which no sequences can be made, as far as its first chunk tells.

    It takes one look at that chunk's lengths and its first row, however long the stream is. Of a stream whose first
    chunks are deleted it is the first that is left.

    Args:
        reader: the stream; it opens nothing.
        rule: how sequences are made.
        too_long: what becomes of a row that is longer than a sequence.

    Returns:
        Whether there was a chunk to look at.

    Raises:
        StreamMismatch: its rows are packs, or were cut or padded by their producer.
        LengthsMissing: how long its rows are is not known.
        BadSample: one of them is longer than a sequence.
        SealInvalid, TokensInvalid, ChunkMissing, OSError: it cannot be read.
    """
    size, samples = reader.samples_per_chunk, reader.seen.samples
    # Its open files are let go of with it: this process may never read that chunk again.
    look = copy.copy(reader)
    look.parent = reader.parent
    first = 0
    try:
        if samples:
            look.chunk(0)
    except ChunkRetired as error:
        first = (error.chunks_before or 0) * size
    if first >= samples:
        return False
    _check_rows(look, first)
    known = WindowLengths(look, 1)
    _check_form(look, form_made(known.source(first // size)))
    lengths = known.of(first // size)
    if too_long == "raise" and not isinstance(rule, SplitRule):
        longer = np.flatnonzero(lengths > rule.size)
        if len(longer):
            row = int(longer[0])
            raise row_too_long(look, first + row, int(lengths[row]), rule.size)
    return True


def _check_form(reader: StreamReader, form: str | None) -> None:
    """Refuses rows that are sequences already: what pads them would be taken for tokens, and borders would be lost."""
    if form in ("split", "pad"):
        where = str(reader.directory)
        was = "cut to sequences" if form == "split" else "padded"
        raise StreamMismatch(
            f"{where}: its rows were {was} by their producer (lazyshard-producer run --{form}), so no sequences are "
            f"made of them: train each as one sample, with `LazyShardedDataset({where!r}, ...)`, or produce the rows "
            f"without --{form}",
            directory=where,
            expected="rows",
            actual=f"rows made with --{form}",
        )


def _check_rows(reader: StreamReader, sample: int) -> None:
    """Refuses packs; a stream has them in every row or in none."""
    try:
        packed = decode_pack(parse_row(reader.line(sample))) is not None
    except (ChunkCorrupt, RowInvalid):
        # Who draws it says so, or leaves it out.
        return
    if packed:
        where = str(reader.directory)
        raise StreamMismatch(
            f"{where}: its rows are packs already (lazyshard-producer run --pack), of which no sequences are made: "
            f"train each pack as one sample, with `LazyShardedDataset({where!r}, encode)`, whose `encode` gets "
            f"{{'pack': ROWS, 'lengths': TOKENS}} (in ms-swift --packing true), or produce the rows without --pack",
            directory=where,
            expected="rows",
            actual="packs",
        )
