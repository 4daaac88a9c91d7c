"""Encoded samples in the cache of a node: the file of a chunk, a slot for each of its rows, and records behind them.

```
offset
0        magic (24 bytes), key (16), rows (u64), 8 bytes of 0, digest of these 56 bytes (u64)
64       for each row a slot: offset, size and digest of its record (u64 each); zeros where there is none
...      records, anywhere behind the slots:
           key (16), row (u64), digest of the row's line (u64), bytes of the text (u64)
           arrays: as in the side file of a chunk, each at a multiple of 8 bytes from here
           text: a line of JSON that describes the sample, or why there is none
```

All numbers are little-endian, all digests XXH3 (64 bits, seed 0). A record says by itself which row of which chunk it
is of, encoded with what (the key), and made of which line. So whatever a slot or a record was overwritten with, what
is read is either just what was kept, or nothing.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from lazyshard.errors import RowInvalid
from lazyshard.format.arrays import fill_row, pack_row
from lazyshard.format.records import Encoding
from lazyshard.memory import loads

KEPT_VERSION: Final = 1
"""Of these bytes, and of what the text says; another one has other names."""

MAX_RECORD_BYTES: Final = 1 << 30
"""One system call reads it. A slot that says more is damaged."""

LEAST_CACHE_BYTES: Final = 4096
"""Of a cache: less has no room for the slots of a chunk and a sample, and would keep nothing without a word."""

_MAGIC: Final = b"lazyshard kept sample\n\0\1"
_FACE: Final = struct.Struct("<24s16sQ8x")
_DIGEST: Final = struct.Struct("<Q")
_SLOT: Final = struct.Struct("<QQQ")
_HEAD: Final = struct.Struct("<16sQQQ")

HEAD_BYTES: Final = _FACE.size + _DIGEST.size
SLOT_BYTES: Final = _SLOT.size

_SAMPLE: Final = "sample"
_DROPPED: Final = "dropped"

_digest = xxhash.xxh3_64_intdigest


Slot: TypeAlias = tuple[int, int, int]
"""Where the record of a row lies: its first byte in the file, 0 where there is none; its bytes; their digest."""


class Kept(NamedTuple):
    """What is kept of a row.

    Attributes:
        sample: what was made of it, as it was packed; None where it was dropped.
        dropped: why it was dropped; None where it was not.
    """

    sample: Any
    dropped: str | None = None


def chunk_key(encoding: Encoding, number: int, samples_per_chunk: int, rows: int, identity: bytes) -> bytes:
    """Returns the 16 bytes by which what is kept of a chunk is known.

    Args:
        encoding: what its rows are encoded with.
        number: the chunk's number. With the next one it tells the numbers of its samples, which steps may look at.
        samples_per_chunk: of the stream.
        rows: of the chunk.
        identity: tells its rows from those of any other chunk; see `lazyshard.stream.chunk.Chunk.identity`.
    """
    facts = orjson.dumps(dict(encoding), option=orjson.OPT_SORT_KEYS)
    place = f"{KEPT_VERSION} {number} {samples_per_chunk} {rows} ".encode()
    return xxhash.xxh3_128_digest(place + xxhash.xxh3_128_digest(facts) + identity)


def table_size(rows: int) -> int:
    """Returns the bytes before the records of a file of so many rows."""
    return HEAD_BYTES + rows * SLOT_BYTES


def slot_at(row: int) -> int:
    """Returns the byte at which the slot of a row lies."""
    return HEAD_BYTES + row * SLOT_BYTES


def encode_head(key: bytes, rows: int) -> bytes:
    """Returns the first bytes of a file."""
    face = _FACE.pack(_MAGIC, key, rows)
    return face + _DIGEST.pack(_digest(face))


def encode_slot(slot: Slot) -> bytes:
    """Returns the bytes of a slot."""
    return _SLOT.pack(*slot)


def decode_slot(slots: bytes | bytearray, row: int = 0) -> Slot:
    """Returns a slot out of many."""
    return _SLOT.unpack_from(slots, row * SLOT_BYTES)


def encode_sample(packed: Any, key: bytes, row: int, line: int) -> bytes:
    """Returns the record of a sample.

    Args:
        packed: the sample, made of what JSON has and of numpy arrays.
        key: of its chunk.
        row: its row there.
        line: digest of the row's line.

    Raises:
        RowInvalid: it holds what no row can.
    """
    text, arrays = pack_row({_SAMPLE: packed})
    return _HEAD.pack(key, row, line, len(text)) + arrays + text


def encode_dropped(reason: str, key: bytes, row: int, line: int) -> bytes:
    """Returns the record of a row that makes no sample. Arguments and errors as of `encode_sample`."""
    text = pack_row({_DROPPED: reason}).line
    return _HEAD.pack(key, row, line, len(text)) + text


def slot_of(record: bytes, offset: int) -> Slot:
    """Returns the slot of a record that lies there."""
    return offset, len(record), _digest(record)


def decode_record(data: npt.NDArray[np.uint8], digest: int, key: bytes, row: int, line: int) -> Kept | None:
    """Returns what a record says; None if it is not the whole record of this row of this chunk, made of this line.

    Args:
        data: u8 of shape (bytes,), the caller's own: arrays of the sample are views of it.
        digest: as its slot tells it.
        key: of the chunk.
        row: the row.
        line: digest of its line.
    """
    view = data.data
    if len(view) < _HEAD.size or _digest(view) != digest:
        return None
    found_key, found_row, found_line, size = _HEAD.unpack_from(view)
    text = len(view) - size
    if found_key != key or found_row != row or found_line != line or text < _HEAD.size:
        return None
    try:
        found = loads(view[text:])
        if _SAMPLE in found:
            fill_row(found, data[_HEAD.size : text])
            return Kept(found[_SAMPLE])
        return Kept(None, found[_DROPPED])
    except (orjson.JSONDecodeError, RowInvalid, KeyError, TypeError):
        # Written otherwise, with a right digest: by nobody that we know.
        return None
