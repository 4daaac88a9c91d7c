"""What is told of a stream at a glance, rows of it, and lengths counted in buckets."""

from __future__ import annotations

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
from lazyshard.errors import ChunkCorrupt, StreamInvalid, StreamMissing, StreamUnsealed
from lazyshard.inspection import inspection
from lazyshard.inspection.inspection import Overview, describe_chunk, overview, read_rows
from lazyshard.inspection.row_facts import MAX_BINS, Bin, Keys, Lengths
from lazyshard.stream.retire import retire
from lazyshard.stream.stream import open_now
from tests.stream.damage import delete, edit, flip, put, stream
from tests.stream.streams import foreign, produce


def facts(found: Overview) -> tuple[int, int, int, bool, bool]:
    """Chunks, samples, bytes, whether all chunks were looked at, whether it has ended."""
    return found.chunks, found.samples, found.size, found.complete, found.published.ended


def test_overview(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 2, clock=lambda: 1700000000.0) as writer:
        for number in range(5):
            writer.write({"id": number, "text": "x" * number}, tokens=number)
    found = overview(tmp_path)
    assert facts(found) == (3, 5, 5 * 19 + 10, True, True)
    assert (found.retired, found.looked_at, found.unread, found.reason) == (0, 3, 0, "")
    assert found.manifest is not None
    assert (found.manifest.created_at, found.last_sealed_at, found.samples_per_chunk) == (1700000000.0, 1700000000.0, 2)
    assert (found.lengths.smallest, found.lengths.quantile(0.5), found.lengths.largest) == (19, 21, 23)
    assert (found.tokens.smallest, found.tokens.quantile(0.5), found.tokens.largest) == (0, 2, 4)
    assert (found.keys.rows, found.keys.rows_with) == (2, {"id": 2, "text": 2})


def test_rows_are_not_read_for_the_lengths(tmp_path: Path) -> None:
    delete("chunk_00001.jsonl", "chunk_00002.jsonl")(stream(tmp_path))
    found = overview(tmp_path)
    assert facts(found) == (3, 5, 45, True, True)
    assert (found.unread, found.keys.rows) == (0, 2)


def test_long_stream_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "SAMPLED_CHUNKS", 3)
    stream(tmp_path, 19)
    found = overview(tmp_path)
    assert (found.looked_at, found.lengths.count) == (3, 5)
    # Rows 0, 1, 8, 9 and 18, the last a byte longer: 46 bytes.
    assert facts(found) == (10, 19, 175, False, True)
    assert facts(overview(tmp_path, every=True)) == (10, 19, 180, True, True)


def test_live_stream_is_not_waited_for(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 2) as writer:
        assert facts(overview(tmp_path)) == (0, 0, 0, True, False)
        for number in range(5):
            writer.write({"id": number})
        found = overview(tmp_path)
    assert facts(found) == (2, 4, 36, True, False)
    assert found.published.head is not None
    assert found.published.head.state == "running"


def test_deleted_chunks_are_left_out(tmp_path: Path) -> None:
    stream(tmp_path, 6, end=False)
    retire(tmp_path, 2, 3)
    found = overview(tmp_path)
    assert (found.retired, facts(found)) == (2, (1, 2, 18, True, False))
    assert found.published.samples == 6


def test_what_cannot_be_looked_at_is_counted(tmp_path: Path) -> None:
    put("chunk_00001.jsonl.completed", b"{}")(stream(tmp_path, 6))
    found = overview(tmp_path)
    assert facts(found) == (3, 6, 54, False, True)
    assert (found.looked_at, found.unread) == (2, 1)
    assert found.reason.startswith(f"{tmp_path}/chunk_00001.jsonl.completed: field 'format'")


def test_first_rows_that_are_damaged(tmp_path: Path) -> None:
    flip("chunk_00000.jsonl", 10)(stream(tmp_path))
    found = overview(tmp_path)
    assert (found.looked_at, found.unread, found.keys.rows) == (3, 1, 1)
    assert "chunk_00000.jsonl: row 1 (byte 9): expected XXH3" in found.reason


