"""Native and foreign streams: what is published, and what is refused."""

import contextlib
import os
import pickle
import re
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lazyshard import StreamReader
from lazyshard.errors import ChunkMissing, FileInvalid, FileRefused, StreamInvalid, WaitTimeout
from lazyshard.stream import stream as foreign_streams
from lazyshard.stream.listing import list_chunks, names_in
from lazyshard.stream.stream import NativeStream, open_stream
from tests.stream.damage import delete, each, edit
from tests.stream.streams import foreign, names, produce, raised, refusal_of, rows


def native(directory: Path) -> NativeStream:
    stream = open_stream(directory, None)
    assert isinstance(stream, NativeStream)
    return stream


def put(chunk: Path, number: int) -> None:
    """Puts a chunk of one row, and its marker."""
    chunk.write_bytes(b'{"id":%d}\n' % number)
    chunk.with_name(f"{chunk.name}.completed").touch()


def test_native_stream_is_known_by_its_head_or_else_is_listed(tmp_path: Path) -> None:
    found = native(produce(tmp_path, 4)).published()
    assert found.head is not None and found.head.state == "finished"
    for end in (True, False):
        if not end:
            (tmp_path / "stream.end").unlink()
        for damage in (b"", b'{"format":1,"chu', b"\0" * 80):
            (tmp_path / "head.json").write_bytes(damage)
            found = native(tmp_path).published()
            assert (found.chunks, found.samples, found.ended, found.head) == (2, 4, end, None)
    # A partial chunk without head and end is not counted.
    partial = produce(tmp_path / "partial", 3)
    delete("head.json", "stream.end")(partial)
    found = native(partial).published()
    assert (found.chunks, found.samples, found.ended) == (1, 2, False)


def test_head_or_end_that_contradicts_the_manifest_is_an_error(tmp_path: Path) -> None:
    heads = [(2, 5, True), (2, 3, False), (3, 4, True), (10**12, 10**12, True)]
    damages = [edit("head.json", chunks=chunks, samples=samples, ended=ended) for chunks, samples, ended in heads]
    damages.append(each(edit("stream.end", samples=9), delete("head.json")))
    produce(tmp_path, 4)
    for damage in damages:
        damage(tmp_path)
        raised(FileInvalid, StreamReader, tmp_path)


def test_short_chunk_in_the_middle_is_an_error_and_no_end(tmp_path: Path) -> None:
    stream = produce(tmp_path / "stream", 6)
    for name in ("chunk_00001.jsonl", "chunk_00001.jsonl.completed"):
        (stream / name).write_bytes((produce(tmp_path / name, 3) / name).read_bytes())
    reader = StreamReader(stream)
    for sample in (2, 3):
        assert raised(StreamInvalid, reader.read, sample).chunk == 1
    assert [reader.read(sample)["id"] for sample in (0, 1, 4, 5)] == [0, 1, 4, 5]


def test_foreign_stream_is_read_by_its_markers_whatever_the_padding_of_its_numbers(tmp_path: Path) -> None:
    foreign(tmp_path, b'{"id":0}\n{"id":1}\n', b'{"id":2}\n{"id":3}', b'{"id":4}\n', end=True)
    for wrong in (None, 0, -2, 1.5, True):
        with pytest.raises(ValueError, match="samples_per_chunk"):
            StreamReader(tmp_path, wrong)  # type: ignore[arg-type]
    before = names(tmp_path)
    reader = StreamReader(tmp_path, 2)
    assert list(reader) == rows(0, 5)
    assert (reader.stream_id, reader.seen.chunks, reader.seen.ended) == (None, 3, True)
    assert reader.line(3) == b'{"id":3}'
    assert names(tmp_path) == before
    again = StreamReader(tmp_path, 2)
    (tmp_path / "chunk_00001.jsonl").rename(tmp_path / "chunk_1.jsonl")
    assert list(again) == list(StreamReader(tmp_path, 2)) == rows(0, 5)
    odd = foreign(tmp_path / "odd", end=True)
    for number, name in enumerate(["chunk_0", "chunk_01", "chunk_002", *(f"chunk_{n}" for n in range(3, 12))]):
        put(odd / f"{name}.jsonl", number)
    assert list(StreamReader(tmp_path / "odd", 1)) == rows(0, 12)
    # Without markers, or a file, it is none.
    for path in (tmp_path / "odd").glob("*.completed"):
        path.unlink()
    assert raised(FileInvalid, StreamReader, tmp_path / "odd", 1).directory == str(tmp_path / "odd")
    raised(FileRefused, StreamReader, tmp_path / "odd" / "chunk_0.jsonl")


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
            refusal_of(StreamInvalid, re.escape(str(error)), foreign_streams.look_foreign, directory)
            return
        scan = foreign_streams.look_foreign(directory)
        assert (scan.complete, scan.gap) == (listing.complete, listing.gap)
        assert (scan.data, scan.seals) == (len(listing.data), len(listing.seals))
        assert {chunk: scan.data_name(chunk) for chunk in listing.data} == listing.data
        assert set(scan.odd) <= set(listing.data)
        assert scan.ours == {"stream.owner", "stream.json", "head.json"} & set(os.listdir(directory))


