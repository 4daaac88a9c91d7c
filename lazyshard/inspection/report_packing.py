"""How full the sequences of a stream are, and what packing its rows would bring. No I/O.

Rows are packed as `lazyshard-producer run --pack` does: best fit in buffers of as many rows (`lazyshard.plan.packing`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from lazyshard.inspection.report_chunks import Made
from lazyshard.inspection.row_facts import Lengths
from lazyshard.plan.packing import pack_samples

BUFFER_ROWS: Final = 10_000
"""As `--pack-buffer` has it by default."""

MICRO_BATCHES: Final = (1, 2, 4, 8)
"""Rows of a micro batch whose padding is told."""

_SMALLEST: Final = 512
_LARGEST: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Packing:
    """How full sequences are.

    Attributes:
        form: "pack", "split" or "pad" for what the stream's rows are; None for rows as they are.
        size: tokens of a sequence: those of the form, or those for which packing was tried.
        given: whether that size was asked for; otherwise, for rows as they are, it was chosen.
        rows: rows whose lengths were looked at.
        filled: share of the sequences that tokens fill, from 0 to 1: of rows as they are, once they are packed.
        packs: of rows as they are: how many packs these rows make.
        too_long: of rows as they are: how many are longer than a pack, and are in none.
        padding: of rows as they are: for some numbers of rows in a micro batch the share of it that is padding, where
            each is padded to its longest.
    """

    form: str | None
    size: int
    given: bool
    rows: int
    filled: float
    packs: int = 0
    too_long: int = 0
    padding: tuple[tuple[int, float], ...] = ()

    @property
    def saved(self) -> float:
        """Share of the sequences that packing would save, from 0 to 1."""
        rows = self.rows - self.too_long
        return 1 - self.packs / rows if rows else 0.0


def pack_size(longest: int) -> int:
    """Returns the power of two, from 512 on, that holds the longest row.

    >>> pack_size(300), pack_size(4096), pack_size(4097)
    (512, 4096, 8192)
    """
    return min(_LARGEST, max(_SMALLEST, 1 << (max(1, longest) - 1).bit_length()))


def look_at_packing(
    made: Made, tokens: Lengths, kept: npt.NDArray[np.int64], asked: int | None, *, packed: bool = False
) -> Packing | None:
    """Returns how full sequences are; None where their lengths, or the length that they may have, are not known.

    Args:
        made: how the stream's rows were made.
        tokens: lengths of the rows in tokens.
        kept: those of some rows one by one, shape (n,).
        asked: tokens of a pack for which packing is tried, or of packs whose seals do not tell; None for neither.
        packed: whether rows are packs, whatever their seals tell.
    """
    form = made.form or ("pack" if packed else None)
    if not tokens.count:
        return None
    if form is not None:
        size = made.size or asked
        if size is None:
            return None
        return Packing(form, size, made.size is None, tokens.count, min(1.0, tokens.mean / size))
    rows = kept[kept > 0]
    if not len(rows):
        return None
    size = asked or pack_size(tokens.largest)
    fit = rows[rows <= size]
    packs = sum(len(pack_samples(fit[at : at + BUFFER_ROWS], size)) for at in range(0, len(fit), BUFFER_ROWS))
    return Packing(
        form=None,
        size=size,
        given=asked is not None,
        rows=len(rows),
        filled=int(fit.sum()) / (packs * size) if packs else 0.0,
        packs=packs,
        too_long=len(rows) - len(fit),
        padding=tuple((count, padding(rows, count)) for count in MICRO_BATCHES if count <= len(rows)),
    )


def padding(lengths: npt.NDArray[np.int64], rows: int) -> float:
    """Returns the share of micro batches of so many rows in turn that is padding, each padded to its longest.

    >>> padding(np.array([1, 3, 2, 2, 9]), 2)
    0.2
    """
    whole = lengths[: len(lengths) // rows * rows].reshape(-1, rows)
    padded = int(whole.max(axis=1).sum()) * rows
    return (padded - int(whole.sum())) / padded if padded else 0.0
