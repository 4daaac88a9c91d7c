"""A producer into a bucket that heeds its consumers: waits for them, deletes behind them, and never before them."""

import json
import time
from pathlib import Path

import pytest

from lazyshard.format.records import chunk_name, seal_name
from lazyshard.format.state import ReadingHint
from lazyshard.store.files import UrlPath
from lazyshard.stream import StreamReader
from lazyshard.stream.cursor import write_reading
from lazyshard_producer.shipping.store import Spool
from tests.harness.processes.environment import DEADLINE_S
from tests.harness.processes.producing import rows
from tests.store.producing import CHANGES, LASTING, Run, Shipping, chunk_names, until
from tests.store.server import Server
from tests.store.streams import publish
from tests.stream.streams import cursor

pytestmark = pytest.mark.full
PER_CHUNK = 3
CHUNKS = 6
ATTENTIVE = ["tests.store.producer_haste:attentive"]


@pytest.fixture
def source(source: Path) -> Path:
    source.write_bytes(rows(0, CHUNKS * PER_CHUNK))
    return source


def stream_id(url: UrlPath) -> str:
    return str(json.loads(url.store.get(f"{url.key}/stream.json"))["stream_id"])


def commit(url: UrlPath, chunks: int, name: str = "train") -> None:
    cursor(url, name, consumed=chunks * PER_CHUNK, chunks_before=chunks, stream_id=stream_id(url))


def published(run: Run) -> int:
    return int(run.record("head.json").get("chunks", 0))


def test_it_stays_ahead_of_the_slowest_reader_and_deletes_behind_it(run: Run) -> None:
    pid = run.start("--max-ahead", 2, "--retain", "consumed", "--consumers", "train", prepare=ATTENTIVE)
    until(lambda: published(run) == 2)
    reader = StreamReader(run.url, max_wait=DEADLINE_S)
    seen = []
    for chunk in range(CHUNKS):
        write_reading(run.url, ReadingHint("train", stream_id(run.url), 1, 0, chunk + 1, time.time()))
        seen += [reader.read(sample)["id"] for sample in range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK)]
        assert published(run) <= chunk + 3
        # Later the run may have ended: it waits for nobody to read the last chunks.
        if chunk < 2:
            commit(run.url, chunk + 1)
            gone = chunk_name(chunk)
            until(lambda gone=gone: not run.read(gone))  # type: ignore[misc]
    assert seen == list(range(CHUNKS * PER_CHUNK))
    run.wait(pid)
    found = run.objects()
    left = chunk_names(CHUNKS) - chunk_names(2)
    assert set(found) == LASTING | left | {"retired.json", "cursors/train.json", "cursors/train.reading.json"}
    assert json.loads(found["retired.json"])["chunks_before"] == 2


def test_killed_as_it_deletes(run: Run, source: Path) -> None:
    source.write_bytes(rows(0, 4 * PER_CHUNK))
    run.options = (*run.options, "--retain", 1)
    for turn, number in enumerate(range(0, 40, 3)):
        one = run.beside(number)
        one.stopped(lambda one=one: published(one) == 3, "--max-ahead", 3)  # type: ignore[misc]
        commit(one.url, 2)
        if turn // 2 % 2:
            one.move()
        code, said = one.kill_at(number, "before" if turn % 2 else "after")
        if code == 0:
            assert number > 8
            break
        assert code == -9, said
        one.finish()
        left = chunk_names(4) - chunk_names(2)
        assert set(one.objects()) == LASTING | left | {"retired.json", "cursors/train.json"}
    else:
        pytest.fail("the run never ended by itself")


@pytest.fixture
def deleting(bucket: UrlPath, tmp_path: Path) -> Shipping:
    """Of a stream of four chunks in a bucket."""
    spool = Spool(tmp_path, str(bucket))
    publish(spool.stream, bucket, 4 * PER_CHUNK, PER_CHUNK, end=False)
    spool.close()
    return Shipping(bucket, tmp_path)


def want(deleting: Shipping, chunks: int) -> None:
    deleting.shelf.retire(chunks, deleting.shelf.announced, lambda: None)


@pytest.mark.parametrize(
    ("consumers", "late", "asked", "first"),
    [
        ({}, None, 3, 0),
        ({"one": 4}, None, 4, 3),
        # Nobody has looked since.
        ({"early": 3}, 1, 3, 1),
        ({"early": 3, "torn": None}, None, 3, 0),
    ],
    ids=["nobody has come", "the newest chunk", "one comes at the last moment", "a cursor that cannot be used"],
)
def test_chunks_that_anybody_may_need_and_the_newest_one_stay(
    consumers: dict[str, int | None], late: int | None, asked: int, first: int, deleting: Shipping
) -> None:
    for name, chunks in consumers.items():
        if chunks is None:
            deleting.store.put(f"cursors/{name}.json", b"{")
        else:
            commit(deleting.url, chunks, name)
    want(deleting, asked)
    if late is not None:
        commit(deleting.url, late, "late")
    deleting.shelf.finish()
    assert deleting.left() == chunk_names(4) - chunk_names(first)
    assert deleting.shelf.first() == first


def test_what_was_asked_for_is_done_once_the_cursor_that_was_ahead_of_the_store_is_not(deleting: Shipping) -> None:
    # A reader finds the seal before the producer knows that it is in the store: its cursor counts a moment later.
    commit(deleting.url, 5)
    want(deleting, 2)
    deleting.shelf.go_on()
    assert deleting.left() == chunk_names(4)
    deleting.shelf.announced = deleting.shelf.shipped = 5
    deleting.shelf.finish()
    assert deleting.left() == chunk_names(4) - chunk_names(2)


def test_the_mark_is_put_before_the_first_deletion(deleting: Shipping, server: Server) -> None:
    commit(deleting.url, 2)
    server.asked.clear()
    want(deleting, 2)
    deleting.shelf.finish()
    asked = [(method, key.rpartition("/")[2]) for method, key in server.asked if method in CHANGES]
    gone = [("DELETE", name(number)) for number in (0, 1) for name in (seal_name, chunk_name)]
    assert asked == [("PUT", "retired.json"), *gone]


def test_what_a_killed_run_has_not_deleted_does_not_hold_up_the_next_chunks(deleting: Shipping, server: Server) -> None:
    left = [chunk_name(number) for number in range(100, 140)]
    deleting.shelf._leftovers = list(left)
    deleted: list[str] = []
    server.fault = lambda method, key: deleted.append(key.rpartition("/")[2]) if method == "DELETE" else None
    deleting.shelf.go_on()
    assert deleted == left[:16]
    assert deleting.shelf.settle(4, lambda text: None)
    assert deleted == left


def test_a_consumer_that_was_forgotten_is_forgotten_here_too(deleting: Shipping) -> None:
    commit(deleting.url, 1, "gone")
    commit(deleting.url, 3, "there")
    deleting.shelf.pull()
    deleting.store.delete("cursors/gone.json")
    deleting.shelf.pull()
    assert [path.name for path in (deleting.shelf.directory / "cursors").iterdir()] == ["there.json"]
