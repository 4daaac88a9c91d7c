"""The small files of a stream as literal bytes, with what no field of them may be."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import orjson
from hypothesis import strategies as st

from lazyshard.errors import ChunkCorrupt, FileInvalid, FormatInvalid, StateInvalid
from lazyshard.format.records import STATES, End, Head, Manifest, Owner, Retired, encode, in_file, pack, parse_object
from lazyshard.format.seal import Seal, SealedArrays
from lazyshard.format.state import BlendShare, Cursor, ReadingHint, RunState
from lazyshard.part import Part
from tests.stream.streams import raised

finite: Final = st.floats(allow_nan=False, allow_infinity=False)
integers: Final = st.integers(-(2**63), 2**64 - 1)  # all that a row can hold


def json_of(leaves: st.SearchStrategy[Any], keys: st.SearchStrategy[str], most: int) -> st.SearchStrategy[Any]:
    def extend(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3)

    return st.recursive(leaves, extend, max_leaves=most)


def changed(data: bytes, **values: Any) -> bytes:
    return orjson.dumps(orjson.loads(data) | values)


GONE: Final = object()


def with_field(data: bytes, path: str, value: Any = GONE) -> Any:
    """What the file says, with the field at a path like `parts.0.dp` replaced or gone."""
    values = orjson.loads(data)
    at = values
    *parents, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in parents:
        at = at[step]
    at[last] = value
    if value is GONE:
        del at[last]
    return values


def without(data: bytes, field: str) -> bytes:
    return orjson.dumps(with_field(data, field))


def refusal(decode: Callable[[], object], error: type[FormatInvalid], file: str, field: str | None) -> FormatInvalid:
    """The error with which the decoder refuses a field of a file; its message says all that it says in its fields."""
    found = raised(error, decode)
    assert (type(found), found.file, found.field) == (error, file, field)
    assert all(str(said) in str(found) for said in (file, field or file, found.expected, found.actual))
    return found


STREAM_ID: Final = "5f0c1a9be7d24c3f8a6b0e1d2c3b4a59"
DIGESTS: Final = (9796749203539134198, 8210857458222577632)
"""XXH3 of `{"text":"one"}` and `{"text":"zwei ü"}`, each with its newline."""
MAX_CHUNKS: Final = 10**15
MAX_SAMPLES: Final = 2**62


@dataclass(frozen=True, slots=True)
class Wrong:
    path: str  # as `with_field` takes it
    value: object  # what it becomes
    field: str  # which one is refused
    expected: str  # what the refusal says of what is expected, in part


def wrong(paths: str, *values: object, expected: str = "", field: str = "") -> list[Wrong]:
    pairs = [(path, value) for path in paths.split() for value in values]
    return [Wrong(path, value, field or re.sub(r"\.([0-9]+)", r"[\1]", path), expected) for path, value in pairs]


def integer(paths: str, low: int, high: int) -> list[Wrong]:
    expected = f"an integer from {low} to {high}"
    return wrong(paths, low - 1, high + 1, True, None, 2.0, "2", [2], {"2": 2}, expected=expected)


@dataclass(frozen=True, slots=True)
class Record:
    file: str  # its name in the stream
    decode: Callable[..., Any]  # takes the bytes and the path for messages
    golden: bytes
    value: Any  # what they say
    wrong: list[Wrong]
    values: st.SearchStrategy[Any]  # any such value that can be written
    newest: int = 1  # format
    optional: tuple[str, ...] = ()  # fields that may be missing
    error: type[FormatInvalid] = FileInvalid


def read_state(data: bytes, file: str = "lazyshard.json") -> RunState:
    with in_file(file, StateInvalid):
        return RunState.read(parse_object(data))


def written(value: Any) -> bytes:
    return encode(value.to_dict()) if isinstance(value, RunState) else bytes(value.encode())


text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
chunks = st.integers(0, MAX_CHUNKS)
samples = st.integers(0, MAX_SAMPLES)
counts = st.tuples(chunks, st.integers(0, 10**18)).map(lambda pair: (pair[0], pair[0] and sum(pair)))
ends = counts.map(lambda pair: End(*pair))
_head = (counts, st.booleans(), st.sampled_from(STATES), st.floats(0, 1e300), text, st.integers(0, 2**31), finite)
heads = st.builds(lambda count, *more: Head(*count, *more), *_head)
draws = st.integers(0, 40) | st.sampled_from([2**31, 2**40])
no_text = ("", 1, None)
COUNTS: Final = [
    *integer("chunks", 0, MAX_CHUNKS),
    *integer("samples", 0, MAX_SAMPLES),
    *wrong("samples", 2, expected="at least one for each of 3"),
    *wrong("chunks", 0, field="samples", expected="0, "),
]
NO_STREAM_ID: Final = ["", "5f", "5f\n", 5, STREAM_ID.upper()]

borders = st.lists(st.integers(1, 2**40), max_size=6, unique=True).map(sorted)
skips = borders.map(lambda found: tuple(zip(found[::2], found[1::2], strict=False)))
parts_of_runs = st.builds(
    Part, st.integers(1, 2**20), st.integers(1, 2**62), draws, st.none() | draws, st.booleans(), skips, draws, draws
)


@st.composite
def states(draw: st.DrawFn) -> RunState:
    parts = sorted(draw(st.lists(parts_of_runs, min_size=1, max_size=4)), key=lambda part: part.first_step)
    unit = draw(st.integers(1, 2**20))
    return RunState(
        stream_id=draw(st.none() | st.just(STREAM_ID)),
        samples_per_chunk=draw(st.integers(1, 10**8)),
        unit=unit,
        window=unit * draw(draws),
        seed=draw(st.integers(0, 2**63 - 1)),
        max_total_samples=draw(st.none() | st.integers(1, 2**62)),
        parts=tuple(parts),
        consumed=sum(part.dp * part.draws for part in parts if part.trained),
    )


@st.composite
def seals(draw: st.DrawFn) -> Seal:
    numbers = st.tuples(st.integers(1, 2**40), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
    sizes, digests, tokens = zip(*draw(st.lists(numbers, min_size=1)), strict=True)
    return Seal(
        chunk=7,
        offsets=np.cumsum([0, *sizes], dtype="<u8"),
        digests=np.array(digests, "<u8"),
        tokens=np.array(tokens, "<u4") if draw(st.booleans()) else None,
        source=draw(json_of(st.none() | st.booleans() | integers | text, st.text("ab"), 5)),
        sealed_at=draw(finite),
    )


def plain(value: Any) -> Any:
    """The same as it can be compared, which the arrays of a seal cannot be."""
    if not isinstance(value, Seal):
        return value
    arrays: list[Any] = [value.offsets, value.digests, value.tokens, value.patches]
    arrays += [value.arrays.offsets, value.arrays.digests] if value.arrays else []
    numbers = [None if one is None else (one.dtype.name, one.tolist()) for one in arrays]
    return value.chunk, numbers, value.source, value.sealed_at


def u64(*values: int) -> Any:
    return np.array(values, np.uint64)


CURSOR: Final = Cursor("sft", STREAM_ID, 2048, 20, {"dp_size": 8, "seed": 0}, 1700000001.25)
CURSOR_GOLDEN: Final = (
    b'{"format":1,"consumer":"sft","stream_id":"%s","consumed":2048,"chunks_before":20,'
    b'"plan":{"dp_size":8,"seed":0},"updated_at":1700000001.25}\n' % STREAM_ID.encode()
)
_plans = st.dictionaries(text | st.just(""), st.integers(0, 2**63 - 1))
CURSORS: Final = st.builds(Cursor, st.just("sft"), st.just(STREAM_ID), samples, chunks, _plans, finite)
OWNER: Final = "3/9c41d7e2b06f83a5 process 14106 on node1"
CURSOR_STATE: Final = RunState(STREAM_ID, 100, 100, 0, 0, None, (Part(8, 4, 256),), 2048)
_STATE: Final = CURSOR_STATE.to_dict()
_PARTS: Final = (
    Part(4, 2, 100, draws_per_step=10),
    Part(4, 2, 6, trained=False, first_step=10),
    Part(2, 1, 30, epoch=1, skip=((0, 5), (5, 9), (40, 41)), first_step=10, draws_per_step=3),
)

RECORDS: Final = {
    "end": Record("stream.end", End.decode, b'{"format":1,"chunks":3,"samples":25}\n', End(3, 25), COUNTS, ends),
    "owner": Record(
        "stream.owner",
        Owner.decode,
        b'{"format":1,"epoch":2,"token":"00c0ffee","host":"node1","pid":42,"since":1700000000.5}\n',
        Owner(2, "00c0ffee", "node1", 42, 1700000000.5),
        [
            *integer("epoch", 1, MAX_SAMPLES),
            *integer("pid", 0, 2**31),
            *wrong("token host", *no_text),
            *wrong("since", False),
        ],
        st.builds(Owner, st.integers(1, MAX_SAMPLES), text, text, st.integers(0, 2**31), finite),
    ),
    "retired": Record(
        "retired.json",
        Retired.decode,
        b'{"format":1,"stream_id":"%s","chunks_before":20,"updated_at":1700000001.25}\n' % STREAM_ID.encode(),
        Retired(STREAM_ID, 20, 1700000001.25),
        [*integer("chunks_before", 0, MAX_CHUNKS), *wrong("stream_id", *NO_STREAM_ID, None)],
        st.builds(Retired, st.just(STREAM_ID), chunks, st.floats(0, 1e12)),
    ),
    "manifest": Record(
        "stream.json",
        Manifest.decode,
        b'{"format":1,"stream_id":"%s","samples_per_chunk":1000,"created_at":1700000000.5}\n' % STREAM_ID.encode(),
        Manifest(STREAM_ID, 1000, 1700000000.5),
        [
            *integer("samples_per_chunk", 1, 100_000_000),
            *wrong("stream_id", *NO_STREAM_ID, None, "0" * 33, "g" * 32, "\u0660" * 32, "../" * 8 + "etc/pwd/"),
        ],
        st.builds(Manifest, st.text("0123456789abcdef", min_size=32, max_size=32), st.integers(1, 100_000_000), finite),
        newest=2,
    ),
    "manifest of encoded rows": Record(
        "stream.json",
        Manifest.decode,
        b'{"format":2,"stream_id":"%s","samples_per_chunk":1000,"created_at":1700000000.5,'
        b'"encoding":{"kind":"swift","binary":null,"scale":0.5,"thinking":false}}\n' % STREAM_ID.encode(),
        Manifest(
            STREAM_ID, 1000, 1700000000.5, True, {"kind": "swift", "binary": None, "scale": 0.5, "thinking": False}
        ),
        wrong("encoding", [], {}, "swift", {"a": {}}, {"a": [1]}, {"": 1}, expected="1 to 1000"),
        st.builds(Manifest, st.just(STREAM_ID), st.just(5), finite, st.just(True)),
        newest=2,
        optional=("encoding",),
    ),
    "head": Record(
        "head.json",
        Head.decode,
        b'{"format":1,"chunks":3,"samples":25,"ended":false,"state":"running","rate":12.5,'
        b'"host":"node1","pid":42,"updated_at":1700000001.25}\n',
        Head(3, 25, False, "running", 12.5, "node1", 42, 1700000001.25),
        [
            *COUNTS,
            *integer("open", 0, MAX_SAMPLES),
            *integer("pid", 0, 2**31),
            *wrong("state", "paused", *no_text),
            *wrong("ended note", 1),
            *wrong("rate updated_at row_at", "1"),
            *wrong("host", *no_text),
        ],
        heads,
    ),
    "hint": Record(
        "cursors/sft.reading.json",
        lambda data, *file: ReadingHint.decode(data, "sft", *file),
        b'{"format":1,"consumer":"sft","stream_id":"%s","dp_size":8,"window":3,"needs_chunks":64,'
        b'"updated_at":1700000001.25}\n' % STREAM_ID.encode(),
        ReadingHint("sft", STREAM_ID, 8, 3, 64, 1700000001.25),
        [
            *integer("dp_size", 1, 2**31),
            *integer("window", 0, MAX_SAMPLES),
            *integer("needs_chunks", 0, MAX_CHUNKS),
            *wrong("stream_id", *NO_STREAM_ID),
            *wrong("consumer", "dpo"),
        ],
        st.builds(ReadingHint, st.just("sft"), st.none(), st.integers(1, 2**31), samples, chunks, st.floats(0, 1e12)),
        optional=("stream_id",),
    ),
    "cursor": Record(
        "cursors/sft.json",
        lambda data, *file: Cursor.decode(data, "sft", *file),
        CURSOR_GOLDEN,
        CURSOR,
        [
            *integer("consumed", 0, MAX_SAMPLES),
            *integer("chunks_before", 0, MAX_CHUNKS),
            *integer("plan.seed", 0, 2**63 - 1),
            *wrong("plan", None, 8, "8", [8]),
            *wrong("stream_id", *NO_STREAM_ID),
            *wrong("consumer", "dpo"),
        ],
        CURSORS,
        optional=("stream_id",),
    ),
    "cursor of a run": Record(
        "cursors/sft.json",
        lambda data, *file: Cursor.decode(data, "sft", *file),
        CURSOR_GOLDEN[:-2] + b',"state":' + written(CURSOR_STATE)[:-1] + b',"owner":"' + OWNER.encode() + b'"}\n',
        replace(CURSOR, state=CURSOR_STATE, owner=OWNER),
        [
            *wrong("state", 5),
            *wrong("state", {}, field="state.format"),
            *wrong("state", _STATE | {"window": 7}, field="state.window"),
            *wrong("state", _STATE | {"parts": [5]}, field="state.parts[0]"),
            *wrong("stream_id", None, field="state.stream_id", expected="None"),
            *wrong("consumed", 2047, field="state.consumed", expected="2047"),
            *wrong("owner", 5, True, ["1/x"], "a\nb", "\x7f", "x" * 401, expected="at most 400 "),
        ],
        CURSORS,
        optional=("state", "owner"),
    ),
    "cursor of a blend": Record(
        "cursors/sft.json",
        lambda data, *file: Cursor.decode(data, "sft", *file),
        CURSOR_GOLDEN[:-2]
        + b',"blend":[{"stream":"/data/a","weight":0.75,"consumed":3},{"stream":"/b","weight":0.25,"consumed":1}]}\n',
        replace(CURSOR, blend=(BlendShare("/data/a", 0.75, 3), BlendShare("/b", 0.25, 1))),
        [
            *wrong("blend", "a", [], [{"stream": "a", "weight": 1, "consumed": 0}] * 65),
            *wrong("blend.0", 1),
            *wrong("blend.0.stream", "", "x" * 401),
            *wrong("blend.0.weight", 1.1, True),
            *wrong("blend.0.consumed", -1),
            *wrong("blend.0", {"stream": "a", "weight": 1}, field="blend[0].consumed"),
        ],
        CURSORS,
        optional=("stream_id", "blend"),
    ),
    "seal": Record(
        "chunk_00007.jsonl.completed",
        lambda data, *file: Seal.decode(data, 7, *file),
        b'{"format":1,"chunk":7,"samples":2,"bytes":34,"offsets":"AAAAAAAAAAAPAAAAAAAAACIAAAAAAAAA",'
        b'"xxh3":"9oaKxn4L9YfgN7nyWtPycQ==","tokens":"AwAAAAcAAAA=","source":{"in.jsonl":34},"sealed_at":1700000002.5}\n',
        Seal(7, u64(0, 15, 34), u64(*DIGESTS), np.array([3, 7], "<u4"), {"in.jsonl": 34}, 1700000002.5),
        [
            *integer("chunk", 0, MAX_CHUNKS),
            *integer("samples", 1, 100_000_000),
            *integer("bytes", 1, MAX_SAMPLES),
            *wrong("chunk", 8, expected="7, "),
            *wrong("bytes", 33, expected="34, "),
            *wrong("sealed_at", None, True, "1"),
            *wrong("offsets", pack([1, 15, 34], "<u8"), expected="a first row at byte 0"),
            *wrong("offsets", *(pack([0, at, 34], "<u8") for at in (35, 0, 34, 2**64 - 1)), expected="increasing"),
            *wrong("offsets", pack([0, 34], "<u8"), "", expected="3 numbers of 8 bytes"),
            *wrong("xxh3", pack([1, 2, 3], "<u8"), expected="2 numbers of 8 bytes"),
            *wrong("tokens", pack([1, 2], "<u8"), "", expected="2 numbers of 4 bytes"),
            *wrong("offsets xxh3 tokens", "AAAA*AAA", [1, 2], expected="base64"),
        ],
        seals(),
        newest=3,
        optional=("tokens", "source"),
        error=ChunkCorrupt,
    ),
    "seal with arrays": Record(
        "chunk_00000.jsonl.completed",
        lambda data, *file: Seal.decode(data, 0, *file),
        b'{"format":2,"chunk":0,"samples":2,"bytes":20,"offsets":"AAAAAAAAAAALAAAAAAAAABQAAAAAAAAA",'
        b'"xxh3":"AQAAAAAAAAACAAAAAAAAAA==","tokens":null,"arrays_bytes":16,'
        b'"arrays_offsets":"AAAAAAAAAAAQAAAAAAAAABAAAAAAAAAA","arrays_xxh3":"AwAAAAAAAAAEAAAAAAAAAA==",'
        b'"source":null,"sealed_at":1.5}\n',
        Seal(0, u64(0, 11, 20), u64(1, 2), sealed_at=1.5, arrays=SealedArrays(u64(0, 16, 16), u64(3, 4))),
        [
            *integer("arrays_bytes", 0, MAX_SAMPLES),
            *wrong("arrays_bytes", 24, expected="16, "),
            *wrong("arrays_offsets", pack([0, 16, 8], "<u8"), expected="non-decreasing"),
            *wrong("arrays_offsets", pack([0, 16], "<u8"), expected="3 numbers of 8 bytes"),
            *wrong("arrays_xxh3", pack([0, 16, 8], "<u8"), expected="2 numbers of 8 bytes"),
            *wrong("arrays_xxh3", None, expected="base64"),
        ],
        st.builds(Seal, st.just(0), st.just(np.array([0, 1], "<u8")), st.just(np.array([5], "<u8"))),
        newest=3,
        optional=("tokens", "source"),
        error=ChunkCorrupt,
    ),
    "seal with blobs": Record(
        "chunk_00000.jsonl.completed",
        lambda data, *file: Seal.decode(data, 0, *file),
        b'{"format":3,"chunk":0,"samples":1,"bytes":8,"offsets":"AAAAAAAAAAAIAAAAAAAAAA==","xxh3":"AQAAAAAAAAA=",'
        b'"tokens":null,"patches":"BwAAAA==","arrays_bytes":8,"arrays_offsets":"AAAAAAAAAAAIAAAAAAAAAA==",'
        b'"arrays_xxh3":"AwAAAAAAAAA=","source":null,"sealed_at":1.5}\n',
        Seal(0, u64(0, 8), u64(1), None, None, 1.5, SealedArrays(u64(0, 8), u64(3), blobs=True), u64(7).astype("<u4")),
        [
            *wrong("format", 0, "3", None, expected="an integer from 1"),
            *wrong("patches", pack([1], "<u8"), "", expected="1 numbers of 4 bytes"),
        ],
        st.builds(Seal, st.just(0), st.just(np.array([0, 1], "<u8")), st.just(np.array([5], "<u8"))),
        newest=3,
        optional=("tokens", "patches", "source"),
        error=ChunkCorrupt,
    ),
    "state": Record(
        "lazyshard.json",
        read_state,
        b'{"format":1,"stream_id":"5f0c1a9be7d24c3f8a6b0e1d2c3b4a59","samples_per_chunk":100,"unit":10,"window":20,'
        b'"seed":7,"max_total_samples":null,"parts":['
        b'{"dp":4,"batch_size":2,"draws":100,"epoch":null,"trained":true,"skip":[],"first_step":0,"draws_per_step":10},'
        b'{"dp":4,"batch_size":2,"draws":6,"epoch":null,"trained":false,"skip":[],"first_step":10,"draws_per_step":0},'
        b'{"dp":2,"batch_size":1,"draws":30,"epoch":1,"trained":true,"skip":[[0,5],[5,9],[40,41]],"first_step":10,'
        b'"draws_per_step":3}],"consumed":460}\n',
        RunState(STREAM_ID, 100, 10, 20, 7, None, _PARTS, 460),
        [
            *wrong("format", 0, -1, True, 1.0, "1", None, [1], expected="from 1 to 2147483648"),
            *wrong("stream_id", *NO_STREAM_ID),
            *integer("samples_per_chunk", 1, 10**8),
            *wrong("window", 5, 21, expected="a multiple of unit, 10"),
            *integer("seed", 0, 2**63 - 1),
            *wrong("max_total_samples", 0, True, "1", 2**62 + 1, expected=f"from 1 to {MAX_SAMPLES} or null"),
            *wrong("parts", None, 5, "parts", {"0": {}}, []),
            *wrong("parts.1", None, 5, [], "part"),
            *integer("parts.0.dp", 1, 2**31),
            *integer("unit parts.0.batch_size", 1, MAX_SAMPLES),
            *integer("window parts.0.draws parts.0.first_step parts.0.draws_per_step consumed", 0, MAX_SAMPLES),
            *wrong("parts.0.epoch", -1, False, 0.0, "0", expected=" or null"),
            *wrong("parts.0.trained", None, 0, 1, "true"),
            *wrong("parts.0.skip", None, 5, {"a": 1}, "05"),
            *wrong("parts.0.skip", [5], [[5]], [[5, 6, 7]], field="parts[0].skip[0]"),
            *wrong("parts.0.skip", [[-1, 3]], [[3.0, 5]], field="parts[0].skip[0][0]", expected="from 0 to"),
            *wrong("parts.0.skip", [[3, 3]], [[3, 2]], [[3, "5"]], [[3, 2**62 + 1]], field="parts[0].skip[0][1]"),
            *wrong("parts.0.skip", [[3, 5], [4, 6]], [[3, 5], [0, 2]], field="parts[0].skip[1][0]", expected="from 5 "),
            *wrong("parts.2.first_step", 0, 9, expected="at least 10"),
            *wrong("consumed", 0, 459, 461, 484, expected="460, "),
            *wrong("parts.2.draws", 31, field="consumed", expected="462, "),
            *wrong("parts.1.trained", True, field="consumed", expected="484, "),
        ],
        states(),
        error=StateInvalid,
    ),
}

WRONG: Final = [(name, one) for name, record in RECORDS.items() for one in record.wrong]
