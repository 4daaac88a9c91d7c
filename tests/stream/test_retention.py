"""Deleting the oldest chunks: what goes, in which order, what producers and readers find; and lengths in tokens."""

import contextlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lazyshard import ChunkWriter, StreamReader, errors
from lazyshard.errors import ChunkRetired, FileInvalid, ProducerFenced, StreamEnded, StreamInvalid
from lazyshard.format.records import Manifest, Retired, chunk_name, seal_name, tokens_name
from lazyshard.inspection.inspection import overview
from lazyshard.inspection.row_facts import mean_tokens
from lazyshard.inspection.survey import take_survey
from lazyshard.store import durable
from lazyshard.stream.listing import list_chunks, list_kept, read_retired, retire
from lazyshard.stream.stream import NativeStream, open_stream
from tests.stream import streams
from tests.stream.damage import found
from tests.stream.streams import names, produce, raised, raising, refusal_of, rows


@pytest.fixture
def stream(tmp_path: Path) -> Path:
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
    with mock.patch("time.time", return_value=1700000000.5):
        assert retire(stream, 4, 5) == 2
    # Again, and with an older number: nothing comes back, nothing goes.
    assert [retire(stream, chunks, 5) for chunks in (4, 1, 0)] == [0, 0, 0]
    assert (chunk_files(stream), read_retired(stream)) == (files(4), 4)
    assert names(stream / ".tmp") == []
    manifest = Manifest.decode((stream / "stream.json").read_bytes())
    assert Retired.decode((stream / "retired.json").read_bytes()) == Retired(manifest.stream_id, 4, 1700000000.5)


def test_newest_chunk_never_goes(tmp_path: Path) -> None:
    for published, chunks_before, kept in [(5, 5, 4), (5, 10**15, 4), (1, 1, 0), (1, 10**15, 0), (0, 1, 0)]:
        stream = produce(tmp_path / f"{published} {chunks_before}", 2 * published, end=False)
        assert retire(stream, chunks_before, published) == kept
        assert chunk_files(stream) == files(*range(kept, published))
        assert ("retired.json" in names(stream)) is (kept > 0)
        with ChunkWriter(stream, 2) as writer:
            assert writer.published_samples == 2 * published


