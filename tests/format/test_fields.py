from __future__ import annotations

import base64
import struct
from collections.abc import Callable
from contextlib import suppress

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.errors import FileInvalid, FormatInvalid
from lazyshard.format.fields import MAX_CHUNKS, Fields, encode, pack
from tests.format.cases import check_refusal


def fields(**values: object) -> Fields:
    return Fields(orjson.dumps({"format": 1} | values), "f.json")


def test_largest_chunk_number_keeps_index_arithmetic_within_64_bits() -> None:
    assert MAX_CHUNKS == 10**15


@pytest.mark.parametrize(
    ("data", "actual"),
    [
        (b"[]", "[]"),
        (b"1", "1"),
        (b"null", "null"),
        (b"true", "true"),
        (b'"x"', "'x'"),
        (b"[" * 1000 + b"]" * 1000, "[[[[[[[...]]]]]]]"),
        (b'"' + b"x" * 100 + b'"', "'" + "x" * 37 + "..." + "x" * 38 + "'"),
    ],
)
def test_json_that_is_no_object_is_refused(data: bytes, actual: str) -> None:
    check_refusal(
        lambda: Fields(data, "f.json"),
        FileInvalid,
        file="f.json",
        field=None,
        expected="a JSON object",
        actual=actual,
    )


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"", "b''"),
        (b"\0\0\0", r"b'\x00\x00\x00'"),
        (b'{"format":1', "b'{\"format\":1'"),
        (b'{"format":1,"a":NaN}', 'b\'{"format":1,"a":NaN}\''),
        (b"\xff", r"b'\xff'"),
        (b"\xef\xbb\xbf{}", r"b'\xef\xbb\xbf{}'"),
        (b"[" * 100_000, "b'" + "[" * 75 + "..."),
        (b'{"a":' * 100_000, "b'" + ('{"a":' * 15) + "..."),
    ],
)
def test_bytes_that_are_no_json_are_refused(data: bytes, shown: str) -> None:
    with pytest.raises(FileInvalid) as caught:
        Fields(data, "f.json")
    assert (caught.value.file, caught.value.field, caught.value.expected) == ("f.json", None, "a JSON object")
    assert str(caught.value.actual).startswith(f"{shown} (")
    assert str(caught.value).startswith(f"f.json: expected a JSON object, found {shown} (")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", [0, -1, True, None, 1.0, "1", 2**31 + 1, [1]])
def test_format_that_is_no_positive_integer_is_refused(value: object) -> None:
    with pytest.raises(FileInvalid) as caught:
        fields(format=value)
    assert (caught.value.field, caught.value.expected) == ("format", "an integer from 1 to 2147483648")


def test_missing_format_is_refused() -> None:
    check_refusal(
        lambda: Fields(b'{"chunks":1}', "f.json"),
        FileInvalid,
        file="f.json",
        field="format",
        expected="an integer from 1 to 2147483648",
        actual="no such field",
    )


@pytest.mark.parametrize(
    ("value", "actual"),
    [
        (1, "1"),
        (8, "8"),
        (-3, "-3"),
        (True, "true"),
        (False, "false"),
        (3.0, "3.0"),
        (None, "null"),
        ("3", "'3'"),
        ([3], "[3]"),
        ({}, "{}"),
        (18446744073709551615, "18446744073709551615"),
    ],
)
def test_integer_of_another_type_or_range_is_refused(value: object, actual: str) -> None:
    check_refusal(
        lambda: fields(n=value).integer("n", 2, 7),
        FileInvalid,
        file="f.json",
        field="n",
        expected="an integer from 2 to 7",
        actual=actual,
    )


def test_integer_past_64_bits_is_refused() -> None:
    read = Fields(b'{"format":1,"n":100000000000000000000000000000}', "f.json")
    with pytest.raises(FileInvalid) as caught:
        read.integer("n", 0, 2**62)
    assert caught.value.actual == "1e+29"


def test_integer_at_both_bounds_is_read() -> None:
    assert fields(n=2).integer("n", 2, 7) == 2
    assert fields(n=7).integer("n", 2, 7) == 7


