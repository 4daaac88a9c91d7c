"""Lines that are refused or look like it, one by one and together; rows made of Python values; keys that come twice."""

import enum
import pickle
import tracemalloc
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.errors import RowInvalid
from lazyshard.format import batch
from lazyshard.format.batch import check_lines
from lazyshard.format.row import check_row, encode_row, has_duplicate_keys, parse_row
from tests.format.records import finite, integers, json_of
from tests.harness.fuzz.formats import check_batch
from tests.stream.streams import raised

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
    ('{"é":}'.encode(), 6, ""),
    ('{"日本語":"\u00fc", "b":}'.encode(), 23, ""),
    ('{"😀":"😀"}x'.encode(), 15, ""),
    ('{"😀":"é\0"}'.encode(), 11, ""),
    ('{"é":"é'.encode(), 9, ""),
    *[(line, 0, "a blank line") for line in (b"", b"\n", b"  \t\r\n", b" ")],
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
    parsed = raised(RowInvalid, parse_row, line)
    caught = raised(RowInvalid, check_row, line)
    assert str(parsed) == str(caught)
    return caught


@pytest.mark.parametrize(("line", "byte", "fact"), REFUSED)
def test_refused_with_the_byte_and_the_reason(line: bytes, byte: int, fact: str) -> None:
    error = refusal(line)
    assert error.byte == byte
    assert error.reason and fact in error.reason
    assert f"(byte {byte} " in str(error)
    assert (error.file, error.line) == (None, None)
    for other in {TORN, RETURNS, MARK} - {fact}:
        assert other not in error.reason


def test_nan_infinity_and_lone_surrogates_are_refused() -> None:
    for value in ("NaN", "-NaN", "Infinity", "-Infinity", "nan", "inf", "-inf", "[NaN]", "[1,-Infinity]"):
        error = refusal(f'{{"a":{value}}}'.encode())
        assert str(error.reason).startswith("NaN")
        assert error.byte is not None and error.byte >= 5
    for escape in (rb"\ud800", rb"\udc00", rb"\ud800x", rb"\ud800\u0041", rb"\udfff\udfff"):
        error = refusal(b'{"a":"' + escape + b'"}')
        assert error.byte is not None and 6 <= error.byte <= 6 + len(escape)
    for line in (b'{"a":1,}\r\n', b'{"a":"\r"}\r\n', b'{"a":1,\r"b":nul}\r\n', b'{"a":"\xef\xbb\xbfx"'):
        assert not any(word in str(refusal(line)) for word in (RETURNS, MARK))


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"a":['])
@pytest.mark.parametrize("closing", [b"", b"]", b"}"])
def test_row_nested_past_all_limits_is_refused(opening: bytes, closing: bytes) -> None:
    assert refusal(opening * 100_000 + closing * 100_000).byte is not None


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
    caught = raised(RowInvalid, check_row, before + integer + after)
    shown = integer.decode() if len(integer) <= 24 else integer[:20].decode() + "..."
    assert caught.byte == len(before)
    assert f"the integer {shown} " in str(caught)


def test_integer_at_the_64_bit_bounds_a_deep_row_and_a_view_are_read() -> None:
    for integer in (2**64 - 1, 2**63, 2**63 - 1, -(2**63), 0):
        line = b'{"a":%d,"b":[{"c":%d}]}\n' % (integer, integer)
        assert check_row(line) == {"a": integer, "b": [{"c": integer}]}
    assert check_row(b'{"a":' * 1000 + b"1e300" + b"}" * 1000).keys() == {"a"}
    assert raised(RowInvalid, parse_row, memoryview('{"é":}'.encode())).byte == 6
    assert parse_row(memoryview(b'{"a":1}\n')) == {"a": 1}


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


def test_line_end_within_the_row_is_refused_for_publishing() -> None:
    lines = {b'{"a":\n1}\n': 5, b'{"a":1}\n\n': 7, b"\n{}\n": 0, b'{"a":\r1}\n': 5, b"{}\r\r\n": 2, b'{\r\n"a":1}': 2}
    for line, byte in lines.items():
        caught = raised(RowInvalid, check_row, line)
        assert caught.byte == byte
        assert str(caught.reason).startswith("a line end within the row")


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
    caught = raised(RowInvalid, encode_row, row)
    assert (caught.byte, caught.file, caught.line) == (None, None, None)
    return str(caught.reason)


def test_encoded_row_is_pinned() -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({}, "{}\n"),
        ({"null": "null", "b": [None, {"c": None}]}, '{"null":"null","b":[null,{"c":null}]}\n'),
        ({"a": "line\nend\r\u2028"}, '{"a":"line\\nend\\r\u2028"}\n'),
        ({"a": (1, 2.5, True), "é": "😀"}, '{"a":[1,2.5,true],"é":"😀"}\n'),
        ({"a": 2**64 - 1, "b": -(2**63)}, '{"a":18446744073709551615,"b":-9223372036854775808}\n'),
        ({"a": 0.1 + 0.2, "b": -0.0, "c": Label.GOOD}, '{"a":0.30000000000000004,"b":-0.0,"c":"good"}\n'),
    ]
    for row, line in rows:
        assert encode_row(row) == line.encode()


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
    for bad in (NAN, INF, -INF, Label.UNKNOWN):
        for value in (bad, [bad], (1, bad), [{"b": {"c": [None, bad]}}], nested(bad, 250)):
            assert refused({"a": value}).startswith("NaN")
    rows: list[object] = [[1], "x", None, 1, b"{}", (("a", 1),)]
    for row in rows:
        assert refused(row).endswith(f"found {type(row).__name__}")


