"""Native and foreign streams: what is published, and what is refused."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lazyshard import StreamReader
from lazyshard.errors import (
    ChunkMissing,
    FileInvalid,
    FileRefused,
    StreamInvalid,
    StreamUnsealed,
    WaitTimeout,
)
from lazyshard.stream import stream as foreign_streams
from lazyshard.stream.listing import list_chunks, scan_chunks
from lazyshard.stream.native_stream import NativeStream
from lazyshard.stream.stream import ForeignStream, open_stream
from tests.stream.damage import edit
from tests.stream.streams import foreign, names, produce, rows


def native(directory: Path) -> NativeStream:
    stream = open_stream(directory, None)
    assert isinstance(stream, NativeStream)
    return stream


def test_native_stream_is_known_by_its_head(tmp_path: Path) -> None:
    found = native(produce(tmp_path, 4, end=False)).published()
    assert (found.chunks, found.samples, found.ended, found.gap) == (2, 4, False, None)
    assert found.head is not None and found.head.state == "idle"


@pytest.mark.parametrize("damage", [None, b"", b'{"format":1,"chu', b"\0" * 80])
def test_native_stream_without_a_usable_head_is_listed(damage: bytes | None, tmp_path: Path) -> None:
    produce(tmp_path, 4, end=False)
    (tmp_path / "head.json").unlink()
    if damage is not None:
        (tmp_path / "head.json").write_bytes(damage)
    found = native(tmp_path).published()
    assert (found.chunks, found.samples, found.ended, found.head) == (2, 4, False, None)
    (tmp_path / "stream.end").write_bytes(b'{"format":1,"chunks":2,"samples":4}')
    found = native(tmp_path).published()
    assert (found.chunks, found.samples, found.ended) == (2, 4, True)


def test_partial_chunk_without_head_and_end_is_not_counted(tmp_path: Path) -> None:
    produce(tmp_path, 3)
    (tmp_path / "head.json").unlink()
    (tmp_path / "stream.end").unlink()
    found = native(tmp_path).published()
    assert (found.chunks, found.samples, found.ended) == (1, 2, False)


@pytest.mark.parametrize(
    "fields",
    [
        {"chunks": 2, "samples": 5},
        {"chunks": 2, "samples": 3, "ended": False},
        {"chunks": 3, "samples": 4},
        {"chunks": 10**12, "samples": 10**12},
    ],
)
def test_head_that_contradicts_the_manifest_is_an_error(fields: dict[str, Any], tmp_path: Path) -> None:
    edit("head.json", **fields)(produce(tmp_path, 4))
    with pytest.raises(FileInvalid):
        StreamReader(tmp_path)


def test_end_that_contradicts_the_manifest_is_an_error(tmp_path: Path) -> None:
    produce(tmp_path, 4)
    (tmp_path / "head.json").unlink()
    (tmp_path / "stream.end").write_bytes(b'{"format":1,"chunks":2,"samples":9}')
    with pytest.raises(FileInvalid):
        StreamReader(tmp_path)


@pytest.mark.parametrize("wrong", [0, -2, 1.5, True])
def test_impossible_samples_per_chunk_is_refused(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="samples_per_chunk is an integer"):
        StreamReader(foreign(tmp_path, b"{}\n"), wrong)


def test_manifest_that_is_listed_but_not_found_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(tmp_path, 4)
    real = os.open

    def forgetful(path: Any, *arguments: Any, **named: Any) -> int:
        if str(path).endswith("stream.json"):
            raise FileNotFoundError(2, "a name that the filesystem remembers not to exist", str(path))
        return real(path, *arguments, **named)

    monkeypatch.setattr(os, "open", forgetful)
    assert open_stream(tmp_path, None) is None
    monkeypatch.undo()
    assert native(tmp_path).published().samples == 4


def test_short_chunk_in_the_middle_is_an_error_and_no_end(tmp_path: Path) -> None:
    stream = produce(tmp_path / "stream", 6)
    for name in ("chunk_00001.jsonl", "chunk_00001.jsonl.completed"):
        (stream / name).write_bytes((produce(tmp_path / name, 3) / name).read_bytes())
    reader = StreamReader(stream)
    for sample in (2, 3):
        with pytest.raises(StreamInvalid) as caught:
            reader.read(sample)
        assert caught.value.chunk == 1
    assert [reader.read(sample)["id"] for sample in (0, 1, 4, 5)] == [0, 1, 4, 5]


def test_foreign_stream_is_read_by_its_markers(tmp_path: Path) -> None:
    foreign(tmp_path, b'{"id":0}\n{"id":1}\n', b'{"id":2}\n{"id":3}', b'{"id":4}\n', end=True)
    reader = StreamReader(tmp_path, 2)
    assert list(reader) == rows(0, 5)
    assert (reader.stream_id, reader.seen.chunks, reader.seen.ended) == (None, 3, True)
    assert reader.line(3) == b'{"id":3}'


def test_foreign_stream_needs_samples_per_chunk(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="samples_per_chunk must be given"):
        StreamReader(foreign(tmp_path, b"{}\n"))


def test_foreign_stream_without_markers_is_refused_and_told_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "chunk_0.jsonl").write_bytes(b"{}\n")
    with pytest.raises(StreamUnsealed, match=r"`lazyshard-producer run --source") as caught:
        StreamReader(tmp_path, 1)
    assert caught.value.directory == str(tmp_path)


def test_foreign_numbers_are_ordered_as_numbers_whatever_their_padding(tmp_path: Path) -> None:
    for number, name in enumerate(["chunk_0", "chunk_01", "chunk_002", *(f"chunk_{n}" for n in range(3, 12))]):
        (tmp_path / f"{name}.jsonl").write_bytes(b'{"id":%d}\n' % number)
        (tmp_path / f"{name}.jsonl.completed").touch()
    (tmp_path / "stream.end").touch()
    assert list(StreamReader(tmp_path, 1)) == rows(0, 12)


def test_foreign_numbers_past_five_digits_are_ordered_as_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chunk_100000.jsonl").write_bytes(b'{"id":7}\n')
    listed = [f"chunk_{n:05d}.jsonl{end}" for n in range(100_001) for end in ("", ".completed")]
    monkeypatch.setattr(
        os, "scandir", lambda path: contextlib.nullcontext(SimpleNamespace(name=name) for name in sorted(listed))
    )
    reader = StreamReader(tmp_path, 1)
    assert (reader.seen.chunks, reader.seen.samples) == (100_001, 100_001)
    assert reader.read(100_000) == {"id": 7}


_NAMES = st.sampled_from(
    [
        *(f"chunk_{number:0{width}d}.jsonl" for number in range(7) for width in (5, 5, 5, 1, 7)),
        *(f"chunk_{number}.jsonl" for number in (99_999, 100_000, 10**18 - 1, 10**18, 10**40)),
        *("chunk_000001.jsonlx", "chunk_.jsonl", "chunk_0000a.jsonl", "xhunk_00000.jsonl", "chunk_00001.arrays"),
        *("stream.owner", "stream.json", "head.json", "rows", "chunk_٣.jsonl", "chunk_00000:jsonl"),
    ]
)


@example([("chunk_1000000000000000000.jsonl", "both")], 2)
@example([("chunk_1.jsonl", "data")], 2)
@given(st.lists(st.tuples(_NAMES, st.sampled_from(["both", "data", "marker"]))), st.integers(0, 7))
def test_what_is_scanned_of_a_foreign_directory_is_what_is_listed(odd: list[tuple[str, str]], whole: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        found = {f"chunk_{number:05d}.jsonl": "both" for number in range(whole)} | dict(odd)
        for name, what in found.items():
            if what != "marker":
                (directory / name).touch()
            if what != "data":
                (directory / f"{name}.completed").touch()
        try:
            listing = list_chunks(directory)
        except StreamInvalid as error:
            with pytest.raises(StreamInvalid, match=re.escape(str(error))):
                scan_chunks(directory)
            return
        scan = scan_chunks(directory)
        assert (scan.complete, scan.gap) == (listing.complete, listing.gap)
        assert (scan.data, scan.seals) == (len(listing.data), len(listing.seals))
        assert {chunk: scan.data_name(chunk) for chunk in listing.data} == listing.data
        assert set(scan.odd) <= set(listing.data)
        assert scan.ours == {"stream.owner", "stream.json", "head.json"} & set(os.listdir(directory))


@pytest.fixture
def listings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The directories that were listed so far."""
    listed: list[Any] = []

    def noted(call: Callable[[Any], Any], path: Any) -> Any:
        listed.append(path)
        return call(path)

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, functools.partial(noted, getattr(os, name)))
    return listed


