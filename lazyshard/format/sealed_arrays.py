"""What a seal says of the side file of its chunk: where the arrays of each row lie, and what they were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lazyshard.format.fields import MAX_SAMPLES, Fields, pack


@dataclass(frozen=True, slots=True, eq=False)
class SealedArrays:
    """What is known of the side file of a complete chunk.

    Attributes:
        offsets: u64 of shape (samples + 1,): the arrays of row i are the bytes of the half-open range [offsets[i],
            offsets[i + 1]) of the side file, none where the two are equal; the last entry is the file's size.
        digests: u64 of shape (samples,): XXH3 (64 bits, seed 0) of each row's bytes there.
    """

    offsets: npt.NDArray[np.uint64]
    digests: npt.NDArray[np.uint64]

    @property
    def size(self) -> int:
        """Bytes in the side file."""
        return int(self.offsets[-1])

    def values(self) -> dict[str, Any]:
        """Returns the fields of the seal."""
        return {
            "arrays_bytes": self.size,
            "arrays_offsets": pack(self.offsets, "<u8"),
            "arrays_xxh3": pack(self.digests, "<u8"),
        }

    @classmethod
    def decode(cls, fields: Fields, samples: int) -> SealedArrays:
        """Reads the fields of the seal of so many rows.

        Raises:
            SealInvalid: one is missing or wrong.
        """
        size = fields.integer("arrays_bytes", 0, MAX_SAMPLES)
        offsets = fields.packed("arrays_offsets", "<u8", samples + 1)
        if offsets[0] != 0:
            raise fields.refuse("arrays_offsets", "the first row's arrays at byte 0", f"byte {offsets[0]}")
        falls = np.flatnonzero(offsets[1:] < offsets[:-1])
        if len(falls):
            row = int(falls[0])
            raise fields.refuse(
                "arrays_offsets",
                "starts that do not fall",
                f"row {row} from byte {offsets[row]} to byte {offsets[row + 1]}",
            )
        if offsets[-1] != size:
            raise fields.refuse("arrays_bytes", f"{offsets[-1]}, where the arrays of the last row end", str(size))
        return cls(offsets, fields.packed("arrays_xxh3", "<u8", samples))
