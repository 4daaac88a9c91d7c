"""Lines that are refused, and those that look like it and are not."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.errors import RowInvalid
from lazyshard.format.row import check_row, parse_row

TORN: Final = "ends in NUL bytes"
RETURNS: Final = "carriage returns as line ends"
MARK: Final = "a byte order mark"

REFUSED: Final[list[tuple[bytes, int, str]]] = [
    *[(line, len(line), "") for line in (b'{"a":1', b'{"a":', b'{"a', b"{")],
    *[(b'{"a":' + value + b"}", 5, "") for value in (b"", b"01", b"tru", b"1e999", b"-1e999", b"9" * 5000)],
    *[(b'{"a":"' + control + b'"}', 6, "") for control in (b"\t", b"\r", b"\n")],
    (b"{'a':1}", 1, ""),
    (b'{"a":1}{"b":2}', 7, ""),
    (b'{"a":1} {"b":2}', 8, ""),
    (b'{"a":1},', 7, ""),
    (b'{"a":1}\n{"b":2}\n', 8, ""),
    # Bytes are counted, not characters.
    ('{"é":}'.encode(), 6, ""),
    ('{"日本語":"\u00fc", "b":}'.encode(), 23, ""),
    ('{"😀":"😀"}x'.encode(), 15, ""),
    ('{"😀":"é\0"}'.encode(), 11, ""),
    ('{"é":"é'.encode(), 9, ""),
    *[(line, 0, "nothing but blanks") for line in (b"", b"\n", b"  \t\r\n", b" ")],
    (b'{"a":"\xff"}', 6, "byte 0xff"),
    ('{"é":"'.encode() + b'\xc3"}', 7, "byte 0xc3"),
    (b'{"a":"\xed\xa0\x80"}', 6, "byte 0xed"),
    (b'{"a":"\xe2\x82', 6, "byte 0xe2"),
    (b"\x1f\x8b\x08\x00abc", 1, "byte 0x8b"),
    (b"\xff\xfe" + '{"a":1}\n'.encode("utf-16-le"), 0, "-f UTF-16 "),
    (b"\xfe\xff" + '{"a":1}\n'.encode("utf-16-be"), 0, "-f UTF-16 "),
    ("{}".encode("utf-16-le"), 0, "-f UTF-16LE "),
    ('{"a":1}'.encode("utf-16-be"), 0, "-f UTF-16BE "),
    (b'\xef\xbb\xbf{"a":1}', 0, MARK),
    (b"\xef\xbb\xbf\n", 0, MARK),
    (b'{"a":\xef\xbb\xbf1}', 5, MARK),
    ('{"\ufeff":"é",\ufeff"b":1}'.encode(), 12, MARK),
    (b'{"a":1}\r{"b":2}', 8, RETURNS),
    (b'{"a":1} \r \r{"b":2}\r\n', 11, RETURNS),
    (b'{"a":"x\0\0\0\0', 7, TORN),
    (b'{"a":1}\0\0\0\r\n', 7, TORN),
    ('{"é":1}'.encode() + b"\0" * 4096, 8, TORN),
    (b"\0", 0, TORN),
    *[(line, 0, "found an array") for line in (b"[1]", b'[{"a":1}]\n')],
    (b'"x"', 0, "found a string"),
    *[(line, 0, "found a number") for line in (b"1", b"-1.5")],
    (b"null", 0, "found null"),
    *[(line, 0, "found true or false") for line in (b"true", b"false\n")],
]


def refusal(line: bytes) -> RowInvalid:
    """The error of both readers of a line, which must be the same."""
    with pytest.raises(RowInvalid) as parsed:
        parse_row(line)
    with pytest.raises(RowInvalid) as caught:
        check_row(line)
    assert str(parsed.value) == str(caught.value)
    return caught.value


@pytest.mark.parametrize(("line", "byte", "fact"), REFUSED)
def test_refused_with_the_byte_and_the_reason(line: bytes, byte: int, fact: str) -> None:
    error = refusal(line)
    assert error.byte == byte
    assert error.reason and fact in error.reason
    assert f"(byte {byte} " in str(error)
    assert (error.file, error.line) == (None, None)
    for other in {TORN, RETURNS, MARK} - {fact}:
        assert other not in error.reason


@pytest.mark.parametrize(
    "line", [b'{"a":1,}\r\n', b'{"a":"\r"}\r\n', b'{"a":1,\r"b":nul}\r\n', b'{"a":"\xef\xbb\xbfx"']
)
def test_other_fault_beside_carriage_returns_or_a_mark_in_a_string_is_named_itself(line: bytes) -> None:
    assert not any(word in str(refusal(line)) for word in (RETURNS, MARK))


@pytest.mark.parametrize(
    "value", ["NaN", "-NaN", "Infinity", "-Infinity", "nan", "inf", "-inf", "[NaN]", "[1,-Infinity]"]
)
def test_nan_and_infinity_are_refused_by_name(value: str) -> None:
    error = refusal(f'{{"a":{value}}}'.encode())
    assert str(error.reason).startswith("NaN")
    assert error.byte is not None and error.byte >= 5


@pytest.mark.parametrize("escape", [rb"\ud800", rb"\udc00", rb"\ud800x", rb"\ud800\u0041", rb"\udfff\udfff"])
def test_lone_surrogate_is_refused(escape: bytes) -> None:
    error = refusal(b'{"a":"' + escape + b'"}')
    assert error.byte is not None and 6 <= error.byte <= 6 + len(escape)


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"a":['])
@pytest.mark.parametrize("closing", [b"", b"]", b"}"])
def test_row_nested_past_all_limits_is_refused(opening: bytes, closing: bytes) -> None:
    assert refusal(opening * 100_000 + closing * 100_000).byte is not None


def test_byte_of_a_view_is_that_of_the_bytes() -> None:
    with pytest.raises(RowInvalid) as caught:
        parse_row(memoryview('{"é":}'.encode()))
    assert caught.value.byte == 6
    assert parse_row(memoryview(b'{"a":1}\n')) == {"a": 1}


PAST: Final = b"18446744073709551616"
DIGITS: Final = b"99999999999999999999999"


@pytest.mark.parametrize("integer", [PAST, b"-9223372036854775809", b"9" * 24, b"1" + b"0" * 100])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'{"a":', b"}"),
        (b'{"a":[{"b":[1, ', b"]}]}\n"),
        (b'{ "\xc3\xa9" : ', b" }"),
        (b'{"a":' * 900, b"}" * 900),
        # The same digits come in strings before.
        (b'{"a":"' + DIGITS + b'","b\\"' + DIGITS + b'":', b"}"),
    ],
)
def test_integer_past_64_bits_is_refused_for_publishing(integer: bytes, before: bytes, after: bytes) -> None:
    with pytest.raises(RowInvalid) as caught:
        check_row(before + integer + after)
    shown = integer.decode() if len(integer) <= 24 else integer[:20].decode() + "..."
    assert caught.value.byte == len(before)
    assert f"the integer {shown} " in str(caught.value)


@pytest.mark.parametrize("integer", [2**64 - 1, 2**63, 2**63 - 1, -(2**63), 0])
def test_integer_at_the_64_bit_bounds_is_exact(integer: int) -> None:
    line = b'{"a":%d,"b":[{"c":%d}]}\n' % (integer, integer)
    assert check_row(line) == {"a": integer, "b": [{"c": integer}]}


ACCEPTED: Final[list[tuple[bytes, object]]] = [
    # Long numbers that are no integers.
    (b'{"a":"99999999999999999999999","b":1e300}', {"a": "99999999999999999999999", "b": 1e300}),
    (b'{"a":"\\"99999999999999999999999:","b":1e19}', {"a": '"99999999999999999999999:', "b": 1e19}),
    (b'{"99999999999999999999999":1e19}', {"99999999999999999999999": 1e19}),
    (b'{"a":3.14159265358979323846264338327950288}', {"a": 3.141592653589793}),
    (b'{"a":99999999999999999999999.5,"b":-99999999999999999999999e0}', {"a": 1e23, "b": -1e23}),
    (b'{"a":1E+0000000000000000000022,"b":1e-0000000000000000000001}', {"a": 1e22, "b": 0.1}),
    (b'{"a":1e22,"b":0.00000000000000000000000001}', {"a": 1e22, "b": 1e-26}),
    (b'{"a":1.7976931348623157e308,"b":5e-324,"c":-0.0}', {"a": 1.7976931348623157e308, "b": 5e-324, "c": -0.0}),
    # Unusual rows.
    (b"{}", {}),
    (b'{"a":1}\r\n', {"a": 1}),
    (b'{"a":1}\r', {"a": 1}),
    (b' { "a" :\t1 } \n', {"a": 1}),
    (b'{"":null}', {"": None}),
    ('{"a":"\ufeffx\u2028y\u2029z\u0085"}'.encode(), {"a": "\ufeffx\u2028y\u2029z\u0085"}),
    (rb'{"a":"\u0000\u001f\ud83d\ude00\n\r\/"}', {"a": "\0\x1f😀\n\r/"}),
    (b'{"a":"\x7f"}', {"a": "\x7f"}),
    (b'{"a":1,"a":2}', {"a": 2}),
    (b'{"a":"NaN","NaN":"Infinity"}', {"a": "NaN", "NaN": "Infinity"}),
]


@pytest.mark.parametrize(("line", "row"), ACCEPTED)
def test_what_looks_odd_is_accepted(line: bytes, row: object) -> None:
    assert check_row(line) == row
    assert parse_row(line) == row


@pytest.mark.parametrize(
    ("line", "byte"),
    [
        (b'{"a":\n1}\n', 5),
        (b'{"a":1}\n\n', 7),
        (b"\n{}\n", 0),
        (b'{"a":\r1}\n', 5),
        (b"{}\r\r\n", 2),
        (b'{\r\n"a":1}', 2),
    ],
)
def test_line_end_within_the_row_is_refused_for_publishing(line: bytes, byte: int) -> None:
    with pytest.raises(RowInvalid) as caught:
        check_row(line)
    assert caught.value.byte == byte
    assert str(caught.value.reason).startswith("a line end within the row")


def test_row_nested_as_deep_as_can_be_read_is_checked() -> None:
    assert check_row(b'{"a":' * 1000 + b"1e300" + b"}" * 1000).keys() == {"a"}


@given(st.binary(), st.integers(0, 40), st.integers(0, 3))
def test_any_bytes_are_read_or_refused_at_a_byte_within(piece: bytes, at: int, drop: int) -> None:
    golden = '{"é":[1.5,-2,"\\n😀"],"b":{"c":null}}\n'.encode()
    spoiled = golden[:at] + piece[:3] + golden[at + drop :]
    for line in (spoiled, piece, b'{"a":' + piece + b"}", b'{"a":"' + piece + b'"}'):
        try:
            check_row(line)
        except RowInvalid as error:
            assert error.byte is not None and 0 <= error.byte <= len(line)
