"""The files of a stream directory as values: encode, decode, validate. No I/O, no clock.

- `names`: file names; `fields`: how JSON of other people's making is read
- `manifest`, `head`, `end`, `owner`, `seal`, `tokens`, `retired`, `cursor`, `reading`: one file of the directory each
- `cursor_token`: which run writes a cursor; `stream_id`: what tells a stream from its replacement
- `state` with `state_fields`: what a run needs to go on, in checkpoints and cursors; `blend_state`: of several streams;
  `sequence_state`: over sequences
- `arrays`: arrays in rows; `sealed_arrays`: what a seal says of them; `mixed`: what it says of the mixture of sources
- `encoding`: what encoded rows were made with; `encoded_row`: such a row on its way
- `source_rows`, `dealt`: what seals of the producer say of the rows it read, and how it dealt them
- `byte_size`: a number of bytes as people write it; `odd_value`: what to say of a value that is no JSON
- `kept_sample`: not of the directory: an encoded sample in the cache of a node
- `indexed`: not of the directory: the index of Megatron's IndexedDataset
- `row`: one line of a chunk; `batch`: many at a time; `duplicate_keys`: what is odd in one; `packed_row`: a row of rows

The specification for other languages is `docs/format.md`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lazyshard.lazy import lazily

if TYPE_CHECKING:
    from lazyshard.format.batch import CheckedArrays, CheckedLines, check_lines
    from lazyshard.format.cursor import Cursor, check_consumer
    from lazyshard.format.duplicate_keys import has_duplicate_keys
    from lazyshard.format.encoded_row import EncodedRow, check_encoded
    from lazyshard.format.encoding import Encoding, check_encoding
    from lazyshard.format.end import End
    from lazyshard.format.fields import FORMAT
    from lazyshard.format.head import STATES, Head, ProducerState
    from lazyshard.format.manifest import Manifest, check_samples_per_chunk
    from lazyshard.format.owner import Owner
    from lazyshard.format.packed_row import PackedRow, decode_pack, encode_encoded_pack, encode_pack
    from lazyshard.format.reading import ReadingMark
    from lazyshard.format.retired import Retired
    from lazyshard.format.row import check_line, check_row, encode_row, parse_row
    from lazyshard.format.seal import Seal
    from lazyshard.format.sealed_arrays import SealedArrays
    from lazyshard.format.state import PartState, RunState

__all__ = [
    "FORMAT",
    "STATES",
    "CheckedArrays",
    "CheckedLines",
    "Cursor",
    "EncodedRow",
    "Encoding",
    "End",
    "Head",
    "Manifest",
    "Owner",
    "PackedRow",
    "PartState",
    "ProducerState",
    "ReadingMark",
    "Retired",
    "RunState",
    "Seal",
    "SealedArrays",
    "check_consumer",
    "check_encoded",
    "check_encoding",
    "check_line",
    "check_lines",
    "check_row",
    "check_samples_per_chunk",
    "decode_pack",
    "encode_encoded_pack",
    "encode_pack",
    "encode_row",
    "has_duplicate_keys",
    "parse_row",
]

_HOMES: Final = {
    "batch": (
        "CheckedArrays",
        "CheckedLines",
        "check_lines",
    ),
    "cursor": (
        "Cursor",
        "check_consumer",
    ),
    "duplicate_keys": ("has_duplicate_keys",),
    "encoded_row": (
        "EncodedRow",
        "check_encoded",
    ),
    "encoding": (
        "Encoding",
        "check_encoding",
    ),
    "end": ("End",),
    "fields": ("FORMAT",),
    "head": (
        "STATES",
        "Head",
        "ProducerState",
    ),
    "manifest": (
        "Manifest",
        "check_samples_per_chunk",
    ),
    "owner": ("Owner",),
    "packed_row": (
        "PackedRow",
        "decode_pack",
        "encode_encoded_pack",
        "encode_pack",
    ),
    "reading": ("ReadingMark",),
    "retired": ("Retired",),
    "row": (
        "check_line",
        "check_row",
        "encode_row",
        "parse_row",
    ),
    "seal": ("Seal",),
    "sealed_arrays": ("SealedArrays",),
    "state": (
        "PartState",
        "RunState",
    ),
}

__getattr__ = lazily(__name__, _HOMES)
