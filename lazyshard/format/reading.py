"""A reading mark, `cursors/NAME.reading.json`: how much one consumer of the stream needs to read on.

A hint, replaced about once a window by the reader of rank 0, never synced. A producer that holds back counts from it,
since a cursor stands still between two checkpoints: who held back by cursors could wait for a checkpoint that waits for
data. What may be deleted is told by cursors alone. Lifetime: that of the cursor beside it.
"""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass
from typing import Final

from lazyshard.errors import ReadingInvalid
from lazyshard.format.cursor import check_consumer, is_count
from lazyshard.format.fields import FORMAT, MAX_CHUNKS, MAX_SAMPLES, Fields, encode
from lazyshard.format.names import CURSORS
from lazyshard.format.stream_id import is_stream_id

READING_SUFFIX: Final = ".reading.json"

MAX_DP_SIZE: Final = 2**31
"""No job has as many ranks."""


@dataclass(frozen=True, slots=True)
class ReadingMark:
    """What a consumer needs to read on.

    Attributes:
        consumer: its name, see `check_consumer`.
        stream_id: the stream's identity, None for a foreign directory.
        dp_size: number of its data-parallel ranks.
        window: number of the window that is open or waited for, from 0, in the first epoch; without a shuffle it is
            that of the stripe. One that needs no more than was told already is not told.
        needs_chunks: how many chunks must be published before that window can be drawn, on all ranks: those of the
            half-open range [0, needs_chunks). May go back where a run starts again from an older checkpoint.
        updated_at: seconds since 1970, UTC.

    Raises:
        ValueError: a field is out of its range.
    """

    consumer: str
    stream_id: str | None
    dp_size: int
    window: int
    needs_chunks: int
    updated_at: float

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_consumer(self.consumer)
        if self.stream_id is not None and not is_stream_id(self.stream_id):
            raise ValueError(f"stream_id is 32 hexadecimal digits or None, got {self.stream_id!r}")
        if not math.isfinite(self.updated_at):
            raise ValueError(f"updated_at is a finite number of seconds, got {self.updated_at!r}")
        for name, value, low, high in (
            ("dp_size", self.dp_size, 1, MAX_DP_SIZE),
            ("window", self.window, 0, MAX_SAMPLES),
            ("needs_chunks", self.needs_chunks, 0, MAX_CHUNKS),
        ):
            if not is_count(value, high) or value < low:
                raise ValueError(f"{name} is an integer from {low} to {high}, got {value!r}")

    def encode(self) -> bytes:
        """Returns the file's bytes."""
        return encode({"format": FORMAT} | {name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def decode(cls, data: bytes, consumer: str, file: str | None = None) -> ReadingMark:
        """Reads the file's bytes.

        Args:
            data: the bytes.
            consumer: whose mark it must be.
            file: how to call the file in messages; its name in the stream's directory by default.

        Raises:
            ReadingInvalid: a field is missing or wrong, or it is another consumer's mark.
            VersionUnsupported: a later format.
            ValueError: there can be no consumer of this name.
        """
        name = reading_name(consumer)
        fields = Fields(data, file or f"{CURSORS}/{name}", ReadingInvalid)
        fields.text("consumer", (consumer,))
        stream_id = fields.values.get("stream_id")
        if stream_id is not None and not is_stream_id(stream_id):
            raise fields.refuse("stream_id", "32 hexadecimal digits or null", reprlib.repr(stream_id))
        return cls(
            consumer=consumer,
            stream_id=stream_id,
            dp_size=fields.integer("dp_size", 1, MAX_DP_SIZE),
            window=fields.integer("window", 0, MAX_SAMPLES),
            needs_chunks=fields.integer("needs_chunks", 0, MAX_CHUNKS),
            updated_at=fields.number("updated_at"),
        )


def reading_name(consumer: str) -> str:
    """Returns the name of a consumer's reading mark in the folder of cursors.

    Raises:
        ValueError: there can be no consumer of this name.
    """
    return check_consumer(consumer) + READING_SUFFIX