NONE: list[tuple[object, str]] = [(None, "null"), ([], "[]"), ({"a": 1}, "{'a': 1}")]


@pytest.mark.parametrize(
    ("read", "expected", "wrong"),
    [
        (Fields.number, "a number", [(True, "true"), ("1", "'1'")]),
        (Fields.text, "a string", [("", "''"), (1, "1"), (True, "true")]),
        (lambda read, field: read.text(field, ("a", "b")), "one of a, b", [("c", "'c'"), (1, "1")]),
        (Fields.boolean, "true or false", [(0, "0"), (1, "1"), ("true", "'true'")]),
        (lambda read, field: read.packed(field, "<u8", 1), "a base64 string", [(1, "1"), ([1, 2], "[1, 2]")]),
        (Fields.stream_id, "a string", [("", "''"), (1, "1")]),
        (Fields.stream_id, "32 hexadecimal digits", [("0" * 31, f"'{'0' * 31}'"), ("G" * 32, f"'{'G' * 32}'")]),
    ],
)
def test_field_of_another_type_is_refused(
    read: Callable[[Fields, str], object], expected: str, wrong: list[tuple[object, str]]
) -> None:
    for value, actual in wrong + (NONE if expected != "32 hexadecimal digits" else []):
        check_refusal(
            lambda value=value: read(fields(f=value), "f"),  # type: ignore[misc]
            FileInvalid,
            file="f.json",
            field="f",
            expected=expected,
            actual=actual,
        )


def test_whole_number_is_read_as_float() -> None:
    assert repr(fields(n=3).number("n")) == "3.0"
    assert fields(n=-0.5).number("n") == -0.5


def test_packed_numbers_are_little_endian() -> None:
    assert pack([1, 258], "<u8") == "AQAAAAAAAAACAQAAAAAAAA=="
    assert pack([1, 258], "<u4") == "AQAAAAIBAAA="
    assert base64.b64decode("AQAAAAAAAAACAQAAAAAAAA==") == struct.pack("<2Q", 1, 258)
    assert fields(a="AQAAAAAAAAACAQAAAAAAAA==").packed("a", "<u8", 2).tolist() == [1, 258]
    assert fields(a="AQAAAAIBAAA=").packed("a", "<u4", 2).tolist() == [1, 258]


@pytest.mark.parametrize(
    "value",
    ["AQAAAAAAAAA", "AQAA AAAAAAA=", "AQAAAAAAAAA=\n", "AQAAAAAAAA-_", "ü", "=", "A", "\u0661", "AQ==AAAAAAA="],
)
def test_bad_base64_is_refused(value: str) -> None:
    with pytest.raises(FileInvalid) as caught:
        fields(a=value).packed("a", "<u8", 1)
    assert (caught.value.file, caught.value.field) == ("f.json", "a")
    assert caught.value.expected == "a base64 string"
    assert str(caught.value).startswith("f.json: field 'a': expected a base64 string, found ")


@pytest.mark.parametrize("count", [0, 2, 10**15])
def test_packed_numbers_of_another_count_are_refused(count: int) -> None:
    check_refusal(
        lambda: fields(a="AQAAAAAAAAA=").packed("a", "<u8", count),
        FileInvalid,
        file="f.json",
        field="a",
        expected=f"{count} numbers of 8 bytes",
        actual="8 bytes",
    )


def test_packed_numbers_cannot_be_written_to() -> None:
    assert not fields(a="AQAAAAAAAAA=").packed("a", "<u8", 1).flags.writeable


def test_encoded_file_ends_in_a_newline() -> None:
    assert encode({"a": "ü"}) == '{"a":"ü"}\n'.encode()


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_packed_numbers_round_trip(numbers: list[int]) -> None:
    text = pack(numbers, "<u8")
    assert fields(a=text).packed("a", "<u8", len(numbers)).tolist() == numbers


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with suppress(FormatInvalid):
        Fields(data, "f.json")
