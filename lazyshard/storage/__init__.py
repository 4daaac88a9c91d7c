"""The only place of lazyshard that touches files.

- `durable`: the steps of a durable write; `open_chunk`, `recovery`, `lock`, `rate`, `writer`: the producer's side
- `files`, `chunk`, `listing`, `stream`, `pacing`, `watch`, `reader`: the readers' side
- `cursor`: how far the durable checkpoints of a stream's consumers are
- `adoption`, with `adoption_names`, `adoption_rows`, `adoption_publishing`: a stream out of other programs' chunk files
"""

from lazyshard.storage.cursor import read_cursor, write_cursor
from lazyshard.storage.reader import StreamReader
from lazyshard.storage.stream import Published
from lazyshard.storage.writer import ChunkWriter

__all__ = ["ChunkWriter", "Published", "StreamReader", "read_cursor", "write_cursor"]
