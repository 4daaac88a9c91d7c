"""The cache of a node: bounded, shared, filled ahead, and never a torn chunk in it, whoever is killed when."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard import StreamReader
from lazyshard.errors import FileRefused, StoreRefused
from lazyshard.format.names import chunk_name, seal_name
from lazyshard.store.mirror import Mirror, guess_next
from lazyshard.store.mirror_room import (
    AHEAD_VARIABLE,
    BYTES_VARIABLE,
    FOLDER_VARIABLE,
    _locked,
    cache_bytes,
    cache_folder,
    reserve,
)
from lazyshard.store.objects import PATIENCE_VARIABLE
from lazyshard.store.urls import UrlPath
from tests.store.server import Gate, Server
from tests.store.streams import publish
from tests.stream.streams import DEADLINE_S, HERE, rows, wait_until

pytestmark = pytest.mark.full

READER = """
import sys
from lazyshard import StreamReader
reader = StreamReader(sys.argv[1])
print("open", flush=True)
sys.stdin.readline()
for row in reader:
    print(row["id"], flush=True)
"""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def copies(cache: Path) -> list[str]:
    """Returns what lies in the cache, locks apart."""
    return sorted(path.name for path in cache.glob("*/*"))


def taken(cache: Path) -> int:
    size = 0
    for path in cache.glob("*/*"):
        # It may be removed meanwhile.
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


def no_check() -> None:
    pass


def start(url: UrlPath) -> subprocess.Popen[str]:
    """Starts a reader in a process of its own, which waits for a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", READER, str(url)], cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    """Has a reader begin."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_the_cache_keeps_to_its_bound(
    tmp_path: Path, bucket: UrlPath, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = publish(tmp_path / "local", bucket, 200, 10)
    seal = (folder / seal_name(19)).stat().st_size
    chunk = (folder / chunk_name(19)).stat().st_size + seal
    most = 5 * chunk
    monkeypatch.setenv(BYTES_VARIABLE, str(most))
    reader = StreamReader(bucket)
    seen = 0
    for number in range(200):
        assert reader.read(number) == {"id": number}
        # While nobody makes room: else one that goes could be counted beside one that comes.
        with _locked(cache):
            seen = max(seen, taken(cache))
    # The seals of what is being fetched, by this thread and the one ahead, are counted once they are there.
    assert 3 * chunk < seen <= most + 2 * seal
    assert not caplog.records


