"""Arrays in rows, rows that are encoded, packs, and records of kept samples: what was put in comes back."""

from typing import Any

import numpy as np
import orjson
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lazyshard.errors import RowInvalid
from lazyshard.format import arrays, batch
from lazyshard.format.arrays import Kept, chunk_key, encode_sample, fill_row, pack_row
from lazyshard.format.batch import check_lines, decode_pack, encode_encoded_pack, without_array_keys
from lazyshard.format.records import check_encoding, differences
from lazyshard.format.row import check_row, encode_row
from tests.format.records import json_of
from tests.stream.streams import raised

ROW: dict[str, Any] = {
    "id": 7,
    "input_ids": np.array([1, -2, 3], np.int32),
    "nested": [{"mask": np.array([[True], [False]])}, "text"],
    "nothing": np.zeros((0, 4)),
    "scalar": np.array(1.5, np.float16),
    "weights": np.array([0x3F80, 0xC000], np.uint16).view(arrays.BFLOAT16),
    "images": [b"GIF89a", b""],
}
LINE = (
    b'{"id":7,"input_ids":{"$array":["int32",[3],0]},"nested":[{"mask":{"$array":["bool",[2,1],16]}},"text"],'
    b'"nothing":{"$array":["float64",[0,4],24]},"scalar":{"$array":["float16",[],24]},'
    b'"weights":{"$array":["bfloat16",[2],32]},"images":[{"$bytes":[6,40,"image/gif"]},{"$bytes":[0,48,null]}]}\n'
)
BYTES = bytes.fromhex(
    "01000000 feffffff 03000000 00000000"
    "01 00 000000000000"  # mask
    "003e 000000000000"  # scalar
    "803f 00c0 00000000"
    "474946383961 0000"  # GIF89a
)


def filled(line: bytes, data: bytes) -> dict[str, Any]:
    row: dict[str, Any] = orjson.loads(line)
    fill_row(row, np.frombuffer(data, np.uint8))
    return row


def plain(value: Any) -> Any:
    """The same without arrays, which cannot be compared by ==."""
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.name, value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list) else value


def test_bytes_of_a_row_with_arrays_are_pinned() -> None:
    assert pack_row(ROW) == (LINE, BYTES)
    assert plain(filled(LINE, BYTES)) == plain(ROW)
    row = {"text": 'a "$array": or "$bytes": in a string', 'key with a quote"$array': 1}
    assert pack_row(row) == (encode_row(row), b"")


_NUMBERS = [dtype for name, dtype in arrays.DTYPES.items() if name != "bfloat16"]
_ARRAYS = st.sampled_from(_NUMBERS).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
)
_VALUES = json_of(st.none() | st.text(max_size=3) | st.binary(max_size=9) | _ARRAYS, st.sampled_from("abc"), 6)
_ROWS = st.dictionaries(st.text(max_size=3).filter(lambda key: key != "$array"), _VALUES, max_size=4)