def test_place_of_the_value_and_advice_are_told() -> None:
    row: dict[str, Any] = {"a": [1] * 10, "b": {1, 2}}
    row["c"] = [row]
    assert "set under 'b'" in refused(row)
    # So deep and wide that it is not looked for to the end.
    reason = refused({"a": [[0] * 1000] * 200 + [[1j]]})
    assert "complex" in reason and "under" not in reason
    advice: list[tuple[object, str]] = [(b"\xff\xd8", "base64"), (np.float32(1), ".item()"), (object(), "use dicts")]
    for value, told in advice:
        assert told in refused({"x": value})


@pytest.mark.parametrize(
    ("line", "twice"),
    [
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
values = json_of(st.none() | st.booleans() | integers | finite | text, text, 12)


@given(st.dictionaries(text, values, max_size=5))
def test_encoded_row_reads_back_the_same(row: dict[str, Any]) -> None:
    line = encode_row(row)
    assert line.endswith(b"}\n")
    assert (line.count(b"\n"), line.count(b"\r")) == (1, 0)
    assert repr(parse_row(line)) == repr(row)  # unlike ==, tells 1 from 1.0 and 0.0 from -0.0
    assert check_row(line) == check_row(line[:-1]) == row
    assert not has_duplicate_keys(line, row)


GOOD = b'{"id":1,"messages":[{"role":"user","content":"a: \\"b\\": c"}]}\n'

ODD = [
    *(line for line, _, _ in REFUSED if len(line) < 100),
    *(line for line, _ in ACCEPTED),
    b'{"a":1}\n\n',
    b'{"a":1}\r\r\n\n',
    b'{"a":\t1}\n',
    b'{"a":\r1}\n',
    b'{"a":\n1}\n',
    b'{"a"\t :1,"a":2}\n',
    b'{"a" :1,"b"  :2}\n',
    b'{"a":"x :y \\" : \\":"}\n',
    b'{"a":{"b":{"c":1}},"d":[[{"e":1}],{"f":{"g":1}}]}\n',
    b'{"a":[{"b":[{"c":1,"c":1}]}]}\n',
    b'{"\\u003a":1,"a":":"}\n',
    b'{"a\\"":1,"a\\u0022":2}\n',
    b'{"a":9223372036854775807,"b":-9223372036854775808,"c":18446744073709551615}\n',
    b'{"a":18446744073709551616}\n',
    b'{"a":-9223372036854775809}\n',
    b'{"a":1e300,"b":12345678901234567890.5}\n',
    b'{"a":NaN}\n',
    b'{"a":"\\ud800"}\n',
    b'{"a":' * 2000 + b"1" + b"}" * 2000 + b"\n",
]


@pytest.mark.parametrize("odd", ODD)
def test_odd_line_among_others_is_taken_as_alone(odd: bytes) -> None:
    for place in (0, 31, 32, 69):
        check_batch([*[GOOD] * place, odd, *[GOOD] * (69 - place)])


@pytest.mark.parametrize("end", ['"b":1e30}', '"b":1,"b":":"}'])
def test_escapes_of_a_long_string_take_no_memory_each(end: str) -> None:
    line = (r'{"a":"' + "\\n" * 200_000 + '",' + end).encode()
    tracemalloc.start()
    try:
        check_row(line)
        has_duplicate_keys(line, parse_row(line))
        assert tracemalloc.get_traced_memory()[1] < 20 * len(line)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("number", [b"9" * 20, b"-" + b"9" * 20, b"9" * 19 + b".5"])
def test_long_number_across_windows_is_found(number: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_WINDOW_BYTES", 64)
    for before in (0, 1, 7, 8, 15):
        for length in range(30, 80):
            line = b'{"a":"' + b"x" * length + b'","b":' + number + b"}\n"
            lines = [b'{"c":"' + b"y" * before + b'"}\n', line]
            check_batch(lines)
            assert (check_lines(lines).refused is None) is (b"." in number)


def test_checked_lines_are_those_before_the_first_refusal_and_survive_the_way_out_of_a_worker() -> None:
    # The first, though another one is refused for a reason that is seen sooner.
    for lines, rows in (([], 0), ([GOOD] * 40 + [b'{"a":18446744073709551616}\n'] + [GOOD] * 40 + [b"{\n"], 40)):
        check_batch(lines)
        assert len(check_lines(lines)) == rows
    found = check_lines([GOOD, b'{"a":1,"a":2}\n', b"{"])
    assert found.ends.dtype == found.digests.dtype == np.uint64
    again = pickle.loads(pickle.dumps(found))
    assert (again.data, again.duplicates, again.refused.index) == (found.data, (1,), 2)
    assert again.digests.tolist() == found.digests.tolist()
