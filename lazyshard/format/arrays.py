"""Arrays in rows: their bytes lie in a side file, and in the row stands where, of which dtype and shape.

```
row as it is written    {"id": 7, "input_ids": array([1, 2, 3], dtype=int32), "mel": array(..., dtype=float16)}
line of the chunk       {"id":7,"input_ids":{"$array":["int32",[3],0]},"mel":{"$array":["float16",[80,300],16]}}
bytes in the side file  01000000 02000000 03000000 00000000  (48,000 bytes of mel)
```

An array is little-endian and in C order, begins at a multiple of 8 bytes and is followed by zeros up to the next one.
Its offset counts from the first byte of its row, so a row's line and bytes stay the same wherever in a chunk it stands.
"""

from __future__ import annotations

import math
import re
import struct
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from lazyshard.errors import RowInvalid
from lazyshard.format.records import Encoding
from lazyshard.format.row import encode_row, values_in
from lazyshard.memory import loads

# The only key of the object that stands in a row for an array; no other object of such a row has it
ARRAY_KEY: Final = "$array"

BFLOAT16: Final = np.dtype([("bfloat16", "<u2")])
"""Of arrays of bfloat16 numbers, of which numpy has none: their bits. ``bits.view(BFLOAT16)`` of an array of uint16."""

# By the name that stands in a row
DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "bool": np.dtype(np.bool_),
    **{f"{kind}int{8 * size}": np.dtype(f"<{kind or 'i'}{size}") for kind in ("u", "") for size in (1, 2, 4, 8)},
    **{f"float{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    "bfloat16": BFLOAT16,
}

# Bytes: as large as the largest number, so that no number of a row's arrays lies across two words
_ALIGNMENT: Final = 8
_MAX_DIMENSIONS: Final = 32  # More than the oldest numpy that is supported can make are refused
MAX_ROW_BYTES: Final = 1 << 31  # Of the arrays of a row, which is read into memory whole
_MAX_COUNT: Final = 2**62

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_KEY_IN_LINE: Final = b'"$array":'

# What stands for an array in a line that `pack_row` has made. In a text such a brace has a backslash behind it, and no
# other object of the row has this key.
_DESCRIBED: Final = re.compile(rb'(\{"\$array":\["[a-z0-9]+",\[[0-9,]*\],)([0-9]+)(?=\]\})')


class PackedRow(NamedTuple):
    """A row as it is published: its line with the newline, and its bytes in the side file."""

    line: bytes
    arrays: bytes


def pack_row(row: object) -> PackedRow:
    """Returns the line of a row that may hold numpy arrays, and their bytes.

    Raises RowInvalid: as `encode_row`; or an array of another dtype than `DTYPES`, arrays of more than 2 GiB in all, or
    a key that is reserved for what stands in an array's place.
    """
    parts: list[bytes | memoryview] = []
    size = count = 0

    def pack(value: Any) -> dict[str, Any]:
        nonlocal size, count
        if not isinstance(value, np.ndarray):
            raise TypeError
        little, offset = value.dtype.newbyteorder("<"), size
        name = _NAMES.get(little)
        if name is None or isinstance(value, np.ma.MaskedArray):
            found = "a masked one" if name else f"one of {value.dtype}"
            raise _invalid(f"expected an array of {', '.join(DTYPES)}, found {found}; convert it with astype")
        if value.ndim > _MAX_DIMENSIONS:
            raise _invalid(f"expected an array of at most {_MAX_DIMENSIONS} dimensions, found {value.ndim}")
        padding = -value.nbytes % _ALIGNMENT
        size, count = size + value.nbytes + padding, count + 1
        if size > MAX_ROW_BYTES:
            raise _invalid(f"expected arrays of at most {MAX_ROW_BYTES} bytes in a row, found {size}")
        if value.nbytes:
            part = np.ascontiguousarray(value, dtype=little).reshape(-1).view(np.uint8)
            # Other bytes than 0 and 1, as a view of numbers has, are no truth values to who reads them.
            parts.extend((((part != 0) if name == "bool" else part).data, bytes(padding)))
        return {ARRAY_KEY: [name, list(value.shape), offset]}

    line = encode_row(row, pack)
    # A key with a quote in it counts here too; what is counted wrongly is looked at more closely.
    if line.count(_KEY_IN_LINE) != count:
        refuse_array_key(row)
    return PackedRow(line, b"".join(parts))