@given(_ROWS)
def test_row_comes_back_as_it_was_and_its_bytes_are_aligned(row: dict[str, Any]) -> None:
    line, data = pack_row(row)
    assert len(data) % 8 == 0
    assert plain(filled(line, data)) == plain(row)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.int16).reshape(3, 4).T,
        np.arange(12, dtype=np.int16)[::-3],
        np.arange(6, dtype=">u4").reshape(2, 3),
        np.array([2, 0, 7], np.uint8).view(np.bool_),
    ],
    ids=["transposed", "strided", "big-endian", "truth values of other bytes"],
)
def test_array_of_any_layout_is_written_in_c_order_little_endian(array: np.ndarray[Any, Any]) -> None:
    packed = pack_row({"x": array})
    expected = (array.view(np.uint8) != 0).tolist() if array.dtype == bool else array.tolist()
    array[...] = 0  # what is written is what it was
    found = filled(*packed)["x"]
    assert found.flags.c_contiguous
    assert found.dtype == array.dtype.newbyteorder("<")
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("value", "fact"),
    [
        (np.array(["a"]), "<U1"),
        (np.zeros(1, complex), "complex128"),
        (np.array(["2020-01-01"], "M8[D]"), "datetime64[D]"),
        (np.array([object()]), "object"),
        (np.ma.masked_array([1], [True]), "masked"),
        (np.int64(1), "numpy.int64 under 'x'"),
        (type("Tensor", (), {})(), ".tolist(); or an array: .numpy()"),
        ([1, {"y": (2, 1j)}], "complex under 'x[1].y[1]'"),
        ({"$array": 1}, "'$array'"),
        ([{"$array": ["int32", [1], 0]}], "'$array'"),
        ({"y": {"$bytes": [1, 0, None]}}, "'$bytes'"),
        (float("nan"), "NaN"),
        (np.broadcast_to(np.zeros(1, np.int64), (2**20, 2**9)), "2147483648 bytes in a row, found 4294967296"),
    ],
)
def test_row_that_cannot_be_written_is_refused(value: object, fact: str) -> None:
    assert fact in str(raised(RowInvalid, pack_row, {"id": 1, "x": value, "y": np.zeros(1)}))


HUGE = 2**62
A, B = "$array", "$bytes"


@pytest.mark.parametrize(
    ("key", "fact", "wrong"),
    [
        (A, '{"$array":[dtype, shape, offset]}', [["float32", [2], 0, 1], {}]),
        (A, "a dtype of bool, ", [["object", [1], 0], ["<f4", [1], 0], [["int32"], [1], 0]]),
        (A, "a shape of at most 32 ", [["int32", shape, 0] for shape in (4, [-1], [1.0], [True], [1] * 33, [2**63])]),
        (A, "can be counted", [["int32", [HUGE, 0], 0], ["uint8", [HUGE, 4], 0], ["uint8", [2**32, 2**32], 0]]),
        (A, "a multiple of 8", [["int32", [1], offset] for offset in (-8, 4, "0")]),
        (A, "within the 16 bytes", [["int32", *place] for place in (([1], HUGE), ([5], 0), ([3], 8), ([0], 24))]),
        (A, "within the 16 bytes", [["uint8", [HUGE], 0]]),
        (A, "bytes of 0 and 1, found '2'", [["bool", [16], 0]]),
        (B, '{"$bytes":[size, offset, media type]}', [[1, 0], [1, 0, None, 1], {}]),
        (B, "a size of at least 0", [[-1, 0, None], [1.0, 0, None], ["1", 0, None], [2**63, 0, None]]),
        (B, "a media type", [[1, 0, media] for media in (1, "", "jpeg", "image/", "Image/JPEG", "image/<b>")]),
        (B, "a multiple of 8", [[1, 4, None], [1, -8, None]]),
        (B, "within the 16 bytes", [[17, 0, None], [9, 8, None], [1, 16, None], [2**62, 0, None]]),
    ],
)
def test_description_that_does_not_fit_the_bytes_is_refused(key: str, fact: str, wrong: list[object]) -> None:
    for described in wrong:
        caught = raised(RowInvalid, fill_row, {"a": [{key: described}]}, np.full(16, 2, np.uint8))
        assert "the value at 0: " in str(caught)
        assert fact in str(caught)
        assert len(str(caught)) < 400


def test_media_types_are_told_by_the_first_bytes() -> None:
    begins = {"image/jpeg": b"\xff\xd8\xff\xe0", "image/png": b"\x89PNG\r\n\x1a\n"}
    begins |= {"audio/flac": b"fLaC", "audio/mpeg": b"ID3", "audio/ogg": b"OggS"}
    begins |= {"image/webp": b"RIFF\0\0\0\0WEBPVP8 ", "audio/wav": b"RIFF\0\0\0\0WAVEfmt "}
    begins |= {"video/mp4": b"\0\0\0\x20ftypisom", "image/avif": b"\0\0\0\x20ftypavif", "video/webm": b"\x1aE\xdf\xa3"}
    assert {name: arrays.media_type(data + b"...") for name, data in begins.items()} == {name: name for name in begins}
    for blob in (b"GIF89a", bytearray(b"GIF89a"), memoryview(b"GIF89a"), np.bytes_(b"GIF89a")):
        assert pack_row({"a": blob}) == (b'{"a":{"$bytes":[6,0,"image/gif"]}}\n', b"GIF89a\0\0")


