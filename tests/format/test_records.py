"""Examples of records: bytes and values that stay as they are, what is refused; those of `docs/format.md`; names."""

import dataclasses
import math
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.errors import FileInvalid, FormatInvalid, VersionUnsupported
from lazyshard.format import records
from lazyshard.format.arrays import pack_row
from lazyshard.format.records import STATES, End, Head, Manifest, Owner, in_file, pack, parse_object, unpack
from lazyshard.format.row import check_row
from lazyshard.format.seal import Seal
from lazyshard.format.state import Cursor
from lazyshard.part import Part
from tests.format import records as examples
from tests.format.records import CURSOR, CURSOR_STATE, RECORDS, WRONG, Record, changed, plain, refusal, without, written
from tests.stream.streams import raised

every_record = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
LEAVES = st.none() | st.booleans() | examples.integers | st.floats() | st.text("A0=a\u00fc", max_size=12)
anything = examples.json_of(LEAVES, st.text("ab"), 5)


@every_record
def test_bytes_are_pinned_and_unknown_fields_ignored(record: Record) -> None:
    for data in (record.golden, changed(record.golden, more={"a": [1]})):
        found = record.decode(data)
        assert written(found) == record.golden
        assert plain(found) == plain(record.value)


@every_record
def test_later_format_is_refused_with_both_numbers_before_anything_else_is_read(record: Record) -> None:
    later = str(record.newest + 1)
    found = raised(VersionUnsupported, record.decode, b'{"format":%s}' % later.encode(), record.file)
    assert (found.file, found.field, found.expected, found.actual) == (record.file, "format", str(record.newest), later)
    assert all(said in str(found) for said in (record.file, later, f"{record.newest}; install"))


@pytest.mark.parametrize(("name", "what"), WRONG, ids=[f"{name}-{one.path}-{one.value!r:.20}" for name, one in WRONG])
def test_wrong_field_is_refused(name: str, what: examples.Wrong) -> None:
    record = RECORDS[name]
    data, file = orjson.dumps(examples.with_field(record.golden, what.path, what.value)), f"/data/s/{record.file}"
    found = refusal(lambda: record.decode(data, file), record.error, file, what.field)
    assert what.expected in str(found.expected)


@every_record
def test_missing_field_is_refused_and_named(record: Record) -> None:
    for field in orjson.loads(record.golden):
        data = without(record.golden, field)
        if field in record.optional:
            found = record.decode(data)
            assert plain(found) == plain(record.decode(changed(record.golden, **{field: None})))
            continue
        caught = raised(record.error, record.decode, data)
        assert caught.file == record.file
        # Where a state is there it says another one.
        assert (caught.field, caught.actual) == (field, "no such field") or field == "stream_id"


@every_record
def test_what_is_no_object_is_refused_by_the_file_given(record: Record) -> None:
    for data in (b"", b"[]", b"null", b'"x"', b"\0" * 100, b"\xff\xfe", b"{}{}", record.golden * 2):
        refusal(lambda data=data: record.decode(data, "/x"), record.error, "/x", None)  # type: ignore[misc]


@every_record
@given(data=st.data())
def test_any_value_is_read_again(record: Record, data: st.DataObject) -> None:
    value = data.draw(record.values)
    found = record.decode(written(value))
    assert written(found) == written(value)
    assert plain(found) == plain(value)


@every_record
def test_file_cut_anywhere_or_nested_past_all_limits_is_refused(record: Record) -> None:
    for size in range(len(record.golden) - 1):  # the last byte is the newline, which carries nothing
        raised(record.error, record.decode, record.golden[:size])
    for data in (b"[" * 100_000, b'{"a":' * 100_000, b"[" * 1000 + b"]" * 1000 + b"}"):
        raised(FormatInvalid, record.decode, b'{"format":' + data)


def is_refused_when_made(name: str, what: examples.Wrong) -> bool:
    if name not in ("hint", "cursor", "cursor of a run", "state", "manifest") or what.path in ("consumer", "state"):
        return False
    return what.path in {field.name for field in dataclasses.fields(RECORDS[name].value)}


@pytest.mark.parametrize(
    ("name", "wrong", "field"),
    [
        ("hint", {"consumer": "a/b"}, None),
        ("hint", {"updated_at": math.inf}, "updated_at"),
        ("cursor", {"plan": {"seed": -1}}, "plan.seed"),
        ("cursor", {"updated_at": math.nan}, "updated_at"),
        ("cursor", {"owner": "\ud800"}, "owner"),
        ("cursor", {"state": {}}, "state"),
        ("cursor", {"state": CURSOR_STATE, "consumed": 5}, "state.consumed"),
        ("cursor", {"state": CURSOR_STATE, "stream_id": None}, "state.stream_id"),
        ("state", {"parts": [Part(1)]}, "parts"),
        ("state", {"parts": ({"dp": 1},)}, "parts"),
        *[(name, {one.path: one.value}, one.field) for name, one in WRONG if is_refused_when_made(name, one)],
    ],
)
def test_value_that_could_not_be_read_again_cannot_be_made(name: str, wrong: dict[str, Any], field: str | None) -> None:
    assert getattr(raised(ValueError, replace, RECORDS[name].value, **wrong), "field", None) == field


