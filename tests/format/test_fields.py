"""Typed fields out of what someone else wrote; what else the records hold of them is in their tests."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.errors import FileInvalid, FormatInvalid
from lazyshard.format.fields import (
    MAX_CHUNKS,
    STREAM_ID,
    encode,
    in_file,
    pack,
    parse_object,
    parse_size,
    take,
    unpack,
)
from lazyshard.part import BOOLEAN, NUMBER, TEXT, Kind, integer, or_null
from tests.format.cases import refusal


def fields(**values: object) -> dict[str, object]:
    return parse_object(orjson.dumps({"format": 1} | values))


def refused(read: Callable[[], object], field: str | None, expected: str) -> str:
    """What is said to be found."""

    def read_file() -> object:
        with in_file("f.json"):
            return read()

    found = refusal(read_file, FileInvalid, "f.json", field)
    assert found.expected == expected
    assert len(str(found)) < 300
    return str(found.actual)


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"[]", "[]"),
        (b"null", "null"),
        (b"true", "true"),
        (b'"x"', "'x'"),
        (b"[" * 1000 + b"]" * 1000, "[[[[[[[...]]]]]]]"),
        (b'"' + b"x" * 100 + b'"', "'" + "x" * 37 + "..." + "x" * 38 + "'"),
        (b"", "b'' ("),
        (b"\0\0\0", r"b'\x00\x00\x00' ("),
        (b'{"format":1', "b'{\"format\":1' ("),
        (b'{"format":1,"a":NaN}', 'b\'{"format":1,"a":NaN}\' ('),
        (b"\xef\xbb\xbf{}", r"b'\xef\xbb\xbf{}' ("),
        (b"[" * 100_000, "b'" + "[" * 75 + "... ("),
        (b'{"a":' * 100_000, "b'" + ('{"a":' * 15) + "... ("),
    ],
)
def test_what_is_no_object_is_refused_and_shown_in_short(data: bytes, shown: str) -> None:
    found = refused(lambda: parse_object(data), None, "a JSON object")
    assert found.startswith(shown) if shown.endswith("(") else found == shown


def test_format_is_an_integer_from_1() -> None:
    for value in (0, -1, True, None, 1.0, "1", 2**31 + 1, [1]):
        refused(lambda value=value: fields(format=value), "format", "an integer from 1 to 2147483648")  # type: ignore[misc]
    found = refused(lambda: parse_object(b'{"chunks":1}'), "format", "an integer from 1 to 2147483648")
    assert found == "no such field"


ID = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("kind", "expected", "wrong"),
    [
        (integer(2, 7), "an integer from 2 to 7", [1, 8, -3, True, False, 3.0, "3", 2**64 - 1]),
        (NUMBER, "a number", [True, "1"]),
        (TEXT, "a string", ["", 1, True]),
        (BOOLEAN, "true or false", [0, 1, "true"]),
        (STREAM_ID, "32 hexadecimal digits", ["", 1, ID[1:], ID.upper()]),
    ],
)
def test_field_of_another_type_is_refused(kind: Kind, expected: str, wrong: list[object]) -> None:
    for value in (*wrong, None, [], {"a": 1}):
        found = refused(lambda value=value: take(fields(f=value), "f", kind), "f", expected)  # type: ignore[misc]
        assert found == {"True": "true", "False": "false", "None": "null"}.get(repr(value), repr(value))
    assert refused(lambda: take(fields(), "f", kind), "f", expected) == "no such field"


def test_fields_are_read_at_their_bounds() -> None:
    assert [take(fields(n=value), "n", integer(2, 7)) for value in (2, 7)] == [2, 7]
    assert repr(take(fields(n=3), "n", NUMBER)) == "3.0"
    assert take(fields(n=-0.5), "n", NUMBER) == -0.5
    assert take(fields(n=ID), "n", STREAM_ID) == ID
    assert take(fields(n=None), "n", or_null(STREAM_ID)) is None
    huge = parse_object(b'{"format":1,"n":100000000000000000000000000000}')
    assert refused(lambda: take(huge, "n", integer(0, 2)), "n", "an integer from 0 to 2") == "1e+29"
    assert MAX_CHUNKS == 10**15
    assert encode({"a": "ü"}) == '{"a":"ü"}\n'.encode()


def test_packed_numbers_are_little_endian_and_cannot_be_written_to() -> None:
    assert pack([1, 258], "<u8") == "AQAAAAAAAAACAQAAAAAAAA=="
    assert unpack(fields(a="AQAAAAAAAAACAQAAAAAAAA=="), "a", "<u8", 2).tobytes() == struct.pack("<2Q", 1, 258)
    assert pack([1, 258], "<u4") == "AQAAAAIBAAA="
    assert unpack(fields(a="AQAAAAIBAAA="), "a", "<u4", 2).tolist() == [1, 258]
    assert not unpack(fields(a="AQAAAAAAAAA="), "a", "<u8", 1).flags.writeable


@pytest.mark.parametrize(
    "value", ["AQAAAAAAAAA", "AQAA AAAAAAA=", "AQAAAAAAAAA=\n", "AQAAAAAAAA-_", "ü", "=", "A", "\u0661", "AQ==AAAAAAA="]
)
def test_bad_base64_is_refused(value: str) -> None:
    refused(lambda: unpack(fields(a=value), "a", "<u8", 1), "a", "a base64 string")


@pytest.mark.parametrize("count", [0, 2, 10**15])
def test_packed_numbers_of_another_count_are_refused(count: int) -> None:
    read = fields(a="AQAAAAAAAAA=")
    assert refused(lambda: unpack(read, "a", "<u8", count), "a", f"{count} numbers of 8 bytes") == "8 bytes"


@given(st.lists(st.integers(0, 2**64 - 1)), st.binary(max_size=60))
def test_packed_numbers_round_trip_and_any_bytes_are_read_or_refused(numbers: list[int], data: bytes) -> None:
    assert unpack(fields(a=pack(numbers, "<u8")), "a", "<u8", len(numbers)).tolist() == numbers
    with suppress(FormatInvalid):
        parse_object(data)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("20GB", 20 * 10**9), ("20 gb", 20 * 10**9), ("1.5MiB", 3 << 19), ("64k", 64_000), ("2Ti", 2 << 40)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "GB", "1e9", "20 GB more", "0.0001", "1PB", "٣GB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError):
        parse_size(text)