def test_other_keys_beside_an_array_and_an_array_for_a_row_are_refused_and_any_depth_is_filled() -> None:
    for described in ({"$array": ["uint8", [1], 0]}, {"$bytes": [1, 0, None]}):
        for row in ({"a": {**described, "b": 1}}, dict(described)):
            raised(RowInvalid, fill_row, row, np.zeros(8, np.uint8))
    depth = 1000
    row = orjson.loads(b'{"a":' * depth + b'{"$array":["uint8",[1],0]}' + b"}" * depth)
    fill_row(row, np.array([5] + [0] * 7, np.uint8))
    for _ in range(depth):
        row = row["a"]
    assert row.tolist() == [5]


def test_lines_with_the_reserved_key_are_refused_up_to_the_first() -> None:
    lines = check_lines([b'{"a":1}\n', b'{"a":"$array"}\n', b'{"a":[{"\\u0024array":1}]}\n', b'{"a":4}\n'])
    found = without_array_keys(lines)
    assert (found.data, found.ends.tolist(), len(found)) == (b'{"a":1}\n{"a":"$array"}\n', [8, 23], 2)
    assert found.refused is not None
    assert (found.refused.index, "'$array'" in str(found.refused)) == (2, True)
    bare = check_lines([b'{"a":"\\u00e4 $array"}\n'])
    assert without_array_keys(bare) is bare


def encoded(row: dict[str, Any], tokens: int | None = None) -> batch.EncodedRow:
    return batch.EncodedRow(*pack_row(row), tokens=tokens)


def test_rows_of_a_pack_keep_their_bytes_and_another_form_is_a_row_like_any_other() -> None:
    line = batch.encode_pack([b'{"a": 1.50,\t"b":"\xc3\xa9"}\r\n', b'{"a":2}\n'], [3, 4])
    assert line == b'{"pack":[{"a": 1.50,\t"b":"\xc3\xa9"},{"a":2}],"lengths":[3,4]}\n'
    pack = decode_pack(check_row(line))
    assert pack is not None
    assert (pack.rows, pack.lengths) == ([{"a": 1.5, "b": "é"}, {"a": 2}], [3, 4])
    rows: list[dict[str, Any]] = [
        {},
        {"pack": [{"a": 1}]},
        {"pack": [{"a": 1}], "length": [1]},
        {"pack": [{"a": 1}], "lengths": [1], "id": 5},
        {"pack": [], "lengths": []},
        {"pack": "six of them", "lengths": [1]},
        {"pack": ["a"], "lengths": [1]},
        *[{"pack": [{"a": 1}], "lengths": lengths} for lengths in (1, [1, 2], [0], [True], [1.0])],
    ]
    assert [row for row in rows if decode_pack(row) is not None] == []


def test_arrays_of_a_pack_lie_one_behind_the_other() -> None:
    rows = [encoded({"a": np.arange(count, dtype=np.int16), "b": [{"c": b"GIF8", "d": b"-"}]}) for count in (3, 5)]
    pack = encode_encoded_pack(rows, [3, 5])
    assert pack.line == (
        b'{"pack":[{"a":{"$array":["int16",[3],0]},"b":[{"c":{"$bytes":[4,8,"image/gif"]},"d":{"$bytes":[1,16,null]}}]},'
        b'{"a":{"$array":["int16",[5],24]},"b":[{"c":{"$bytes":[4,40,"image/gif"]},"d":{"$bytes":[1,48,null]}}]}],'
        b'"lengths":[3,5]}\n'
    )
    assert (pack.arrays, pack.tokens) == (rows[0].arrays + rows[1].arrays, 8)
    text = '{"$array":["int16",[3],0]}{"$bytes":[6,0,null]}'
    looks_like_one = encoded({"text": text, "{": text, "numbers": [0, 1]}).line
    assert arrays.move_arrays(looks_like_one, 8) == looks_like_one


