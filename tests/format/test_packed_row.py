"""Rows that are packs: told from others by their form, and their rows kept to the byte."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lazyshard.format import check_row, decode_pack, encode_pack


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
