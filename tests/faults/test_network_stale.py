"""ESTALE in any call of readers and writers; looks that show what was there before. Without a mount."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lazyshard import ChunkWriter, LazyShardedDataset, StreamReader
from lazyshard.errors import ChunkRetired, FileInvalid, LazyShardError, StreamEnded, StreamInvalid, WriterFailed
from lazyshard.format.names import HEAD, RETIRED
from lazyshard.store import files
from lazyshard.stream import listing, native_stream, read_retired, recovery
from lazyshard.stream.retire import list_kept, retire
from lazyshard.stream.watchdog import READERS
from tests.harness.network.mounts import READING, WRITING, StaleCall
from tests.harness.processes.producing import ids
from tests.stream.streams import foreign, forked, open_descriptors, produce, rows
from tests.stream.waiting_by_hand import World

Work = Callable[[Path], list[int]]


def ended(folder: Path) -> Path:
    return produce(folder / "s", 7, 2)


def without_head(folder: Path) -> Path:
    path = produce(folder / "s", 6, 2, end=False)
    (path / HEAD).unlink()
    return path


def retired(folder: Path) -> Path:
    path = ended(folder)
    retire(path, 2, 4)
    return path


def retired_without_head(folder: Path) -> Path:
    path = retired(folder)
    (path / HEAD).unlink()
    return path


def foreign_one(folder: Path) -> Path:
    return foreign(folder / "s", b'{"id":0}\n{"id":1}\n', b'{"id":2}\n{"id":3}\n', end=True)


def read_all(path: Path) -> list[int]:
    return [row["id"] for row in StreamReader(path, 2, max_wait=0)]


def read_six(path: Path) -> list[int]:
    reader = StreamReader(path, max_wait=0)
    return [reader.read(number)["id"] for number in range(6)]


def read_kept(path: Path) -> list[int]:
    reader = StreamReader(path, max_wait=0)
    return [reader.read(number)["id"] for number in range(4, 7)]


def read_as_rank(path: Path) -> list[int]:
    dataset = LazyShardedDataset(path, dp_rank=1, dp_size=2, max_wait=0)
    return [dataset[index]["id"] for index in dataset.rank_indices]


@pytest.mark.parametrize(
    ("make", "work", "expected"),
    [
        (ended, read_all, [0, 1, 2, 3, 4, 5, 6]),
        (ended, read_as_rank, [2, 3, 5]),
        (without_head, read_six, [0, 1, 2, 3, 4, 5]),
        (retired, read_kept, [4, 5, 6]),
        (retired_without_head, read_kept, [4, 5, 6]),
        (foreign_one, read_all, [0, 1, 2, 3]),
    ],
)
def test_readers_go_on_after_estale_in_any_call(
    make: Callable[[Path], Path], work: Work, expected: list[int], tmp_path: Path
) -> None:
    path = make(tmp_path)
    with StaleCall(path, 0) as counted:
        assert work(path) == expected
    assert len(counted.calls) >= 20
    before = open_descriptors()
    for number in range(1, len(counted.calls) + 1):
        with StaleCall(path, number) as stale:
            assert work(path) == expected, stale.calls[number - 1]
        assert len(stale.calls) > number - 1
    assert open_descriptors() == before


@pytest.mark.parametrize(
    ("module", "make", "work"),
    [(files, ended, read_all), (native_stream, ended, read_all), (files, without_head, read_six)],
)
def test_without_a_second_try_readers_would_stop(
    module: Any, make: Callable[[Path], Path], work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path)
    monkeypatch.setattr(module, "again_if_stale", lambda call: call())
    with StaleCall(path, 0) as counted:
        work(path)
    stopped = []
    for number in range(1, len(counted.calls) + 1):
        try:
            with StaleCall(path, number):
                work(path)
        except OSError as error:
            stopped.append(error.errno)
    assert stopped and set(stopped) == {errno.ESTALE}


def test_a_deleted_chunk_that_the_server_has_forgotten_is_reported_as_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ended(tmp_path)
    reader = StreamReader(path, max_wait=0)
    assert reader.read(0) == {"id": 0}
    retire(path, 2, 4)

    pread = os.pread

    def forgotten(fd: int, size: int, offset: int) -> bytes:
        if "chunk_00000" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", forgotten)
    with pytest.raises(ChunkRetired, match="chunk 0 was deleted by the stream's producer"):
        reader.read_published(1, 2)
    with pytest.raises(ChunkRetired):
        reader.line(1)
    monkeypatch.undo()
    assert reader.read(5) == {"id": 5}


def test_writers_stop_and_go_on_after_estale_in_any_call(tmp_path: Path) -> None:
    error = errno.ESTALE
    number, faults = 0, 0
    while True:
        number += 1
        path = tmp_path / str(number)
        with StaleCall(path, number, READING + WRITING, error) as stale:
            try:
                write(path)
            except OSError as cause:
                faults += 1
                assert isinstance(cause, LazyShardError) or cause.errno == error, stale.calls[-1]
                if isinstance(cause, WriterFailed):
                    assert os.strerror(error) in str(cause), stale.calls[-1]
        if len(stale.calls) < number:
            break
        # Whatever it was, the same rows given again make the stream whole.
        if not (path / "stream.end").exists():
            write(path)
        assert ids(path) == list(range(7)), stale.calls[number - 1]
    assert number > 60
    assert faults > 40


def write(path: Path) -> None:
    with contextlib.suppress(StreamEnded), ChunkWriter(path, 2) as writer:
        for row in rows(writer.published_samples, 7):
            writer.write(row)


class Torn:
    """Has the first so many reads of a file give but a part of it, as sshfs may while it is being replaced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> None:
        self.times = times
        self._name = name
        self._read = files.read_file
        monkeypatch.setattr(files, "read_file", self._torn)

    def _torn(self, path: Path, most: int | None = None) -> bytes:
        data = self._read(path, most)
        if path.name == self._name and self.times:
            self.times -= 1
            return data[:20]
        return data


