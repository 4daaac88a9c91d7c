"""Deleting the oldest chunks: what goes, in which order, and what producers and readers find."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import (
    ChunkRetired,
    FileInvalid,
    ProducerFenced,
    StreamEnded,
    StreamInvalid,
    VersionUnsupported,
)
from lazyshard.format.names import chunk_name, seal_name
from lazyshard.format.records import Manifest, Retired
from lazyshard.store import durable
from lazyshard.stream import read_retired
from lazyshard.stream.listing import list_chunks
from lazyshard.stream.native_stream import NativeStream
from lazyshard.stream.retire import list_kept, retire
from lazyshard.stream.stream import open_stream
from tests.stream.streams import foreign, head, names, produce, python, rows


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    """Five chunks of two rows, that goes on."""
    return produce(tmp_path / "s", 10, end=False)


def files(*chunks: int) -> set[str]:
    return {name(chunk) for chunk in chunks for name in (chunk_name, seal_name)}


def chunk_files(stream: Path) -> set[str]:
    return {name for name in names(stream) if name.startswith("chunk_")}


def test_chunks_below_the_number_go_and_the_others_stay(stream: Path) -> None:
    assert read_retired(stream) == 0
    assert retire(stream, 2, 5) == 2
    assert chunk_files(stream) == files(2, 3, 4)
    assert read_retired(stream) == 2
    assert retire(stream, 4, 5) == 2
    assert chunk_files(stream) == files(4)
    # Again, and with an older number: nothing comes back, nothing goes.
    assert [retire(stream, chunks, 5) for chunks in (4, 1, 0)] == [0, 0, 0]
    assert (chunk_files(stream), read_retired(stream)) == (files(4), 4)
    assert names(stream / ".tmp") == []


def test_mark_says_who_and_when(stream: Path) -> None:
    retire(stream, 3, 5, clock=lambda: 1700000000.5)
    manifest = Manifest.decode((stream / "stream.json").read_bytes())
    expected = Retired(manifest.stream_id, 3, 1700000000.5)
    assert Retired.decode((stream / "retired.json").read_bytes()) == expected


@pytest.mark.parametrize("chunks_before", [5, 6, 10**15])
def test_newest_chunk_never_goes(stream: Path, chunks_before: int) -> None:
    assert retire(stream, chunks_before, 5) == 4
    assert chunk_files(stream) == files(4)
    with ChunkWriter(stream) as writer:
        assert writer.published_samples == 10


@pytest.mark.parametrize("published", [0, 1])
def test_stream_of_one_chunk_or_none_keeps_it(tmp_path: Path, published: int) -> None:
    stream = produce(tmp_path, 2 * published, end=False)
    assert retire(stream, 1, published) == 0
    assert chunk_files(stream) == files(*range(published))
    assert "retired.json" not in names(stream)


def test_mark_is_durable_before_the_first_file_goes_and_seals_go_before_data(
    stream: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, rename, unlink = os.fsync, os.replace, os.unlink

    def noted_fsync(fd: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{fd}")).name
        steps.append("sync temporary" if name.startswith("retired.json.") else f"sync {name}")
        fsync(fd)

    def noted_rename(source: Path, target: Path) -> None:
        steps.append(f"rename {target.name}")
        rename(source, target)

    def noted_unlink(path: Path) -> None:
        if not path.name.startswith("retired.json."):
            steps.append(f"unlink {path.name}")
        unlink(path)

    for name, noted in (("fsync", noted_fsync), ("replace", noted_rename), ("unlink", noted_unlink)):
        monkeypatch.setattr(os, name, noted)
    retire(stream, 2, 5)
    assert steps == [
        "sync temporary",
        "rename retired.json",
        "sync s",
        "unlink chunk_00000.jsonl.tokens",
        "unlink chunk_00000.jsonl.completed",
        "unlink chunk_00000.jsonl",
        "unlink chunk_00001.jsonl.tokens",
        "unlink chunk_00001.jsonl.completed",
        "unlink chunk_00001.jsonl",
        "sync s",
    ]
    steps.clear()
    retire(stream, 2, 5)
    assert steps == []


def test_producer_that_was_fenced_deletes_nothing(stream: Path) -> None:
    before = names(stream)

    def check() -> None:
        raise ProducerFenced("taken over")

    with pytest.raises(ProducerFenced):
        retire(stream, 3, 5, check=check)
    assert names(stream) == before


def test_directory_that_is_no_stream_of_ours_keeps_everything(tmp_path: Path) -> None:
    stream = foreign(tmp_path / "f", b'{"id":0}\n', b'{"id":1}\n')
    with pytest.raises(StreamInvalid, match=r"there is no stream\.json"):
        retire(stream, 1, 2)
    with pytest.raises(StreamInvalid):
        retire(tmp_path / "nowhere", 1, 2)
    assert chunk_files(stream) == files(0, 1)


def test_deletion_that_failed_in_the_middle_is_completed_by_the_next_call(
    stream: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = os.unlink

    def fail(path: Path) -> None:
        if path.name == chunk_name(1):
            raise OSError(5, "Input/output error")
        unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fail)
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output error"):
                retire(stream, 3, 5)
    assert chunk_files(stream) == {chunk_name(1), *files(2, 3, 4)}
    assert read_retired(stream) == 3
    assert StreamReader(stream).read(6) == {"id": 6}
    assert retire(stream, 0, 5) == 2
    assert chunk_files(stream) == files(3, 4)


def test_mark_that_cannot_be_written_deletes_nothing(stream: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "write_all", full)
        with pytest.raises(OSError, match="No space left"):
            retire(stream, 3, 5)
    assert chunk_files(stream) == files(*range(5))
    assert read_retired(stream) == 0
    assert names(stream / ".tmp") == []


@pytest.mark.parametrize(
    ("data", "error"), [(b"", FileInvalid), (b'{"format":1}', FileInvalid), (b'{"format":2}', VersionUnsupported)]
)
def test_mark_that_cannot_be_used_stops_deletion_and_start_and_changes_nothing(
    stream: Path, data: bytes, error: type[Exception]
) -> None:
    retire(stream, 2, 5)
    (stream / "retired.json").write_bytes(data)
    for call in (lambda: retire(stream, 3, 5), lambda: ChunkWriter(stream), lambda: read_retired(stream)):
        with pytest.raises(error, match=str(stream / "retired.json")):
            call()
    with pytest.raises(error):
        StreamReader(stream).read(0)
    assert chunk_files(stream) == files(2, 3, 4)


def test_mark_of_another_stream_deletes_no_chunk_of_this_one(stream: Path) -> None:
    # The stream was removed to begin anew, but for this file.
    old = Retired("f" * 32, 3, 0.0).encode()
    (stream / "retired.json").write_bytes(old)
    assert read_retired(stream) == 0
    produce(stream, 12, end=False)
    assert chunk_files(stream) == files(*range(6))
    assert list(StreamReader(produce(stream, 12))) == rows(0, 12)
    assert retire(stream, 1, 6) == 1
    assert read_retired(stream) == 1


def test_retired_chunks_are_left_out_of_the_listing(stream: Path) -> None:
    everything = list_chunks(stream)
    assert (everything.first, everything.sealed, everything.complete, everything.gap) == (0, 5, 5, None)
    retire(stream, 2, 5)
    (stream / seal_name(0)).write_bytes(b"back")
    (stream / chunk_name(1)).write_bytes(b"back")
    kept = list_kept(stream)
    assert (kept.first, kept.sealed, kept.complete, kept.gap) == (2, 5, 5, None)
    assert (sorted(kept.data), sorted(kept.seals)) == ([2, 3, 4], [2, 3, 4])
    assert kept.leftovers == [seal_name(0), chunk_name(1)]
    (stream / chunk_name(3)).unlink()
    assert (list_kept(stream).complete, list_kept(stream).gap) == (3, 3)


CALLS = """
import sys
from lazyshard import ChunkWriter
calls = []
sys.addaudithook(lambda event, arguments: calls.append(event) if event == "open" or event[:3] == "os." else None)
ChunkWriter(sys.argv[1]).close(end=False)
print(len(calls))
"""


def test_cost_of_a_start_does_not_grow_with_what_was_retired(tmp_path: Path) -> None:
    calls = []
    for chunks in (10, 100):
        stream = produce(tmp_path / str(chunks), chunks, 1, end=False)
        retire(stream, chunks - 3, chunks)
        done = python(CALLS, stream)
        assert done.stderr == ""
        calls.append(int(done.stdout))
    assert calls[0] == calls[1]


def test_next_producer_goes_on_after_the_retired_chunks(stream: Path) -> None:
    with ChunkWriter(stream) as writer:
        retire(stream, 4, 5)
        writer.write({"id": 10}, source="ten")
        writer.write({"id": 11}, source="eleven")
        retire(stream, 5, 6)
        writer.close(end=False)
    with ChunkWriter(stream) as writer:
        assert (writer.published_chunks, writer.published_samples, writer.source) == (6, 12, "eleven")
        writer.write({"id": 12})
    assert (head(stream).chunks, head(stream).samples, head(stream).ended) == (7, 13, True)
    assert json.loads((stream / "stream.end").read_bytes()) == {
        "format": 1,
        "chunks": 7,
        "samples": 13,
        "source": "eleven",
    }
    reader = StreamReader(stream)
    assert [reader.read(sample)["id"] for sample in (10, 11, 12)] == [10, 11, 12]


def test_partial_last_chunk_without_an_end_is_ended_above_retired_ones(tmp_path: Path) -> None:
    stream = produce(tmp_path, 9)
    retire(stream, 10, 5)
    (stream / "stream.end").unlink()
    (stream / "head.json").unlink()
    assert StreamReader(stream).seen.samples == 8
    with pytest.raises(ValueError, match="ended with 9 samples"):
        ChunkWriter(stream)
    assert json.loads((stream / "stream.end").read_bytes()) == {"format": 1, "chunks": 5, "samples": 9}


def test_what_came_back_below_the_mark_is_cleared_at_the_next_start(stream: Path) -> None:
    retire(stream, 3, 5)
    for name in (seal_name(0), chunk_name(2), chunk_name(1), seal_name(1), chunk_name(5)):
        (stream / name).write_bytes(b"back")
    ChunkWriter(stream).close(end=False)
    assert chunk_files(stream) == files(3, 4)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (files(3), r"chunk_00003\.jsonl\.completed is missing although chunk_00004"),
        (files(2), r"chunk_00002\.jsonl\.completed is missing although chunk_00003"),
        (
            files(2, 3, 4),
            r"chunk_00002\.jsonl\.completed is missing, the first that retired\.json says was not deleted",
        ),
    ],
)
def test_gap_above_the_mark_is_refused_and_nothing_removed(stream: Path, lost: set[str], message: str) -> None:
    retire(stream, 2, 5)
    for name in lost:
        (stream / name).unlink()
    (stream / seal_name(0)).write_bytes(b"back")
    (stream / chunk_name(9)).write_bytes(b"unsealed")
    before = chunk_files(stream)
    with pytest.raises(StreamInvalid, match=message):
        ChunkWriter(stream)
    assert chunk_files(stream) == before


def test_sample_of_a_retired_chunk_is_an_error_at_once(stream: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = StreamReader(stream)
    retire(stream, 3, 5)

    def sleep(_: float) -> None:
        raise AssertionError("waited for a chunk that is gone")

    for module in ("reader", "waiting"):
        monkeypatch.setattr(f"lazyshard.stream.{module}.time", SimpleNamespace(sleep=sleep, monotonic=lambda: 0.0))
    for sample in (0, 5):
        with pytest.raises(ChunkRetired, match=r"chunk \d was deleted .* all chunks below 3") as caught:
            reader.read(sample)
        assert (caught.value.chunk, caught.value.chunks_before) == (sample // 2, 3)
        assert caught.value.file == str(stream / seal_name(sample // 2))
    assert isinstance(caught.value, FileNotFoundError)
    assert "--retain all" in str(caught.value) and "--consumers" in str(caught.value)
    assert [reader.read(sample)["id"] for sample in range(6, 10)] == [6, 7, 8, 9]
    with pytest.raises(ChunkRetired):
        next(iter(reader))


def test_data_that_goes_between_seal_and_data_is_retired_and_not_missing(
    stream: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = StreamReader(stream)
    open_sealed = NativeStream.open_chunk.__globals__["open_sealed"]

    def late(path: Path, seal: Any) -> Any:
        retire(stream, 3, 5)
        return open_sealed(path, seal)

    monkeypatch.setitem(NativeStream.open_chunk.__globals__, "open_sealed", late)
    with pytest.raises(ChunkRetired):
        reader.read(4)


def test_chunk_that_is_open_is_read_on(stream: Path) -> None:
    reader = StreamReader(stream)
    reader.read(0)
    retire(stream, 3, 5)
    assert reader.read(1) == {"id": 1}
    with pytest.raises(ChunkRetired):
        pickle.loads(pickle.dumps(reader)).read(1)


COUNTED = """
import sys
from lazyshard import StreamReader
from lazyshard.stream import reader as module
module._LET_GO_S = float(sys.argv[2])
reader = StreamReader(sys.argv[1])
opened = []
sys.addaudithook(lambda event, arguments: opened.append(arguments[0]) if event == "open" else None)
for sample in range(4, 10):
    reader.read(sample)
