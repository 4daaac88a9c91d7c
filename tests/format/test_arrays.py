from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lazyshard.errors import FileInvalid, RowInvalid, SealInvalid
from lazyshard.format.arrays import BFLOAT16, DTYPES, fill_row, pack_row
from lazyshard.format.batch import check_lines, without_array_keys
from lazyshard.format.fields import pack
from lazyshard.format.records import Manifest
from lazyshard.format.row import encode_row
from lazyshard.format.seal import Seal, SealedArrays
from tests.format.cases import changed, check_refusal, without

ROW: dict[str, Any] = {
    "id": 7,
    "input_ids": np.array([1, -2, 3], np.int32),
    "nested": [{"mask": np.array([[True], [False]])}, "text"],
    "nothing": np.zeros((0, 4)),
    "scalar": np.array(1.5, np.float16),
    "weights": np.array([0x3F80, 0xC000], np.uint16).view(BFLOAT16),
}
LINE = (
    b'{"id":7,"input_ids":{"$array":["int32",[3],0]},"nested":[{"mask":{"$array":["bool",[2,1],16]}},"text"],'
    b'"nothing":{"$array":["float64",[0,4],24]},"scalar":{"$array":["float16",[],24]},'
    b'"weights":{"$array":["bfloat16",[2],32]}}\n'
)
BYTES = (
    bytes.fromhex("01000000 feffffff 03000000 00000000")
    + bytes.fromhex("01 00 000000000000")
    + bytes.fromhex("003e 000000000000")
    + bytes.fromhex("803f 00c0 00000000")
)

MANIFEST = (
    b'{"format":2,"stream_id":"0123456789abcdef0123456789abcdef","samples_per_chunk":1000,"created_at":1700000000.5}\n'
)
SEAL = (
    b'{"format":2,"chunk":0,"samples":2,"bytes":20,"offsets":"AAAAAAAAAAALAAAAAAAAABQAAAAAAAAA",'
    b'"xxh3":"AQAAAAAAAAACAAAAAAAAAA==","tokens":null,"arrays_bytes":16,'
    b'"arrays_offsets":"AAAAAAAAAAAQAAAAAAAAABAAAAAAAAAA","arrays_xxh3":"AwAAAAAAAAAEAAAAAAAAAA==",'
    b'"source":null,"sealed_at":1.5}\n'
)


def filled(line: bytes, data: bytes) -> dict[str, Any]:
    row: dict[str, Any] = orjson.loads(line)
    fill_row(row, np.frombuffer(data, np.uint8))
    return row


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_bytes_of_a_row_with_arrays_are_pinned() -> None:
    assert pack_row(ROW) == (LINE, BYTES)
    assert same(filled(LINE, BYTES), ROW)


def test_row_without_arrays_is_written_as_in_any_stream() -> None:
    row = {"text": 'a "$array": in a string', 'key with a quote"$array': 1}
    assert pack_row(row) == (encode_row(row), b"")


_NUMBERS = [dtype for name, dtype in DTYPES.items() if name != "bfloat16"]
_ARRAYS = st.sampled_from(_NUMBERS).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
)
_ROWS = st.dictionaries(
    st.text(max_size=3).filter(lambda key: key != "$array"),
    st.recursive(
        st.none() | st.text(max_size=3) | _ARRAYS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
        max_leaves=6,
    ),
    max_size=4,
)


@given(_ROWS)
def test_row_comes_back_as_it_was_and_its_bytes_are_aligned(row: dict[str, Any]) -> None:
    line, data = pack_row(row)
    assert len(data) % 8 == 0
    assert same(filled(line, data), row)


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
    found = filled(*pack_row({"x": array}))["x"]
    assert found.flags.c_contiguous
    assert found.dtype == array.dtype.newbyteorder("<")
    assert found.tolist() == (array.view(np.uint8) != 0).tolist() if array.dtype == bool else array.tolist()