@pytest.mark.parametrize("name", [HEAD, RETIRED])
def test_a_file_that_is_read_while_it_is_replaced_is_read_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = retired(tmp_path)
    listed: list[Path] = []
    monkeypatch.setattr(native_stream, "list_kept", lambda directory, stream_id: listed.append(directory))
    torn = Torn(monkeypatch, name, 2)
    with pytest.raises(ChunkRetired, match="all chunks below 2"):
        StreamReader(path, max_wait=0).read(0)
    assert (torn.times, listed) == (0, [])


def test_a_file_that_stays_torn_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = retired(tmp_path)
    Torn(monkeypatch, RETIRED, 10**9)
    with pytest.raises(FileInvalid):
        read_retired(path)


def lagging(path: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Has the first so many listings show what was there before the seal of chunk 2, as another machine may do."""
    seen = 0

    def list_old(directory: Path) -> listing.Listing:
        nonlocal seen
        seen += 1
        found = list_chunks(directory)
        if seen > times or 2 not in found.seals:
            return found
        seals = {chunk: name for chunk, name in found.seals.items() if chunk < 2}
        return listing.Listing(found.data, seals, 2, 2)

    list_chunks = listing.list_chunks
    monkeypatch.setattr("lazyshard.stream.retire.list_chunks", list_old)


def test_a_producer_waits_for_a_listing_that_lags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = produce(tmp_path / "s", 6, 2, end=False)
    lagging(path, monkeypatch, 3)
    with ChunkWriter(path) as writer:
        assert writer.published_samples == 6
    assert ids(path) == list(range(6))
    assert "chunk_00002.jsonl.completed: is there, but not listed yet; waiting for the filesystem" in caplog.text


def test_a_listing_that_stays_behind_is_refused_and_nothing_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = produce(tmp_path / "s", 6, 2, end=False)
    lagging(path, monkeypatch, 10**9)
    monkeypatch.setattr(recovery, "LISTING_S", 0.05)
    with pytest.raises(StreamInvalid, match=r"is there, but a listing of .* has not shown it for 0 s; start"):
        ChunkWriter(path)
    monkeypatch.undo()
    assert ids(path) == list(range(6))


def test_without_that_a_sealed_chunk_would_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = produce(tmp_path / "s", 6, 2, end=False)
    lagging(path, monkeypatch, 1)
    monkeypatch.setattr(recovery, "_list", lambda directory, manifest, check: list_kept(directory, manifest.stream_id))
    ChunkWriter(path).close(end=False)
    assert (path / "chunk_00002.jsonl.completed").exists()
    assert not (path / "chunk_00002.jsonl").exists()


def test_what_takes_too_long_is_told_ever_more_rarely_and_so_is_its_end() -> None:
    clock = World(again=True, advice="; the filesystem hangs, or its server is away")
    clock.watchdog.ask(lambda: "reading a%b")
    hangs = "reading a%b; the filesystem hangs, or its server is away"
    assert clock.look_at(59.9) == []
    assert clock.look_at(60.0) == [f"no answer for 60 s: {hangs}"]
    assert clock.look_at(119.0) == []
    assert clock.look_at(120.0) == [f"no answer for 120 s: {hangs}"]
    assert clock.look_at(239.0) == []
    assert clock.look_at(240.0) == [f"no answer for 240 s: {hangs}"]
    clock.watchdog.answered()
    assert clock.told == ["answered after 240 s: reading a%b"]
    clock.told.clear()
    clock.watchdog.ask(lambda: "reading b")
    assert clock.look_at(299.0) == []
    clock.watchdog.answered()
    assert clock.told == []


def test_a_fork_waits_for_nothing_that_its_parent_has_asked_for() -> None:
    READERS.start()
    READERS.ask(lambda: "reading the parent's")
    try:

        def work() -> None:
            assert not READERS._asked and READERS._thread is None
            READERS.start()
            READERS.ask(lambda: "reading a child's")
            assert READERS._thread is not None and READERS._thread.is_alive()
            READERS.answered()

        assert forked(work) == 0
    finally:
        READERS.answered()
