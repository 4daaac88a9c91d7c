r"""Arrays and blobs (images, any bytes) in rows: stored in a side file; the row has their kind, size and offset.

```
row as written          {"id": 7, "input_ids": array([1, 2, 3], dtype=int32), "image": b"\xff\xd8\xff..."}
line of the chunk       {"id":7,"input_ids":{"$array":["int32",[3],0]},"image":{"$bytes":[48211,16,"image/jpeg"]}}
bytes in the side file  01000000 02000000 03000000 00000000  (48,211 bytes of the image) 0000000000
```

An array is little-endian and in C order; a blob, `bytes` in Python, is stored as it is. Each begins at a multiple of 8
bytes and is padded with zeros to the next one. Its offset counts from the first byte of its row, so the line and bytes
of a row are the same anywhere in a chunk. Below are the records of encoded samples in the cache of a node.
"""

from __future__ import annotations

import math
import re
import struct
from typing import Any, Final, NamedTuple

import numpy as np
import orjson
import xxhash

from lazyshard.errors import RowInvalid
from lazyshard.format.records import Encoding
from lazyshard.format.row import encode_row, values_in
from lazyshard.memory import loads
from lazyshard.part import Array, ByteArray

# The only key of an object that represents an array, or a blob, in a row; both are reserved in streams with arrays
ARRAY_KEY: Final = "$array"
BLOB_KEY: Final = "$bytes"

BFLOAT16: Final = np.dtype([("bfloat16", "<u2")])
"""dtype of bfloat16 arrays as raw bits, since numpy has no bfloat16: ``bits.view(BFLOAT16)`` of an array of uint16."""

# By name, as in rows
DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "bool": np.dtype(np.bool_),
    **{f"{kind}int{8 * size}": np.dtype(f"<{kind or 'i'}{size}") for kind in ("u", "") for size in (1, 2, 4, 8)},
    **{f"float{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    "bfloat16": BFLOAT16,
}

# Bytes: the size of the largest number, so that every number of an array is aligned
_ALIGNMENT: Final = 8
_MAX_DIMENSIONS: Final = 32  # The limit of the oldest supported numpy
MAX_ROW_BYTES: Final = 1 << 31  # Limit of the arrays and blobs of a row, which are read into memory as a whole
_MAX_COUNT: Final = 2**62

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_KEYS_IN_LINE: Final = (b'"$array":', b'"$bytes":')
BLOB_IN_LINE: Final = b'{"$bytes":['  # begins a blob; a chunk with a row that has one is sealed in format 3

# The description of an array or a blob in a line of `pack_row`. Within a string, a backslash would follow the brace,
# and no other object of the row has these keys.
_DESCRIBED: Final = re.compile(
    rb'(\{"\$array":\["[a-z0-9]+",\[[0-9,]*\],|\{"\$bytes":\[[0-9]+,)([0-9]+)(?=\]\}|,(?:null|"[a-z0-9.+/-]+")\]\})'
)

# The first bytes of the media types that are told apart, by their offset. Others are stored without a type.
_MAGIC_BYTES: Final[tuple[tuple[int, bytes, str], ...]] = (
    (0, b"\xff\xd8\xff", "image/jpeg"),
    (0, b"\x89PNG\r\n\x1a\n", "image/png"),
    (0, b"GIF8", "image/gif"),
    (8, b"WEBP", "image/webp"),
    (4, b"ftypavif", "image/avif"),
    (8, b"WAVE", "audio/wav"),
    (0, b"fLaC", "audio/flac"),
    (0, b"OggS", "audio/ogg"),
    (0, b"ID3", "audio/mpeg"),
    (4, b"ftypM4A", "audio/mp4"),
    (4, b"ftyp", "video/mp4"),
    (0, b"\x1aE\xdf\xa3", "video/webm"),
)
_MEDIA_TYPE: Final = re.compile(r"[a-z]+/[a-z0-9.+-]{1,100}")


class PackedRow(NamedTuple):
    """A row in its published form: its line with the newline, and its bytes in the side file."""

    line: bytes
    arrays: bytes