@pytest.mark.parametrize(("end", "many", "most"), [(True, 1000, 1), (True, 300, 0), (False, 1000, 0)])
def test_foreign_chunks_are_looked_up_and_only_an_end_is_listed(
    end: bool, many: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_streams, "_MANY", many)
    foreign(tmp_path, *(b'{"id":%d}\n' % number for number in range(300)), end=end)
    scan, listing = Mock(wraps=os.scandir), Mock(wraps=os.listdir)
    monkeypatch.setattr(os, "scandir", scan)
    monkeypatch.setattr(os, "listdir", listing)
    reader = StreamReader(tmp_path, 1)
    assert (reader.seen.chunks, reader.seen.ended) == (300, end)
    assert [reader.read(number)["id"] for number in (0, 298, 150)] == [0, 298, 150]
    sent = pickle.dumps(reader)
    assert len(sent) < 4096
    assert pickle.loads(sent).read(7) == {"id": 7}
    assert scan.call_count + listing.call_count == most
    assert reader.read(299) == {"id": 299}
    assert scan.call_count + listing.call_count == int(end)
    with pytest.raises(FileNotFoundError):
        open_stream(tmp_path, 1).open_chunk(300)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("gap", "missing", "behind"),
    [(1, "", "chunk_3.jsonl"), (1, ".completed", "chunk_00003.jsonl"), (2, "", "chunk_00003.jsonl")],
)
def test_rows_past_an_end(gap: int, missing: str, behind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_streams, "_MANY", 1)
    foreign(tmp_path, *(b'{"id":%d}\n' % number for number in range(4)), end=True)
    (tmp_path / f"chunk_{gap:05d}.jsonl{missing}").unlink()
    for end in ("", ".completed"):
        (tmp_path / f"chunk_00003.jsonl{end}").rename(tmp_path / f"{behind}{end}")
    caught = raised((StreamInvalid, ChunkMissing), lambda: list(StreamReader(tmp_path, 1, max_wait=0)))
    assert isinstance(caught, StreamInvalid | ChunkMissing) and caught.chunk == gap


def test_foreign_directory_is_listed_for_waits_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign(tmp_path, b'{"id":0}\n')
    clock, listed = [100.0], []
    monkeypatch.setattr("lazyshard.stream.stream.time.monotonic", lambda: clock[0])

    def scan(directory: Path) -> list[str]:
        listed.append(directory)
        clock[0] += 2.0
        return names_in(directory)

    monkeypatch.setattr(foreign_streams, "names_in", scan)
    reader = StreamReader(tmp_path, 1)
    foreign(tmp_path, *(b'{"id":%d}\n' % number for number in range(4)))
    # Of what is out of order, or otherwise named, a listing tells; until then it is waited for.
    put(tmp_path / "chunk_00005.jsonl", 5)
    put(tmp_path / "chunk_4.jsonl", 4)
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
    put(tmp_path / "chunk_00006.jsonl", 6)
    assert (reader.refresh().chunks, reader.seen.ended, reader.seen.gap, len(listed)) == (7, False, 7, 4)
    (tmp_path / "chunk_00007.jsonl").write_bytes(b'{"id":7}\n')
    assert (reader.refresh().ended, len(listed)) == (True, 5)
    assert list(reader) == rows(0, 8)


@pytest.mark.parametrize(
    ("missing", "gap", "end"), [("1.jsonl", 1, True), ("1.jsonl.completed", 1, False), ("2.jsonl.completed", 2, True)]
)
def test_foreign_gap_is_waited_for_and_named(missing: str, gap: int, end: bool, tmp_path: Path) -> None:
    foreign(tmp_path, b'{"id":0}\n', b'{"id":1}\n', b'{"id":2}\n', end=end)
    file = tmp_path / f"chunk_0000{missing}"
    content = file.read_bytes()
    file.unlink()
    reader = StreamReader(tmp_path, 1, max_wait=0)
    assert not reader.seen.ended
    assert reader.read(0) == {"id": 0}
    for number in range(gap, 3 if end else gap + 1):
        caught = refusal_of(WaitTimeout, f"chunk {gap} lacks", reader.read, number)
        assert (caught.state, caught.heartbeat_age) == (None, None)
    assert (reader.seen.chunks, reader.seen.ended, reader.seen.gap) == (gap, False, gap)
    file.write_bytes(content)
    assert [reader.read(n)["id"] for n in (1, 2)] == [1, 2]
    assert reader.refresh().gap is None and reader.refresh().ended is end


def test_foreign_chunk_of_a_wrong_number_of_rows_is_refused(tmp_path: Path) -> None:
    for data in (b"", b"\n", b'{"id":0}\n', b'{"id":0}\n{"id":1}\n{"id":2}\n'):
        reader = StreamReader(foreign(tmp_path / "middle", data, b'{"id":2}\n{"id":3}\n'), 2)
        assert raised(StreamInvalid, reader.read, 0).chunk == 0
        assert reader.read(2) == {"id": 2}
        # The last one may have fewer when the stream has ended.
        foreign(tmp_path / "last", data, end=True)
        with pytest.raises(StreamInvalid) if len(data) > 20 else contextlib.nullcontext():
            assert list(StreamReader(tmp_path / "last", 2)) == rows(0, data.count(b"id"))


def test_foreign_end_that_is_touched_later_makes_the_last_chunk_a_partial_one(tmp_path: Path) -> None:
    foreign(tmp_path, b'{"id":0}\n{"id":1}\n', b'{"id":2}\n')
    reader = StreamReader(tmp_path, 2, max_wait=0)
    assert (reader.seen.chunks, reader.seen.samples, reader.seen.short) == (1, 2, 1)
    raised(WaitTimeout, reader.read, 2)
    (tmp_path / "stream.end").touch()
    assert reader.read(2) == {"id": 2}
    raised(IndexError, reader.read, 3)