def test_bytes_are_those_of_the_moment_of_writing() -> None:
    array = np.zeros(2, np.int64)
    packed = pack_row({"x": array})
    array += 1
    assert filled(*packed)["x"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (np.array(["a"]), "found one of <U1; convert it with astype"),
        (np.zeros(1, complex), "found one of complex128; convert it with astype"),
        (np.array(["2020-01-01"], "M8[D]"), "found one of datetime64[D]; convert it with astype"),
        (np.array([object()]), "found one of object; convert it with astype"),
        (np.ma.masked_array([1], [True]), "found a masked one; convert it with astype"),
        (
            np.int64(1),
            "Type is not JSON serializable: numpy.int64 under 'x'; a row holds what JSON has, and numpy arrays: "
            "convert it, with .item()",
        ),
        (b"\xff\xd8", "base64.b64encode(it).decode(); or an array: np.frombuffer(it, np.uint8)"),
        (type("Tensor", (), {})(), "convert it, with .tolist(); or an array: .numpy()"),
        ([1, {"y": (2, 1j)}], "Type is not JSON serializable: complex under 'x[1].y[1]'; a row holds what JSON has"),
        ({"$array": 1}, "the key '$array' stands for arrays in a stream that holds some; give it another name"),
        ([{"$array": ["int32", [1], 0]}], "the key '$array' stands for arrays"),
        (float("nan"), "NaN and infinities are not JSON"),
    ],
)
def test_row_that_cannot_be_written_is_refused(value: object, reason: str) -> None:
    with pytest.raises(RowInvalid) as caught:
        pack_row({"id": 1, "x": value, "y": np.zeros(1)})
    assert reason in str(caught.value)


def test_row_of_too_many_bytes_is_refused_before_they_are_copied() -> None:
    huge = np.broadcast_to(np.zeros(1, np.int64), (2**20, 2**9))
    with pytest.raises(RowInvalid, match="at most 2147483648 bytes in a row, found 4294967296"):
        pack_row({"x": huge})


def test_array_in_a_stream_without_arrays_is_refused_with_the_way_out() -> None:
    with pytest.raises(RowInvalid, match=r"made by ChunkWriter\(\.\.\., arrays=True\) holds arrays"):
        encode_row({"x": np.zeros(1)})


HUGE = 2**62


@pytest.mark.parametrize(
    ("described", "reason"),
    [
        (["float32", [2], 0, 1], 'expected {"$array":[dtype, shape, offset]}'),
        ({}, 'expected {"$array":[dtype, shape, offset]}'),
        (["object", [1], 0], "expected a dtype of bool, "),
        (["<f4", [1], 0], "expected a dtype of bool, "),
        ([["int32"], [1], 0], "expected a dtype of bool, "),
        (["int32", 4, 0], "expected a shape of at most 32 integers from 0 on"),
        (["int32", [-1], 0], "expected a shape of at most 32 integers from 0 on"),
        (["int32", [1.0], 0], "expected a shape of at most 32 integers from 0 on"),
        (["int32", [True], 0], "expected a shape of at most 32 integers from 0 on"),
        (["int32", [1] * 33, 0], "expected a shape of at most 32 integers from 0 on"),
        (["int32", [2**63], 0], "expected a shape of at most 32 integers from 0 on"),
        (["int32", [HUGE, 0], 0], "expected a shape whose elements can be counted"),
        (["uint8", [HUGE, 4], 0], "expected a shape whose elements can be counted"),
        (["uint8", [2**32, 2**32], 0], "expected a shape whose elements can be counted"),
        (["int32", [1], -8], "expected an offset that is a multiple of 8"),
        (["int32", [1], 4], "expected an offset that is a multiple of 8"),
        (["int32", [1], "0"], "expected an offset that is a multiple of 8"),
        (["int32", [1], HUGE], "expected an array within the 16 bytes of its row"),
        (["int32", [5], 0], "expected an array within the 16 bytes of its row"),
        (["int32", [3], 8], "expected an array within the 16 bytes of its row"),
        (["int32", [0], 24], "expected an array within the 16 bytes of its row"),
        (["uint8", [HUGE], 0], "expected an array within the 16 bytes of its row"),
        (["bool", [16], 0], "expected truth values, bytes of 0 and 1, found '2'"),
    ],
)
def test_description_that_does_not_fit_the_bytes_is_refused(described: object, reason: str) -> None:
    with pytest.raises(RowInvalid) as caught:
        fill_row({"a": [{"$array": described}]}, np.full(16, 2, np.uint8))
    assert str(caught.value).startswith("not a row: the array at 0: ")
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 400


