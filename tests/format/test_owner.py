from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.errors import OwnerInvalid
from lazyshard.format import Owner
from tests.format.cases import changed, check_later_format, check_refusal, not_an_integer, without

GOLDEN = b'{"format":1,"epoch":2,"token":"00c0ffee","host":"node1","pid":42,"since":1700000000.5}\n'
VALUE = Owner(2, "00c0ffee", "node1", 42, 1700000000.5)


def test_owner_bytes_are_pinned() -> None:
    assert VALUE.encode() == GOLDEN
    assert Owner.decode(GOLDEN) == VALUE


def test_owner_is_named_by_process_and_host() -> None:
    assert str(VALUE) == "process 42 on node1"


def test_unknown_field_of_owner_is_ignored() -> None:
    assert Owner.decode(changed(GOLDEN, user="x")) == VALUE


def test_owner_of_a_later_format_is_refused() -> None:
    check_later_format(Owner.decode, GOLDEN, file="stream.owner")


def check(value_of: dict[str, object], field: str, expected: str, actual: str) -> None:
    check_refusal(
        lambda: Owner.decode(changed(GOLDEN, **value_of), "/data/s/stream.owner"),
        OwnerInvalid,
        file="/data/s/stream.owner",
        field=field,
        expected=expected,
        actual=actual,
    )


@pytest.mark.parametrize(("value", "actual"), not_an_integer(1, 2**62))
def test_epoch_that_is_no_count_is_refused(value: object, actual: str) -> None:
    check({"epoch": value}, "epoch", "an integer from 1 to 4611686018427387904", actual)


@pytest.mark.parametrize(("value", "actual"), not_an_integer(0, 2**31))
def test_pid_of_owner_that_is_no_count_is_refused(value: object, actual: str) -> None:
    check({"pid": value}, "pid", "an integer from 0 to 2147483648", actual)


@pytest.mark.parametrize("field", ["token", "host"])
@pytest.mark.parametrize(("value", "actual"), [("", "''"), (1, "1"), (None, "null")])
def test_text_of_owner_that_is_none_is_refused(field: str, value: object, actual: str) -> None:
    check({field: value}, field, "a string", actual)


def test_since_that_is_no_number_is_refused() -> None:
    check({"since": False}, "since", "a number", "false")


@pytest.mark.parametrize("field", ["format", "epoch", "token", "host", "pid", "since"])
def test_missing_field_of_owner_is_refused(field: str) -> None:
    with pytest.raises(OwnerInvalid) as caught:
        Owner.decode(without(GOLDEN, field))
    assert (caught.value.file, caught.value.field, caught.value.actual) == ("stream.owner", field, "no such field")
    assert str(caught.value).startswith(f"stream.owner: field '{field}': expected ")


text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@given(st.integers(1, 2**62), text, text, st.integers(0, 2**31), st.floats(allow_nan=False, allow_infinity=False))
def test_owner_round_trips(epoch: int, token: str, host: str, pid: int, since: float) -> None:
    value = Owner(epoch, token, host, pid, since)
    assert Owner.decode(value.encode()) == value