def test_states_of_a_head_and_what_it_says_besides_comes_last() -> None:
    record = RECORDS["head"]
    golden = record.golden
    extras: list[dict[str, Any]] = [{"open": 7, "row_at": 1.5}, {"note": "12 chunks ahead"}]
    for extra in extras:
        said = replace(record.value, **extra)
        assert said.encode() == golden[:-2] + b"," + orjson.dumps(extra)[1:] + b"\n"
        assert Head.decode(said.encode()) == said
    assert [Head.decode(changed(golden, state=state)).state for state in STATES] == list(STATES)
    assert Head.decode(changed(golden, rate=-1)).rate == 0.0
    assert Head.decode(changed(golden, chunks=0, samples=0)).samples == 0


def test_what_manifests_and_cursors_say_besides_is_left_out_where_there_is_none() -> None:
    record = RECORDS["manifest of encoded rows"]
    plain = replace(record.value, encoding=None)
    assert plain.encode() == without(record.golden, "encoding") + b"\n"
    assert Manifest.decode(plain.encode()) == plain
    assert Manifest.decode(changed(record.golden, format=1)) == replace(plain, arrays=False)
    assert End.decode(b'{"format":1,"chunks":0,"samples":0}') == End(0, 0)
    assert str(Owner(2, "00c0ffee", "node1", 42, 0.0)) == "process 42 on node1"
    assert [records.check_samples_per_chunk(bound) for bound in (1, 100_000_000)] == [1, 100_000_000]
    golden = RECORDS["cursor"].golden
    assert (CURSOR.state, CURSOR.owner, CURSOR.blend) == (None, "", ())
    assert Cursor.decode(changed(golden, state=None, owner="", blend=None), "sft") == CURSOR
    assert RECORDS["hint"].decode(changed(RECORDS["hint"].golden, stream_id=None)).stream_id is None


def fields(**values: object) -> dict[str, object]:
    return parse_object(orjson.dumps({"format": 1} | values))


def refused(read: Callable[[], object], field: str | None, expected: str) -> str:
    def read_file() -> object:
        with in_file("f.json"):
            return read()

    found = refusal(read_file, FileInvalid, "f.json", field)
    assert found.expected == expected
    assert len(str(found)) < 300
    return str(found.actual)


def test_packed_numbers_are_little_endian_and_cannot_be_written_to() -> None:
    assert pack([1, 258], "<u8") == "AQAAAAAAAAACAQAAAAAAAA=="
    assert unpack(fields(a="AQAAAAAAAAACAQAAAAAAAA=="), "a", "<u8", 2).tobytes() == struct.pack("<2Q", 1, 258)
    assert pack([1, 258], "<u4") == "AQAAAAIBAAA="
    assert unpack(fields(a="AQAAAAIBAAA="), "a", "<u4", 2).tolist() == [1, 258]
    one = fields(a="AQAAAAAAAAA=")
    assert not unpack(one, "a", "<u8", 1).flags.writeable
    for count in (0, 2, 10**15):
        found = refused(lambda count=count: unpack(one, "a", "<u8", count), "a", f"{count} numbers of 8 bytes")  # type: ignore[misc]
        assert found == "8 bytes"
    wrong = ("AQAAAAAAAAA", "AQAA AAAAAAA=", "AQAAAAAAAAA=\n", "AQAAAAAAAA-_", "ü", "=", "A", "\u0661", "AQ==AAAAAAA=")
    for value in wrong:
        refused(lambda value=value: unpack(fields(a=value), "a", "<u8", 1), "a", "a base64 string")  # type: ignore[misc]


def test_chunk_number_has_five_digits_and_grows_and_any_other_name_is_no_chunk() -> None:
    digits = {0: "00000", 42: "00042", 99999: "99999", 100000: "100000", 10**15: "1" + "0" * 15}
    for chunk, text in digits.items():
        assert records.chunk_name(chunk) == f"chunk_{text}.jsonl"
        assert records.seal_name(chunk) == f"chunk_{text}.jsonl.completed"
    for text in ("7", "0000000007", "00000000000000000001", "1700000000000000000"):
        assert records.parse_chunk_name(f"chunk_{text}.jsonl") == (int(text), False)
        assert records.parse_chunk_name(f"chunk_{text}.jsonl.completed") == (int(text), True)
    numbers = ("", "-1", "+1", "1_000", " 1", "1e3", "\u0661", "²", "1" * 5000)
    suffixes = (".jsonl\n", ".json", "xjsonl", ".jsonl.gz", ".jsonl.completed.completed", ".jsonl.tmp")
    others = ("", "\nchunk_00001.jsonl", ".chunk_00001.jsonl", "Chunk_00001.jsonl", "stream.json", "stream.end")
    like = [f"chunk_{number}.jsonl" for number in numbers] + [f"chunk_00001{suffix}" for suffix in suffixes]
    for name in [*like, *others]:
        assert records.parse_chunk_name(name) is None, name
    for make in (records.chunk_name, records.seal_name, records.arrays_name):
        raised(ValueError, make, -1)


