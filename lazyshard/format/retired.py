"""The retired mark, `retired.json`: which chunks the producer has deleted, or is deleting.

Written durably before the first file of a chunk is removed, so that a missing chunk is either retired or lost, and
nobody has to guess. Lifetime: from the first deletion on as long as the stream.
"""

from __future__ import annotations

from dataclasses import dataclass

from lazyshard.errors import RetiredInvalid
from lazyshard.format.fields import FORMAT, MAX_CHUNKS, Fields, encode
from lazyshard.format.names import RETIRED


@dataclass(frozen=True, slots=True)
class Retired:
    """Which chunks are not there any more.

    Attributes:
        stream_id: the stream's identity. A mark that was left by another stream says nothing of this one.
        chunks_before: the chunks of the half-open range [0, chunks_before) are deleted or being deleted.
        updated_at: seconds since 1970, UTC, by the producer's clock.
    """

    stream_id: str
    chunks_before: int
    updated_at: float

    def encode(self) -> bytes:
        """Returns the file's bytes."""
        return encode({"format": FORMAT} | {name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def decode(cls, data: bytes, file: str = RETIRED) -> Retired:
        """Reads the file's bytes.

        Raises:
            RetiredInvalid: a field is missing or wrong.
            VersionUnsupported: a later format.
        """
        fields = Fields(data, file, RetiredInvalid)
        return cls(
            stream_id=fields.stream_id("stream_id"),
            chunks_before=fields.integer("chunks_before", 0, MAX_CHUNKS),
            updated_at=fields.number("updated_at"),
        )