def pack_row(row: object) -> PackedRow:
    """Returns the line of a row that may hold numpy arrays and bytes, and the bytes of these.

    Raises RowInvalid as `encode_row`, or for an array whose dtype is not in `DTYPES`, arrays and blobs of more than 2
    GiB in total, or a reserved key.
    """
    parts: list[bytes | memoryview] = []
    size = count = 0

    def add(part_bytes: int) -> bytes:
        """Counts the bytes of an array or a blob; returns the padding after it."""
        nonlocal size, count
        padding = -part_bytes % _ALIGNMENT
        size, count = size + part_bytes + padding, count + 1
        if size > MAX_ROW_BYTES:
            raise _invalid(f"expected arrays and blobs of at most {MAX_ROW_BYTES} bytes in a row, found {size}")
        return bytes(padding)

    def pack(value: Any) -> dict[str, Any]:
        offset = size
        if isinstance(value, bytes | bytearray | memoryview):
            blob = bytes(value)
            parts.extend((blob, add(len(blob))))
            return {BLOB_KEY: [len(blob), offset, media_type(blob)]}
        if not isinstance(value, np.ndarray):
            raise TypeError
        little = value.dtype.newbyteorder("<")
        name = _NAMES.get(little)
        if name is None or isinstance(value, np.ma.MaskedArray):
            found = "a masked one" if name else f"one of {value.dtype}"
            raise _invalid(f"expected an array of {', '.join(DTYPES)}, found {found}; convert it with astype")
        if value.ndim > _MAX_DIMENSIONS:
            raise _invalid(f"expected an array of at most {_MAX_DIMENSIONS} dimensions, found {value.ndim}")
        padding = add(value.nbytes)
        if value.nbytes:
            part = np.ascontiguousarray(value, dtype=little).reshape(-1).view(np.uint8)
            # A bool view of numbers may contain bytes other than 0 and 1, which readers reject.
            parts.extend((((part != 0) if name == "bool" else part).data, padding))
        return {ARRAY_KEY: [name, list(value.shape), offset]}

    line = encode_row(row, pack)
    # The counts include keys that merely contain the text of these, so if they differ, check each object.
    if sum(map(line.count, _KEYS_IN_LINE)) != count:
        refuse_array_key(row)
    return PackedRow(line, b"".join(parts))


def move_arrays(line: bytes, by: int) -> bytes:
    """Returns a line of `pack_row` with the offsets of its arrays and blobs increased by `by` bytes."""
    return _DESCRIBED.sub(lambda found: b"%b%d" % (found[1], int(found[2]) + by), line) if by else line


def may_hold_arrays(line: bytes) -> bool:
    """Returns whether a line may contain an array, a blob or a reserved key; False is certain."""
    return b"$array" in line or b"$bytes" in line or b"\\u" in line


def refuse_array_key(row: object) -> None:
    """Raises RowInvalid if a row has a reserved key."""
    for value in values_in(row):
        if isinstance(value, dict) and (key := next((key for key in (ARRAY_KEY, BLOB_KEY) if key in value), None)):
            raise _invalid(f"the key {key!r} is reserved in a stream with arrays; rename it")


def media_type(blob: bytes) -> str | None:
    """Returns the media type of an image, a recording or a video by its first bytes; None if it is not known.

    >>> media_type(b"GIF89a..."), media_type(b"text")
    ('image/gif', None)
    """
    return next((name for at, magic, name in _MAGIC_BYTES if blob.startswith(magic, at)), None)


def fill_row(row: dict[str, Any], data: ByteArray) -> None:
    """Replaces the descriptions in a parsed row by arrays, which are views of `data`, and bytes; each is checked first.

    `data` is u8 of shape (bytes,): the row's bytes in the side file. After a RowInvalid the row is partly filled.
    """
    if ARRAY_KEY in row or BLOB_KEY in row:
        raise _invalid(f"expected a row, found an array in its place (key {ARRAY_KEY!r} or {BLOB_KEY!r})")
    pending: list[dict[str, Any] | list[Any]] = [row]
    while pending:
        container: Any = pending.pop()
        for key, value in container.items() if type(container) is dict else enumerate(container):
            kind = type(value)
            if kind is dict and ARRAY_KEY in value:
                container[key] = _array(value, key, data)
            elif kind is dict and BLOB_KEY in value:
                container[key] = _blob(value, key, data)
            elif kind is dict or kind is list:
                pending.append(value)


def _array(value: dict[str, Any], key: str | int, data: ByteArray) -> Array:
    described = value[ARRAY_KEY]
    if len(value) != 1 or type(described) is not list or len(described) != 3:
        raise _refused(key, f'{{"{ARRAY_KEY}":[dtype, shape, offset]}}', value)
    name, shape, offset = described
    dtype = DTYPES.get(name) if type(name) is str else None
    if dtype is None:
        raise _refused(key, f"a dtype of {', '.join(DTYPES)}", name)
    if type(shape) is not list or len(shape) > _MAX_DIMENSIONS or not all(map(_is_count, shape)):
        raise _refused(key, f"a shape of at most {_MAX_DIMENSIONS} integers of at least 0", shape)
    # numpy multiplies the nonzero dimensions even if the array is empty.
    if math.prod(filter(None, shape)) > _MAX_COUNT // dtype.itemsize:
        raise _refused(key, "a shape whose elements can be counted", shape)
    stop = _stop(value, key, data, offset, math.prod(shape) * dtype.itemsize)
    array: Array = np.ndarray(shape, dtype, data, offset)
    if dtype == np.bool_ and array.size and data[offset:stop].max() > 1:
        raise _refused(key, "truth values, bytes of 0 and 1", f"{data[offset:stop].max()}")
    return array


