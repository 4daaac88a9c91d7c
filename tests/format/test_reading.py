from __future__ import annotations

import math
import re
import reprlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.errors import FormatInvalid, ReadingInvalid
from lazyshard.format import ReadingMark
from lazyshard.format.reading import reading_name
from tests.format.cases import changed, check_later_format, check_refusal, not_an_integer, without

STREAM_ID = "5f0c1a9be7d24c3f8a6b0e1d2c3b4a59"
GOLDEN = (
    b'{"format":1,"consumer":"sft","stream_id":"5f0c1a9be7d24c3f8a6b0e1d2c3b4a59","dp_size":8,"window":3,'
    b'"needs_chunks":64,"updated_at":1700000001.25}\n'
)
VALUE = ReadingMark("sft", STREAM_ID, 8, 3, 64, 1700000001.25)
DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"


def decode(data: bytes) -> ReadingMark:
    return ReadingMark.decode(data, "sft")


def test_reading_mark_bytes_are_pinned() -> None:
    assert VALUE.encode() == GOLDEN
    assert decode(GOLDEN) == VALUE
    assert reading_name("sft") == "sft.reading.json"


def test_example_of_the_specification_is_read_and_written_the_same() -> None:
    found = re.search(r"^cursors/sft\.reading\.json +(\{.*\})$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert found
    text = found[1].encode() + b"\n"
    assert decode(text).encode() == text


def test_unknown_field_of_reading_mark_is_ignored() -> None:
    assert decode(changed(GOLDEN, lag=[8])) == VALUE


def test_reading_mark_of_a_later_format_is_refused() -> None:
    check_later_format(decode, GOLDEN, file="cursors/sft.reading.json")


@pytest.mark.parametrize("data", [without(GOLDEN, "stream_id"), changed(GOLDEN, stream_id=None)])
def test_reading_mark_of_a_foreign_directory_has_no_stream_id(data: bytes) -> None:
    assert decode(data).stream_id is None


def check(value_of: dict[str, object], field: str, expected: str, actual: str) -> None:
    check_refusal(
        lambda: ReadingMark.decode(changed(GOLDEN, **value_of), "sft", "/s/cursors/sft.reading.json"),
        ReadingInvalid,
        file="/s/cursors/sft.reading.json",
        field=field,
        expected=expected,
        actual=actual,
    )


@pytest.mark.parametrize(
    ("field", "low", "high"), [("dp_size", 1, 2**31), ("window", 0, 2**62), ("needs_chunks", 0, 10**15)]
)
def test_number_of_reading_mark_out_of_its_range_is_refused(field: str, low: int, high: int) -> None:
    for value, actual in not_an_integer(low, high):
        check({field: value}, field, f"an integer from {low} to {high}", actual)
    for value in (low, high):
        assert getattr(decode(changed(GOLDEN, **{field: value})), field) == value


@pytest.mark.parametrize("value", ["", "5f", STREAM_ID.upper(), 5])
def test_stream_id_that_is_none_is_refused(value: Any) -> None:
    check({"stream_id": value}, "stream_id", "32 hexadecimal digits or null", reprlib.repr(value))


def test_reading_mark_of_another_consumer_is_refused() -> None:
    check({"consumer": "dpo"}, "consumer", "one of sft", "'dpo'")


@pytest.mark.parametrize("field", ["format", "consumer", "dp_size", "window", "needs_chunks", "updated_at"])
def test_missing_field_of_reading_mark_is_refused(field: str) -> None:
    with pytest.raises(ReadingInvalid) as caught:
        decode(without(GOLDEN, field))
    assert (caught.value.file, caught.value.field) == ("cursors/sft.reading.json", field)
    assert caught.value.actual == "no such field"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"consumer": "a/b"}, "the name of a consumer is .*"),
        ({"stream_id": "x"}, "stream_id is 32 hexadecimal digits or None, got 'x'"),
        ({"dp_size": 0}, "dp_size is an integer from 1 to 2147483648, got 0"),
        ({"dp_size": True}, "dp_size is an integer from 1 to 2147483648, got True"),
        ({"window": -1}, "window is an integer from 0 to 4611686018427387904, got -1"),
        ({"needs_chunks": 1.0}, "needs_chunks is an integer from 0 to 1000000000000000, got 1.0"),
        ({"updated_at": math.inf}, "updated_at is a finite number of seconds, got inf"),
    ],
)
def test_value_that_could_not_be_read_again_is_refused(wrong: dict[str, Any], said: str) -> None:
    fields: dict[str, Any] = {name: getattr(VALUE, name) for name in VALUE.__slots__}
    with pytest.raises(ValueError, match=f"^{said}$"):
        ReadingMark(**(fields | wrong))


@given(st.integers(1, 2**31), st.integers(0, 2**62), st.integers(0, 10**15), st.floats(0, 1e12))
def test_reading_mark_round_trips(dp: int, window: int, chunks: int, time: float) -> None:
    value = ReadingMark("sft", None, dp, window, chunks, time)
    assert decode(value.encode()) == value


def test_reading_mark_cut_anywhere_is_refused() -> None:
    for size in range(len(GOLDEN) - 1):  # the last byte is the newline, which carries nothing
        with pytest.raises(ReadingInvalid):
            decode(GOLDEN[:size])


@given(st.sampled_from(sorted(orjson.loads(GOLDEN))), st.none() | st.integers() | st.text(max_size=3) | st.floats())
def test_mutated_reading_mark_is_read_or_refused(field: str, value: Any) -> None:
    with suppress(FormatInvalid, TypeError):  # orjson writes no integer of more than 64 bits
        decode(changed(GOLDEN, **{field: value}))
