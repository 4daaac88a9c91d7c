"""How a chunk becomes published, and how the stream ends. The order of steps is the guarantee.

Rows under `.tmp/`, and the side file of their arrays if they have one, are synced, renamed, and the directory synced;
then the same for the seal. The seal is the commit: before it nothing of the chunk counts, after it nothing of it
changes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lazyshard.errors import ProducerFenced
from lazyshard.format import End
from lazyshard.format.names import END, arrays_name, chunk_name, seal_name
from lazyshard.store.durable import publish_bytes, rename, sync_directory
from lazyshard.store.files import MAX_PLAIN_BYTES
from lazyshard.stream.lock import WriterLock
from lazyshard.stream.open_chunk import OpenChunk


def publish_chunk(
    directory: Path, chunk: OpenChunk, source: Any, now: float, *, lock: WriterLock, temporary: Path
) -> None:
    """Publishes a chunk, all of whose rows were passed on. It is published if and only if this returns.

    Args:
        directory: the stream's directory.
        chunk: the chunk.
        source: the position after it, for its seal.
        now: seconds since 1970.
        lock: the right to write to the stream, which is looked at before each step that shows.
        temporary: a name on the same filesystem to write the seal under.

    Raises:
        ProducerFenced: another producer has taken the stream over, or has published this chunk all the same.
        OSError: the filesystem refused.
        TypeError: `source` is not JSON.
    """
    target = directory / seal_name(chunk.number)
    chunk.finish()
    lock.check()
    if os.path.lexists(target):
        # By a producer that has taken over since the look before, most likely.
        lock.check()
        raise ProducerFenced(
            f"{target}: somebody else has published this chunk; this producer stops, nothing of the stream was changed",
            directory=str(directory),
        )
    if chunk.arrays is not None:
        rename(chunk.arrays.file.path, directory / arrays_name(chunk.number))
    rename(chunk.path, directory / chunk_name(chunk.number))
    sync_directory(directory)
    seal = chunk.seal(source, now)
    lock.check()
    publish_bytes(seal.encode(), target, temporary)


def publish_end(directory: Path, chunks: int, samples: int, source: Any = None, *, temporary: Path) -> None:
    """Ends the stream after so many chunks, all of them published; `source` is the position behind all that was read.

    Raises:
        OSError: the filesystem refused.
    """
    data = End(chunks, samples, source).encode()
    if len(data) > MAX_PLAIN_BYTES:
        # Readers refuse such a file, and can do without the position.
        data = End(chunks, samples).encode()
    publish_bytes(data, directory / END, temporary)
