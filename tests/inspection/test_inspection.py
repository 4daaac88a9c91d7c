"""What is told of a stream at a glance, rows of it, lengths counted in buckets, and how it came to be."""

import json
import math
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lazyshard import ChunkWriter
from lazyshard.errors import ChunkCorrupt, FileInvalid, StreamInvalid, StreamMissing
from lazyshard.format.state import Cursor
from lazyshard.inspection import inspection, row_facts
from lazyshard.inspection.row_facts import MAX_BINS, OTHERS, Keys, Lengths, count_refusals, read_refusals
from lazyshard.stream.cursor import write_cursor
from lazyshard.stream.listing import retire
from lazyshard.stream.stream import open_now
from tests.stream.damage import Damage, delete, edit, flip, put, stream
from tests.stream.streams import foreign, produce, publish_rows, raised, refusal_of

SEAL = "chunk_00001.jsonl.completed"
NOW = 1_700_000_000.0
At = inspection.At
values = st.lists(st.one_of(st.integers(0, 3000), st.integers(0, 2**50)), min_size=1, max_size=60)


def facts(found: inspection.Overview) -> tuple[int, int, int, bool, bool]:
    """Chunks, samples, bytes, whether all chunks were looked at, whether it has ended."""
    return found.chunks, found.samples, found.size, found.complete, found.published.ended


def test_live_stream_that_is_still_to_publish_its_last_chunk_is_not_waited_for(tmp_path: Path) -> None:
    delete("stream.end")(produce(tmp_path, 5))
    at_work = {"state": "running", "pid": os.getpid(), "updated_at": time.time()}
    edit("head.json", chunks=2, samples=4, ended=False, **at_work)(tmp_path)
    assert facts(inspection.overview(tmp_path)) == (2, 4, 36, True, False)


@pytest.mark.parametrize(
    ("damage", "size", "complete", "looked_at", "unread", "keys", "named"),
    [
        (delete("chunk_00001.jsonl", "chunk_00002.jsonl"), 54, True, 3, 0, 2, ""),  # Rows are not read for the lengths
        (put(SEAL, b"{}"), 54, False, 2, 1, 2, SEAL),
        (flip("chunk_00000.jsonl", 10), 54, True, 3, 1, 1, "chunk_00000.jsonl: row 1 (byte 9)"),
    ],
)
def test_what_cannot_be_looked_at_is_counted(
    damage: Damage, size: int, complete: bool, looked_at: int, unread: int, keys: int, named: str, tmp_path: Path
) -> None:
    damage(stream(tmp_path, 6))
    found = inspection.overview(tmp_path)
    assert facts(found) == (3, 6, size, complete, True)
    assert (found.looked_at, found.unread, found.keys.rows) == (looked_at, unread, keys)
    assert named in found.reason and (found.reason != "") is (unread > 0)


def test_directories_that_do_not_tell_how_many_rows_a_chunk_has_and_no_stream(tmp_path: Path) -> None:
    def refused(kind: type[Exception]) -> None:
        raised(kind, inspection.overview, tmp_path)

    refused(StreamMissing)
    (tmp_path / "chunk_00000.jsonl").touch()
    refused(FileInvalid)
    foreign(tmp_path, b"\n", b"{}\n")
    refused(StreamInvalid)
    delete("chunk_00000.jsonl")(tmp_path)
    refused(StreamInvalid)


def test_rows_up_to_a_damaged_one(tmp_path: Path) -> None:
    opened = open_now(stream(tmp_path, 5, per_chunk=3))
    assert [(row.sample, row.byte, row.value) for row in inspection.read_rows(opened, 0, 2, 1)] == [(2, 18, {"id": 2})]
    flip("chunk_00001.jsonl", 10)(tmp_path)
    shown = inspection.read_rows(opened, 1, 0, 10)
    assert next(shown).sample == 3
    refusal_of(ChunkCorrupt, "row 1", next, shown)


def test_keys_of_rows() -> None:
    keys = Keys()
    row: dict[str, Any] = {"a": 1, "b": [{"c": 1}, {"c": 2}], "d": None}
    for values in (row, row | {"a": 1.5, "e": [], "f": True}, {"d": "x", "g": [1, "x", 2, [3]]}):
        keys.add(values)
    assert keys.rows == 3
    assert keys.kinds == {
        "a": {"integer": 1, "number": 1},
        "b": {"array of object": 2},
        "d": {"null": 2, "string": 1},
        "e": {"array": 1},
        "f": {"true or false": 1},
        "g": {"array of integer, string, array": 1},
    }


def counted(*groups: list[int]) -> Lengths:
    return Lengths(*(np.array(group, np.uint64) for group in groups))