print(*(str(path).rpartition("/")[2] for path in opened))
"""


@pytest.mark.parametrize(("every_s", "looks"), [("inf", 0), ("0", 2)])
def test_mark_is_looked_at_no_more_often_than_deleted_chunks_are_closed(stream: Path, every_s: str, looks: int) -> None:
    retire(stream, 2, 5)
    done = python(COUNTED, stream, every_s)
    assert done.stderr == ""
    found = done.stdout.split()
    assert found.count("retired.json") == looks
    assert [name for name in found if name != "retired.json"] == [
        name(chunk) for chunk in (2, 3, 4) for name in (seal_name, chunk_name)
    ]


@pytest.mark.parametrize("chunks_before", [0, 2, 4])
@pytest.mark.parametrize("end", [False, True])
def test_lost_head_of_a_retired_stream_is_made_up_for_by_the_listing(
    tmp_path: Path, chunks_before: int, end: bool
) -> None:
    stream = produce(tmp_path, 9, end=end)
    # Four full chunks; the partial one is only there once the stream has ended.
    published = 5 if end else 4
    retire(stream, chunks_before, published)
    kept = min(chunks_before, published - 1)
    (stream / "head.json").unlink()
    opened = open_stream(stream, None)
    assert isinstance(opened, NativeStream)
    found = opened.published()
    assert (found.chunks, found.samples, found.ended, found.gap) == (published, 9 if end else 8, end, None)
    reader = StreamReader(stream, max_wait=0)
    assert [reader.read(n)["id"] for n in range(2 * kept, found.samples)] == list(range(2 * kept, found.samples))
    with contextlib.suppress(StreamEnded):
        ChunkWriter(stream, 2).close(end=False)
    assert (head(stream).chunks, head(stream).samples, head(stream).ended) == (published, 9 if end else 8, end)


def test_chunks_that_go_while_the_directory_is_listed_make_no_gap(
    stream: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = os.listdir

    def slow(path: Any) -> list[str]:
        # A listing is no snapshot: it may have passed the first names before they went, and not the later ones.
        found = listed(path)
        retire(stream, 3, 5)
        return [name for name in found if name not in files(1, 2)]

    monkeypatch.setattr(os, "listdir", slow)
    found = list_kept(stream)
    assert (found.first, found.complete, found.gap) == (3, 5, None)