def test_what_is_no_encoding_is_refused_and_differences_are_named() -> None:
    was: dict[str, Any] = {"template": "qwen", "max_length": 512, "flag": True, "gone": 1}
    now: dict[str, Any] = {"template": "qwen", "max_length": 1024, "flag": 1, "new": "x"}
    assert (differences(was, was), len(differences(was, now))) == ([], 4)
    assert differences(was, now, leave_out=["flag", "gone", "new"]) == ["max_length is 512 there and 1024 here"]
    numbers = (np.int64(1), float("nan"), 2**64, 10**400)
    wrong: list[Any] = [{}, *({"a": number} for number in numbers), {1: 1}, {"a": b""}, 5]
    for value in wrong:
        raised(ValueError, check_encoding, value)
    assert check_encoding({"a": 2**64 - 1, "b": -(2**63), "c": None}) == {"a": 2**64 - 1, "b": -(2**63), "c": None}


KEY = bytes(range(16))
SAMPLE = {"input_ids": np.array([1, 2, 3], np.int32), "length": 3, "mask": [np.array([True])]}


def read(record: bytes, key: bytes = KEY, row: int = 5, line: int = 7) -> Kept | None:
    digest = arrays.SLOT.unpack(arrays.encode_slot(record, 64))[2]
    return arrays.decode_record(np.frombuffer(record, np.uint8).copy(), digest, key, row, line)


def test_text_with_a_right_digest_that_describes_nothing_is_none() -> None:
    good = encode_sample("x", KEY, 5, 7, dropped=True)
    head, text = good[:40], good[40:]
    for other in (b"[]", b'{"a":1}'.ljust(len(text)), b"{".ljust(len(text)), b'{"sample":{"$array":[1,2,3]}}'):
        record = head[:32] + len(other).to_bytes(8, "little") + other
        assert read(record) is None, other
    assert read(head[:32] + (1 << 40).to_bytes(8, "little") + text) is None
    rows: list[dict[str, Any]] = [{"key": bytes(16)}, {"row": 6}, {"line": 8}]
    for row in rows:
        assert read(encode_sample(SAMPLE, KEY, 5, 7), **row) is None


def test_bytes_are_those_of_the_first_version() -> None:
    assert arrays.encode_head(KEY, 2).hex() == (
        "6c617a797368617264206b6570742073616d706c650a0001"  # magic
        "000102030405060708090a0b0c0d0e0f"
        "0200000000000000"
        "0000000000000000"
        "48cf22babce88ebb"
    )
    assert (arrays.HEAD_BYTES, arrays.slot_at(2)) == (64, 112)
    assert (
        encode_sample("x", KEY, 5, 7, dropped=True).hex()
        == ("000102030405060708090a0b0c0d0e0f050000000000000007000000000000001000000000000000")
        + b'{"dropped":"x"}\n'.hex()
    )
    assert arrays.SLOT.pack(64, 10, 3).hex() == "40000000000000000a000000000000000300000000000000"
    assert arrays.encode_slot(b"abc", 64) == arrays.SLOT.pack(64, 3, xxhash.xxh3_64_intdigest(b"abc"))


def test_key_is_another_one_for_anything_else() -> None:
    facts: dict[str, Any] = {"max_length": 512, "template": "qwen"}
    key = chunk_key(facts, 3, 100, 100, KEY)
    assert key == chunk_key(dict(reversed(facts.items())), 3, 100, 100, KEY)
    others = [chunk_key({**facts, "max_length": value}, 3, 100, 100, KEY) for value in (513, 512.0, "512")]
    others += [chunk_key(facts, *numbers, KEY) for numbers in ((4, 100, 100), (3, 101, 100), (3, 100, 99))]
    others.append(chunk_key(facts, 3, 100, 100, bytes(16)))
    assert len({key, *others}) == len(others) + 1
