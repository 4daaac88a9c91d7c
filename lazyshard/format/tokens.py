"""The file of lengths, `chunk_NNNNN.jsonl.tokens`: how long a chunk's rows are in tokens, measured after it was sealed.

A seal never changes, so what is measured later lies beside it. The file names the digest of the seal's bytes, and the
seal those of the rows: it cannot be taken for another chunk's, nor for that of a chunk that was made anew under the
same number. It counts for more than what the seal says. Lifetime: from when it is measured, replaced when it is
measured in another way, deleted with its chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from lazyshard.errors import TokensInvalid
from lazyshard.format.fields import FORMAT, MAX_CHUNKS, Fields, encode, pack
from lazyshard.format.manifest import MAX_SAMPLES_PER_CHUNK
from lazyshard.format.names import tokens_name

MAX_TOKENS: Final = 2**32 - 1
"""The longest that a row can be said to be."""

MAX_MEASURE_CHARACTERS: Final = 1000


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The lengths of a chunk's rows.

    Attributes:
        chunk: the chunk's number.
        seal: `seal_digest` of its seal.
        lengths: u32 of shape (samples,): tokens of each row; 0 for one of which no sample is made.
        measure: how they were measured, in a line. Two chunks of the same text were measured alike.
        measured_at: seconds since 1970, UTC.
        bad: how many of the rows could not be measured, and count 0 because that was wanted.
    """

    chunk: int
    seal: str
    lengths: npt.NDArray[np.uint32]
    measure: str
    measured_at: float = 0.0
    bad: int = 0

    def encode(self) -> bytes:
        """Returns the file's bytes."""
        return encode(
            {
                "format": FORMAT,
                "chunk": self.chunk,
                "samples": len(self.lengths),
                "seal": self.seal,
                "measure": self.measure,
                "tokens": pack(self.lengths, "<u4"),
                "xxh3": _digest(self.lengths),
                "measured_at": self.measured_at,
            }
            | ({"bad": self.bad} if self.bad else {})
        )

    @classmethod
    def decode(cls, data: bytes, chunk: int, file: str = "") -> Tokens:
        """Reads the file's bytes. Whether `seal` is the digest of the seal that is there is for the caller to see.

        Args:
            data: the bytes.
            chunk: the number in the file's name.
            file: how to call the file in messages; its canonical name by default.

        Raises:
            TokensInvalid: a field is missing, wrong, or of another chunk; or the lengths are not those once written.
            VersionUnsupported: a later format.
        """
        fields = Fields(data, file or tokens_name(chunk), TokensInvalid)
        if fields.integer("chunk", 0, MAX_CHUNKS) != chunk:
            raise fields.refuse("chunk", f"{chunk}, as in the file's name", str(fields.values["chunk"]))
        seal, measure = fields.text("seal"), fields.text("measure")
        if len(measure) > MAX_MEASURE_CHARACTERS:
            raise fields.refuse("measure", f"at most {MAX_MEASURE_CHARACTERS} characters", str(len(measure)))
        lengths = fields.packed("tokens", "<u4", fields.integer("samples", 1, MAX_SAMPLES_PER_CHUNK))
        found = _digest(lengths)
        if fields.text("xxh3") != found:
            raise fields.refuse("xxh3", f"{found}, of the lengths that are there", repr(fields.values["xxh3"])[:80])
        bad = fields.integer("bad", 0, len(lengths)) if "bad" in fields.values else 0
        return cls(chunk, seal, lengths, measure, fields.number("measured_at"), bad)


def seal_digest(data: bytes) -> str:
    """Returns what tells a seal from any other: XXH3 (128 bits, seed 0) of its bytes, 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def _digest(lengths: npt.NDArray[np.uint32]) -> str:
    return xxhash.xxh3_64_hexdigest(np.asarray(lengths, "<u4").tobytes())