@given(numbers=values, share=st.floats(0, 1))
def test_quantiles(numbers: list[int], share: float) -> None:
    lengths = counted(numbers)
    wanted = sorted(numbers)[max(1, math.ceil(share * len(numbers))) - 1]
    found = lengths.quantile(share)
    assert found == wanted if wanted < 2048 else wanted * (1 - 1 / 1024) <= found <= wanted
    assert (lengths.smallest, lengths.largest, lengths.count) == (min(numbers), max(numbers), len(numbers))
    assert lengths.mean == sum(numbers) / len(numbers)


@example(numbers=[50_000, 50_000, 50_010, 60_000])  # 50,000, the first edge, lies within a bucket
@given(numbers=values)
def test_histogram(numbers: list[int]) -> None:
    bins = counted(numbers).histogram()
    assert 1 <= len(bins) <= max(MAX_BINS, math.ceil(math.log10(max(numbers) + 1)) + 1)
    assert [one.high for one in bins[:-1]] == [one.low for one in bins[1:]]
    assert bins[0].low <= min(numbers) < bins[0].high
    assert bins[-1].low <= max(numbers) < bins[-1].high
    assert sum(one.count for one in bins) == len(numbers)
    for one in bins:
        if one.high <= 4096:  # Past 4,096 an edge may lie within a bucket
            assert one.count == sum(one.low <= number < one.high for number in numbers)


@given(first=values, second=values)
def test_counts_of_two_are_those_of_one(first: list[int], second: list[int]) -> None:
    both, one = counted(first, [], second), counted([*first, *second])
    assert both.histogram() == one.histogram()
    assert (both.smallest, both.largest, both.total) == (one.smallest, one.largest, one.total)


@pytest.mark.parametrize(
    ("numbers", "edges"),
    [
        ([0], [0, 1]),
        ([9, 9, 11], [7, 10, 15]),
        ([100, 299], [100, 150, 200, 300]),
        ([9, 999], [5, 10, 20, 50, 100, 200, 500, 1000]),
        ([5, 70_000], [1, 10, 100, 1000, 10_000, 100_000]),
    ],
)
def test_bins_are_as_fine_as_there_is_room_for(numbers: list[int], edges: list[int]) -> None:
    assert [(one.low, one.high) for one in counted(numbers).histogram()] == list(pairwise(edges))


def test_nothing_counted_and_memory_that_does_not_grow_with_the_lengths() -> None:
    lengths = counted([])
    assert (lengths.count, lengths.mean, lengths.histogram(), lengths.spread(80)) == (0, 0.0, [], [])
    lengths = counted([2**50 - 1, 2**60])
    assert lengths.largest == 2**60
    assert lengths._buckets.nbytes < 400_000


@given(st.lists(st.integers(0, 2_000), min_size=1, max_size=50), st.integers(1, 100))
def test_spread_counts_each_length_in_a_bin_of_one_width(values: list[int], most: int) -> None:
    assert sum(one.count for one in counted([*values, 5_001, 123_457, 10**9]).spread(most)) == len(values) + 3
    bins = counted(values).spread(most)
    assert 1 <= len(bins) <= most
    assert len({one.high - one.low for one in bins}) == 1
    assert [one.count for one in bins] == [sum(one.low <= value < one.high for value in values) for one in bins]


def course(history: inspection.History) -> list[inspection.At]:
    assert history.found is not None
    return history.found.course


def written(directory: Path, rows: int = 12, first: int = 0) -> ChunkWriter:
    """A stream of chunks of 2, a row every 5 seconds; its rows have their number as tokens."""
    moments = iter(range(10**6))
    writer = ChunkWriter(directory, 2, clock=lambda: NOW + next(moments))
    for number in range(first, first + rows):
        writer.write({"id": number}, tokens=number)
    writer.close(end=False)
    return writer


def refuse(directory: Path, *reasons: str) -> None:
    with (directory / "quarantine.jsonl").open("a") as file:
        file.writelines(json.dumps({"source": "a", "line": 1, "reason": one}) + "\n" for one in reasons)


def nothing(*_: Any, **__: Any) -> Any:
    raise AssertionError("this is not to be read")


@given(st.lists(st.tuples(st.floats(0.01, 100), st.integers(0, 1000)), min_size=1, max_size=50), st.integers(1, 80))
def test_rates_times_their_stretches_are_all_that_came(steps: list[tuple[float, int]], most: int) -> None:
    course = [At(0.0, 0)]
    for seconds, amount in steps:
        course.append(At(course[-1].time + seconds, course[-1].amount + amount))
    found = inspection.rates(course, most)
    assert len(found) == min(most, len(steps))
    stretch = course[-1].time / len(found)
    assert sum(one.amount * stretch for one in found) == pytest.approx(course[-1].amount)
    # Of one moment there is no rate.
    assert inspection.rates([At(1.0, 5), At(1.0, 9)], most) == inspection.rates([At(1.0, 5)], most) == []


