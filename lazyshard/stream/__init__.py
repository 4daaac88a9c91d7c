"""The files of a stream: how chunks are published, waited for, read, acknowledged and deleted.

- `writer`: what a producer writes with; of that `lock`, `writer_opening`, `recovery`: how it begins; `publishing`,
  `open_chunk`: chunks; `head`: what readers are told
- `chunk`, `chunk_files`, `listing`, `stream` with `native_stream` and `foreign_stream`, `reader`: the readers' side;
  `scattered`: rows in any order
- `waiting`, `pacing`: waiting for a producer, and what is said meanwhile; `node_poll`: one process of a node polls for
  all; `watchdog`: what somebody is stuck in
- `cursor`, `consumers`: how far a stream's consumers are; `retire`: what nobody needs is deleted; `run_state`: the
  state of a run and its course
- `token_lengths`: lengths in tokens, as sealed
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lazyshard.lazy import lazily

if TYPE_CHECKING:
    from lazyshard.stream.consumers import Consumer, forget_consumer, list_consumers, read_reading, write_reading
    from lazyshard.stream.cursor import CursorOwner, read_cursor, write_cursor
    from lazyshard.stream.listing import Published
    from lazyshard.stream.reader import StreamReader
    from lazyshard.stream.retire import list_kept, read_retired
    from lazyshard.stream.writer import ChunkWriter

__all__ = [
    "ChunkWriter",
    "Consumer",
    "CursorOwner",
    "Published",
    "StreamReader",
    "forget_consumer",
    "list_consumers",
    "list_kept",
    "read_cursor",
    "read_reading",
    "read_retired",
    "write_cursor",
    "write_reading",
]

_HOMES: Final = {
    "consumers": (
        "Consumer",
        "forget_consumer",
        "list_consumers",
        "read_reading",
        "write_reading",
    ),
    "cursor": (
        "CursorOwner",
        "read_cursor",
        "write_cursor",
    ),
    "listing": ("Published",),
    "reader": ("StreamReader",),
    "retire": (
        "list_kept",
        "read_retired",
    ),
    "writer": ("ChunkWriter",),
}

__getattr__ = lazily(__name__, _HOMES)