def test_seals_go_first_and_a_deletion_that_failed_is_completed(stream: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        streams.fail_when(patch, "unlink", lambda path: path.name == chunk_name(1))
        for _ in range(2):
            refusal_of(OSError, "Input/output error", retire, stream, 3, 5)
    assert chunk_files(stream) == {chunk_name(1), *files(2, 3, 4)}
    assert read_retired(stream) == 3
    assert StreamReader(stream).read(6) == {"id": 6}
    assert retire(stream, 0, 5) == 2
    assert chunk_files(stream) == files(3, 4)


def test_what_deletes_nothing(stream: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raised(ProducerFenced, retire, stream, 3, 5, check=raising(ProducerFenced("taken over")))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(durable, "write_all", raising(OSError(28, "No space left on device")))
        retire(stream, 3, 5)
    assert (chunk_files(stream), read_retired(stream)) == (files(*range(5)), 0)
    assert names(stream / ".tmp") == []
    others = streams.foreign(tmp_path / "f", b'{"id":0}\n', b'{"id":1}\n')
    for directory in (others, tmp_path / "nowhere"):
        raised(StreamInvalid, retire, directory, 1, 2)
    assert chunk_files(others) == files(0, 1)


@pytest.mark.parametrize(
    ("data", "error"),
    [(b"", FileInvalid), (b'{"format":1}', FileInvalid), (b'{"format":2}', errors.VersionUnsupported)],
)
def test_unusable_mark_stops_deletion_and_start(stream: Path, data: bytes, error: type[Exception]) -> None:
    retire(stream, 2, 5)
    (stream / "retired.json").write_bytes(data)
    for call in (lambda: retire(stream, 3, 5), lambda: ChunkWriter(stream), lambda: read_retired(stream)):
        refusal_of(error, str(stream / "retired.json"), call)
    raised(error, StreamReader(stream).read, 0)
    assert chunk_files(stream) == files(2, 3, 4)


def test_mark_of_another_stream_deletes_no_chunk_of_this_one(stream: Path) -> None:
    # The stream was removed to begin anew, but for this file.
    (stream / "retired.json").write_bytes(Retired("f" * 32, 3, 0.0).encode())
    assert read_retired(stream) == 0
    produce(stream, 12, end=False)
    assert chunk_files(stream) == files(*range(6))
    assert list(StreamReader(produce(stream, 12))) == rows(0, 12)
    assert retire(stream, 1, 6) == 1
    assert read_retired(stream) == 1


def count_calls(stream: Path, counted: Path) -> None:
    """Counts the calls of a start that have to do with files; in a process of its own, which keeps the hook."""
    calls: list[str] = []
    sys.addaudithook(lambda event, _: calls.append(event) if event == "open" or event[:3] == "os." else None)
    ChunkWriter(stream).close(end=False)
    counted.write_text(str(len(calls)))


def test_cost_of_a_start_does_not_grow_with_what_was_retired(tmp_path: Path) -> None:
    for chunks in (10, 100):
        stream = produce(tmp_path / str(chunks), chunks, 1, end=False)
        retire(stream, chunks - 3, chunks)
        assert streams.forked(partial(count_calls, stream, tmp_path / f"{chunks} calls")) == 0
    assert (tmp_path / "10 calls").read_text() == (tmp_path / "100 calls").read_text()


@pytest.mark.parametrize("lost", [(3,), (2,), (2, 3, 4)])
def test_gap_above_the_mark_is_refused_and_nothing_removed(stream: Path, lost: tuple[int, ...]) -> None:
    retire(stream, 2, 5)
    for name in files(*lost):
        (stream / name).unlink()
    (stream / seal_name(0)).write_bytes(b"back")
    (stream / chunk_name(9)).write_bytes(b"unsealed")
    before = chunk_files(stream)
    refusal_of(StreamInvalid, f"{seal_name(lost[0])} is missing", ChunkWriter, stream)
    assert chunk_files(stream) == before


def test_data_that_goes_after_its_seal_was_read_is_retired(stream: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = StreamReader(stream)
    open_sealed = NativeStream.open_chunk.__globals__["open_sealed"]

    def late(path: Path, seal: Any) -> Any:
        retire(stream, 3, 5)
        return open_sealed(path, seal)

    monkeypatch.setitem(NativeStream.open_chunk.__globals__, "open_sealed", late)
    raised(ChunkRetired, reader.read, 4)


@pytest.mark.parametrize(("chunks_before", "end"), [(0, False), (2, True), (4, False), (4, True)])
def test_lost_head_of_a_retired_stream_is_made_up_for(tmp_path: Path, chunks_before: int, end: bool) -> None:
    stream = produce(tmp_path, 9, end=end)
    # Four full chunks; the partial one is only there once the stream has ended.
    published, samples = (5, 9) if end else (4, 8)
    retire(stream, chunks_before, published)
    kept = min(chunks_before, published - 1)
    (stream / "head.json").unlink()
    opened = open_stream(stream, None)
    assert isinstance(opened, NativeStream)
    found = opened.published()
    assert (found.chunks, found.samples, found.ended, found.gap) == (published, samples, end, None)
    reader = StreamReader(stream, max_wait=0)
    assert [reader.read(n)["id"] for n in range(2 * kept, samples)] == list(range(2 * kept, samples))
    with contextlib.suppress(StreamEnded):
        ChunkWriter(stream, 2).close(end=False)
    told = streams.head(stream)
    assert (told.chunks, told.samples, told.ended) == (published, samples, end)


def test_chunks_that_go_during_a_listing_make_no_gap(stream: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = os.listdir

    def slow(path: Any) -> list[str]:
        # A listing is no snapshot: it may have passed the first names before they went, and not the later ones.
        found = listed(path)
        retire(stream, 3, 5)
        return [name for name in found if name not in files(1, 2)]

    monkeypatch.setattr(os, "listdir", slow)
    found = list_kept(stream)
    assert (found.first, found.complete, found.gap) == (3, 5, None)


def leave_tokens(directory: Path, *chunks: int) -> Path:
    """Puts files there as `lazyshard measure` of an earlier release has."""
    for chunk in chunks:
        (directory / tokens_name(chunk)).write_bytes(b'{"format":1,"chunk":%d}\n' % chunk)
    (directory / ".measure").mkdir(exist_ok=True)
    (directory / ".measure" / "lock").touch()
    return directory


def test_lengths_are_those_of_the_seals_and_chunks_without_or_deleted_are_named(tmp_path: Path) -> None:
    directory = streams.sealed(tmp_path / "s", [1, 2, 3, 4, 5])
    assert streams.lengths_of(directory) == [1, 2, 3, 4, 5]
    assert mean_tokens(directory) == 3
    assert overview(directory).tokens.total == 15
    without = streams.put_lengths(produce(tmp_path / "without", 5), [1, 2])
    deleted = streams.sealed(tmp_path / "deleted", list(range(10)), end=False)
    retire(deleted, 1, 5)
    for directory, chunk in ((without, 1), (deleted, 0)):
        caught = raised(errors.LengthUnknown, streams.lengths_of, directory)
        assert (caught.chunk, caught.directory) == (chunk, str(directory))


def test_files_of_measured_lengths_are_passed_over_and_go_with_their_chunk(tmp_path: Path) -> None:
    directory = leave_tokens(streams.sealed(tmp_path / "s", [1, 2, 3, 4, 5]), 0, 1, 9)
    assert streams.lengths_of(directory) == [1, 2, 3, 4, 5]
    assert found(directory) == found(directory, quick=True) == []
    assert take_survey(directory, 0.0).problems == ()
    assert list(StreamReader(directory)) == rows(0, 5)
    other = leave_tokens(produce(tmp_path / "t", 10, end=False), 0, 1, 2)
    raised(errors.LengthUnknown, streams.lengths_of, other)
    assert retire(other, 2, 5) == 2
    assert [path.name for path in other.glob("*.tokens")] == [tokens_name(2)]
    assert list_chunks(other).complete == 0
    # What a killed deletion has left the next start removes, and leaves the others alone.
    leave_tokens(other, 0)
    assert list_kept(other).leftovers == [tokens_name(0)]
    ChunkWriter(other, 2).close(end=False)
    assert [path.name for path in other.glob("*.tokens")] == [tokens_name(2)]
