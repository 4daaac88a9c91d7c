"""The seal, `chunk_NNNNN.jsonl.completed`: the commit record of a chunk.

Its presence says that the chunk is complete and immutable. It publishes the rows and moves the producer's source
positions in one atomic step, so no second file can disagree with it. Lifetime: that of its chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lazyshard.errors import SealInvalid
from lazyshard.format.fields import FORMAT, FORMAT_WITH_ARRAYS, MAX_CHUNKS, Fields, encode, pack
from lazyshard.format.names import seal_name
from lazyshard.format.records import MAX_SAMPLES_PER_CHUNK
from lazyshard.part import MAX_SAMPLES


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


@dataclass(frozen=True, slots=True, eq=False)
class Seal:
    """What is known of a complete chunk.

    Attributes:
        chunk: the chunk's number.
        offsets: u64 of shape (samples + 1,): row i is the bytes of the half-open range [offsets[i], offsets[i + 1]) of
            the data file, its newline included; the last entry is the file's size.
        digests: u64 of shape (samples,): XXH3 (64 bits, seed 0) of each row's bytes, its newline included.
        tokens: u32 of shape (samples,): length of each sample in tokens, or None where not measured.
        source: JSON value: the producer's position in every source after this chunk; None where it keeps none.
        sealed_at: seconds since 1970, UTC.
        arrays: what is known of the chunk's side file; None in a stream whose rows hold no arrays.
    """

    chunk: int
    offsets: npt.NDArray[np.uint64]
    digests: npt.NDArray[np.uint64]
    tokens: npt.NDArray[np.uint32] | None = None
    source: Any = None
    sealed_at: float = 0.0
    arrays: SealedArrays | None = None

    @property
    def samples(self) -> int:
        """Rows in the chunk."""
        return len(self.digests)

    @property
    def size(self) -> int:
        """Bytes in the data file."""
        return int(self.offsets[-1])

    def encode(self) -> bytes:
        """Returns the file's bytes."""
        arrays = {} if self.arrays is None else self.arrays.values()
        return encode(
            {
                "format": FORMAT if self.arrays is None else FORMAT_WITH_ARRAYS,
                "chunk": self.chunk,
                "samples": self.samples,
                "bytes": self.size,
                "offsets": pack(self.offsets, "<u8"),
                "xxh3": pack(self.digests, "<u8"),
                "tokens": None if self.tokens is None else pack(self.tokens, "<u4"),
                **arrays,
                "source": self.source,
                "sealed_at": self.sealed_at,
            }
        )

    @classmethod
    def decode(cls, data: bytes, chunk: int, file: str = "") -> Seal:
        """Reads the file's bytes.

        Args:
            data: the bytes.
            chunk: the number in the file's name.
            file: how to call the file in messages; its canonical name by default.

        Raises:
            SealInvalid: a field is missing, wrong, or of another chunk.
            VersionUnsupported: a later format.
        """
        fields = Fields(data, file or seal_name(chunk), FORMAT_WITH_ARRAYS, SealInvalid)
        if fields.integer("chunk", 0, MAX_CHUNKS) != chunk:
            raise fields.refuse("chunk", f"{chunk}, as in the file's name", str(fields.values["chunk"]))
        samples = fields.integer("samples", 1, MAX_SAMPLES_PER_CHUNK)
        offsets = fields.packed("offsets", "<u8", samples + 1)
        _check_offsets(fields, offsets)
        return cls(
            chunk=chunk,
            offsets=offsets,
            digests=fields.packed("xxh3", "<u8", samples),
            tokens=None if fields.values.get("tokens") is None else fields.packed("tokens", "<u4", samples),
            source=fields.values.get("source"),
            sealed_at=fields.number("sealed_at"),
            arrays=SealedArrays.decode(fields, samples) if fields.format == FORMAT_WITH_ARRAYS else None,
        )


def _check_offsets(fields: Fields, offsets: npt.NDArray[np.uint64]) -> None:
    size = fields.integer("bytes", 1, MAX_SAMPLES)
    if offsets[0] != 0:
        raise fields.refuse("offsets", "a first row at byte 0", f"byte {offsets[0]}")
    falls = np.flatnonzero(offsets[1:] <= offsets[:-1])
    if len(falls):
        row = int(falls[0])
        raise fields.refuse(
            "offsets", "rising row starts", f"row {row} from byte {offsets[row]} to byte {offsets[row + 1]}"
        )
    if offsets[-1] != size:
        raise fields.refuse("bytes", f"{offsets[-1]}, where the last row ends", str(size))