def _blob(value: dict[str, Any], key: str | int, data: ByteArray) -> bytes:
    described = value[BLOB_KEY]
    if len(value) != 1 or type(described) is not list or len(described) != 3:
        raise _refused(key, f'{{"{BLOB_KEY}":[size, offset, media type]}}', value)
    size, offset, media = described
    if not _is_count(size):
        raise _refused(key, "a size of at least 0", size)
    if media is not None and not (type(media) is str and _MEDIA_TYPE.fullmatch(media)):
        raise _refused(key, "a media type such as image/png, or null", media)
    return data[offset : _stop(value, key, data, offset, size)].tobytes()


def _stop(value: dict[str, Any], key: str | int, data: ByteArray, offset: Any, size: int) -> int:
    """Returns where an array or a blob of `size` bytes ends. Raises RowInvalid if the offset or the end is wrong."""
    if not _is_count(offset) or offset % _ALIGNMENT:
        raise _refused(key, f"an offset that is a multiple of {_ALIGNMENT}", offset)
    stop: int = offset + size
    if stop > len(data):
        raise _refused(key, f"an end within the {len(data)} bytes of its row", f"{value}, which ends at {stop}")
    return stop


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _refused(key: str | int, expected: str, found: Any) -> RowInvalid:
    return _invalid(f"the value at {key!r:.80}: expected {expected}, found {str(found)!r:.120}")


def _invalid(reason: str) -> RowInvalid:
    return RowInvalid(f"not a row: {reason}", reason=reason)


# Encoded samples in the cache of a node: one file per chunk, with a slot for each row, followed by records
#
#   offset
#   0        magic (24 bytes), key (16), rows (u64), 8 bytes of 0, digest of these 56 bytes (u64)
#   64       for each row a slot: offset, size and digest of its record (u64 each); zeros if there is none
#   ...      records, anywhere after the slots:
#              key (16), row (u64), digest of the row's line (u64), bytes of the text (u64)
#              arrays: as in the side file of a chunk, each at a multiple of 8 bytes from here
#              text: a line of JSON that describes the sample, or why the row was dropped
#
# All numbers are little-endian, all digests XXH3 (64 bits, seed 0). A record identifies its chunk and encoding (the
# key), its row, and the line it was made from. So even if slots or records were overwritten, a read returns either
# exactly what was stored, or nothing.

KEPT_VERSION: Final = 1  # Of these bytes and of the text; another version uses other file names
MAX_RECORD_BYTES: Final = 1 << 30  # A record is read in one system call. A slot with a larger size is damaged
# Minimum cache size: a smaller one has no room for the slots of a chunk and a sample, and would silently store nothing
LEAST_CACHE_BYTES: Final = 4096

_MAGIC: Final = b"lazyshard kept sample\n\0\1"
_FACE: Final = struct.Struct("<24s16sQ8x")
SLOT: Final = struct.Struct("<QQQ")  # Offset in the file, 0 if there is no record; size; digest
_HEAD: Final = struct.Struct("<16sQQQ")
HEAD_BYTES: Final = _FACE.size + 8
_SAMPLE: Final = "sample"
_DROPPED: Final = "dropped"

_digest = xxhash.xxh3_64_intdigest


class Kept(NamedTuple):
    """The cached result of a row: the packed `sample`, or why it was `dropped`, None if it was not."""

    sample: Any
    dropped: str | None = None


def chunk_key(encoding: Encoding, number: int, samples_per_chunk: int, rows: int, identity: bytes) -> bytes:
    """Returns the key of a chunk's cached samples, 16 bytes; `identity` is the identity of `stream.chunk.Chunk`."""
    facts = orjson.dumps(dict(encoding), option=orjson.OPT_SORT_KEYS)
    place = f"{KEPT_VERSION} {number} {samples_per_chunk} {rows} ".encode()
    return xxhash.xxh3_128_digest(place + xxhash.xxh3_128_digest(facts) + identity)


def slot_at(row: int) -> int:
    """Returns the offset of a row's slot; for the number of rows, the offset at which the records begin."""
    return HEAD_BYTES + row * SLOT.size


def encode_head(key: bytes, rows: int) -> bytes:
    """Returns the header of a file."""
    face = _FACE.pack(_MAGIC, key, rows)
    return face + _digest(face).to_bytes(8, "little")


def encode_sample(packed: Any, key: bytes, row: int, line: int, *, dropped: bool = False) -> bytes:
    """Returns the record of a row's sample, or if `dropped` of the reason; `line` is its line's digest.

    Raises as `pack_row`.
    """
    text, arrays = pack_row({_DROPPED if dropped else _SAMPLE: packed})
    return _HEAD.pack(key, row, line, len(text)) + arrays + text


def encode_slot(record: bytes, offset: int) -> bytes:
    """Returns the slot of a record at an offset."""
    return SLOT.pack(offset, len(record), _digest(record))


def decode_record(data: ByteArray, digest: int, key: bytes, row: int, line: int) -> Kept | None:
    """Returns the content of a record; None unless it is the whole record of this row, chunk and line.

    `data` is u8 of shape (bytes,), owned by the caller: arrays of the sample are views of it; `digest` is the slot's.
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
        # The digest is right but the content is not: written by an unknown program.
        return None
