"""Rows made of Python values, and keys that come twice."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import orjson
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


def nested(value: Any, levels: int) -> Any:
    for _ in range(levels):
        value = [value]
    return value


def refused(row: object) -> str:
    """The reason."""
    with pytest.raises(RowInvalid) as caught:
        encode_row(row)
    assert (caught.value.byte, caught.value.file, caught.value.line) == (None, None, None)
    return str(caught.value.reason)


@pytest.mark.parametrize("bad", [NAN, INF, -INF, Label.UNKNOWN])
def test_nan_at_any_depth_is_refused(bad: object) -> None:
    for value in (bad, [bad], (1, bad), [{"b": {"c": [None, bad]}}], nested(bad, 250)):
        assert refused({"a": value}).startswith("NaN")


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({}, b"{}\n"),
        ({"null": "null", "b": [None, {"c": None}]}, b'{"null":"null","b":[null,{"c":null}]}\n'),
        ({"a": "line\nend\r\u2028"}, '{"a":"line\\nend\\r\u2028"}\n'.encode()),
        ({"a": (1, 2.5, True), "é": "😀"}, '{"a":[1,2.5,true],"é":"😀"}\n'.encode()),
        ({"a": 2**64 - 1, "b": -(2**63)}, b'{"a":18446744073709551615,"b":-9223372036854775808}\n'),
        ({"a": 0.1 + 0.2, "b": -0.0, "c": Label.GOOD}, b'{"a":0.30000000000000004,"b":-0.0,"c":"good"}\n'),
    ],
)
def test_encoded_row_is_pinned(row: dict[str, Any], line: bytes) -> None:
    assert encode_row(row) == line


@pytest.mark.parametrize("row", [[1], "x", None, 1, b"{}", (("a", 1),)])
def test_value_that_is_no_dict_is_refused(row: object) -> None:
    assert refused(row).endswith(f"found {type(row).__name__}")


def test_value_that_json_cannot_hold_is_refused() -> None:
    itself: dict[str, Any] = {}
    itself["a"] = itself
    dicts: dict[str, Any] = {}
    for _ in range(100_000):
        dicts = {"a": dicts}
    keys: list[object] = [{1: "a"}, {None: "a"}, {"a": {2.5: 1}}, {("a", "b"): 1}, {"\udfff": 1}]
    values = [{1, 2}, object(), Turn(NAN), Turn(1.0), 2**64, [-(2**63) - 1], 10**5000, "\ud800", ["x\udc80"]]
    deep: list[object] = [itself, dicts, {"a": nested([], 255)}, {"a": nested([], 100_000)}]
    for row in (*keys, *({"a": value} for value in values), *deep):
        assert refused(row).startswith("cannot be written as JSON")


def test_place_of_the_value_is_told_and_not_searched_for_ever() -> None:
    row: dict[str, Any] = {"a": [1] * 10, "b": {1, 2}}
    row["c"] = [row]
    assert "set under 'b'" in refused(row)
    # So deep and wide that it is not looked for to the end.
    reason = refused({"a": [[0] * 1000] * 200 + [[1j]]})
    assert "complex" in reason and "under" not in reason


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
    assert advice in refused({"x": value})


@pytest.mark.parametrize(
    ("line", "twice"),
    [
        (b'{"a":1,"a":1}\n', True),
        (b'{"a":[1,{"b":[{"c":1,"c":2}]}]}', True),
        (b'{"a":1,"a"\t:2}', True),
        (rb'{"a":1,"\u0061":2}', True),
        (rb'{"a\"b":1,"a\u0022b":2}', True),
        ('{"é":1,"\\u00e9":2}'.encode(), True),
        (rb'{"x":"}{\\","a":1,"a":2}', True),
        (b'{"a":[{"a":1},{"a":2}],"b":{"a":1}}', False),
        (rb'{"a\"":":","b":"\\"}', False),
        (rb'{"a":"\\","a\\":"\\\""}', False),
        (b'{"a":"{","b":"}","c":"\xc2\xab : \xc2\xbb"}', False),
        (b'{"A":1,"a":2}', False),
        *[((b'{"a"' + colon) * 1000 + b"1" + b"}" * 1000, False) for colon in (b":", b" :")],
        *[((b'{"a"' + colon) * 999 + b'{"b":1,"b":2}' + b"}" * 999, True) for colon in (b":", b" :")],
    ],
)
def test_key_that_comes_twice_in_one_object_is_found_without_a_false_alarm(line: bytes, twice: bool) -> None:
    assert has_duplicate_keys(line, parse_row(line)) == twice


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


@given(st.dictionaries(text, values, max_size=5))
def test_encoded_row_reads_back_the_same(row: dict[str, Any]) -> None:
    line = encode_row(row)
    assert line.endswith(b"}\n")
    assert (line.count(b"\n"), line.count(b"\r")) == (1, 0)
    assert repr(parse_row(line)) == repr(row)  # unlike ==, tells 1 from 1.0 and 0.0 from -0.0
    assert check_row(line) == check_row(line[:-1]) == row
    assert not has_duplicate_keys(line, row)


class Pairs(list[tuple[str, Any]]):
    """An object's members, any key any number of times."""


KEYS = st.text(alphabet='ab:"\\{} \n', max_size=4)
INNER = st.recursive(
    st.integers(-5, 5) | KEYS | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.lists(st.tuples(KEYS, inner), max_size=4).map(Pairs),
    max_leaves=10,
)


def written(value: Any, colon: str, escaped: bool) -> str:
    if isinstance(value, Pairs):
        members = (f"{written(key, '', escaped)}{colon}{written(one, colon, escaped)}" for key, one in value)
        return "{" + ",".join(members) + "}"
    if isinstance(value, list):
        return "[" + ",".join(written(item, colon, escaped) for item in value) + "]"
    return json.dumps(value).replace(":", "\\u003a") if escaped else json.dumps(value)


def comes_twice(value: Any) -> bool:
    if isinstance(value, Pairs):
        return len({key for key, _ in value}) < len(value) or any(comes_twice(one) for _, one in value)
    return isinstance(value, list) and any(map(comes_twice, value))


@given(st.lists(st.tuples(KEYS, INNER), max_size=4).map(Pairs), st.sampled_from([":", " :", "\t: "]), st.booleans())
def test_keys_that_come_twice_are_found_in_any_text(row: Pairs, colon: str, escaped: bool) -> None:
    line = written(row, colon, escaped).encode()
    assert has_duplicate_keys(line, orjson.loads(line)) == comes_twice(row)