def test_seals_cursors_and_refused_rows_tell_it_no_row_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream_id = written(tmp_path).stream_id
    write_cursor(tmp_path, Cursor("b", stream_id, 8, 4, {}, NOW + 9))
    write_cursor(tmp_path, Cursor("a", stream_id, 4, 2, {}, NOW + 7))
    refuse(tmp_path, "torn", "torn", "no answer")
    monkeypatch.setattr(inspection, "read_rows", nothing)
    found = inspection.take_history(tmp_path)
    assert [one.amount for one in course(found)] == [2, 4, 6, 8, 10, 12]
    trained = [(one.consumer, one.updated_at, one.consumed) for one in found.trained]
    assert trained == [("a", NOW + 7, 4), ("b", NOW + 9, 8)]
    assert found.refusals is not None and [one.rows for one in found.refusals.reasons] == [2, 1]
    assert found.found is not None
    assert (found.found.tokens.count, found.found.tokens.largest, found.found.looked_at) == (12, 11, 6)
    monkeypatch.setattr(inspection, "overview", nothing)  # Of a foreign directory no chunk is looked at at all
    assert inspection.take_history(foreign(tmp_path / "foreign", b'{"id":0}\n{"id":1}\n')) == inspection.History(None)


def test_what_has_not_changed_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    refuse(tmp_path, "torn")
    before = inspection.take_history(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(inspection, "overview", nothing)
        patch.setattr(inspection, "read_refusals", nothing)
        assert inspection.take_history(tmp_path, before) == before
    refuse(tmp_path, "torn")
    with monkeypatch.context() as patch:
        patch.setattr(inspection, "overview", nothing)
        found = inspection.take_history(tmp_path, before)
    assert found.found is before.found and found.refusals is not None
    assert found.refusals.rows == 2
    written(tmp_path, 2, 12)
    assert [one.amount for one in course(inspection.take_history(tmp_path, found))][-1] == 14


def test_deleted_chunks_are_not_looked_at_and_of_many_consumers_those_furthest_behind(tmp_path: Path) -> None:
    stream_id = written(tmp_path).stream_id
    before = inspection.take_history(tmp_path)
    retire(tmp_path, 2, 6)
    for number in range(inspection.MOST_TRAINED + 2):
        write_cursor(tmp_path, Cursor(f"c{number:02d}", stream_id, 12 if number < 2 else 4, 2, {}, NOW))
    found = inspection.take_history(tmp_path, before)
    assert [one.amount for one in course(found)] == [6, 8, 10, 12]
    assert found.found is not None and found.found.unread == 0
    assert [one.consumer for one in found.trained] == [f"c{number:02d}" for number in range(2, 22)]


def test_a_clock_that_was_set_back_does_not_lead_back(tmp_path: Path) -> None:
    moments = iter([0.0, 0.0, *range(9, 0, -1), *[0.0] * 99])
    publish_rows(tmp_path, 2, [{}] * 6, end=False, clock=lambda: next(moments))
    times = [one.time for one in course(inspection.take_history(tmp_path))]
    assert len(times) == 3 and len(set(times)) == 1 and times[0] > 0


def refusal(reason: str, number: int = 1, source: str = "a.jsonl", **values: Any) -> bytes:
    entry = {"source": source, "line": number, "byte": 0, "reason": reason, "row": "{", "at": 1.0}
    return json.dumps(entry | values).encode() + b"\n"


def test_reasons_that_differ_by_numbers_are_one() -> None:
    told = [("no answer", 3, "a.jsonl"), ("byte 7: torn", 4, "a.jsonl"), ("byte 19: torn", 9, "b.jsonl")]
    binary = refusal("not UTF-8", row_base64="/w==").replace(b'"row": "{", ', b"")
    lines = [*(refusal(*one) for one in told), binary, b"{", b"[]\n", b"x\n"]
    found = count_refusals(iter(lines), complete=True)
    reasons = [(one.reason, one.rows, len(one.sources), one.first.line) for one in found.reasons]
    assert reasons == [("byte 7: torn", 2, 2, 4), ("no answer", 1, 1, 3), ("not UTF-8", 1, 1, 1)]
    assert (found.rows, found.unreadable, found.complete) == (4, 2, True)


def test_many_reasons_and_a_long_file_are_counted_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_facts, "MOST_TOLD_APART", 2)
    counts = count_refusals((refusal(f"reason {name}") for name in "abcddd"), complete=True)
    assert [(one.reason, one.rows) for one in counts.reasons] == [("reason a", 1), ("reason b", 1), (OTHERS, 4)]
    monkeypatch.setattr(row_facts, "_MOST_BYTES", 250)
    (tmp_path / "quarantine.jsonl").write_bytes(refusal("x") * 100)
    found = read_refusals(tmp_path)
    assert found is not None and found.rows < 5 and not found.complete
    assert read_refusals(tmp_path / "elsewhere") is None
