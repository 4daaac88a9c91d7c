"""Each small file of a stream: its bytes are pinned, and whatever else they are is read or refused by field."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.errors import FormatInvalid
from lazyshard.format.cursor import ReadingMark, reading_name
from lazyshard.format.records import STATES, End, Head, Manifest, Owner, check_samples_per_chunk
from tests.format.cases import changed, check_later_format, check_refusal, without
from tests.format.records import RECORDS, WRONG, Record, Wrong

DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"

every_record = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text("A0=a\u00fc", max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
    max_leaves=5,
)


@every_record
def test_bytes_are_pinned(record: Record) -> None:
    found = record.decode(record.golden)
    assert found.encode() == record.golden
    assert record.value in (None, found)


@pytest.mark.parametrize(
    ("name", "file"),
    [("retired", "retired.json"), ("hint", "cursors/sft.reading.json"), ("cursor", "cursors/sft.json")],
)
def test_example_of_the_specification_is_read_and_written_the_same(name: str, file: str) -> None:
    found = re.search(rf"^{re.escape(file)} +(\{{.*\}})$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert found
    line = found[1].encode() + b"\n"
    assert RECORDS[name].decode(line).encode() == line


@every_record
def test_unknown_field_is_ignored(record: Record) -> None:
    assert record.decode(changed(record.golden, more={"a": [1]})).encode() == record.golden


@every_record
def test_later_format_is_refused(record: Record) -> None:
    check_later_format(record.decode, record.golden, file=record.file, newest=record.newest)


@pytest.mark.parametrize(("name", "what"), WRONG, ids=[f"{name}-{one[1]}-{one[3]}" for name, one in WRONG])
def test_wrong_field_is_refused(name: str, what: Wrong) -> None:
    record, (values, field, expected, actual) = RECORDS[name], what
    data, file = changed(record.golden, **values), f"/data/s/{record.file}"
    check_refusal(
        lambda: record.decode(data, file), record.error, file=file, field=field, expected=expected, actual=actual
    )


@every_record
def test_missing_field_is_refused_and_named(record: Record) -> None:
    for field in orjson.loads(record.golden):
        data = without(record.golden, field)
        if field in record.optional:
            record.decode(data)
            continue
        with pytest.raises(record.error) as caught:
            record.decode(data)
        assert (caught.value.file, caught.value.field, caught.value.actual) == (record.file, field, "no such field")


@every_record
def test_what_is_no_object_is_refused_by_the_file_given(record: Record) -> None:
    for data, shown in ((b"", "b''"), (b"[]", "[]")):
        with pytest.raises(record.error) as caught:
            record.decode(data, "/data/s/x")
        found = caught.value
        assert (found.file, found.field, found.expected) == ("/data/s/x", None, "a JSON object")
        assert str(found.actual).startswith(shown)


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


def test_end_of_an_empty_stream_is_read() -> None:
    assert End.decode(b'{"format":1,"chunks":0,"samples":0}') == End(0, 0)


def test_owner_is_named_by_process_and_host() -> None:
    assert str(Owner(2, "00c0ffee", "node1", 42, 0.0)) == "process 42 on node1"


def test_hint_of_a_foreign_directory_has_no_stream_id() -> None:
    record = RECORDS["hint"]
    for data in (without(record.golden, "stream_id"), changed(record.golden, stream_id=None)):
        assert record.decode(data).stream_id is None
    assert reading_name("sft") == "sft.reading.json"


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


@pytest.mark.parametrize("value", [0, -1, True, 100_000_001, 2.0, "2", None])
def test_number_that_cannot_be_samples_per_chunk_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match="samples_per_chunk"):
        check_samples_per_chunk(value)
    with pytest.raises(ValueError, match="samples_per_chunk"):
        Manifest("0" * 32, value, 0.0)
    assert [check_samples_per_chunk(bound) for bound in (1, 100_000_000)] == [1, 100_000_000]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"consumer": "a/b"}, "name of a consumer"),
        ({"stream_id": "x"}, "stream_id"),
        ({"dp_size": 0}, "dp_size"),
        ({"dp_size": True}, "dp_size"),
        ({"window": -1}, "window"),
        ({"needs_chunks": 1.0}, "needs_chunks"),
        ({"updated_at": math.inf}, "updated_at"),
    ],
)
def test_hint_that_could_not_be_read_again_is_refused(wrong: dict[str, Any], field: str) -> None:
    value = RECORDS["hint"].value
    with pytest.raises(ValueError, match=field):
        ReadingMark(**({name: getattr(value, name) for name in value.__slots__} | wrong))