@pytest.mark.parametrize("per_chunk", [None, 2])
def test_foreign_directory(per_chunk: int | None, tmp_path: Path) -> None:
    foreign(tmp_path, b'{"id":0}\n{"id":1}\n', b'{"id":2}\n{"id":3}', end=True)
    found = overview(tmp_path, per_chunk)
    assert facts(found) == (2, 4, 35, True, True)
    assert (found.manifest, found.samples_per_chunk, found.last_sealed_at) == (None, 2, None)
    assert (found.tokens.count, found.keys.rows_with) == (0, {"id": 2})


def test_first_chunk_of_a_foreign_directory_must_tell_how_many_rows(tmp_path: Path) -> None:
    foreign(tmp_path, b"\n", b"{}\n")
    with pytest.raises(StreamInvalid, match=r"chunk_00000\.jsonl: holds no rows"):
        overview(tmp_path)
    delete("chunk_00000.jsonl")(tmp_path)
    with pytest.raises(StreamInvalid, match="chunk 0 is not complete, so nothing tells"):
        overview(tmp_path)


def test_no_stream(tmp_path: Path) -> None:
    with pytest.raises(StreamMissing, match="there is no stream"):
        overview(tmp_path)
    (tmp_path / "chunk_00000.jsonl").touch()
    with pytest.raises(StreamUnsealed):
        overview(tmp_path)


def test_rows(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 3) as writer:
        for number in range(5):
            writer.write({"id": number}, tokens=10 + number)
    opened = open_now(tmp_path)
    found = list(read_rows(opened, 1, 0, 10))
    assert [(row.sample, row.chunk, row.row, row.byte, row.tokens, row.value) for row in found] == [
        (3, 1, 0, 0, 13, {"id": 3}),
        (4, 1, 1, 9, 14, {"id": 4}),
    ]
    assert [row.line for row in read_rows(opened, 0, 2, 1)] == [b'{"id":2}\n']
    flip("chunk_00001.jsonl", 10)(tmp_path)
    shown = read_rows(opened, 1, 0, 10)
    assert next(shown).sample == 3
    with pytest.raises(ChunkCorrupt, match="row 1"):
        next(shown)


def test_chunk(tmp_path: Path) -> None:
    shown = describe_chunk(open_now(stream(tmp_path)), 2)
    assert (shown.file, shown.number, shown.first, shown.rows, shown.size) == (
        tmp_path / "chunk_00002.jsonl",
        2,
        4,
        1,
        9,
    )
    assert shown.seal is not None
    assert (shown.lengths.count, shown.tokens.count) == (1, 0)


def test_keys_of_rows() -> None:
    keys = Keys()
    row: dict[str, Any] = {"a": 1, "b": [{"c": 1}, {"c": 2}], "d": None}
    for values in (row, row | {"a": 1.5, "e": [], "f": True}, {"d": "x", "g": [1, "x", 2, [3]]}):
        keys.add(values)
    assert keys.rows == 3
    assert keys.rows_with == {"a": 2, "b": 2, "d": 3, "e": 1, "f": 1, "g": 1}
    assert keys.kinds == {
        "a": ["integer", "number"],
        "b": ["array of object"],
        "d": ["null", "string"],
        "e": ["array"],
        "f": ["true or false"],
        "g": ["array of integer, string, array"],
    }


def test_producer_that_is_still_to_publish_its_last_chunk(tmp_path: Path) -> None:
    produce(tmp_path, 5)
    delete("stream.end")(tmp_path)
    edit("head.json", chunks=2, samples=4, ended=False, state="running", pid=os.getpid(), updated_at=time.time())(
        tmp_path
    )
    assert facts(overview(tmp_path)) == (2, 4, 36, True, False)


values = st.lists(st.one_of(st.integers(0, 3000), st.integers(0, 2**50)), min_size=1, max_size=60)


def counted(*groups: list[int]) -> Lengths:
    lengths = Lengths()
    for group in groups:
        lengths.add(np.array(group, np.uint64))
    return lengths