@pytest.mark.parametrize(("end", "many", "most"), [(True, 1000, 1), (True, 300, 0), (False, 1000, 0)])
def test_foreign_chunks_are_looked_up_and_only_an_end_is_listed(
    end: bool, many: int, most: int, tmp_path: Path, listings: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_streams, "_MANY", many)
    foreign(tmp_path, *(b'{"id":%d}\n' % number for number in range(300)), end=end)
    reader = StreamReader(tmp_path, 1)
    assert (reader.seen.chunks, reader.seen.ended) == (300, end)
    assert [reader.read(number)["id"] for number in (0, 298, 150)] == [0, 298, 150]
    sent = pickle.dumps(reader)
    assert len(sent) < 4096
    assert pickle.loads(sent).read(7) == {"id": 7}
    assert len(listings) == most
    assert reader.read(299) == {"id": 299}
    assert len(listings) == int(end)
    with pytest.raises(FileNotFoundError):
        open_stream(tmp_path, 1).open_chunk(300)  # type: ignore[union-attr]


@pytest.mark.parametrize("gap", [1, 2])
@pytest.mark.parametrize("missing", ["", ".completed"])
@pytest.mark.parametrize("behind", ["chunk_00003.jsonl", "chunk_3.jsonl"])
def test_rows_behind_an_end_that_was_believed_are_an_error(
    gap: int, missing: str, behind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_streams, "_MANY", 1)
    foreign(tmp_path, *(b'{"id":%d}\n' % number for number in range(4)), end=True)
    (tmp_path / f"chunk_{gap:05d}.jsonl{missing}").unlink()
    for end in ("", ".completed"):
        (tmp_path / f"chunk_00003.jsonl{end}").rename(tmp_path / f"{behind}{end}")
    reader = StreamReader(tmp_path, 1, max_wait=0)
    with pytest.raises((StreamInvalid, ChunkMissing)) as caught:
        list(reader)
    assert isinstance(caught.value, StreamInvalid | ChunkMissing) and caught.value.chunk == gap


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 7, 8, 100])
def test_foreign_chunks_are_counted_by_lookups(chunks: int, tmp_path: Path, listings: list[Any]) -> None:
    foreign(tmp_path, *[b'{"id":0}\n'] * chunks)
    reader = StreamReader(tmp_path, 1)
    assert reader.seen.chunks == chunks
    for number in range(chunks, chunks + 3):
        (tmp_path / f"chunk_{number:05d}.jsonl").write_bytes(b"{}\n")
        (tmp_path / f"chunk_{number:05d}.jsonl.completed").touch()
        assert reader.refresh().chunks == number + 1
    assert not listings


