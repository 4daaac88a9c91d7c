"""Rows that are encoded or packs: put together with their arrays, told from others, and kept to the byte."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.format.arrays import fill_row, move_arrays, pack_row
from lazyshard.format.batch import EncodedRow, check_encoded, decode_pack, encode_encoded_pack, encode_pack
from lazyshard.format.records import check_encoding, differences
from lazyshard.format.row import check_row
from tests.format.test_arrays import plain


def encoded(row: dict[str, Any], tokens: int | None = None) -> EncodedRow:
    return EncodedRow(*pack_row(row), tokens=tokens)


def test_encoded_rows_are_put_together_with_arrays_and_lengths() -> None:
    rows = [encoded({"a": np.array([1, 2, 3], np.int32)}, 3), encoded({"a": 1}, 0)]
    found = check_encoded(rows)
    assert found.data == b'{"a":{"$array":["int32",[3],0]}}\n{"a":1}\n'
    assert found.tokens is not None and found.tokens.tolist() == [3, 0]
    assert found.arrays is not None
    assert found.arrays.data == bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0])
    assert found.arrays.ends.tolist() == [16, 16]
    assert rows[0].data == rows[0].line + rows[0].arrays
    assert check_encoded([rows[0], rows[1]._replace(tokens=None)]).tokens is None


def test_rows_of_a_pack_keep_their_bytes() -> None:
    line = encode_pack([b'{"a": 1.50,\t"b":"\xc3\xa9"}\r\n', b'{"a":2}\n'], [3, 4])
    assert line == b'{"pack":[{"a": 1.50,\t"b":"\xc3\xa9"},{"a":2}],"lengths":[3,4]}\n'
    pack = decode_pack(check_row(line))
    assert pack is not None
    assert (pack.rows, pack.lengths) == ([{"a": 1.5, "b": "é"}, {"a": 2}], [3, 4])


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"pack": [{"a": 1}]},
        {"pack": [{"a": 1}], "length": [1]},
        {"pack": [{"a": 1}], "lengths": [1], "id": 5},
        {"pack": [], "lengths": []},
        {"pack": "six of them", "lengths": [1]},
        {"pack": ["a"], "lengths": [1]},
        *[{"pack": [{"a": 1}], "lengths": lengths} for lengths in (1, [1, 2], [0], [True], [1.0])],
    ],
    ids=json.dumps,
)
def test_what_has_another_form_is_a_row_like_any_other(row: dict[str, Any]) -> None:
    assert decode_pack(row) is None


def test_arrays_of_a_pack_lie_one_behind_the_other() -> None:
    rows = [encoded({"a": np.arange(count, dtype=np.int16), "b": [{"c": np.ones(1, np.int64)}]}) for count in (3, 5)]
    pack = encode_encoded_pack(rows, [3, 5])
    assert pack.line == (
        b'{"pack":[{"a":{"$array":["int16",[3],0]},"b":[{"c":{"$array":["int64",[1],8]}}]},'
        b'{"a":{"$array":["int16",[5],16]},"b":[{"c":{"$array":["int64",[1],32]}}]}],"lengths":[3,5]}\n'
    )
    assert (pack.arrays, pack.tokens) == (rows[0].arrays + rows[1].arrays, 8)
    text = '{"$array":["int16",[3],0]}'
    looks_like_one = encoded({"text": text, "{": text, "numbers": [0, 1]}).line
    assert move_arrays(looks_like_one, 8) == looks_like_one


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


@pytest.mark.parametrize("value", [{}, {"a": np.int64(1)}, {"a": float("nan")}, {"a": 2**64}, {1: 1}, {"a": b""}, 5])
def test_what_is_no_encoding_is_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        check_encoding(value)
    assert check_encoding({"a": 2**64 - 1, "b": -(2**63), "c": None}) == {"a": 2**64 - 1, "b": -(2**63), "c": None}


def test_differences_of_encodings_name_every_fact_with_both_values() -> None:
    was: dict[str, Any] = {"template": "qwen", "max_length": 512, "flag": True, "system": "a" * 100, "gone": 1}
    now: dict[str, Any] = {"template": "qwen", "max_length": 1024, "flag": 1, "system": None, "new": "x"}
    found = [
        "max_length is 512 there and 1024 here",
        "flag is True there and 1 here",
        f"system is '{'a' * 56}... there and null here",
        "gone is 1 there and not said here",
        "new is not said there and 'x' here",
    ]
    assert differences(was, was) == []
    assert differences(was, now) == found
    assert differences(was, now, leave_out=["flag", "system", "gone", "new"]) == found[:1]
