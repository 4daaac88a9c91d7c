"""The files of a stream: how chunks are published, waited for, read, acknowledged and deleted.

`writer` and `reader` are the two sides; a `reader` polls as often as `waiting` says, by the rate in `head`; `cursor`
records how far each consumer is; `listing` deletes chunks within the producer's limits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lazyshard.lazy import lazily

if TYPE_CHECKING:
    from lazyshard.stream.cursor import (
        Consumer,
        CursorOwner,
        forget_consumer,
        list_consumers,
        read_cursor,
        read_reading,
        write_cursor,
        write_reading,
    )
    from lazyshard.stream.listing import Published, list_kept, read_retired
    from lazyshard.stream.reader import StreamReader
    from lazyshard.stream.writer import ChunkWriter

_OF_CONSUMERS: Final = "Consumer CursorOwner forget_consumer list_consumers read_cursor read_reading write_cursor"
_HOMES: Final = {
    "cursor": (*_OF_CONSUMERS.split(), "write_reading"),
    "listing": ("Published", "list_kept", "read_retired"),
    "reader": ("StreamReader",),
    "writer": ("ChunkWriter",),
}

__all__ = ["ChunkWriter", "Consumer", "CursorOwner", "Published", "StreamReader", "forget_consumer", "list_consumers"]
__all__ += ["list_kept", "read_cursor", "read_reading", "read_retired", "write_cursor", "write_reading"]

__getattr__ = lazily(__name__, _HOMES)
