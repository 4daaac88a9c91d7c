"""The end of a stream, `stream.end`: no chunk follows.

Written once, after the last seal is durable. Lifetime: as long as the stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lazyshard.errors import EndInvalid
from lazyshard.format.fields import FORMAT, MAX_CHUNKS, MAX_SAMPLES, Fields, encode
from lazyshard.format.names import END


@dataclass(frozen=True, slots=True)
class End:
    """How much an ended stream holds.

    Attributes:
        chunks: all chunks: those of the half-open range [0, chunks).
        samples: rows in them.
        source: the producer's position behind all that it has read, as in seals; None if it gave none.
    """

    chunks: int
    samples: int
    source: Any = field(default=None, compare=False)

    def encode(self) -> bytes:
        """Returns the file's bytes."""
        source = {} if self.source is None else {"source": self.source}
        return encode({"format": FORMAT, "chunks": self.chunks, "samples": self.samples} | source)

    @classmethod
    def decode(cls, data: bytes, file: str = END) -> End:
        """Reads the file's bytes.

        Raises:
            EndInvalid: a field is missing or wrong.
            VersionUnsupported: a later format.
        """
        fields = Fields(data, file, EndInvalid)
        chunks = fields.integer("chunks", 0, MAX_CHUNKS)
        samples = fields.integer("samples", 0, MAX_SAMPLES)
        if chunks == 0 and samples > 0:
            raise fields.refuse("samples", "0, as there is no chunk", str(samples))
        if samples < chunks:
            raise fields.refuse("samples", f"at least one for each of {chunks} chunks", str(samples))
        return cls(chunks=chunks, samples=samples, source=fields.values.get("source"))
