"""Rows made of Python values, and keys that come twice."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.errors import RowInvalid
from lazyshard.format.row import check_row, encode_row, has_duplicate_keys, parse_row

NAN = float("nan")
INF = float("inf")


class Label(enum.Enum):
    GOOD = "good"
    UNKNOWN = NAN


@dataclass
class Turn:
    score: float


def check_refusal(row: object, reason: str) -> None:
    with pytest.raises(RowInvalid) as caught:
        encode_row(row)
    assert caught.value.reason is not None
    assert caught.value.reason.startswith(reason)
    assert str(caught.value) == f"not a row: {caught.value.reason}"
    assert (caught.value.byte, caught.value.file, caught.value.line) == (None, None, None)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_nan_at_any_depth_is_refused(bad: float) -> None:
    rows: list[dict[str, Any]] = [{"a": bad}, {"a": [bad]}, {"a": (1, bad)}, {"a": [{"b": {"c": [None, bad]}}]}]
    deep: Any = bad
    for _ in range(250):
        deep = [deep]
    for row in [*rows, {"a": deep}]:
        check_refusal(row, "NaN and infinities are not JSON; write null or a string")


def test_nan_of_an_enumeration_is_refused() -> None:
    check_refusal({"a": [Label.UNKNOWN]}, "NaN and infinities are not JSON; write null or a string")
    assert encode_row({"a": [Label.GOOD]}) == b'{"a":["good"]}\n'


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({}, b"{}\n"),
        ({"a": None}, b'{"a":null}\n'),
        ({"null": "null", "b": [None, {"c": None}]}, b'{"null":"null","b":[null,{"c":null}]}\n'),
        ({"a": "line\nend\r\u2028"}, '{"a":"line\\nend\\r\u2028"}\n'.encode()),
        ({"a": (1, 2.5, True)}, b'{"a":[1,2.5,true]}\n'),
        ({"é": "😀"}, '{"é":"😀"}\n'.encode()),
        ({"a": 2**64 - 1, "b": -(2**63)}, b'{"a":18446744073709551615,"b":-9223372036854775808}\n'),
        ({"a": 0.1 + 0.2, "b": -0.0}, b'{"a":0.30000000000000004,"b":-0.0}\n'),
    ],
)
def test_encoded_row_is_pinned(row: dict[str, Any], line: bytes) -> None:
    assert encode_row(row) == line


@pytest.mark.parametrize("row", [[1], "x", None, 1, b"{}", (("a", 1),)])
def test_value_that_is_no_dict_is_refused(row: object) -> None:
    check_refusal(row, f"expected a dict, found {type(row).__name__}")


@pytest.mark.parametrize(
    "row",
    [
        {1: "a"},
        {None: "a"},
        {"a": {2.5: 1}},
        {("a", "b"): 1},
        {"a": {1, 2}},
        {"a": b"bytes"},
        {"a": 1 + 2j},
        {"a": object()},
        {"a": Turn(NAN)},
        {"a": Turn(1.0)},
        {"a": 2**64},
        {"a": [-(2**63) - 1]},
        {"a": 10**5000},
        {"a": "\ud800"},
        {"\udfff": 1},
        {"a": ["x\udc80"]},
    ],
)
def test_value_that_json_cannot_hold_is_refused(row: object) -> None:
    check_refusal(row, "cannot be written as JSON: ")


@pytest.mark.parametrize("levels", [255, 100_000])
def test_value_nested_past_the_limit_is_refused(levels: int) -> None:
    lists: list[Any] = []
    dicts: dict[str, Any] = {}
    for _ in range(levels):
        lists = [lists]
        dicts = {"a": dicts}
    check_refusal({"a": lists}, "cannot be written as JSON: ")
    check_refusal(dicts, "cannot be written as JSON: ")


def test_value_that_holds_itself_is_refused() -> None:
    row: dict[str, Any] = {}
    row["a"] = row
    check_refusal(row, "cannot be written as JSON: ")


@pytest.mark.parametrize(
    "line",
    [
        b'{"a":1,"a":2}',
        b'{"a":1,"a":1}\n',
        b'{"a":1,"b":2,"a":{}}',
        b'{"a":{"b":1,"b":2}}',
        b'{"a":[1,{"b":[{"c":1,"c":2}]}]}',
        b'{"a" :1,"a" :2}',
        b'{"a"  :1,"a"\t:2}',
        b'{"a":1,"a"\t:2}',
        rb'{"a":1,"\u0061":2}',
        rb'{"a\"b":1,"a\u0022b":2}',
        '{"é":1,"\\u00e9":2}'.encode(),
        b'{"":1,"":2}',
        b'{"a":{"x":1},"a":{"x":2}}',
        rb'{"x":"}{\\","a":1,"a":2}',
    ],
)
def test_duplicate_key_is_found(line: bytes) -> None:
    assert has_duplicate_keys(line, parse_row(line))


@pytest.mark.parametrize(
    "line",
    [
        b"{}",
        b'{"a":1,"b":2}',
        b'{"a":{"a":{"a":1}}}',
        b'{"a":[{"a":1},{"a":2}],"b":{"a":1}}',
        b'{"a":{"x":1},"x":{"a":1}}',
        rb'{"a":"say \"a\":1, \"a\":2"}',
        rb'{"a":"\"a\":1"}',
        rb'{"a\"":":","b":"\\"}',
        rb'{"a":"\\","a\\":"\\\""}',
        b'{"a" : "b" , "b" : "a"}',
        b'{"a":"{","b":"}","c":"\xc2\xab : \xc2\xbb"}',
        b'{"a":["a","a"],"b":":"}',
        b'{"a":":a","b":" :"}',
        b'{"A":1,"a":2}',
    ],
)
def test_row_without_duplicate_keys_gives_no_false_alarm(line: bytes) -> None:
    assert not has_duplicate_keys(line, parse_row(line))


@pytest.mark.parametrize("colon", [b":", b" :"])
def test_keys_of_a_row_nested_deep_are_compared(colon: bytes) -> None:
    opening = b'{"a"' + colon
    line = opening * 1000 + b"1" + b"}" * 1000
    assert not has_duplicate_keys(line, parse_row(line))
    line = opening * 999 + b'{"b":1,"b":2}' + b"}" * 999
    assert has_duplicate_keys(line, parse_row(line))


text = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)
rows = st.dictionaries(text, values, max_size=5)


@given(rows)
def test_encoded_row_reads_back_the_same(row: dict[str, Any]) -> None:
    line = encode_row(row)
    assert line.endswith(b"}\n")
    assert line.count(b"\n") == 1
    assert b"\r" not in line
    assert repr(parse_row(line)) == repr(row)  # unlike ==, tells 1 from 1.0 and 0.0 from -0.0
    assert check_row(line) == row
    assert check_row(line[:-1]) == row
    assert not has_duplicate_keys(line, row)


@given(st.lists(st.tuples(st.text('a":\\ {}', max_size=2), values), max_size=4), st.sampled_from([":", " :", "\t: "]))
def test_duplicate_keys_are_those_that_differ_in_no_character(pairs: list[tuple[str, Any]], colon: str) -> None:
    body = [encode_row({key: value})[1:-2] for key, value in pairs]
    heads = [encode_row({key: 0})[1:-4] for key, _ in pairs]
    parts = [head + colon.encode() + part[len(head) + 1 :] for head, part in zip(heads, body, strict=True)]
    line = b"{" + b",".join(parts) + b"}"
    assert has_duplicate_keys(line, parse_row(line)) == (len({key for key, _ in pairs}) < len(pairs))


def test_value_that_holds_itself_is_not_searched_for_ever() -> None:
    row: dict[str, Any] = {"a": [1] * 10, "b": {1, 2}}
    row["c"] = [row]
    check_refusal(row, "cannot be written as JSON: Type is not JSON serializable: set under 'b'; a row holds what JSON")
    # So deep and wide that it is not looked for to the end.
    row = {"a": [[0] * 1000] * 200 + [[1j]]}
    check_refusal(row, "cannot be written as JSON: Type is not JSON serializable: complex; a row holds")


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (b"\xff\xd8", "base64.b64encode(it).decode()"),
        (bytearray(b"a"), "base64.b64encode(it).decode()"),
        ({2, 1}, "sorted()"),
        (range(3), "list()"),
        (Decimal("1.5"), "float(), or str() to keep every digit"),
        (Path("a.png"), "str()"),
        (timedelta(1), ".total_seconds()"),
        (np.float32(1), ".item()"),
        (np.datetime64("2020"), "str()"),
        (1j, "[it.real, it.imag]"),
        (type("Tensor", (), {})(), ".tolist()"),
        (object(), "make it of dicts, lists, text, numbers, True, False and None"),
    ],
)
def test_advice_fits_the_type(value: object, advice: str) -> None:
    with pytest.raises(RowInvalid) as caught:
        encode_row({"x": value})
    assert advice in str(caught.value)
