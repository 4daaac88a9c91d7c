"""Arrays in rows: what is written for them, and what is put in their place again."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lazyshard.errors import RowInvalid
from lazyshard.format.arrays import BFLOAT16, DTYPES, fill_row, pack_row
from lazyshard.format.batch import check_lines, without_array_keys
from lazyshard.format.row import encode_row

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
BYTES = bytes.fromhex(
    "01000000 feffffff 03000000 00000000"
    "01 00 000000000000"  # mask
    "003e 000000000000"  # scalar
    "803f 00c0 00000000"
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
        (np.int64(1), "numpy.int64 under 'x'; a row holds what JSON has, and numpy arrays: convert it, with .item()"),
        (b"\xff\xd8", "base64.b64encode(it).decode(); or an array: np.frombuffer(it, np.uint8)"),
        (type("Tensor", (), {})(), ".tolist(); or an array: .numpy()"),
        ([1, {"y": (2, 1j)}], "complex under 'x[1].y[1]'"),
        ({"$array": 1}, "'$array'"),
        ([{"$array": ["int32", [1], 0]}], "'$array'"),
        (float("nan"), "NaN"),
        (np.broadcast_to(np.zeros(1, np.int64), (2**20, 2**9)), "2147483648 bytes in a row, found 4294967296"),
    ],
)
def test_row_that_cannot_be_written_is_refused(value: object, fact: str) -> None:
    with pytest.raises(RowInvalid) as caught:
        pack_row({"id": 1, "x": value, "y": np.zeros(1)})
    assert fact in str(caught.value)


def test_array_in_a_stream_without_arrays_is_refused_with_the_way_out() -> None:
    with pytest.raises(RowInvalid, match="arrays=True"):
        encode_row({"x": np.zeros(1)})


HUGE = 2**62


@pytest.mark.parametrize(
    ("fact", "wrong"),
    [
        ('{"$array":[dtype, shape, offset]}', [["float32", [2], 0, 1], {}]),
        ("a dtype of bool, ", [["object", [1], 0], ["<f4", [1], 0], [["int32"], [1], 0]]),
        ("a shape of at most 32 ", [["int32", shape, 0] for shape in (4, [-1], [1.0], [True], [1] * 33, [2**63])]),
        ("can be counted", [["int32", [HUGE, 0], 0], ["uint8", [HUGE, 4], 0], ["uint8", [2**32, 2**32], 0]]),
        ("a multiple of 8", [["int32", [1], offset] for offset in (-8, 4, "0")]),
        ("within the 16 bytes", [["int32", *place] for place in (([1], HUGE), ([5], 0), ([3], 8), ([0], 24))]),
        ("within the 16 bytes", [["uint8", [HUGE], 0]]),
        ("bytes of 0 and 1, found '2'", [["bool", [16], 0]]),
    ],
)
def test_description_that_does_not_fit_the_bytes_is_refused(fact: str, wrong: list[object]) -> None:
    for described in wrong:
        with pytest.raises(RowInvalid) as caught:
            fill_row({"a": [{"$array": described}]}, np.full(16, 2, np.uint8))
        assert "the array at 0: " in str(caught.value)
        assert fact in str(caught.value)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("row", [{"a": {"$array": ["uint8", [1], 0], "b": 1}}, {"$array": ["uint8", [1], 0]}])
def test_other_keys_beside_an_array_and_an_array_for_a_row_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(RowInvalid):
        fill_row(row, np.zeros(8, np.uint8))


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
    bare = check_lines([b'{"a":"\\u00e4 $array"}\n'])
    assert without_array_keys(bare) is bare