def test_foreign_directory_is_listed_for_who_waits_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign(tmp_path, b'{"id":0}\n')
    clock, listed = [100.0], []
    monkeypatch.setattr("lazyshard.stream.stream.time.monotonic", lambda: clock[0])

    def scan(directory: Path) -> Any:
        listed.append(directory)
        clock[0] += 2.0
        return scan_chunks(directory)

    monkeypatch.setattr(foreign_streams, "scan_chunks", scan)
    reader = StreamReader(tmp_path, 1)
    foreign(tmp_path, *(b'{"id":%d}\n' % number for number in range(4)))
    # Of what is out of order, or otherwise named, a listing tells; until then it is waited for.
    for name in ("chunk_00005.jsonl", "chunk_4.jsonl"):
        (tmp_path / name).write_bytes(b'{"id":%d}\n' % int(name[6:-6]))
        (tmp_path / f"{name}.completed").touch()
    assert (reader.refresh(4).chunks, len(listed)) == (4, 0)
    assert (reader.refresh(5).chunks, len(listed)) == (6, 1)
    clock[0] += 39.9
    assert (reader.refresh(7).chunks, len(listed)) == (6, 1)
    clock[0] += 0.2
    assert (reader.refresh(7).chunks, len(listed)) == (6, 2)
    (tmp_path / "chunk_00007.jsonl.completed").touch()
    (tmp_path / "stream.end").touch()
    assert (reader.refresh().chunks, reader.seen.ended, reader.seen.gap, len(listed)) == (6, False, 6, 3)
    assert (reader.refresh().chunks, len(listed)) == (6, 3)
    (tmp_path / "chunk_00006.jsonl").write_bytes(b'{"id":6}\n')
    (tmp_path / "chunk_00006.jsonl.completed").touch()
    assert (reader.refresh().chunks, reader.seen.ended, reader.seen.gap, len(listed)) == (7, False, 7, 4)
    (tmp_path / "chunk_00007.jsonl").write_bytes(b'{"id":7}\n')
    assert (reader.refresh().ended, len(listed)) == (True, 5)
    assert list(reader) == rows(0, 8)