def move_arrays(line: bytes, by: int) -> bytes:
    """Returns a line of `pack_row` whose arrays lie so many bytes further on, behind those of other rows."""
    return _DESCRIBED.sub(lambda found: b"%b%d" % (found[1], int(found[2]) + by), line) if by else line


def may_hold_arrays(line: bytes) -> bool:
    """Whether there may be an array, or a key that is reserved for one, in a line; False where there is none."""
    return b"$array" in line or b"\\u" in line


def refuse_array_key(row: object) -> None:
    """Raises RowInvalid if a row has the key that is reserved."""
    if any(isinstance(value, dict) and ARRAY_KEY in value for value in values_in(row)):
        raise _invalid(f"the key {ARRAY_KEY!r} stands for arrays in a stream that holds some; rename it")


def fill_row(row: dict[str, Any], data: npt.NDArray[np.uint8]) -> None:
    """Puts arrays, views of the data, in the places of a parsed row where they are described; each is checked first.

    `data` is u8 of shape (bytes,): the row's bytes in the side file. RowInvalid: the row is changed in part.
    """
    if ARRAY_KEY in row:
        raise _invalid(f"expected a row, found an array in its place (key {ARRAY_KEY!r})")
    pending: list[dict[str, Any] | list[Any]] = [row]
    while pending:
        container: Any = pending.pop()
        for key, value in container.items() if type(container) is dict else enumerate(container):
            kind = type(value)
            if kind is dict and ARRAY_KEY in value:
                container[key] = _array(value, key, data)
            elif kind is dict or kind is list:
                pending.append(value)


