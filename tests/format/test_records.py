"""Each small file of a stream: its bytes are pinned, and whatever else they are is read or refused by field."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.errors import FormatInvalid, VersionUnsupported
from lazyshard.format.cursor import Cursor
from lazyshard.format.records import STATES, End, Head, Manifest, Owner, check_samples_per_chunk
from lazyshard.part import Part
from tests.format.cases import changed, refusal, with_field, without
from tests.format.records import CURSOR, CURSOR_STATE, RECORDS, WRONG, Record, Wrong

every_record = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text("A0=a\u00fc", max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
    max_leaves=5,
)


@every_record
def test_bytes_are_pinned_and_unknown_fields_ignored(record: Record) -> None:
    for data in (record.golden, changed(record.golden, more={"a": [1]})):
        found = record.decode(data)
        assert found.encode() == record.golden
        assert record.value in (None, found)


@every_record
def test_later_format_is_refused_with_both_numbers_before_anything_else_is_read(record: Record) -> None:
    later = str(record.newest + 1)
    with pytest.raises(VersionUnsupported) as caught:
        record.decode(b'{"format":%s}' % later.encode(), record.file)
    found = caught.value
    assert (found.file, found.field, found.expected, found.actual) == (record.file, "format", str(record.newest), later)
    assert all(said in str(found) for said in (record.file, later, f"{record.newest}; install"))


@pytest.mark.parametrize(("name", "what"), WRONG, ids=[f"{name}-{one.path}-{one.value!r:.20}" for name, one in WRONG])
def test_wrong_field_is_refused(name: str, what: Wrong) -> None:
    record = RECORDS[name]
    data, file = orjson.dumps(with_field(record.golden, what.path, what.value)), f"/data/s/{record.file}"
    found = refusal(lambda: record.decode(data, file), record.error, file, what.field)
    assert what.expected in str(found.expected)


@every_record
def test_missing_field_is_refused_and_named(record: Record) -> None:
    for field in orjson.loads(record.golden):
        data = without(record.golden, field)
        if field in record.optional:
            found = record.decode(data)
            assert not record.value or found == record.decode(changed(record.golden, **{field: None}))
            continue
        with pytest.raises(record.error) as caught:
            record.decode(data)
        assert caught.value.file == record.file
        # Where a state is there it says another one.
        assert (caught.value.field, caught.value.actual) == (field, "no such field") or field == "stream_id"


@every_record
def test_what_is_no_object_is_refused_by_the_file_given(record: Record) -> None:
    for data in (b"", b"[]", b"null", b'"x"', b"\0" * 100, b"\xff\xfe", b"{}{}", record.golden * 2):
        refusal(lambda data=data: record.decode(data, "/x"), record.error, "/x", None)  # type: ignore[misc]


@every_record
@given(data=st.data())
def test_any_value_is_read_again(record: Record, data: st.DataObject) -> None:
    value = data.draw(record.values)
    found = record.decode(value.encode())
    assert found.encode() == value.encode()
    assert record.value is None or found == value


@every_record
@given(data=st.data())
def test_mutated_bytes_and_fields_are_read_or_refused(record: Record, data: st.DataObject) -> None:
    golden = record.golden
    start = data.draw(st.integers(0, len(golden)))
    end = data.draw(st.integers(start, min(len(golden), start + 4)))
    piece = data.draw(st.binary(max_size=4) | st.sampled_from([b"-", b"9", b'"', b"[", b"null", b"1e999"]))
    with suppress(FormatInvalid):
        record.decode(golden[:start] + piece + golden[end:])
    values = orjson.loads(golden)
    for field in data.draw(st.sets(st.sampled_from(sorted(values)), min_size=1, max_size=2)):
        values[field] = data.draw(anything)
    with suppress(FormatInvalid):
        record.decode(orjson.dumps(values))
    with pytest.raises(FormatInvalid):
        record.decode(data.draw(st.binary()))


@every_record
def test_file_cut_anywhere_is_refused(record: Record) -> None:
    for size in range(len(record.golden) - 1):  # the last byte is the newline, which carries nothing
        with pytest.raises(record.error):
            record.decode(record.golden[:size])


@every_record
@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"a":' * 100_000, b"[" * 1000 + b"]" * 1000 + b"}"])
def test_field_nested_past_all_limits_is_refused(record: Record, data: bytes) -> None:
    with pytest.raises(FormatInvalid):
        record.decode(b'{"format":' + data)


@pytest.mark.parametrize(
    ("name", "wrong", "field"),
    [
        ("hint", {"consumer": "a/b"}, None),
        ("hint", {"stream_id": "x"}, "stream_id"),
        ("hint", {"dp_size": True}, "dp_size"),
        ("hint", {"window": -1}, "window"),
        ("hint", {"needs_chunks": 1.0}, "needs_chunks"),
        ("hint", {"updated_at": math.inf}, "updated_at"),
        ("cursor", {"consumed": 1.0}, "consumed"),
        ("cursor", {"chunks_before": True}, "chunks_before"),
        ("cursor", {"plan": {"seed": -1}}, "plan.seed"),
        ("cursor", {"plan": 5}, "plan"),
        ("cursor", {"stream_id": "x"}, "stream_id"),
        ("cursor", {"updated_at": math.nan}, "updated_at"),
        ("cursor", {"owner": "\ud800"}, "owner"),
        ("cursor", {"owner": None}, "owner"),
        ("cursor", {"state": {}}, "state"),
        ("cursor", {"state": CURSOR_STATE, "consumed": 5}, "state.consumed"),
        ("cursor", {"state": CURSOR_STATE, "stream_id": None}, "state.stream_id"),
        ("state", {"consumed": 461}, "consumed"),
        ("state", {"parts": [Part(1)]}, "parts"),
        ("state", {"parts": ({"dp": 1},)}, "parts"),
        *[
            ("manifest", {"samples_per_chunk": value}, "samples_per_chunk")
            for value in (0, -1, True, 100_000_001, 2.0, "2", None)
        ],
    ],
)
def test_value_that_could_not_be_read_again_cannot_be_made(name: str, wrong: dict[str, Any], field: str | None) -> None:
    with pytest.raises(ValueError) as caught:
        replace(RECORDS[name].value, **wrong)
    assert getattr(caught.value, "field", None) == field


def test_values_at_the_bounds() -> None:
    assert End.decode(b'{"format":1,"chunks":0,"samples":0}') == End(0, 0)
    assert str(Owner(2, "00c0ffee", "node1", 42, 0.0)) == "process 42 on node1"
    assert [check_samples_per_chunk(bound) for bound in (1, 100_000_000)] == [1, 100_000_000]


@pytest.mark.parametrize("extra", [{"open": 7, "row_at": 1.5}, {"note": "12 chunks ahead"}])
def test_what_a_head_says_besides_comes_last(extra: dict[str, Any]) -> None:
    record = RECORDS["head"]
    said = replace(record.value, **extra)
    assert said.encode() == record.golden[:-2] + b"," + orjson.dumps(extra)[1:] + b"\n"
    assert Head.decode(said.encode()) == said


def test_states_of_a_head() -> None:
    golden = RECORDS["head"].golden
    assert STATES == ("running", "waiting", "idle", "finished", "failed")
    assert [Head.decode(changed(golden, state=state)).state for state in STATES] == list(STATES)
    assert Head.decode(changed(golden, rate=-1)).rate == 0.0
    assert Head.decode(changed(golden, chunks=0, samples=0)).samples == 0


def test_only_a_manifest_with_arrays_tells_an_encoding() -> None:
    record = RECORDS["manifest of encoded rows"]
    plain = replace(record.value, encoding=None)
    assert plain.encode() == without(record.golden, "encoding") + b"\n"
    assert Manifest.decode(plain.encode()) == plain
    assert Manifest.decode(changed(record.golden, format=1)) == replace(plain, arrays=False)


def test_cursor_says_nothing_of_what_earlier_releases_do_not_know() -> None:
    golden = RECORDS["cursor"].golden
    assert (CURSOR.state, CURSOR.owner, CURSOR.blend) == (None, "", ())
    assert Cursor.decode(changed(golden, state=None, owner="", blend=None), "sft") == CURSOR
    assert RECORDS["hint"].decode(changed(RECORDS["hint"].golden, stream_id=None)).stream_id is None