def test_foreign_chunk_that_is_renamed_is_found_by_its_number(tmp_path: Path) -> None:
    foreign(tmp_path, b'{"id":0}\n', b'{"id":1}\n', end=True)
    reader = StreamReader(tmp_path, 1)
    (tmp_path / "chunk_00001.jsonl").rename(tmp_path / "chunk_1.jsonl")
    assert reader.read(1) == {"id": 1}


@pytest.mark.parametrize("missing", ["chunk_00001.jsonl", "chunk_00001.jsonl.completed"])
@pytest.mark.parametrize("end", [True, False])
def test_foreign_gap_is_waited_for_and_named(missing: str, end: bool, tmp_path: Path) -> None:
    foreign(tmp_path, b'{"id":0}\n', b'{"id":1}\n', b'{"id":2}\n', end=end)
    content = (tmp_path / missing).read_bytes()
    (tmp_path / missing).unlink()
    reader = StreamReader(tmp_path, 1, max_wait=0)
    assert not reader.seen.ended
    assert reader.read(0) == {"id": 0}
    for number in (1, 2) if end else (1,):
        with pytest.raises(WaitTimeout, match="chunk 1 lacks its data or its marker"):
            reader.read(number)
    assert (reader.seen.chunks, reader.seen.ended, reader.seen.gap) == (1, False, 1)
    (tmp_path / missing).write_bytes(content)
    assert [reader.read(n)["id"] for n in (1, 2)] == [1, 2]
    assert reader.refresh().gap is None and reader.refresh().ended is end


def test_foreign_last_chunk_without_a_marker_is_not_dropped_at_the_end(tmp_path: Path) -> None:
    foreign(tmp_path, b'{"id":0}\n', end=True)
    (tmp_path / "chunk_00001.jsonl").write_bytes(b'{"id":1}\n')
    reader = StreamReader(tmp_path, 1, max_wait=0)
    assert (reader.seen.ended, reader.seen.gap) == (False, 1)
    with pytest.raises(WaitTimeout, match="chunk 1 lacks"):
        list(reader)
    (tmp_path / "chunk_00001.jsonl.completed").touch()
    assert list(reader) == rows(0, 2)


@pytest.mark.parametrize("data", [b"", b"\n", b'{"id":0}\n', b'{"id":0}\n{"id":1}\n{"id":2}\n'])
def test_foreign_chunk_of_a_wrong_number_of_rows_is_refused(data: bytes, tmp_path: Path) -> None:
    foreign(tmp_path, data, b'{"id":2}\n{"id":3}\n')
    reader = StreamReader(tmp_path, 2)
    with pytest.raises(StreamInvalid, match=f"found {data.count(b'id')}") as caught:
        reader.read(0)
    assert caught.value.chunk == 0
    assert reader.read(2) == {"id": 2}


def test_foreign_last_chunk_of_too_many_rows_is_refused(tmp_path: Path) -> None:
    foreign(tmp_path, b'{"id":0}\n{"id":1}\n{"id":2}\n', end=True)
    with pytest.raises(StreamInvalid):
        StreamReader(tmp_path, 2)


@pytest.mark.parametrize("data", [b"", b" \n"])
def test_foreign_last_chunk_may_be_empty_when_the_stream_has_ended(data: bytes, tmp_path: Path) -> None:
    foreign(tmp_path, b'{"id":0}\n', data, end=True)
    assert list(StreamReader(tmp_path, 1)) == rows(0, 1)


def test_foreign_end_that_is_touched_later_makes_the_last_chunk_a_partial_one(tmp_path: Path) -> None:
    foreign(tmp_path, b'{"id":0}\n{"id":1}\n', b'{"id":2}\n')
    reader = StreamReader(tmp_path, 2, max_wait=0)
    assert (reader.seen.chunks, reader.seen.samples, reader.seen.short) == (1, 2, 1)
    with pytest.raises(WaitTimeout):
        reader.read(2)
    (tmp_path / "stream.end").touch()
    assert reader.read(2) == {"id": 2}
    with pytest.raises(IndexError):
        reader.read(3)


def test_looking_leaves_the_directory_as_it_is(tmp_path: Path) -> None:
    for directory in (foreign(tmp_path / "foreign", b"{}\n", end=True), produce(tmp_path / "native", 4, 1)):
        before = names(directory)
        list(StreamReader(directory, 1))
        assert names(directory) == before
    assert isinstance(open_stream(tmp_path / "foreign", 1), ForeignStream)


def test_file_in_place_of_the_directory_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"{}")
    with pytest.raises(FileRefused):
        StreamReader(tmp_path / "rows.jsonl")