def _array(value: dict[str, Any], key: str | int, data: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    described = value[ARRAY_KEY]
    if len(value) != 1 or type(described) is not list or len(described) != 3:
        raise _refused(key, f'{{"{ARRAY_KEY}":[dtype, shape, offset]}}', value)
    name, shape, offset = described
    dtype = DTYPES.get(name) if type(name) is str else None
    if dtype is None:
        raise _refused(key, f"a dtype of {', '.join(DTYPES)}", name)
    if type(shape) is not list or len(shape) > _MAX_DIMENSIONS or not all(map(_is_count, shape)):
        raise _refused(key, f"a shape of at most {_MAX_DIMENSIONS} integers from 0 on", shape)
    if not _is_count(offset) or offset % _ALIGNMENT:
        raise _refused(key, f"an offset that is a multiple of {_ALIGNMENT}", offset)
    # numpy multiplies the dimensions that are not 0, also where the array holds nothing.
    if math.prod(filter(None, shape)) > _MAX_COUNT // dtype.itemsize:
        raise _refused(key, "a shape whose elements can be counted", shape)
    stop = offset + math.prod(shape) * dtype.itemsize
    if stop > len(data):
        raise _refused(key, f"an array within the {len(data)} bytes of its row", f"{described}, which ends at {stop}")
    array: npt.NDArray[Any] = np.ndarray(shape, dtype, data, offset)
    if dtype == np.bool_ and array.size and data[offset:stop].max() > 1:
        raise _refused(key, "truth values, bytes of 0 and 1", f"{data[offset:stop].max()}")
    return array


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _refused(key: str | int, expected: str, found: Any) -> RowInvalid:
    return _invalid(f"the array at {key!r:.80}: expected {expected}, found {str(found)!r:.120}")


def _invalid(reason: str) -> RowInvalid:
    return RowInvalid(f"not a row: {reason}", reason=reason)


# Encoded samples in the cache of a node: the file of a chunk, a slot for each of its rows, and records behind them
#
#   offset
#   0        magic (24 bytes), key (16), rows (u64), 8 bytes of 0, digest of these 56 bytes (u64)
#   64       for each row a slot: offset, size and digest of its record (u64 each); zeros where there is none
#   ...      records, anywhere behind the slots:
#              key (16), row (u64), digest of the row's line (u64), bytes of the text (u64)
#              arrays: as in the side file of a chunk, each at a multiple of 8 bytes from here
#              text: a line of JSON that describes the sample, or why there is none
#
# All numbers are little-endian, all digests XXH3 (64 bits, seed 0). A record says by itself which row of which chunk it
# is of, encoded with what (the key), and made of which line. So whatever a slot or a record was overwritten with, what
# is read is either just what was kept, or nothing.

KEPT_VERSION: Final = 1  # Of these bytes, and of what the text says; another one has other names
MAX_RECORD_BYTES: Final = 1 << 30  # One system call reads it. A slot that says more is damaged
# Of a cache: less has no room for the slots of a chunk and a sample, and would keep nothing without a word
LEAST_CACHE_BYTES: Final = 4096

_MAGIC: Final = b"lazyshard kept sample\n\0\1"
_FACE: Final = struct.Struct("<24s16sQ8x")
SLOT: Final = struct.Struct("<QQQ")  # First byte in the file, 0 where there is none; bytes; their digest
_HEAD: Final = struct.Struct("<16sQQQ")
HEAD_BYTES: Final = _FACE.size + 8
_SAMPLE: Final = "sample"
_DROPPED: Final = "dropped"

_digest = xxhash.xxh3_64_intdigest


class Kept(NamedTuple):
    """What is kept of a row: the `sample` as it was packed; or why it was `dropped`, None where it was not."""

    sample: Any
    dropped: str | None = None


def chunk_key(encoding: Encoding, number: int, samples_per_chunk: int, rows: int, identity: bytes) -> bytes:
    """Returns the 16 bytes by which what is kept of a chunk is known; `identity` is that of `stream.chunk.Chunk`."""
    facts = orjson.dumps(dict(encoding), option=orjson.OPT_SORT_KEYS)
    place = f"{KEPT_VERSION} {number} {samples_per_chunk} {rows} ".encode()
    return xxhash.xxh3_128_digest(place + xxhash.xxh3_128_digest(facts) + identity)


def slot_at(row: int) -> int:
    """Returns the byte at which the slot of a row lies; of the number of all rows, where the records begin."""
    return HEAD_BYTES + row * SLOT.size


def encode_head(key: bytes, rows: int) -> bytes:
    """Returns the first bytes of a file."""
    face = _FACE.pack(_MAGIC, key, rows)
    return face + _digest(face).to_bytes(8, "little")


def encode_sample(packed: Any, key: bytes, row: int, line: int, *, dropped: bool = False) -> bytes:
    """Returns the record of a sample of a row of the chunk of this key, by its line's digest. Raises as `pack_row`.

    Of a row that makes no sample, as it is `dropped`, it is that of the reason.
    """
    text, arrays = pack_row({_DROPPED if dropped else _SAMPLE: packed})
    return _HEAD.pack(key, row, line, len(text)) + arrays + text


def encode_slot(record: bytes, offset: int) -> bytes:
    """Returns the slot of a record that lies there."""
    return SLOT.pack(offset, len(record), _digest(record))


def decode_record(data: npt.NDArray[np.uint8], digest: int, key: bytes, row: int, line: int) -> Kept | None:
    """Returns what a record says; None if it is not the whole record of this row of this chunk, made of this line.

    `data` is u8 of shape (bytes,), the caller's own: arrays of the sample are views of it; `digest` as its slot tells.
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
