from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.errors import HeadInvalid
from lazyshard.format import STATES, Head
from tests.format.cases import changed, check_later_format, check_refusal, not_an_integer, without

GOLDEN = (
    b'{"format":1,"chunks":3,"samples":25,"ended":false,"state":"running","rate":12.5,'
    b'"host":"node1","pid":42,"updated_at":1700000001.25}\n'
)
VALUE = Head(3, 25, False, "running", 12.5, "node1", 42, 1700000001.25)


def test_head_bytes_are_pinned() -> None:
    assert VALUE.encode() == GOLDEN
    assert Head.decode(GOLDEN) == VALUE


def test_rows_of_the_open_chunk_come_last() -> None:
    silent = replace(VALUE, open=7, row_at=1.5)
    assert silent.encode() == GOLDEN[:-2] + b',"open":7,"row_at":1.5}\n'
    assert Head.decode(silent.encode()) == silent


def test_note_of_a_waiting_producer_comes_last() -> None:
    noted = replace(VALUE, note="12 chunks ahead")
    assert noted.encode() == GOLDEN[:-2] + b',"note":"12 chunks ahead"}\n'
    assert Head.decode(noted.encode()) == noted


def test_producer_states_are_pinned() -> None:
    assert STATES == ("running", "waiting", "idle", "finished", "failed")


@pytest.mark.parametrize("state", STATES)
def test_every_state_is_read(state: str) -> None:
    assert Head.decode(changed(GOLDEN, state=state)).state == state


def test_unknown_field_of_head_is_ignored() -> None:
    assert Head.decode(changed(GOLDEN, queue=[1])) == VALUE


def test_head_of_a_later_format_is_refused() -> None:
    check_later_format(Head.decode, GOLDEN, file="head.json")


def test_head_of_an_empty_stream_is_read() -> None:
    assert Head.decode(changed(GOLDEN, chunks=0, samples=0)) == replace(VALUE, chunks=0, samples=0)


def test_negative_rate_counts_as_unknown() -> None:
    assert Head.decode(changed(GOLDEN, rate=-1)).rate == 0.0


def check(value_of: dict[str, object], field: str, expected: str, actual: str) -> None:
    check_refusal(
        lambda: Head.decode(changed(GOLDEN, **value_of), "/data/s/head.json"),
        HeadInvalid,
        file="/data/s/head.json",
        field=field,
        expected=expected,
        actual=actual,
    )


@pytest.mark.parametrize(("value", "actual"), not_an_integer(0, 10**15))
def test_chunks_of_head_that_are_no_count_are_refused(value: object, actual: str) -> None:
    check({"chunks": value}, "chunks", "an integer from 0 to 1000000000000000", actual)


@pytest.mark.parametrize(("value", "actual"), not_an_integer(0, 2**62))
def test_samples_of_head_that_are_no_count_are_refused(value: object, actual: str) -> None:
    check({"samples": value}, "samples", "an integer from 0 to 4611686018427387904", actual)


@pytest.mark.parametrize(("value", "actual"), not_an_integer(0, 2**62))
def test_open_rows_of_head_that_are_no_count_are_refused(value: object, actual: str) -> None:
    check({"open": value}, "open", "an integer from 0 to 4611686018427387904", actual)


@pytest.mark.parametrize(("value", "actual"), not_an_integer(0, 2**31))
def test_pid_of_head_that_is_no_count_is_refused(value: object, actual: str) -> None:
    check({"pid": value}, "pid", "an integer from 0 to 2147483648", actual)


def test_head_with_fewer_samples_than_chunks_is_refused() -> None:
    check({"samples": 2}, "samples", "at least one for each of 3 chunks", "2")


def test_head_with_samples_but_no_chunk_is_refused() -> None:
    check({"chunks": 0}, "samples", "0, as there is no chunk", "25")


@pytest.mark.parametrize(("value", "actual"), [("paused", "'paused'"), ("", "''"), (1, "1"), (None, "null")])
def test_unknown_state_is_refused(value: object, actual: str) -> None:
    check({"state": value}, "state", "one of running, waiting, idle, finished, failed", actual)


def test_ended_that_is_no_boolean_is_refused() -> None:
    check({"ended": 1}, "ended", "true or false", "1")


@pytest.mark.parametrize("field", ["rate", "updated_at", "row_at"])
def test_number_of_head_of_another_type_is_refused(field: str) -> None:
    check({field: "1"}, field, "a number", "'1'")


def test_empty_host_of_head_is_refused() -> None:
    check({"host": ""}, "host", "a string", "''")


@pytest.mark.parametrize(
    "field", ["format", "chunks", "samples", "ended", "state", "rate", "host", "pid", "updated_at"]
)
def test_missing_field_of_head_is_refused(field: str) -> None:
    with pytest.raises(HeadInvalid) as caught:
        Head.decode(without(GOLDEN, field))
    assert (caught.value.file, caught.value.field, caught.value.actual) == ("head.json", field, "no such field")
    assert str(caught.value).startswith(f"head.json: field '{field}': expected ")


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(
    st.integers(0, 10**15),
    st.integers(0, 10**18),
    st.booleans(),
    st.sampled_from(STATES),
    finite,
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    st.integers(0, 2**31),
)
def test_head_round_trips(chunks: int, more: int, ended: bool, state: str, number: float, host: str, pid: int) -> None:
    known = next(known for known in STATES if known == state)
    value = Head(chunks, chunks and chunks + more, ended, known, abs(number), host, pid, number)
    assert Head.decode(value.encode()) == value
