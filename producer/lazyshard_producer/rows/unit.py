"""A unit: a source row of which several are made, or a block of rows that are shuffled or packed, published in part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import xxhash

from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.wording import count


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunUnit:
    """A unit of which an earlier run has published a part.

    Attributes:
        names: the sources of its rows.
        rows: how many these are.
        skip: rows made of them that are published.
        digest: XXH3 of those, in hexadecimal.
        new: whether all its sources are inputs that are taken as new ones, so that other rows than before are no fault.
    """

    names: Sequence[str]
    rows: int
    skip: int
    digest: str
    new: bool

    def find(self, rows: Iterable[bytes]) -> bool:
        """Returns whether these rows begin with those that are published."""
        digest = xxhash.xxh3_64()
        left = self.skip
        for line in islice(rows, self.skip):
            digest.update(line)
            left -= 1
        return not left and digest.hexdigest() == self.digest

    def refuse(self) -> SourceRefused:
        """Returns the error for rows that do not."""
        names = ", ".join(self.names)
        return SourceRefused(
            f"{names}: the last chunk ends within the rows that are made of {count(self.rows, 'row')} of it, and the "
            f"first {self.skip} of them come out otherwise now than they were published: the source was changed in a "
            f"part that was read, or a function does not give the same rows for the same row; put back what it was, or "
            f"choose another --out",
            file=names,
            expected=f"XXH3 {self.digest} of the first {count(self.skip, 'row')}",
            actual="another one",
        )
