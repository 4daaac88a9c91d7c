"""What is done with a block of rows before it is published: shuffled, or packed. The same block gives the same rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Final, NamedTuple

from lazyshard.format import EncodedRow, encode_encoded_pack, encode_pack
from lazyshard.format.arrays import MAX_ROW_BYTES
from lazyshard.plan import pack_samples, permutation
from lazyshard_producer.rows.recipe import Line, Made
from lazyshard_producer.sources.source import Place

_PACK_BYTES: Final = MAX_ROW_BYTES // 2
"""The rows of a pack hold no more in all, so that readers take it, whose text is longer than theirs."""


class MadeRow(NamedTuple):
    """A row on its way.

    Attributes:
        line: the row, as it is published.
        place: where the row comes from of which it was made; of a pack where its first row does.
        tokens: its length, 0 where it was not measured.
        squares: the square of that; of a pack the sum of those of its samples, none of which attends to another.
    """

    line: Line
    place: Place
    tokens: int = 0
    squares: int = 0

    @property
    def data(self) -> bytes:
        """What tells it from others."""
        return self.line if isinstance(self.line, bytes) else self.line.data

    @property
    def size(self) -> int:
        """Bytes of that."""
        return len(self.line) if isinstance(self.line, bytes) else len(self.line.line) + len(self.line.arrays)


def made_rows(made: Made, place: Place) -> list[MadeRow]:
    """Returns the rows that were made of the source row at a place."""
    if not made.tokens:  # nobody asks for them
        return [MadeRow(line, place) for line in made.lines]
    pairs = zip(made.lines, made.tokens, strict=True)
    return [MadeRow(line, place, tokens, tokens * tokens) for line, tokens in pairs]


Arrange = Callable[[Sequence[MadeRow], int], Sequence[MadeRow]]
"""Takes the rows of a block and its number, and returns what is published of it."""


class Blocks(NamedTuple):
    """Blocks, and what is done with one.

    Attributes:
        rows: source rows of a block; only the last one has fewer, and one that has ended before by its bytes.
        most_bytes: of the rows made of them, with which it ends in any case; None for any number.
        arrange: what is done.
    """

    rows: int
    most_bytes: int | None
    arrange: Arrange


def shuffling(rows: int, seed: int) -> Blocks:
    """Returns blocks that are shuffled; the seed and a block's number give its order."""
    return Blocks(rows, None, partial(_shuffle, seed))


def packing(rows: int, most_bytes: int, capacity: int) -> Blocks:
    """Returns blocks of which packs are made, of at most so many tokens each; see `lazyshard.plan.packing`."""
    return Blocks(rows, most_bytes, partial(_pack, capacity))


def _shuffle(seed: int, rows: Sequence[MadeRow], number: int) -> list[MadeRow]:
    to = permutation(len(rows), seed, number).tolist()
    # Element i of the permutation is where row i goes.
    return [row for _, row in sorted(zip(to, rows, strict=True), key=itemgetter(0))]


def _pack(capacity: int, rows: Sequence[MadeRow], number: int) -> list[MadeRow]:
    packs = pack_samples([row.tokens for row in rows], capacity)
    return [_packed(part) for pack in packs for part in _parts([rows[index] for index in pack], _PACK_BYTES)]


def _parts(rows: Sequence[MadeRow], most: int) -> Iterator[Sequence[MadeRow]]:
    """Yields the rows in as few parts as hold at most so many bytes, in order; each part holds a row at least."""
    first = held = 0
    for index, row in enumerate(rows):
        if held + row.size > most and index > first:
            yield rows[first:index]
            first, held = index, 0
        held += row.size
    yield rows[first:]


def _packed(rows: Sequence[MadeRow]) -> MadeRow:
    lengths = [row.tokens for row in rows]
    plain = [row.line for row in rows if isinstance(row.line, bytes)]
    encoded = [row.line for row in rows if isinstance(row.line, EncodedRow)]
    # All are of one kind.
    line: Line = encode_encoded_pack(encoded, lengths) if encoded else encode_pack(plain, lengths)
    return MadeRow(line, rows[0].place, sum(lengths), sum(row.squares for row in rows))
