"""The cache of a node: bounded, shared, filled ahead, and never a torn chunk in it, whoever is killed when."""

import contextlib
import gc
import os
import random
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard import StreamReader
from lazyshard.errors import ConfigInvalid, FileRefused
from lazyshard.format.records import chunk_name, seal_name
from lazyshard.store.durable import locked
from lazyshard.store.files import FOLDER_VARIABLE, UrlPath, cache_folder
from lazyshard.store.mirror import AHEAD_VARIABLE, BYTES_VARIABLE, Mirror, guess_next
from lazyshard.store.objects import PATIENCE_VARIABLE, number_of
from tests.store.server import Gate, Server
from tests.store.streams import copies, publish
from tests.stream.streams import collect_garbage, raising, refusal_of, rows, running, wait_until

pytestmark = pytest.mark.full


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def taken(cache: Path) -> int:
    size = 0
    for path in cache.glob("*/*"):
        # It may be removed meanwhile.
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


def read_all(url: UrlPath) -> None:
    list(StreamReader(url))


def test_the_cache_keeps_to_its_bound(
    tmp_path: Path, bucket: UrlPath, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = publish(tmp_path / "local", bucket, 120, 10)
    chunk = (folder / chunk_name(11)).stat().st_size + (folder / seal_name(11)).stat().st_size
    most = 5 * chunk
    monkeypatch.setenv(BYTES_VARIABLE, str(most))
    reader = StreamReader(bucket)
    seen = 0
    for number in range(120):
        assert reader.read(number) == {"id": number}
        # While nobody makes room: else one that goes could be counted beside one that comes.
        with locked(cache / ".lock"):
            seen = max(seen, taken(cache))
    assert 3 * chunk < seen <= most
    assert not caplog.records


@pytest.fixture
def room(tmp_path: Path, bucket: UrlPath, monkeypatch: pytest.MonkeyPatch) -> int:
    """The size of one of six chunks of ten rows, of which three fit into the cache, and nothing is fetched ahead."""
    folder = publish(tmp_path / "local", bucket, 60, 10)
    chunk = (folder / chunk_name(5)).stat().st_size + (folder / seal_name(5)).stat().st_size + 8
    monkeypatch.setenv(AHEAD_VARIABLE, "0")
    monkeypatch.setenv(BYTES_VARIABLE, str(3 * chunk))
    return chunk


@pytest.mark.usefixtures("room")
def test_what_was_used_last_stays(server: Server, bucket: UrlPath, cache: Path) -> None:
    reader = StreamReader(bucket)
    for sample in (0, 10, 20, 0, 30):
        reader.read(sample)
    assert copies(cache) == [chunk_name(number) for number in (0, 2, 3)]
    assert set(server.gets(".jsonl").values()) == {1}


@pytest.mark.usefixtures("room")
def test_what_was_fetched_ahead_does_not_make_room_for_more_of_it(bucket: UrlPath, cache: Path) -> None:
    mirror = Mirror(bucket, "0" * 32, lambda: None)
    for number in range(5):
        mirror.fetch(number)
    assert copies(cache) == [chunk_name(number) for number in range(3)]
    # Somebody waits for this one.
    mirror.open(4)
    assert chunk_name(4) in copies(cache) and chunk_name(0) not in copies(cache)


@pytest.mark.usefixtures("room")
def test_what_is_read_stays(
    server: Server, bucket: UrlPath, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(BYTES_VARIABLE, "1")
    monkeypatch.delenv(AHEAD_VARIABLE)
    held, other = StreamReader(bucket), StreamReader(bucket)
    assert held.read(0) == {"id": 0}
    assert [other.read(sample)["id"] for sample in (10, 20, 30)] == [10, 20, 30]
    assert [held.read(sample)["id"] for sample in (1, 2)] == [1, 2]
    assert server.gets(".jsonl") == Counter({chunk_name(number): 1 for number in range(4)})
    (told,) = caplog.messages
    assert BYTES_VARIABLE in told


def test_a_window_wider_than_what_is_held_open_is_fetched_once(tmp_path: Path, server: Server, bucket: UrlPath) -> None:
    publish(tmp_path / "local", bucket, 60, 10)
    reader = StreamReader(bucket)
    window = random.Random(0).sample(range(60), 60)
    assert [reader.read(sample)["id"] for sample in window] == window
    assert set(server.gets(".jsonl").values()) == {1}
    # Once it is known how many are needed, they stay open.
    opened = reader.chunks_opened
    assert [reader.read(sample)["id"] for sample in window] == window
    assert reader.chunks_opened == opened


def test_one_that_is_killed_while_it_fetches_leaves_nothing_behind(
    tmp_path: Path, server: Server, bucket: UrlPath, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path / "local", bucket, 12, 4)
    monkeypatch.setenv(AHEAD_VARIABLE, "0")
    gate = Gate()
    server.fault = lambda method, key: gate.hold if method == "GET" and key.endswith(chunk_name(1)) else None
    with running(read_all, bucket):
        gate.wait()
        assert f".{chunk_name(1)}.part" in copies(cache)
    gate.open()
    assert chunk_name(1) not in copies(cache)
    server.fault = lambda method, key: None
    # What was left of another stream.
    left = cache / "another"
    left.mkdir(mode=0o700)
    for name in (f".{chunk_name(7)}.part", chunk_name(9)):
        (left / name).write_bytes(b"x" * 100)
    assert list(StreamReader(bucket)) == rows(0, 12)
    assert copies(cache) == [chunk_name(chunk) for chunk in (0, 1, 2, 9)]


def test_stopped_reader(tmp_path: Path, server: Server, bucket: UrlPath, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path / "local", bucket, 12, 4)
    monkeypatch.setattr("lazyshard.store.mirror._STALLED_S", 0.2)
    gate = Gate()
    holds = {("GET", f"{bucket.key}/{chunk_name(1)}"): gate.hold}
    server.fault = lambda method, key: holds.pop((method, key), None)
    with running(read_all, bucket) as pid:
        gate.wait()
        os.kill(pid, signal.SIGSTOP)
        assert StreamReader(bucket).read(4) == {"id": 4}
    gate.open()


def test_read_ahead_and_open_files_end_with_their_reader(tmp_path: Path, bucket: UrlPath, cache: Path) -> None:
    publish(tmp_path / "local", bucket, 20, 4)
    before = set(threading.enumerate())

    def ahead() -> int:
        gc.collect()
        return sum(thread.name == "lazyshard-read-ahead" for thread in set(threading.enumerate()) - before)

    def links() -> list[Path]:
        """Files of the cache that this process has open. Connections to the store come and go."""
        return [fd for fd in Path("/proc/self/fd").iterdir() if os.path.realpath(fd).startswith(str(cache))]

    collect_garbage()
    reader = StreamReader(bucket)
    assert len(list(reader)) == 20
    assert ahead() <= 1
    assert links()
    del reader
    wait_until(lambda: not ahead(), "the thread ends")
    wait_until(lambda: not links(), "its files are closed")


def test_folder_and_bound_that_cannot_be_used_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for place in ("file", "file/below", "open"):
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / place))
        refusal_of(FileRefused, str(tmp_path / place.partition("/")[0]), cache_folder)
    for text in ("-1", "1.5", "16GB"):
        monkeypatch.setenv(BYTES_VARIABLE, text)
        refusal_of(ConfigInvalid, BYTES_VARIABLE, number_of, BYTES_VARIABLE, 1)


