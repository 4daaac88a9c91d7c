"""The small files of a stream as literal bytes, with what no field of them may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from hypothesis import strategies as st

from lazyshard.errors import (
    FileInvalid,
    FormatInvalid,
    SealInvalid,
)
from lazyshard.format.cursor import Cursor, ReadingMark
from lazyshard.format.records import STATES, End, Head, Manifest, Owner, Retired
from lazyshard.format.seal import Seal
from tests.format.cases import not_an_integer

STREAM_ID: Final = "5f0c1a9be7d24c3f8a6b0e1d2c3b4a59"
MAX_CHUNKS: Final = 10**15
MAX_SAMPLES: Final = 2**62

Wrong = tuple[dict[str, object], str, str, str]
"""Fields that are changed, and which field is refused with which expectation and finding."""


def integer(field: str, low: int, high: int) -> list[Wrong]:
    return [
        ({field: value}, field, f"an integer from {low} to {high}", shown) for value, shown in not_an_integer(low, high)
    ]


def texts(field: str, expected: str, *values: tuple[object, str]) -> list[Wrong]:
    return [({field: value}, field, expected, shown) for value, shown in values]


def shown(field: str, expected: str, *values: object) -> list[Wrong]:
    return [({field: value}, field, expected, repr(value)) for value in values]


def plan_seeds(*values: object) -> list[Wrong]:
    expected = "an integer from 0 to 9223372036854775807"
    return [({"plan": {"dp_size": 8, "seed": value}}, "plan.seed", expected, repr(value)) for value in values]


@dataclass(frozen=True, slots=True)
class Record:
    """A file.

    Attributes:
        file: its name in the stream.
        decode: reads it; takes the bytes and the path for messages.
        golden: its bytes.
        value: what they say; None where it cannot be compared.
        wrong: what is refused.
        values: any such value that can be written.
        newest: its newest format.
        optional: fields that may be missing.
        error: what a refusal is.
    """

    file: str
    decode: Callable[..., Any]
    golden: bytes
    value: Any
    wrong: list[Wrong]
    values: st.SearchStrategy[Any]
    newest: int = 1
    optional: tuple[str, ...] = ()
    error: type[FormatInvalid] = FileInvalid


finite = st.floats(allow_nan=False, allow_infinity=False)
text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
chunks = st.integers(0, MAX_CHUNKS)
counts = st.tuples(chunks, st.integers(0, 10**18)).map(lambda pair: (pair[0], pair[0] and sum(pair)))
no_text = [("", "''"), (1, "1"), (None, "null")]

RECORDS: Final = {
    "end": Record(
        "stream.end",
        End.decode,
        b'{"format":1,"chunks":3,"samples":25}\n',
        End(3, 25),
        [
            *integer("chunks", 0, MAX_CHUNKS),
            *integer("samples", 0, MAX_SAMPLES),
            ({"samples": 2}, "samples", "at least one for each of 3 chunks", "2"),
            ({"chunks": 0}, "samples", "0, as there is no chunk", "25"),
        ],
        counts.map(lambda pair: End(*pair)),
    ),
    "owner": Record(
        "stream.owner",
        Owner.decode,
        b'{"format":1,"epoch":2,"token":"00c0ffee","host":"node1","pid":42,"since":1700000000.5}\n',
        Owner(2, "00c0ffee", "node1", 42, 1700000000.5),
        [
            *integer("epoch", 1, MAX_SAMPLES),
            *integer("pid", 0, 2**31),
            *texts("token", "a string", *no_text),
            *texts("host", "a string", *no_text),
            ({"since": False}, "since", "a number", "false"),
        ],
        st.builds(Owner, st.integers(1, MAX_SAMPLES), text, text, st.integers(0, 2**31), finite),
    ),
    "retired": Record(
        "retired.json",
        Retired.decode,
        b'{"format":1,"stream_id":"%s","chunks_before":20,"updated_at":1700000001.25}\n' % STREAM_ID.encode(),
        Retired(STREAM_ID, 20, 1700000001.25),
        [
            *integer("chunks_before", 0, MAX_CHUNKS),
            *texts("stream_id", "32 hexadecimal digits", ("5f", "'5f'"), (STREAM_ID.upper(), repr(STREAM_ID.upper()))),
            *texts("stream_id", "a string", (None, "null"), (5, "5"), ("", "''")),
        ],
        st.builds(Retired, st.just(STREAM_ID), chunks, st.floats(0, 1e12)),
    ),
    "manifest": Record(
        "stream.json",
        Manifest.decode,
        b'{"format":1,"stream_id":"%s","samples_per_chunk":1000,"created_at":1700000000.5}\n' % STREAM_ID.encode(),
        Manifest(STREAM_ID, 1000, 1700000000.5),
        [
            *integer("samples_per_chunk", 1, 100_000_000),
            *shown(
                "stream_id",
                "32 hexadecimal digits",
                "0123",
                STREAM_ID.upper(),
                "0" * 33,
                "g" * 32,
                "\u0660" * 32,
                "../" * 8 + "etc/pwd/",
            ),
        ],
        st.builds(Manifest, st.text("0123456789abcdef", min_size=32, max_size=32), st.integers(1, 100_000_000), finite),
        newest=2,
    ),
    "head": Record(
        "head.json",
        Head.decode,
        b'{"format":1,"chunks":3,"samples":25,"ended":false,"state":"running","rate":12.5,'
        b'"host":"node1","pid":42,"updated_at":1700000001.25}\n',
        Head(3, 25, False, "running", 12.5, "node1", 42, 1700000001.25),
        [
            *integer("chunks", 0, MAX_CHUNKS),
            *integer("samples", 0, MAX_SAMPLES),
            *integer("open", 0, MAX_SAMPLES),
            *integer("pid", 0, 2**31),
            ({"samples": 2}, "samples", "at least one for each of 3 chunks", "2"),
            ({"chunks": 0}, "samples", "0, as there is no chunk", "25"),
            *texts("state", "one of running, waiting, idle, finished, failed", ("paused", "'paused'"), *no_text),
            ({"ended": 1}, "ended", "true or false", "1"),
            *shown("rate", "a number", "1"),
            *shown("updated_at", "a number", "1"),
            *shown("row_at", "a number", "1"),
            *texts("host", "a string", *no_text),
        ],
        st.builds(
            lambda count, *rest: Head(*count, *rest),
            counts,
            st.booleans(),
            st.sampled_from(STATES),
            st.floats(0, 1e300),
            text,
            st.integers(0, 2**31),
            finite,
        ),
    ),
    "hint": Record(
        "cursors/sft.reading.json",
        lambda data, *file: ReadingMark.decode(data, "sft", *file),
        b'{"format":1,"consumer":"sft","stream_id":"%s","dp_size":8,"window":3,"needs_chunks":64,'
        b'"updated_at":1700000001.25}\n' % STREAM_ID.encode(),
        ReadingMark("sft", STREAM_ID, 8, 3, 64, 1700000001.25),
        [
            *integer("dp_size", 1, 2**31),
            *integer("window", 0, MAX_SAMPLES),
            *integer("needs_chunks", 0, MAX_CHUNKS),
            *shown("stream_id", "32 hexadecimal digits or null", "", "5f", 5),
            ({"consumer": "dpo"}, "consumer", "one of sft", "'dpo'"),
        ],
        st.builds(
            ReadingMark,
            st.just("sft"),
            st.none(),
            st.integers(1, 2**31),
            st.integers(0, MAX_SAMPLES),
            chunks,
            st.floats(0, 1e12),
        ),
        optional=("stream_id",),
    ),
    "cursor": Record(
        "cursors/sft.json",
        lambda data, *file: Cursor.decode(data, "sft", *file),
        b'{"format":1,"consumer":"sft","stream_id":"%s","consumed":2048,"chunks_before":20,'
        b'"plan":{"dp_size":8,"seed":0},"updated_at":1700000001.25}\n' % STREAM_ID.encode(),
        Cursor("sft", STREAM_ID, 2048, 20, {"dp_size": 8, "seed": 0}, 1700000001.25),
        [
            *integer("consumed", 0, MAX_SAMPLES),
            *integer("chunks_before", 0, MAX_CHUNKS),
            *plan_seeds(-1, 2**63, 1.0, "8", None, True, [8], {"8": 8}),
            *shown("plan", "an object", None, 8, "8", [8]),
            *shown("stream_id", "32 hexadecimal digits or null", "", "5f", "5f\n", 5),
            ({"consumer": "dpo"}, "consumer", "one of sft", "'dpo'"),
        ],
        st.builds(
            Cursor,
            st.just("sft"),
            st.just(STREAM_ID),
            st.integers(0, MAX_SAMPLES),
            chunks,
            st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), st.integers(0, 2**63 - 1)),
            finite,
        ),
        optional=("stream_id",),
    ),
    "seal": Record(
        "chunk_00007.jsonl.completed",
        lambda data, *file: Seal.decode(data, 7, *file),
        b'{"format":1,"chunk":7,"samples":2,"bytes":34,"offsets":"AAAAAAAAAAAPAAAAAAAAACIAAAAAAAAA",'
        b'"xxh3":"9oaKxn4L9YfgN7nyWtPycQ==","tokens":"AwAAAAcAAAA=","source":{"in.jsonl":34},"sealed_at":1700000002.5}\n',
        None,
        [
            *integer("chunk", 0, MAX_CHUNKS),
            *integer("samples", 1, 100_000_000),
            *integer("bytes", 1, MAX_SAMPLES),
            ({"chunk": 8}, "chunk", "7, as in the file's name", "8"),
            ({"bytes": 33}, "bytes", "34, where the last row ends", "33"),
            *texts("sealed_at", "a number", (None, "null"), (True, "true"), ("1", "'1'")),
        ],
        st.builds(
            Seal,
            chunk=st.just(7),
            offsets=st.just(np.array([0, 15], "<u8")),
            digests=st.integers(0, 2**64 - 1).map(lambda one: np.array([one], "<u8")),
            tokens=st.none(),
            source=st.none() | text,
            sealed_at=finite,
        ),
        newest=2,
        optional=("tokens", "source"),
        error=SealInvalid,
    ),
}

WRONG: Final = [(name, one) for name, record in RECORDS.items() for one in record.wrong]
