"""The manifest, `stream.json`: what never changes about a stream.

Written once when the stream is created. Lifetime: as long as the stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from lazyshard.errors import ManifestInvalid
from lazyshard.format.encoding import MAX_FACTS, Encoding, is_encoding
from lazyshard.format.fields import FORMAT, FORMAT_WITH_ARRAYS, Fields, encode
from lazyshard.format.names import MANIFEST

MAX_SAMPLES_PER_CHUNK: Final = 100_000_000
"""A seal holds 16 bytes a row and more, base64; past this one is no longer read in a reasonable time."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What never changes about a stream.

    Attributes:
        stream_id: 32 hexadecimal digits chosen at random when the stream was created.
        samples_per_chunk: rows in every chunk but possibly the last of an ended stream.
        created_at: seconds since 1970, UTC.
        arrays: whether rows may hold arrays, kept in side files; the file's format tells.
        encoding: what encoded rows were made with; None for rows that no encoder has made. Only streams with arrays
            have one.
    """

    stream_id: str
    samples_per_chunk: int
    created_at: float
    arrays: bool = False
    encoding: Encoding | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        """Checks the number of samples per chunk."""
        check_samples_per_chunk(self.samples_per_chunk)

    def encode(self) -> bytes:
        """Returns the file's bytes."""
        return encode(
            {
                "format": FORMAT_WITH_ARRAYS if self.arrays else FORMAT,
                "stream_id": self.stream_id,
                "samples_per_chunk": self.samples_per_chunk,
                "created_at": self.created_at,
                **({} if self.encoding is None else {"encoding": dict(self.encoding)}),
            }
        )

    @classmethod
    def decode(cls, data: bytes, file: str = MANIFEST) -> Manifest:
        """Reads the file's bytes.

        Raises:
            ManifestInvalid: a field is missing or wrong.
            VersionUnsupported: a later format.
        """
        fields = Fields(data, file, ManifestInvalid, FORMAT_WITH_ARRAYS)
        return cls(
            stream_id=fields.stream_id("stream_id"),
            samples_per_chunk=fields.integer("samples_per_chunk", 1, MAX_SAMPLES_PER_CHUNK),
            created_at=fields.number("created_at"),
            arrays=fields.format == FORMAT_WITH_ARRAYS,
            encoding=_encoding(fields) if fields.format == FORMAT_WITH_ARRAYS else None,
        )


def _encoding(fields: Fields) -> Encoding | None:
    value = fields.values.get("encoding")
    if value is not None and not is_encoding(value):
        raise fields.refuse("encoding", f"an object of 1 to {MAX_FACTS} plain values", str(type(value).__name__))
    return value


def check_samples_per_chunk(value: int) -> int:
    """Returns the value if it can be a number of samples per chunk.

    Raises:
        ValueError: it cannot.
    """
    if type(value) is not int or not 1 <= value <= MAX_SAMPLES_PER_CHUNK:
        raise ValueError(f"samples_per_chunk is an integer from 1 to {MAX_SAMPLES_PER_CHUNK}, got {value!r}")
    return value