def test_a_full_disk_is_told_with_what_to_do(tmp_path: Path, bucket: UrlPath, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path / "local", bucket, 4)
    monkeypatch.setenv(PATIENCE_VARIABLE, "0")
    monkeypatch.setattr("lazyshard.store.mirror.write_all", raising(OSError(28, "No space left on device")))
    refusal_of(OSError, f"chunk 0 of {bucket}.*{BYTES_VARIABLE}", StreamReader(bucket).read, 0)


def test_what_is_guessed() -> None:
    guessed = [([], []), ([5], []), ([5, 5], []), ([0, 1], [2, 3]), ([1, 5, 9], [13, 17])]
    assert [(opened, guess_next(opened, 2)) for opened, _ in guessed] == guessed
    assert (guess_next([4, 0, 6, 2], 1), guess_next([0, 1], 0)) == ([8], [])


@given(st.integers(1, 64), st.integers(0, 63), st.integers(1, 8), st.integers(0, 100), st.randoms())
def test_a_rank_gets_no_others_chunks(ranks: int, rank: int, window: int, start: int, order: random.Random) -> None:
    chunks = [ranks * number + rank for number in range(start, start + 2 * window)]
    opened: list[int] = []
    for first in (0, window):
        part = chunks[first : first + window]
        order.shuffle(part)
        for chunk in part:
            opened.append(chunk)
            guessed = guess_next(opened, 2)
            assert all((ahead - rank) % ranks == 0 and ahead > max(opened) for ahead in guessed)
    assert guess_next(opened, 2) == [chunks[-1] + ranks, chunks[-1] + 2 * ranks]
