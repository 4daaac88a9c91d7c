"""ESTALE in any call of readers and writers; looks that show what was there before. Without a mount."""

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lazyshard import ChunkWriter, LazyShardedDataset, StreamReader
from lazyshard.errors import ChunkRetired, FileInvalid, LazyShardError, StreamEnded, StreamInvalid, WriterFailed
from lazyshard.format.records import HEAD, RETIRED
from lazyshard.store import files
from lazyshard.stream import listing, lock, read_retired
from lazyshard.stream.listing import retire
from lazyshard.stream.waiting import READERS
from tests.harness.network.mounts import READING, WRITING, StaleCall
from tests.harness.processes.producing import ids
from tests.stream.streams import World, fail_when, foreign, forked, open_descriptors, produce, raised, rows


def ended(path: Path) -> Path:
    return produce(path, 7, 2)


def retired(path: Path) -> Path:
    retire(ended(path), 2, 4)
    return path


def live_without_head(path: Path) -> Path:
    (produce(path, 6, 2, end=False) / HEAD).unlink()
    return path


def retired_without_head(path: Path) -> Path:
    (retired(path) / HEAD).unlink()
    return path


def of_others(path: Path) -> Path:
    return foreign(path, b'{"id":0}\n{"id":1}\n', b'{"id":2}\n', end=True)


def read_all(path: Path) -> list[int]:
    return [row["id"] for row in StreamReader(path, 2, max_wait=0)]


def read_there(path: Path) -> list[int]:
    reader = StreamReader(path, max_wait=0)
    return [reader.read(sample)["id"] for sample in range(2 * read_retired(path), reader.seen.samples)]


def read_as_rank(path: Path) -> list[int]:
    dataset = LazyShardedDataset(path, dp_rank=1, dp_size=2, max_wait=0)
    return [dataset[index]["id"] for index in dataset.rank_indices]


@pytest.mark.parametrize(
    ("make", "work", "expected"),
    [
        (ended, read_all, [0, 1, 2, 3, 4, 5, 6]),
        (ended, read_as_rank, [2, 3, 5]),
        (live_without_head, read_there, [0, 1, 2, 3, 4, 5]),
        (retired, read_there, [4, 5, 6]),
        (retired_without_head, read_there, [4, 5, 6]),
        (of_others, read_all, [0, 1, 2]),
    ],
)
def test_readers_go_on_after_estale_in_any_call(
    make: Callable[[Path], Path], work: Callable[[Path], list[int]], expected: list[int], tmp_path: Path
) -> None:
    path = make(tmp_path / "s")
    with StaleCall(path, 0) as counted:
        assert work(path) == expected
    assert len(counted.calls) >= 20
    before = open_descriptors()
    for number in range(1, len(counted.calls) + 1):
        with StaleCall(path, number) as stale:
            assert work(path) == expected, stale.calls[number - 1]
        assert len(stale.calls) > number - 1
    assert open_descriptors() == before


def test_deleted_chunk_that_the_server_forgot_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ended(tmp_path / "s")
    reader = StreamReader(path, max_wait=0)
    assert reader.read(0) == {"id": 0}
    retire(path, 2, 4)
    with monkeypatch.context() as forgotten:
        stale = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        fail_when(forgotten, "pread", lambda fd, *_: "chunk_00000" in os.readlink(f"/proc/self/fd/{fd}"), stale)
        raised(ChunkRetired, reader.read_published, 1, 2)
        raised(ChunkRetired, reader.line, 1)
    assert reader.read(5) == {"id": 5}


@pytest.mark.full
def test_writers_stop_and_go_on_after_estale_in_any_call(tmp_path: Path) -> None:
    number, faults = 0, 0
    while True:
        number += 1
        path = tmp_path / str(number)
        with StaleCall(path, number, READING + WRITING, errno.ESTALE) as stale:
            try:
                write(path)
            except OSError as cause:
                faults += 1
                assert isinstance(cause, LazyShardError) or cause.errno == errno.ESTALE, stale.calls[-1]
                if isinstance(cause, WriterFailed):
                    assert os.strerror(errno.ESTALE) in str(cause), stale.calls[-1]
        if len(stale.calls) < number:
            break
        if not (path / "stream.end").exists():  # Whatever it was, the same rows given again make the stream whole
            write(path)
        assert ids(path) == list(range(7)), stale.calls[number - 1]
    assert number > 60
    assert faults > 40


def write(path: Path) -> None:
    with contextlib.suppress(StreamEnded), ChunkWriter(path, 2) as writer:
        for row in rows(writer.published_samples, 7):
            writer.write(row)


def tear(monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> list[Path]:
    """Has so many reads of a file give a part of it, as sshfs may while it is replaced; returns them as they come."""
    read, torn = files.read_file, list[Path]()

    def part(path: Path, most: int | None = None) -> bytes:
        data = read(path, most)
        if path.name != name or len(torn) == times:
            return data
        torn.append(path)
        return data[:20]

    monkeypatch.setattr(files, "read_file", part)
    return torn


@pytest.mark.parametrize("name", [HEAD, RETIRED])
def test_file_replaced_while_read_is_read_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = retired(tmp_path / "s")
    listed: list[Path] = []
    monkeypatch.setattr(listing, "list_kept", lambda directory, stream_id: listed.append(directory))
    torn = tear(monkeypatch, name, 2)
    raised(ChunkRetired, lambda: StreamReader(path, max_wait=0).read(0))
    assert (len(torn), listed) == (2, [])


def test_a_file_that_stays_torn_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = retired(tmp_path / "s")
    tear(monkeypatch, RETIRED, -1)
    raised(FileInvalid, read_retired, path)


def lagging(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Has the first so many listings show what was there before the seal of chunk 2, as another machine may do."""
    seen = 0

    def list_old(directory: Path) -> listing.Listing:
        nonlocal seen
        seen += 1
        found = list_chunks(directory)
        seals = {chunk: name for chunk, name in found.seals.items() if chunk != 2 or seen > times}
        return listing.Listing(found.data, seals)

    list_chunks = listing.list_chunks
    monkeypatch.setattr("lazyshard.stream.listing.list_chunks", list_old)


def test_a_producer_waits_for_a_listing_that_lags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = produce(tmp_path / "s", 6, 2, end=False)
    lagging(monkeypatch, 3)
    with ChunkWriter(path) as writer:
        assert writer.published_samples == 6
    assert ids(path) == list(range(6))
    assert "chunk_00002.jsonl.completed" in caplog.text


def test_a_listing_that_stays_behind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = produce(tmp_path / "s", 6, 2, end=False)
    lagging(monkeypatch, 10**9)
    monkeypatch.setattr(lock, "LISTING_S", 0.05)
    raised(StreamInvalid, ChunkWriter, path)
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
