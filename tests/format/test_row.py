"""Lines that are refused, and those that look like it and are not."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.errors import RowInvalid
from lazyshard.format.row import check_row, parse_row


def refusal(line: bytes) -> RowInvalid:
    """The error of both readers of a line, which must be the same."""
    with pytest.raises(RowInvalid) as parsed:
        parse_row(line)
    with pytest.raises(RowInvalid) as caught:
        check_row(line)
    assert str(parsed.value) == str(caught.value)
    return caught.value


def check_refusal(error: RowInvalid, reason: str, byte: int) -> None:
    assert (error.reason, error.byte) == (reason, byte)
    assert str(error) == f"not a row: {reason} (byte {byte} of the row)"
    assert (error.file, error.line) == (None, None)


@pytest.mark.parametrize(
    ("line", "byte"),
    [
        (b'{"a":1', 6),
        (b'{"a":', 5),
        (b'{"a', 3),
        (b"{", 1),
        (b'{"a":}', 5),
        (b"{'a':1}", 1),
        (b"{a:1}", 1),
        (b'{"a":01}', 5),
        (b'{"a":tru}', 5),
        (b'{"a":"\t"}', 6),
        (b'{"a":"\r"}', 6),
        (b'{"a":"\n"}', 6),
        (b'{"a":"x\0y"}', 7),
        (b'{"a":1e999}', 5),
        (b'{"a":-1e999}', 5),
        (b'{"a":' + b"9" * 5000 + b"}", 5),
        (b'{"a":-' + b"9" * 5000 + b"}", 5),
        (b'{"a":1}{"b":2}', 7),
        (b'{"a":1} {"b":2}', 8),
        (b'{"a":1},', 7),
        (b'{"a":1}\n{"b":2}\n', 8),
    ],
)
def test_malformed_row_is_refused_at_its_byte(line: bytes, byte: int) -> None:
    error = refusal(line)
    assert error.reason
    check_refusal(error, error.reason, byte)


@pytest.mark.parametrize(
    ("text", "byte"),
    [
        ('{"é":}', 6),
        ('{"日本語":"\u00fc", "b":}', 23),
        ('{"😀":"😀"}x', 15),
        ('{"😀":"é\0"}', 11),
        ('{"é":"é', 9),
    ],
)
def test_byte_counts_bytes_and_not_characters(text: str, byte: int) -> None:
    assert refusal(text.encode()).byte == byte


def test_byte_of_a_view_is_that_of_the_bytes() -> None:
    with pytest.raises(RowInvalid) as caught:
        parse_row(memoryview('{"é":}'.encode()))
    assert caught.value.byte == 6
    assert parse_row(memoryview(b'{"a":1}\n')) == {"a": 1}


@pytest.mark.parametrize("line", [b"", b"\n", b"\r\n", b"  \t\r\n", b" ", b"\t\n"])
def test_blank_row_is_refused(line: bytes) -> None:
    check_refusal(refusal(line), "nothing but blanks", 0)


@pytest.mark.parametrize(
    ("line", "bad", "byte"),
    [
        (b'{"a":"\xff"}', "0xff", 6),
        ('{"é":"'.encode() + b'\xc3"}', "0xc3", 7),
        (b'{"a":"\xed\xa0\x80"}', "0xed", 6),
        (b'{"a":"\xc0\xaf"}', "0xc0", 6),
        (b'{"a":"caf\xe9"}', "0xe9", 9),
        (b'{"a":"\xe2\x82', "0xe2", 6),
        (b"\x1f\x8b\x08\x00abc", "0x8b", 1),
    ],
)
def test_row_that_is_not_utf8_is_refused(line: bytes, bad: str, byte: int) -> None:
    check_refusal(refusal(line), f"not UTF-8: byte {bad}", byte)


@pytest.mark.parametrize(
    ("line", "encoding"),
    [
        (b"\xff\xfe" + '{"a":1}\n'.encode("utf-16-le"), "UTF-16"),
        (b"\xfe\xff" + '{"a":1}\n'.encode("utf-16-be"), "UTF-16"),
        ('{"a":1}'.encode("utf-16-le"), "UTF-16LE"),
        ('{"a":1}'.encode("utf-16-be"), "UTF-16BE"),
        ("{}".encode("utf-16-le"), "UTF-16LE"),
    ],
)
def test_utf16_row_is_refused_and_the_command_named(line: bytes, encoding: str) -> None:
    reason = f"UTF-16 text: expected UTF-8; convert it with `iconv -f {encoding} -t UTF-8`"
    check_refusal(refusal(line), reason, 0)


@pytest.mark.parametrize(
    ("line", "byte"),
    [
        (b'\xef\xbb\xbf{"a":1}', 0),
        (b"\xef\xbb\xbf\n", 0),
        (b'{"a":\xef\xbb\xbf1}', 5),
        (b'{"a":1}\xef\xbb\xbf', 7),
        ('{"\ufeff":"é",\ufeff"b":1}'.encode(), 12),
    ],
)
def test_byte_order_mark_within_the_file_is_refused(line: bytes, byte: int) -> None:
    check_refusal(refusal(line), "a byte order mark, which is only allowed at the start of a file", byte)


def test_byte_order_mark_within_a_string_is_text() -> None:
    line = '{"a":"\ufeffx"}'.encode()
    assert check_row(line) == {"a": "\ufeffx"}
    assert "byte order mark" not in str(refusal(line[:-1]))


@pytest.mark.parametrize(
    ("line", "byte"),
    [(b'{"a":1}\r{"b":2}', 8), (b'{"a":1}\r{"b":2}\r', 8), (b'{"a":1} \r \r{"b":2}\r\n', 11)],
)
def test_carriage_returns_as_line_ends_are_refused(line: bytes, byte: int) -> None:
    reason = r"carriage returns as line ends: expected newlines; convert it with `tr '\r' '\n'`"
    check_refusal(refusal(line), reason, byte)


@pytest.mark.parametrize("line", [b'{"a":1,}\r\n', b'{"a":"\r"}\r\n', b'{"a":1,\r"b":nul}\r\n'])
def test_other_fault_in_a_row_with_carriage_returns_is_named_itself(line: bytes) -> None:
    assert "carriage returns" not in str(refusal(line))


@pytest.mark.parametrize(
    ("line", "byte"),
    [
        (b'{"a":"x\0\0\0\0', 7),
        (b'{"a":1}\0', 7),
        (b'{"a":1}\0\0\0\r\n', 7),
        ('{"é":1}'.encode() + b"\0" * 4096, 8),
        (b"\0", 0),
        (b"\0\0\0\0\0\0", 0),
    ],
)
def test_nul_tail_says_torn(line: bytes, byte: int) -> None:
    check_refusal(refusal(line), "ends in NUL bytes; torn by a crash of the machine that wrote it?", byte)


@pytest.mark.parametrize(
    "value",
    [
        b"NaN",
        b"-NaN",
        b"Infinity",
        b"-Infinity",
        b"nan",
        b"inf",
        b"-inf",
        b"[NaN]",
        b'{"b":[1,Infinity]}',
        b"[1,-Infinity]",
    ],
)
def test_nan_and_infinity_are_refused_by_name(value: bytes) -> None:
    error = refusal(b'{"a":' + value + b"}")
    assert error.reason == "NaN and infinities are not JSON; write null or a string"
    assert error.byte is not None
    assert error.byte >= 5


@pytest.mark.parametrize("escape", [rb"\ud800", rb"\udc00", rb"\ud800x", rb"\ud800\u0041", rb"\udfff\udfff"])
def test_lone_surrogate_is_refused(escape: bytes) -> None:
    error = refusal(b'{"a":"' + escape + b'"}')
    assert error.byte is not None
    assert 6 <= error.byte <= 6 + len(escape)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b"[1]", "an array"),
        (b'[{"a":1}]\n', "an array"),
        (b'"x"', "a string"),
        (b"1", "a number"),
        (b"-1.5", "a number"),
        (b"null", "null"),
        (b"true", "true or false"),
        (b"false\n", "true or false"),
    ],
)
def test_row_that_is_no_object_is_refused(line: bytes, kind: str) -> None:
    check_refusal(refusal(line), f"expected a JSON object, found {kind}", 0)


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":[' * 50_000,
    ],
    ids=["arrays cut", "arrays", "objects cut", "objects", "arrays in an object", "both cut"],
)
def test_row_nested_past_all_limits_is_refused(line: bytes) -> None:
    assert refusal(line).byte is not None


@pytest.mark.parametrize("integer", [b"18446744073709551616", b"-9223372036854775809", b"9" * 24, b"1" + b"0" * 100])
@pytest.mark.parametrize(
    ("before", "after"), [(b'{"a":', b"}"), (b'{"a":[{"b":[1, ', b"]}]}\n"), (b'{ "\xc3\xa9" : ', b" }")]
)
def test_integer_past_64_bits_is_refused_for_publishing(integer: bytes, before: bytes, after: bytes) -> None:
    with pytest.raises(RowInvalid) as caught:
        check_row(before + integer + after)
    shown = integer.decode() if len(integer) <= 24 else integer[:20].decode() + "..."
    check_refusal(caught.value, f"the integer {shown} does not fit into 64 bits; write it as a string", len(before))


def test_integer_past_64_bits_is_found_behind_the_same_digits_in_a_string() -> None:
    digits = b"99999999999999999999999"
    with pytest.raises(RowInvalid) as caught:
        check_row(b'{"a":"' + digits + b'","b\\"' + digits + b'":' + digits + b"}")
    assert caught.value.byte == 5 + 1 + 23 + 1 + 1 + 4 + 23 + 2


def test_integer_past_64_bits_is_found_in_a_row_nested_deep() -> None:
    before = b'{"a":' * 900
    with pytest.raises(RowInvalid) as caught:
        check_row(before + b"18446744073709551616" + b"}" * 900)
    assert caught.value.byte == 4500


@pytest.mark.parametrize("integer", [2**64 - 1, 2**63, 2**63 - 1, -(2**63), 10**18, -(10**18), 0])
def test_integer_at_the_64_bit_bounds_is_exact(integer: int) -> None:
    line = b'{"a":%d,"b":[{"c":%d}]}\n' % (integer, integer)
    assert check_row(line) == {"a": integer, "b": [{"c": integer}]}


@pytest.mark.parametrize(
    ("line", "row"),
    [
        (b'{"a":"99999999999999999999999"}', {"a": "99999999999999999999999"}),
        (b'{"a":"99999999999999999999999","b":1e300}', {"a": "99999999999999999999999", "b": 1e300}),
        (b'{"a":"\\"99999999999999999999999:","b":1e19}', {"a": '"99999999999999999999999:', "b": 1e19}),
        (b'{"99999999999999999999999":1e19}', {"99999999999999999999999": 1e19}),
        (b'{"a":3.14159265358979323846264338327950288}', {"a": 3.141592653589793}),
        (b'{"a":99999999999999999999999.5}', {"a": 1e23}),
        (b'{"a":-99999999999999999999999e0}', {"a": -1e23}),
        (b'{"a":1e22,"b":1E+0000000000000000000022}', {"a": 1e22, "b": 1e22}),
        (b'{"a":1e22,"b":1e-0000000000000000000001}', {"a": 1e22, "b": 0.1}),
        (b'{"a":1e22,"b":0.00000000000000000000000001}', {"a": 1e22, "b": 1e-26}),
        (b'{"a":1.7976931348623157e308,"b":5e-324,"c":-0.0}', {"a": 1.7976931348623157e308, "b": 5e-324, "c": -0.0}),
    ],
)
def test_long_number_that_is_no_integer_is_accepted(line: bytes, row: object) -> None:
    assert check_row(line) == row


@pytest.mark.parametrize(
    ("line", "row"),
    [
        (b"{}", {}),
        (b'{"a":1}\n', {"a": 1}),
        (b'{"a":1}\r\n', {"a": 1}),
        (b'{"a":1}\r', {"a": 1}),
        (b' { "a" :\t1 } \n', {"a": 1}),
        (b'{"":null}', {"": None}),
        ('{"a":"x\u2028y\u2029z\u0085"}'.encode(), {"a": "x\u2028y\u2029z\u0085"}),
        (rb'{"a":"\u0000\u001f\ud83d\ude00\n\r\/"}', {"a": "\0\x1f😀\n\r/"}),
        (b'{"a":"\x7f"}', {"a": "\x7f"}),
        (b'{"a":1,"a":2}', {"a": 2}),
        (b'{"a":"NaN","NaN":"Infinity"}', {"a": "NaN", "NaN": "Infinity"}),
    ],
)
def test_unusual_row_is_accepted(line: bytes, row: object) -> None:
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
    check_refusal(caught.value, "a line end within the row: expected one object on one line", byte)


def test_row_nested_as_deep_as_can_be_read_is_checked() -> None:
    assert check_row(b'{"a":' * 1000 + b"1e300" + b"}" * 1000).keys() == {"a"}


@given(st.binary())
def test_any_bytes_are_read_or_refused(line: bytes) -> None:
    for text in (line, b'{"a":' + line + b"}", b'{"a":"' + line + b'"}'):
        with suppress(RowInvalid):
            check_row(text)


@given(st.binary(max_size=3), st.integers(0, 40), st.integers(0, 3))
def test_refused_byte_lies_within_the_row(piece: bytes, at: int, drop: int) -> None:
    golden = '{"é":[1.5,-2,"\\n😀"],"b":{"c":null}}\n'.encode()
    line = golden[:at] + piece + golden[at + drop :]
    try:
        check_row(line)
    except RowInvalid as error:
        assert error.byte is not None
        assert 0 <= error.byte <= len(line)