DOCUMENT = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
EXAMPLE = DOCUMENT.partition("## A worked example")[2]


def example(pattern: str, text: str = EXAMPLE) -> bytes:
    found = re.search(pattern, text, re.MULTILINE)
    assert found, pattern
    return found[1].encode()


def test_example_seal_matches_the_example_rows() -> None:
    dump = "".join(re.findall(r"^000000\d0: ((?:[0-9a-f]{2,4} )+)", EXAMPLE, re.MULTILINE))
    data = bytes.fromhex(dump)
    text = example(r'^(\{"format":1,"chunk":0.*\})$') + b"\n"
    seal = Seal.decode(text, 0)
    assert seal.encode() == text
    assert seal.size == len(data) == 34
    rows = [data[start:stop] for start, stop in zip(seal.offsets[:-1], seal.offsets[1:], strict=True)]
    assert [check_row(row) for row in rows] == [{"text": "one"}, {"text": "zwei ü"}]
    assert [xxhash.xxh3_64_intdigest(row) for row in rows] == seal.digests.tolist()
    for field, array in (("offsets", seal.offsets), ("xxh3", seal.digests), ("tokens", seal.tokens)):
        assert array is not None
        cell = example(rf"^\| `{field}` \| `([0-9a-f ]+)` \|").decode()
        assert bytes.fromhex(cell) == array.tobytes()


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_example_file_is_read_and_written_the_same(record: Record) -> None:
    for text in re.findall(rf"^{re.escape(record.file)} +(\{{.*\}})$", DOCUMENT, re.MULTILINE):
        assert written(record.decode(text.encode())) == text.encode() + b"\n"


def test_example_of_each_file_is_there() -> None:
    shown = set(re.findall(r"^(\S+\.(?:json|end|owner)) +\{.*\}$", DOCUMENT, re.MULTILINE))
    assert {record.file for record in RECORDS.values() if "chunk" not in record.file} - shown == {"lazyshard.json"}


def test_example_with_arrays_is_what_is_written() -> None:
    arrays = EXAMPLE.partition("### The same with arrays")[2]

    def shown(name: str) -> bytes:
        return example(rf"^{re.escape(name)} +(.*)$", arrays)

    row = {"id": 7, "input_ids": np.array([1, -2, 3], np.int32), "mel": np.array([[0, 0.5], [1, 1.5]], np.float16)}
    line, data = pack_row(row)
    assert line == shown("chunk_00000.jsonl") + b"\n"
    assert data == bytes.fromhex(shown("chunk_00000.arrays").decode())
    assert f"line has {len(line)} bytes, its newline included, its side file {len(data)}:" in " ".join(arrays.split())
    manifest = Manifest.decode(shown("stream.json"))
    assert manifest.arrays
    assert manifest.encode() == shown("stream.json") + b"\n"
    seal = Seal.decode(shown("chunk_00000.jsonl.completed"), 0)
    assert seal.encode() == shown("chunk_00000.jsonl.completed") + b"\n"
    assert seal.arrays is not None
    assert (seal.size, seal.arrays.size) == (len(line), len(data))
    assert seal.digests.tolist() == [xxhash.xxh3_64_intdigest(line)]
    assert seal.arrays.digests.tolist() == [xxhash.xxh3_64_intdigest(data)]
    assert f"`{xxhash.xxh3_64_hexdigest(b'')}` of no bytes" in DOCUMENT


def test_minimal_producer_fills_a_foreign_directory(tmp_path: Path) -> None:
    known: dict[str, Any] = {}
    exec(DOCUMENT.partition("```python\n")[2].partition("```")[0], known)
    for chunk, rows in enumerate(([b'{"n":0}\n', b'{"n":1}\n'], [b'{"n":2}\n'])):
        known["publish"](tmp_path, chunk, rows)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "chunk_00000.jsonl": b'{"n":0}\n{"n":1}\n',
        "chunk_00000.jsonl.completed": b"",
        "chunk_00001.jsonl": b'{"n":2}\n',
        "chunk_00001.jsonl.completed": b"",
    }
