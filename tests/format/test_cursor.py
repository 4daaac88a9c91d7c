from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.errors import FileInvalid, FormatInvalid, StateInvalid, VersionUnsupported
from lazyshard.format.cursor import Cursor, CursorToken, check_consumer, cursor_name
from lazyshard.format.state import RunState
from lazyshard.part import Part
from tests.format.cases import changed, check_refusal, without
from tests.format.records import RECORDS

STREAM_ID = "5f0c1a9be7d24c3f8a6b0e1d2c3b4a59"
GOLDEN = RECORDS["cursor"].golden
VALUE: Cursor = RECORDS["cursor"].value
STATE = RunState(STREAM_ID, 100, 100, 0, 0, None, (Part(8, 4, 256),), 2048)
STATE_GOLDEN = (
    b'{"format":1,"stream_id":"5f0c1a9be7d24c3f8a6b0e1d2c3b4a59","samples_per_chunk":100,"unit":100,"window":0,'
    b'"seed":0,"max_total_samples":null,"parts":[{"dp":8,"batch_size":4,"draws":256,"epoch":null,"trained":true,'
    b'"skip":[],"first_step":0,"draws_per_step":0}],"consumed":2048}'
)
OWNER = "3/9c41d7e2b06f83a5 process 14106 on node1"
OWNED = replace(VALUE, state=STATE, owner=OWNER)
OWNED_GOLDEN = GOLDEN[:-2] + b',"state":' + STATE_GOLDEN + b',"owner":"' + OWNER.encode() + b'"}\n'
DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"


def decode(data: bytes) -> Cursor:
    return Cursor.decode(data, "sft")


def test_cursor_with_state_and_owner_is_pinned() -> None:
    assert OWNED.encode() == OWNED_GOLDEN
    assert decode(OWNED_GOLDEN) == OWNED


@pytest.mark.parametrize("absent", [{"state": None, "owner": None}, {"state": None, "owner": ""}])
def test_cursor_without_state_and_owner_is_read_as_those_of_earlier_releases(absent: dict[str, Any]) -> None:
    assert (VALUE.state, VALUE.owner) == (None, "")
    assert decode(changed(GOLDEN, **absent)) == VALUE


@pytest.mark.parametrize("data", [without(GOLDEN, "stream_id"), changed(GOLDEN, stream_id=None)])
def test_cursor_of_a_foreign_directory_has_no_stream_id(data: bytes) -> None:
    assert decode(data).stream_id is None


def check(value_of: dict[str, object], field: str, expected: str, actual: str) -> None:
    check_refusal(
        lambda: Cursor.decode(changed(GOLDEN, **value_of), "sft", "/data/s/cursors/sft.json"),
        FileInvalid,
        file="/data/s/cursors/sft.json",
        field=field,
        expected=expected,
        actual=actual,
    )


def test_long_wrong_value_of_the_plan_is_shown_in_short() -> None:
    with pytest.raises(FileInvalid) as caught:
        decode(changed(GOLDEN, plan={"seed": "x" * 10_000}))
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("value", "field", "expected", "actual"),
    [
        (5, "state", "an object", "5"),
        ({}, "state.format", "a value", "no such field"),
        (STATE.to_dict() | {"window": 7}, "state.window", "a multiple of unit, 100", "7"),
        (STATE.to_dict() | {"parts": [5]}, "state.parts[0]", "an object", "5"),
        (STATE.to_dict() | {"stream_id": None}, "state.stream_id", f"'{STREAM_ID}' as in the cursor", "None"),
    ],
)
def test_state_that_cannot_be_used_makes_the_cursor_invalid(value: Any, field: str, expected: str, actual: str) -> None:
    check({"state": value}, field, expected, actual)


def test_state_that_has_consumed_something_else_is_refused() -> None:
    check({"consumed": 2047, "state": STATE.to_dict()}, "state.consumed", "2047 as in the cursor", "2048")


def test_state_of_a_later_format_is_refused_by_the_file() -> None:
    with pytest.raises(VersionUnsupported) as caught:
        decode(changed(OWNED_GOLDEN, state={"format": 2}))
    assert (caught.value.file, caught.value.field) == ("cursors/sft.json", "state.format")


@pytest.mark.parametrize("value", [5, True, ["1/x"], "a\nb", "\x7f", "x" * 401])
def test_owner_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(FileInvalid, match=r"field 'owner': expected text of at most 400 characters without .* found "):
        decode(changed(OWNED_GOLDEN, owner=value))


