"""What is done with a block of rows before it is published: shuffled, or packed. The same block gives the same rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import NamedTuple

from lazyshard.format import encode_pack
from lazyshard.plan import pack_samples, permutation
from lazyshard_producer.rows.recipe import Line
from lazyshard_producer.sources.source import Place


class MadeRow(NamedTuple):
    """A row on its way.

    Attributes:
        line: the row, as it is published.
        place: where the row comes from of which it was made; of a pack where its first row does.
        tokens: its length, 0 where it was not measured.
    """

    line: Line
    place: Place
    tokens: int = 0

    @property
    def data(self) -> bytes:
        """What tells it from others."""
        return self.line if isinstance(self.line, bytes) else self.line.data


Arrange = Callable[[Sequence[MadeRow], int], Sequence[MadeRow]]
"""Takes the rows of a block and its number, and returns what is published of it."""


def shuffling(seed: int) -> Arrange:
    """Returns what shuffles blocks; the seed and a block's number give its order."""
    return partial(_shuffle, seed)


def packing(capacity: int) -> Arrange:
    """Returns what makes packs of blocks, of at most so many tokens each; see `lazyshard.plan.packing`."""
    return partial(_pack, capacity)


def _shuffle(seed: int, rows: Sequence[MadeRow], number: int) -> list[MadeRow]:
    to = permutation(len(rows), seed, number).tolist()
    # Element i of the permutation is where row i goes.
    return [row for _, row in sorted(zip(to, rows, strict=True), key=itemgetter(0))]


def _pack(capacity: int, rows: Sequence[MadeRow], number: int) -> list[MadeRow]:
    packs = []
    for pack in pack_samples([row.tokens for row in rows], capacity):
        lengths = [rows[index].tokens for index in pack]
        line = encode_pack([rows[index].data for index in pack], lengths)
        packs.append(MadeRow(line, rows[pack[0]].place, sum(lengths)))
    return packs
