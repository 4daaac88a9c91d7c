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
from lazyshard.format.fields import MAX_CHUNKS, Fields, encode, pack, parse_size
from tests.format.cases import refusal


def fields(**values: object) -> Fields:
    return Fields(orjson.dumps({"format": 1} | values), "f.json")


def refused(read: Callable[[], object], field: str | None, expected: str) -> str:
    """What is said to be found."""
    found = refusal(read, FileInvalid, "f.json", field)
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
    found = refused(lambda: Fields(data, "f.json"), None, "a JSON object")
    assert found.startswith(shown) if shown.endswith("(") else found == shown


def test_format_is_an_integer_from_1() -> None:
    for value in (0, -1, True, None, 1.0, "1", 2**31 + 1, [1]):
        refused(lambda value=value: fields(format=value), "format", "an integer from 1 to 2147483648")  # type: ignore[misc]
    found = refused(lambda: Fields(b'{"chunks":1}', "f.json"), "format", "an integer from 1 to 2147483648")
    assert found == "no such field"


ID = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("read", "expected", "wrong"),
    [
        (
            lambda one, name: one.integer(name, 2, 7),
            "an integer from 2 to 7",
            [1, 8, -3, True, False, 3.0, "3", 2**64 - 1],
        ),
        (Fields.number, "a number", [True, "1"]),
        (Fields.text, "a string", ["", 1, True]),
        (lambda one, name: one.text(name, ("a", "b")), "one of a, b", ["c", 1]),
        (Fields.boolean, "true or false", [0, 1, "true"]),
        (lambda one, name: one.packed(name, "<u8", 1), "a base64 string", [1, [1, 2]]),
        (Fields.stream_id, "a string", ["", 1]),
    ],
)
def test_field_of_another_type_is_refused(
    read: Callable[[Fields, str], object], expected: str, wrong: list[object]
) -> None:
    for value in (*wrong, None, [], {"a": 1}):
        found = refused(lambda value=value: read(fields(f=value), "f"), "f", expected)  # type: ignore[misc]
        assert found == {"True": "true", "False": "false", "None": "null"}.get(repr(value), repr(value))


def test_fields_are_read_at_their_bounds() -> None:
    assert [fields(n=value).integer("n", 2, 7) for value in (2, 7)] == [2, 7]
    assert repr(fields(n=3).number("n")) == "3.0"
    assert fields(n=-0.5).number("n") == -0.5
    assert fields(n=ID).stream_id("n") == ID
    for wrong in (ID[1:], ID.upper()):
        refused(lambda wrong=wrong: fields(n=wrong).stream_id("n"), "n", "32 hexadecimal digits")  # type: ignore[misc]
    huge = Fields(b'{"format":1,"n":100000000000000000000000000000}', "f.json")
    assert refused(lambda: huge.integer("n", 0, 2), "n", "an integer from 0 to 2") == "1e+29"
    assert MAX_CHUNKS == 10**15
    assert encode({"a": "ü"}) == '{"a":"ü"}\n'.encode()


def test_packed_numbers_are_little_endian_and_cannot_be_written_to() -> None:
    assert pack([1, 258], "<u8") == "AQAAAAAAAAACAQAAAAAAAA=="
    assert fields(a="AQAAAAAAAAACAQAAAAAAAA==").packed("a", "<u8", 2).tobytes() == struct.pack("<2Q", 1, 258)
    assert pack([1, 258], "<u4") == "AQAAAAIBAAA="
    assert fields(a="AQAAAAIBAAA=").packed("a", "<u4", 2).tolist() == [1, 258]
    assert not fields(a="AQAAAAAAAAA=").packed("a", "<u8", 1).flags.writeable


@pytest.mark.parametrize(
    "value", ["AQAAAAAAAAA", "AQAA AAAAAAA=", "AQAAAAAAAAA=\n", "AQAAAAAAAA-_", "ü", "=", "A", "\u0661", "AQ==AAAAAAA="]
)
def test_bad_base64_is_refused(value: str) -> None:
    refused(lambda: fields(a=value).packed("a", "<u8", 1), "a", "a base64 string")


@pytest.mark.parametrize("count", [0, 2, 10**15])
def test_packed_numbers_of_another_count_are_refused(count: int) -> None:
    read = fields(a="AQAAAAAAAAA=")
    assert refused(lambda: read.packed("a", "<u8", count), "a", f"{count} numbers of 8 bytes") == "8 bytes"


@given(st.lists(st.integers(0, 2**64 - 1)), st.binary(max_size=60))
def test_packed_numbers_round_trip_and_any_bytes_are_read_or_refused(numbers: list[int], data: bytes) -> None:
    assert fields(a=pack(numbers, "<u8")).packed("a", "<u8", len(numbers)).tolist() == numbers
    with suppress(FormatInvalid):
        Fields(data, "f.json")


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