def test_other_keys_beside_an_array_and_an_array_for_a_row_are_refused() -> None:
    with pytest.raises(RowInvalid, match="the array at 'a': expected"):
        fill_row({"a": {"$array": ["uint8", [1], 0], "b": 1}}, np.zeros(8, np.uint8))
    with pytest.raises(RowInvalid, match="expected a row, found an array in its place"):
        fill_row({"$array": ["uint8", [1], 0]}, np.zeros(8, np.uint8))


def test_row_nested_deeper_than_python_recurses_is_filled() -> None:
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
    plain = check_lines([b'{"a":"\\u00e4 $array"}\n'])
    assert without_array_keys(plain) is plain


def test_manifest_of_a_stream_with_arrays_is_pinned() -> None:
    value = Manifest("0123456789abcdef0123456789abcdef", 1000, 1700000000.5, arrays=True)
    assert value.encode() == MANIFEST
    assert Manifest.decode(MANIFEST) == value
    assert not Manifest.decode(MANIFEST.replace(b'"format":2', b'"format":1')).arrays
    check_refusal(
        lambda: Manifest.decode(changed(MANIFEST, format=0)),
        FileInvalid,
        file="stream.json",
        field="format",
        expected="an integer from 1 to 2147483648",
        actual="0",
    )


def test_seal_of_a_chunk_with_arrays_is_pinned() -> None:
    def u64(*values: int) -> Any:
        return np.array(values, np.uint64)

    value = Seal(0, u64(0, 11, 20), u64(1, 2), sealed_at=1.5, arrays=SealedArrays(u64(0, 16, 16), u64(3, 4)))
    assert value.encode() == SEAL
    found = Seal.decode(SEAL, 0)
    assert found.arrays is not None
    assert found.encode() == SEAL
    assert (found.arrays.size, found.arrays.offsets.tolist(), found.arrays.digests.tolist()) == (
        16,
        [0, 16, 16],
        [3, 4],
    )


def _packed(*values: int) -> str:
    return pack([0, *values], "<u8")


@pytest.mark.parametrize(
    ("values", "field", "expected", "actual"),
    [
        ({"arrays_bytes": -1}, "arrays_bytes", "an integer from 0 to 4611686018427387904", "-1"),
        ({"arrays_bytes": 24}, "arrays_bytes", "16, where the last row ends", "24"),
        (
            {"arrays_offsets": _packed(16, 8)},
            "arrays_offsets",
            "row starts that do not fall",
            "row 1 from byte 16 to byte 8",
        ),
        ({"arrays_offsets": _packed(16)}, "arrays_offsets", "3 numbers of 8 bytes", "16 bytes"),
        ({"arrays_xxh3": _packed(16, 8)}, "arrays_xxh3", "2 numbers of 8 bytes", "24 bytes"),
        ({"arrays_xxh3": None}, "arrays_xxh3", "a base64 string", "null"),
    ],
)
def test_seal_that_contradicts_itself_is_refused(
    values: dict[str, object], field: str, expected: str, actual: str
) -> None:
    check_refusal(
        lambda: Seal.decode(changed(SEAL, **values), 0),
        SealInvalid,
        file="chunk_00000.jsonl.completed",
        field=field,
        expected=expected,
        actual=actual,
    )


@pytest.mark.parametrize("field", ["arrays_bytes", "arrays_offsets", "arrays_xxh3"])
def test_seal_without_what_it_must_say_of_the_arrays_is_refused(field: str) -> None:
    with pytest.raises(SealInvalid, match=f"field '{field}'.*no such field"):
        Seal.decode(without(SEAL, field), 0)
