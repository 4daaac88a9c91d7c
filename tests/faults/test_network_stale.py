"""ESTALE in any call of readers and writers; looks that show what was there before. Without a mount."""

import contextlib
import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from lazyshard import ChunkWriter, LazyShardedDataset, StreamReader
from lazyshard.errors import ChunkRetired, FileInvalid, LazyShardError, StreamEnded, StreamInvalid, WriterFailed
from lazyshard.format.names import HEAD, RETIRED
from lazyshard.store import files
from lazyshard.stream import listing, read_retired, recovery, stream
from lazyshard.stream.retention import retire
from lazyshard.stream.waiting import READERS
from tests.harness.network.mounts import READING, WRITING, StaleCall
from tests.harness.processes.producing import ids
from tests.stream.streams import foreign, forked, open_descriptors, produce, rows
from tests.stream.waiting_by_hand import World

Work = Callable[[Path], list[int]]


def ended(folder: Path) -> Path:
    return produce(folder / "s", 7, 2)


def retired(folder: Path) -> Path:
    path = ended(folder)
    retire(path, 2, 4)
    return path


def without_head(path: Path) -> Path:
    (path / HEAD).unlink()
    return path


def read_all(path: Path) -> list[int]:
    return [row["id"] for row in StreamReader(path, 2, max_wait=0)]


def reading(*samples: int) -> Work:
    return lambda path: list(map(partial(read_one, StreamReader(path, max_wait=0)), samples))


def read_one(reader: StreamReader, sample: int) -> int:
    number: int = reader.read(sample)["id"]
    return number


def read_as_rank(path: Path) -> list[int]:
    dataset = LazyShardedDataset(path, dp_rank=1, dp_size=2, max_wait=0)
    return [dataset[index]["id"] for index in dataset.rank_indices]


@pytest.mark.parametrize(
    ("make", "work", "expected"),
    [
        (ended, read_all, [0, 1, 2, 3, 4, 5, 6]),
        (ended, read_as_rank, [2, 3, 5]),
        (lambda at: without_head(produce(at / "s", 6, 2, end=False)), reading(*range(6)), [0, 1, 2, 3, 4, 5]),
        (retired, reading(4, 5, 6), [4, 5, 6]),
        (lambda at: without_head(retired(at)), reading(4, 5, 6), [4, 5, 6]),
        (lambda at: foreign(at / "s", b'{"id":0}\n{"id":1}\n', b'{"id":2}\n', end=True), read_all, [0, 1, 2]),
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
    with pytest.raises(ChunkRetired):
        reader.read_published(1, 2)
    with pytest.raises(ChunkRetired):
        reader.line(1)
    monkeypatch.undo()
    assert reader.read(5) == {"id": 5}


@pytest.mark.full
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
    monkeypatch.setattr(stream, "list_kept", lambda directory, stream_id: listed.append(directory))
    torn = Torn(monkeypatch, name, 2)
    with pytest.raises(ChunkRetired):
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
        return listing.Listing(found.data, seals)

    list_chunks = listing.list_chunks
    monkeypatch.setattr("lazyshard.stream.retention.list_chunks", list_old)


def test_a_producer_waits_for_a_listing_that_lags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = produce(tmp_path / "s", 6, 2, end=False)
    lagging(path, monkeypatch, 3)
    with ChunkWriter(path) as writer:
        assert writer.published_samples == 6
    assert ids(path) == list(range(6))
    assert "chunk_00002.jsonl.completed" in caplog.text


def test_a_listing_that_stays_behind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = produce(tmp_path / "s", 6, 2, end=False)
    lagging(path, monkeypatch, 10**9)
    monkeypatch.setattr(recovery, "LISTING_S", 0.05)
    with pytest.raises(StreamInvalid):
        ChunkWriter(path)
    monkeypatch.undo()
    assert ids(path) == list(range(6))


def test_what_takes_too_long_is_told_ever_more_rarely_and_so_is_its_end() -> None:
    clock = World(again=True)
    clock.watchdog.ask(lambda: "reading a%b")
    told = {at: len(clock.look_at(at)) for at in (59.9, 60.0, 119.0, 120.0, 239.0, 240.0)}
    assert told == {59.9: 0, 60.0: 1, 119.0: 0, 120.0: 1, 239.0: 0, 240.0: 1}
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
