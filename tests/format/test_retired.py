from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.errors import RetiredInvalid
from lazyshard.format import Retired
from tests.format.cases import changed, check_later_format, check_refusal, not_an_integer, without

STREAM_ID = "5f0c1a9be7d24c3f8a6b0e1d2c3b4a59"
GOLDEN = b'{"format":1,"stream_id":"5f0c1a9be7d24c3f8a6b0e1d2c3b4a59","chunks_before":20,"updated_at":1700000001.25}\n'
VALUE = Retired(STREAM_ID, 20, 1700000001.25)
DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"


def test_retired_mark_bytes_are_pinned() -> None:
    assert VALUE.encode() == GOLDEN
    assert Retired.decode(GOLDEN) == VALUE


def test_example_of_the_specification_is_read_and_written_the_same() -> None:
    found = re.search(r"^retired\.json +(\{.*\})$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert found
    text = found[1].encode() + b"\n"
    assert Retired.decode(text).encode() == text


def test_unknown_field_of_retired_mark_is_ignored() -> None:
    assert Retired.decode(changed(GOLDEN, bytes=12)) == VALUE


def test_retired_mark_of_a_later_format_is_refused() -> None:
    check_later_format(Retired.decode, GOLDEN, file="retired.json")


def check(value_of: dict[str, object], field: str, expected: str, actual: str) -> None:
    check_refusal(
        lambda: Retired.decode(changed(GOLDEN, **value_of), "/s/retired.json"),
        RetiredInvalid,
        file="/s/retired.json",
        field=field,
        expected=expected,
        actual=actual,
    )


@pytest.mark.parametrize(("value", "actual"), not_an_integer(0, 10**15))
def test_chunks_before_that_are_no_count_are_refused(value: object, actual: str) -> None:
    check({"chunks_before": value}, "chunks_before", "an integer from 0 to 1000000000000000", actual)


@pytest.mark.parametrize("value", ["5f", STREAM_ID.upper()])
def test_stream_id_that_is_none_is_refused(value: str) -> None:
    check({"stream_id": value}, "stream_id", "32 hexadecimal digits", repr(value))


@pytest.mark.parametrize("value", [None, 5, ""])
def test_stream_id_that_is_no_text_is_refused(value: Any) -> None:
    with pytest.raises(RetiredInvalid, match="field 'stream_id': expected a string"):
        Retired.decode(changed(GOLDEN, stream_id=value))


@pytest.mark.parametrize("field", ["format", "stream_id", "chunks_before", "updated_at"])
def test_missing_field_of_retired_mark_is_refused(field: str) -> None:
    with pytest.raises(RetiredInvalid) as caught:
        Retired.decode(without(GOLDEN, field))
    assert (caught.value.file, caught.value.field, caught.value.actual) == ("retired.json", field, "no such field")


@given(st.integers(0, 10**15), st.floats(0, 1e12))
def test_retired_mark_round_trips(chunks: int, time: float) -> None:
    value = Retired(STREAM_ID, chunks, time)
    assert Retired.decode(value.encode()) == value


def test_retired_mark_cut_anywhere_is_refused() -> None:
    for size in range(len(GOLDEN) - 1):  # the last byte is the newline, which carries nothing
        with pytest.raises(RetiredInvalid):
            Retired.decode(GOLDEN[:size])
