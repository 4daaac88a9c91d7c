"""Rows that are packs: told from others by their form, and their rows kept to the byte."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.format.arrays import fill_row, move_arrays, pack_row
from lazyshard.format.batch import EncodedRow, decode_pack, encode_encoded_pack, encode_pack
from lazyshard.format.row import check_row


def test_rows_keep_their_bytes() -> None:
    line = encode_pack([b'{"a": 1.50,\t"b":"\xc3\xa9"}\r\n', b'{"a":2}\n'], [3, 4])
    assert line == b'{"pack":[{"a": 1.50,\t"b":"\xc3\xa9"},{"a":2}],"lengths":[3,4]}\n'
    pack = decode_pack(check_row(line))
    assert pack is not None
    assert pack.rows == [{"a": 1.5, "b": "é"}, {"a": 2}]
    assert pack.lengths == [3, 4]


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"messages": []},
        {"pack": [{"a": 1}]},
        {"pack": [{"a": 1}], "length": [1]},
        {"pack": [{"a": 1}], "lengths": [1], "id": 5},
        {"pack": [], "lengths": []},
        {"pack": "six of them", "lengths": [1]},
        {"pack": [{"a": 1}], "lengths": 1},
        {"pack": [{"a": 1}], "lengths": [1, 2]},
        {"pack": ["a"], "lengths": [1]},
        {"pack": [{"a": 1}], "lengths": [0]},
        {"pack": [{"a": 1}], "lengths": [True]},
        {"pack": [{"a": 1}], "lengths": [1.0]},
    ],
    ids=json.dumps,
)
def test_what_has_another_form_is_a_row_like_any_other(row: dict[str, Any]) -> None:
    assert decode_pack(row) is None


def encoded(row: dict[str, Any]) -> EncodedRow:
    packed = pack_row(row)
    return EncodedRow(packed.line, packed.arrays)


def test_arrays_of_a_pack_lie_one_behind_the_other() -> None:
    rows = [encoded({"a": np.arange(count, dtype=np.int16), "b": [{"c": np.ones(1, np.int64)}]}) for count in (3, 5)]
    pack = encode_encoded_pack(rows, [3, 5])
    assert pack.line == (
        b'{"pack":[{"a":{"$array":["int16",[3],0]},"b":[{"c":{"$array":["int64",[1],8]}}]},'
        b'{"a":{"$array":["int16",[5],16]},"b":[{"c":{"$array":["int64",[1],32]}}]}],"lengths":[3,5]}\n'
    )
    assert (pack.arrays, pack.tokens) == (rows[0].arrays + rows[1].arrays, 8)


def test_what_only_looks_like_an_array_stays() -> None:
    text = '{"$array":["int16",[3],0]}'
    line = encoded({"text": text, "{": text, "numbers": [0, 1]}).line
    assert move_arrays(line, 8) == line


values = st.recursive(
    st.one_of(
        st.none(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=6),
        st.sampled_from(['{"$array":["int8",[1],0]}', '"$array":', "\\"]),
        st.builds(np.arange, st.integers(0, 5), dtype=st.sampled_from([np.uint8, np.int32, np.float64])),
        st.builds(np.zeros, st.tuples(st.integers(0, 2), st.integers(0, 3)), dtype=st.just(np.bool_)),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "{", '"']), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.dictionaries(st.sampled_from(["x", "y"]), values, max_size=2), min_size=1, max_size=4))
def test_rows_come_out_of_a_pack_as_they_went_in(rows: list[dict[str, Any]]) -> None:
    made = encode_encoded_pack([encoded(row) for row in rows], [1] * len(rows))
    row = check_row(made.line)
    fill_row(row, np.frombuffer(made.arrays, np.uint8))
    pack = decode_pack(row)
    assert pack is not None
    assert plain(pack.rows) == plain(rows)


def plain(value: Any) -> Any:
    """The same without arrays, which cannot be compared by ==."""
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list) else value