def test_owner_is_a_token_or_a_strangers() -> None:
    token = CursorToken(3, "9c41d7e2b06f83a5", 14106, "node1")
    assert (token.text, str(token)) == (OWNER, "process 14106 on node1")
    assert CursorToken.parse(OWNER) == token
    assert CursorToken(1, "0" * 16, 1, "a\nb\ud800").text == f"1/{'0' * 16} process 1 on a?b?"
    longest = CursorToken(2**62, "0" * 16, 2**31, "h" * 300)
    assert CursorToken.parse(longest.text) == replace(longest, host="h" * 200)
    assert replace(VALUE, owner=longest.text).owner == longest.text
    for stranger in ("", "me", "0" + OWNER, OWNER[1:], "0" + OWNER[1:], OWNER.upper(), f"{2**62 + 1}{OWNER[1:]}"):
        assert CursorToken.parse(stranger) is None


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("", "1 to 200 bytes"),
        ("a" * 201, "1 to 200 bytes"),
        ("ü" * 101, "1 to 200 bytes"),
        ("a/b", 'without "/"'),
        ("/", 'without "/"'),
        ("a\0", "control characters"),
        ("a\nb", "control characters"),
        ("a\x7f", "control characters"),
        ("a\ud800", "lone surrogates"),
        (".", "does not begin with a dot"),
        ("..", "does not begin with a dot"),
        (".sft", "does not begin with a dot"),
        ("sft.reading", 'does not end in ".reading"'),
        (5, "a string"),
        (None, "a string"),
    ],
)
def test_name_that_no_consumer_can_have_is_refused(name: Any, wrong: str) -> None:
    for use in (check_consumer, cursor_name, lambda name: Cursor(name, None, 0, 0, {}, 0.0)):
        with pytest.raises(ValueError, match=f"the name of a consumer is .*{wrong}") as caught:
            use(name)
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["sft", "a" * 200, "ü" * 100, "run 7", "a.json", "reading", "x.reading.2", "-", "~"])
def test_any_other_name_is_a_file_name(name: str, tmp_path: Path) -> None:
    assert cursor_name(name) == f"{name}.json"
    (tmp_path / f".{name}.0123456789abcdef").write_bytes(b"")
    (tmp_path / cursor_name(name)).write_bytes(b"")
    value = Cursor(name, None, 0, 0, {}, 0.0)
    assert Cursor.decode(value.encode(), name) == value


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"consumed": -1}, "consumed"),
        ({"consumed": 1.0}, "consumed"),
        ({"chunks_before": True}, "chunks_before"),
        ({"plan": {"seed": -1}}, "plan.seed"),
        ({"plan": 5}, "plan"),
        ({"stream_id": "x"}, "stream_id"),
        ({"updated_at": math.nan}, "updated_at"),
        ({"owner": "a\nb"}, "owner"),
        ({"owner": "\ud800"}, "owner"),
        ({"owner": None}, "owner"),
        ({"state": {}}, "state"),
        ({"state": STATE, "consumed": 5}, "state.consumed"),
        ({"state": STATE, "stream_id": None}, "state.stream_id"),
    ],
)
def test_value_that_could_not_be_read_again_is_refused(wrong: dict[str, Any], field: str) -> None:
    fields: dict[str, Any] = {name: getattr(VALUE, name) for name in VALUE.__slots__}
    with pytest.raises(StateInvalid) as caught:
        Cursor(**(fields | wrong))
    assert caught.value.field == field


@given(
    st.text("aZ0-._ ü", min_size=1, max_size=12),
    st.integers(0, 2**62),
    st.integers(0, 10**15),
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), st.integers(0, 2**63 - 1)),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_cursor_round_trips(name: str, consumed: int, chunks: int, plan: dict[str, int], time: float) -> None:
    value = Cursor(f"c{name}2", STREAM_ID, consumed, chunks, plan, time)
    assert Cursor.decode(value.encode(), value.consumer) == value


def test_cursor_cut_anywhere_is_refused() -> None:
    for whole in (GOLDEN, OWNED_GOLDEN):
        for size in range(len(whole) - 1):  # the last byte is the newline, which carries nothing
            with pytest.raises(FileInvalid):
                decode(whole[:size])


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text("A0=a\u00fc", max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
def test_mutated_cursor_is_read_or_refused(data: st.DataObject) -> None:
    values = orjson.loads(OWNED_GOLDEN)
    for field in data.draw(st.sets(st.sampled_from(sorted(values)), min_size=1, max_size=2)):
        values[field] = data.draw(anything)
    with suppress(FormatInvalid):
        decode(orjson.dumps(values))
    start = data.draw(st.integers(0, len(GOLDEN)))
    end = data.draw(st.integers(start, min(len(GOLDEN), start + 4)))
    with suppress(FormatInvalid):
        decode(GOLDEN[:start] + data.draw(st.binary(max_size=4)) + GOLDEN[end:])