@given(numbers=values, share=st.floats(0, 1))
def test_quantiles(numbers: list[int], share: float) -> None:
    lengths = counted(numbers)
    wanted = sorted(numbers)[max(1, math.ceil(share * len(numbers))) - 1]
    found = lengths.quantile(share)
    assert found == wanted if wanted < 2048 else wanted * (1 - 1 / 1024) <= found <= wanted
    assert (lengths.smallest, lengths.largest, lengths.count) == (min(numbers), max(numbers), len(numbers))
    assert lengths.mean == sum(numbers) / len(numbers)


# The first edge, 50,000, lies within a bucket.
@example(numbers=[50_000, 50_000, 50_010, 60_000])
@given(numbers=values)
def test_histogram(numbers: list[int]) -> None:
    bins = counted(numbers).histogram()
    assert 1 <= len(bins) <= max(MAX_BINS, math.ceil(math.log10(max(numbers) + 1)) + 1)
    assert [one.high for one in bins[:-1]] == [one.low for one in bins[1:]]
    assert bins[0].low <= min(numbers) < bins[0].high
    assert bins[-1].low <= max(numbers) < bins[-1].high
    assert sum(one.count for one in bins) == len(numbers)
    for one in bins:
        # Past 4,096 an edge may lie within a bucket.
        if one.high <= 4096:
            assert one.count == sum(one.low <= number < one.high for number in numbers)


@given(first=values, second=values)
def test_counts_of_two_are_those_of_one(first: list[int], second: list[int]) -> None:
    merged = counted(first)
    merged.merge(counted(second))
    merged.merge(Lengths())
    both = counted(first, second)
    assert merged.histogram() == both.histogram()
    assert (merged.smallest, merged.largest, merged.total) == (both.smallest, both.largest, both.total)
    other = Lengths()
    other.merge(both)
    assert other.histogram() == both.histogram()


@pytest.mark.parametrize(
    ("numbers", "edges"),
    [
        ([0], [0, 1]),
        ([9, 9, 11], [7, 10, 15]),
        ([100, 299], [100, 150, 200, 300]),
        ([10, 999], [10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700, 1000]),
        ([9, 999], [5, 10, 20, 50, 100, 200, 500, 1000]),
        ([5, 70_000], [1, 10, 100, 1000, 10_000, 100_000]),
    ],
)
def test_bins_are_as_fine_as_there_is_room_for(numbers: list[int], edges: list[int]) -> None:
    counts = [sum(low <= number < high for number in numbers) for low, high in pairwise(edges)]
    wanted = [Bin(*edge, count) for edge, count in zip(pairwise(edges), counts, strict=True)]
    assert counted(numbers).histogram() == wanted


def test_nothing_counted() -> None:
    lengths = Lengths()
    lengths.add(np.array([], np.uint32))
    assert (lengths.count, lengths.mean, lengths.histogram()) == (0, 0.0, [])


def test_memory_does_not_grow_with_the_lengths() -> None:
    lengths = counted([2**50 - 1, 2**60])
    assert lengths.largest == 2**60
    assert lengths._buckets.nbytes < 400_000


@given(st.lists(st.integers(0, 2_000), min_size=1, max_size=50), st.integers(1, 100))
def test_spread_counts_each_length_in_a_bin_of_one_width(values: list[int], most: int) -> None:
    lengths = Lengths()
    lengths.add(np.array(values))
    bins = lengths.spread(most)
    assert 1 <= len(bins) <= most
    assert len({one.high - one.low for one in bins}) == 1
    assert [one.count for one in bins] == [sum(one.low <= value < one.high for value in values) for one in bins]
    assert sum(one.count for one in bins) == len(values)


def test_spread_of_long_lengths_loses_none() -> None:
    lengths = Lengths()
    lengths.add(np.array([2_047, 5_001, 123_457, 10**9]))
    assert sum(one.count for one in lengths.spread(80)) == 4
    assert Lengths().spread(80) == []