def test_what_was_used_last_stays(
    tmp_path: Path, server: Server, bucket: UrlPath, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = publish(tmp_path / "local", bucket, 60, 10)
    chunk = (folder / chunk_name(5)).stat().st_size + (folder / seal_name(5)).stat().st_size
    monkeypatch.setenv(AHEAD_VARIABLE, "0")
    monkeypatch.setenv(BYTES_VARIABLE, str(3 * chunk))
    reader = StreamReader(bucket)
    for sample in (0, 10, 20, 0, 30):
        reader.read(sample)
    assert [name for name in copies(cache) if name.endswith("l")] == [chunk_name(number) for number in (0, 2, 3)]
    assert set(server.gets(".jsonl").values()) == {1}


def test_what_is_read_is_never_removed(
    tmp_path: Path, server: Server, bucket: UrlPath, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish(tmp_path / "local", bucket, 60, 10)
    monkeypatch.setenv(BYTES_VARIABLE, "1")
    held = StreamReader(bucket)
    assert held.read(0) == {"id": 0}
    other = StreamReader(bucket)
    assert [other.read(sample)["id"] for sample in (10, 20, 30)] == [10, 20, 30]
    assert [held.read(sample)["id"] for sample in (1, 2)] == [1, 2]
    assert server.gets(".jsonl") == Counter({chunk_name(number): 1 for number in range(4)})
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert BYTES_VARIABLE in told[0]


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


def test_two_processes_fetch_a_chunk_once(tmp_path: Path, server: Server, bucket: UrlPath) -> None:
    publish(tmp_path / "local", bucket, 40, 4)
    server.asked.clear()
    processes = [start(bucket) for _ in range(2)]
    found = []
    for process in processes:
        go(process)
    for process in processes:
        found.append([int(line) for line in process.communicate(timeout=DEADLINE_S)[0].split()])
        assert process.returncode == 0
    assert found == [list(range(40))] * 2
    assert server.gets(".jsonl") == Counter({chunk_name(chunk): 1 for chunk in range(10)})
    assert server.gets(".completed") == Counter({seal_name(chunk): 1 for chunk in range(10)}) + Counter(
        # Those that were asked for ahead of the end.
        {name: count for name, count in server.gets(".completed").items() if name > seal_name(9)}
    )


def test_one_that_is_killed_while_it_fetches_leaves_nothing_behind(
    tmp_path: Path, server: Server, bucket: UrlPath, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path / "local", bucket, 12, 4)
    monkeypatch.setenv(AHEAD_VARIABLE, "0")
    gate = Gate()
    server.fault = lambda method, key: gate.hold if method == "GET" and key.endswith(chunk_name(1)) else None
    process = start(bucket)
    try:
        go(process)
        gate.wait()
        assert f".{chunk_name(1)}.part" in copies(cache)
        process.send_signal(signal.SIGKILL)
        assert process.wait(DEADLINE_S) == -signal.SIGKILL
    finally:
        gate.open()
        process.kill()
        process.communicate()
    assert chunk_name(1) not in copies(cache)
    server.fault = lambda method, key: None
    assert list(StreamReader(bucket)) == rows(0, 12)
    assert copies(cache) == sorted(name(chunk) for name in (chunk_name, seal_name) for chunk in range(3))


def test_what_a_kill_left_of_another_stream_is_removed(
    tmp_path: Path, bucket: UrlPath, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path / "local", bucket, 4)
    left = cache / "another"
    left.mkdir(parents=True, mode=0o700)
    cache.chmod(0o700)
    (left / f".{chunk_name(7)}.part").write_bytes(b"x" * 100)
    (left / seal_name(7)).write_bytes(b"x")
    (left / seal_name(8)).write_bytes(b"x")
    (left / chunk_name(9)).write_bytes(b"x")
    assert list(StreamReader(bucket)) == rows(0, 4)
    assert [path.name for path in left.iterdir()] == [chunk_name(9)]


def test_one_that_is_stopped_is_not_waited_for_for_ever(
    tmp_path: Path, server: Server, bucket: UrlPath, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path / "local", bucket, 12, 4)
    monkeypatch.setattr("lazyshard.store.mirror._STALLED_S", 0.2)
    gate = Gate()
    holds = [gate.hold]
    server.fault = lambda method, key: (
        holds.pop() if method == "GET" and key.endswith(chunk_name(1)) and holds else None
    )
    process = start(bucket)
    try:
        go(process)
        gate.wait()
        process.send_signal(signal.SIGSTOP)
        assert StreamReader(bucket).read(4) == {"id": 4}
    finally:
        process.kill()
        gate.open()
        process.communicate()


def test_parts_and_orphans_count_until_they_are_gone(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "stream").mkdir(parents=True)
    held = os.open(root / "stream" / f".{chunk_name(0)}.part", os.O_RDWR | os.O_CREAT)
    mine = os.open(root / "stream" / f".{chunk_name(1)}.part", os.O_RDWR | os.O_CREAT)
    for fd in (held, mine):
        fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        assert reserve(root, held, 60, 100, ahead=True)
        assert not reserve(root, mine, 60, 100, ahead=True)
        assert reserve(root, mine, 40, 100, ahead=True)
        assert (os.fstat(held).st_size, os.fstat(mine).st_size) == (60, 40)
    finally:
        os.close(held)
        os.close(mine)


def test_what_was_fetched_ahead_does_not_make_room_for_more_of_it(
    tmp_path: Path, server: Server, bucket: UrlPath, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = publish(tmp_path / "local", bucket, 60, 10)
    chunk = (folder / chunk_name(5)).stat().st_size + (folder / seal_name(5)).stat().st_size
    monkeypatch.setenv(BYTES_VARIABLE, str(3 * chunk))
    mirror = Mirror(bucket, "0" * 32, no_check)
    for number in range(5):
        mirror.fetch(number)
    assert [name for name in copies(cache) if name.endswith("l")] == [chunk_name(number) for number in range(3)]
    # Somebody waits for this one.
    mirror.open(4)
    assert chunk_name(4) in copies(cache)
    assert chunk_name(0) not in copies(cache)


def test_read_ahead_ends_with_its_reader(tmp_path: Path, bucket: UrlPath) -> None:
    publish(tmp_path / "local", bucket, 40, 4)

    before = set(threading.enumerate())

    def ahead() -> int:
        gc.collect()
        return sum(thread.name == "lazyshard-read-ahead" for thread in set(threading.enumerate()) - before)

    reader = StreamReader(bucket)
    assert len(list(reader)) == 40
    assert ahead() == 1
    del reader
    wait_until(lambda: not ahead(), "the thread ends")


def open_links() -> list[str]:
    """Returns what the descriptors of this process are of."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return links


def test_no_descriptor_is_left_open(
    tmp_path: Path, bucket: UrlPath, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path / "local", bucket, 40, 4)
    monkeypatch.setenv(AHEAD_VARIABLE, "0")
    reader = StreamReader(bucket)
    assert reader.read(0) == {"id": 0}
    assert len([link for link in open_links() if link.startswith(str(cache))]) == 1
    del reader
    for _ in range(3):
        assert len(list(StreamReader(bucket))) == 40
    gc.collect()
    # Not all that are open: connections to the store come and go.
    assert [link for link in open_links() if link.startswith(str(cache))] == []


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    with pytest.raises(FileRefused, match=FOLDER_VARIABLE):
        cache_folder()


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for place in ("file", "file/below"):
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / place))
        with pytest.raises(FileRefused, match="found a file in its place"):
            cache_folder()


@pytest.mark.parametrize("text", ["-1", "1.5", "16GB"])
def test_a_bound_that_is_no_number_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BYTES_VARIABLE, text)
    with pytest.raises(StoreRefused, match=f"{BYTES_VARIABLE} is a number from 0 on, got '{text}'"):
        cache_bytes()


def test_a_full_disk_is_told_with_what_to_do(tmp_path: Path, bucket: UrlPath, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path / "local", bucket, 4)
    monkeypatch.setenv(PATIENCE_VARIABLE, "0")

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lazyshard.store.mirror.write_at", full)
    with pytest.raises(OSError, match=f"no space left for a copy of chunk 0 of {bucket}.*{BYTES_VARIABLE}"):
        StreamReader(bucket).read(0)


def test_readers_that_are_killed_spoil_nothing(
    tmp_path: Path, bucket: UrlPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = publish(tmp_path / "local", bucket, 120, 4)
    cache = tmp_path / "cache"
    chunk = (folder / chunk_name(29)).stat().st_size + (folder / seal_name(29)).stat().st_size
    monkeypatch.setenv(BYTES_VARIABLE, str(6 * chunk))
    survivor = start(bucket)
    go(survivor)
    for lines in (1, 5, 14, 30, 59):
        process = start(bucket)
        go(process)
        assert process.stdout is not None
        assert [int(process.stdout.readline()) for _ in range(lines)] == list(range(lines))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == -signal.SIGKILL
        assert taken(cache) <= 6 * chunk
    printed, _ = survivor.communicate(timeout=DEADLINE_S)
    assert [int(line) for line in printed.split()] == list(range(120))
    monkeypatch.setenv("LAZYSHARD_OBJECTS_AHEAD", "0")
    assert list(StreamReader(bucket)) == rows(0, 120)
    assert not [name for name in copies(cache) if name.endswith(".part")]


@pytest.mark.parametrize(
    ("opened", "count", "expected"),
    [
        ([], 2, []),
        ([5], 2, []),
        ([5, 5], 2, []),
        ([0, 1], 2, [2, 3]),
        ([1, 5, 9], 2, [13, 17]),
        ([4, 0, 6, 2], 1, [8]),
        ([0, 1], 0, []),
    ],
)
def test_what_is_guessed(opened: list[int], count: int, expected: list[int]) -> None:
    assert guess_next(opened, count) == expected


@given(
    st.integers(1, 64), st.integers(0, 63), st.integers(1, 8), st.integers(0, 100), st.randoms(use_true_random=False)
)
def test_a_rank_is_never_given_anothers_chunks(
    ranks: int, rank: int, window: int, start: int, order: random.Random
) -> None:
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
