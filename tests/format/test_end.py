from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.errors import EndInvalid
from lazyshard.format import End
from tests.format.cases import changed, check_later_format, check_refusal, not_an_integer, without

GOLDEN = b'{"format":1,"chunks":3,"samples":25}\n'


def test_end_bytes_are_pinned() -> None:
    assert End(3, 25).encode() == GOLDEN
    assert End.decode(GOLDEN) == End(3, 25)


def test_end_of_an_empty_stream_is_read() -> None:
    assert End.decode(b'{"format":1,"chunks":0,"samples":0}') == End(0, 0)


def test_unknown_field_of_end_is_ignored() -> None:
    assert End.decode(changed(GOLDEN, reason="done")) == End(3, 25)


def test_end_of_a_later_format_is_refused() -> None:
    check_later_format(End.decode, GOLDEN, file="stream.end")


def check(value_of: dict[str, object], field: str, expected: str, actual: str) -> None:
    check_refusal(
        lambda: End.decode(changed(GOLDEN, **value_of), "/data/s/stream.end"),
        EndInvalid,
        file="/data/s/stream.end",
        field=field,
        expected=expected,
        actual=actual,
    )


@pytest.mark.parametrize(("value", "actual"), not_an_integer(0, 10**15))
def test_chunks_of_end_that_are_no_count_are_refused(value: object, actual: str) -> None:
    check({"chunks": value}, "chunks", "an integer from 0 to 1000000000000000", actual)


@pytest.mark.parametrize(("value", "actual"), not_an_integer(0, 2**62))
def test_samples_of_end_that_are_no_count_are_refused(value: object, actual: str) -> None:
    check({"samples": value}, "samples", "an integer from 0 to 4611686018427387904", actual)


def test_end_with_fewer_samples_than_chunks_is_refused() -> None:
    check({"samples": 2}, "samples", "at least one for each of 3 chunks", "2")


def test_end_with_samples_but_no_chunk_is_refused() -> None:
    check({"chunks": 0}, "samples", "0, as there is no chunk", "25")


@pytest.mark.parametrize("field", ["format", "chunks", "samples"])
def test_missing_field_of_end_is_refused(field: str) -> None:
    with pytest.raises(EndInvalid) as caught:
        End.decode(without(GOLDEN, field))
    assert (caught.value.file, caught.value.field, caught.value.actual) == ("stream.end", field, "no such field")
    assert str(caught.value).startswith(f"stream.end: field '{field}': expected an integer from ")


def test_empty_end_is_refused() -> None:
    with pytest.raises(EndInvalid, match=r"stream\.end: expected a JSON object, found b''"):
        End.decode(b"")


@given(st.integers(0, 10**15), st.integers(0, 10**18))
def test_end_round_trips(chunks: int, more: int) -> None:
    value = End(chunks, chunks and chunks + more)
    assert End.decode(value.encode()) == value
