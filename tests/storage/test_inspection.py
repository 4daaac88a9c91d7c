"""What is told of a stream at a glance, and rows of it."""

import itertools
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard import ChunkWriter
from lazyshard.errors import ChunkCorrupt, StreamInvalid, StreamMissing, StreamUnsealed
from lazyshard.storage import inspection
from lazyshard.storage.inspection import Overview, describe_chunk, overview, read_rows, sampled_chunks
from lazyshard.storage.opening import open_now
from lazyshard.storage.retire import retire
from lazyshard.storage.row_keys import Keys
from tests.storage.damage import delete, edit, flip, put, stream
from tests.storage.streams import foreign, produce


def facts(found: Overview) -> tuple[int, int, int, bool, bool]:
    """Chunks, samples, bytes, whether all chunks were looked at, whether it has ended."""
    return found.chunks, found.samples, found.size, found.complete, found.published.ended


@given(first=st.integers(0, 10**15), count=st.integers(0, 10**6), per_chunk=st.integers(1, 10**8))
def test_sampled_chunks_are_evenly_spaced(first: int, count: int, per_chunk: int) -> None:
    chunks = sampled_chunks(first, first + count, per_chunk)
    most = max(2, min(inspection.SAMPLED_CHUNKS, inspection.SAMPLED_ROWS // per_chunk))
    assert len(chunks) == min(count, most)
    if chunks:
        assert (chunks[0], chunks[-1]) == (first, first + count - 1)
        gaps = [later - earlier for earlier, later in itertools.pairwise(chunks)]
        assert max(gaps, default=1) - min(gaps, default=1) <= 1 <= min(gaps, default=1)


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
    # Rows 0, 1, 10, 11 and 18, the last three a byte longer: 48 bytes.
    assert facts(found) == (10, 19, 182, False, True)
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
