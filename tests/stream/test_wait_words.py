"""How often a waiting reader looks and reports, and what it says of the producer."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import WaitTimeout
from lazyshard.format.records import Head, ProducerState
from lazyshard.stream import head
from lazyshard.stream.head import RateMeter
from lazyshard.stream.listing import Published, has_unpublished_rows
from tests.stream.damage import edit
from tests.stream.streams import produce, rows


def published(state: ProducerState = "running", rate: float = 2.0, updated_at: float = 100.0, **more: Any) -> Published:
    head = Head(5, 10, state == "finished", state, rate, "node7", 42, updated_at, **more)
    return Published(5, 10, head.ended, head)


def test_pause_is_a_tenth_of_what_is_waited_or_expected_within_bounds() -> None:
    for waited, pause in {0.0: 0.005, 1.0: 0.1, 49.0: 4.9, 10_000.0: 5.0}.items():
        assert head.next_poll(waited, None) == pytest.approx(pause)
    for expected, pause in {1.0: 0.1, 0.0: 0.005, 1e300: 5.0}.items():
        assert head.next_poll(0.0, expected) == pytest.approx(pause)
    for waited, expected, pause in ((100.0, 0.0, 1.0), (100.0, 20.0, 2.0), (1e9, 0.0, 5.0)):
        assert head.next_poll(waited, expected) == pytest.approx(pause)


def test_reports_come_ever_more_rarely() -> None:
    due = [0.0]
    for _ in range(9):
        due.append(head.next_report(due[-1]))
    assert due[1:] == [10, 30, 70, 150, 310, 630, 1230, 1830, 2430]


def test_expected_wait_by_rate_and_state() -> None:
    working: tuple[ProducerState, ...] = ("running", "waiting")
    assert [head.expected_wait(14, published(state, 2.0)) for state in working] == [2.0, 2.0]
    assert head.expected_wait(3, published("running", 2.0)) == 0.0
    unknown = [published("running", rate) for rate in (0.0, 1e-320, 1e-9)]
    unknown += [published("idle"), published("failed"), published("finished"), Published(1, 2, False)]
    assert [head.expected_wait(14, one) for one in unknown] == [None] * 7


def test_durations_are_written_for_people() -> None:
    seconds = (0.4, 59.4, 59.6, 125, 4800, 360_000, float("inf"))
    texts = ["0 s", "59 s", "1 min 0 s", "2 min 5 s", "1 h 20 min", "100 h 0 min", "no limit"]
    assert [head.format_seconds(one) for one in seconds] == texts


@pytest.mark.parametrize(
    ("what", "now", "parts"),
    [
        (published(), 101.0, ["pid 42 on node7", "2.0 samples/s", "about 1 s"]),
        (published(rate=0.0), 161.0, ["for 1 min 1 s", "is 1 min 1 s old, it may be dead"]),
        (published(), 121.0, ["for 21 s", "is 21 s old"]),
        (published(), 50.0, ["is running"]),
        (published(rate=8.0, updated_at=100.5), 101.0, ["should be there by now"]),
        (published(rate=5875.0, open=3, row_at=85.0), 101.0, ["for 16 s", "3 rows or more"]),
        (published(rate=0.01, open=1, row_at=70.0), 101.0, ["in about 6 min 39 s", "for 31 s", "1 row or more"]),
        (published(rate=5875.0), 121.0, ["with rows, if any"]),
        (published("idle"), 7300.0, ["was stopped; start it again", "2 h 0 min old"]),
        (published("failed"), 101.0, ["has failed"]),
        (published("failed", note="a.jsonl:6: no object"), 101.0, ["has failed: a.jsonl:6: no object"]),
        (published("waiting", rate=0.0, note="--max-ahead 5 chunks"), 101.0, ["is waiting (--max-ahead 5 chunks)"]),
        (Published(3, 6, False, gap=3), 0.0, ["nothing is known of the producer", "chunk 3 lacks"]),
        (Published(9, 18, False, published().head, short=1400), 101.0, ["only 1,400 rows"]),
        (Published(1234, 1_234_000, False, published().head), 101.0, ["1,234,000 samples"]),
        (Published(1234, 1_234_000, False), 101.0, ["1,234 chunks"]),
    ],
)
def test_producer_is_described_with_what_to_do(what: Published, now: float, parts: list[str]) -> None:
    text = head.describe_producer(what, 1_235_000 if what.chunks == 1234 else 14, now)
    assert [part for part in parts if part not in text] == [], text
    assert ("may be dead" in text) is (now == 161.0)
    assert "is not there any more" not in text
    if what.head is not None and what.head.state == "running":
        assert "is not there any more" in head.describe_producer(what, 14, now + 20, gone=True)
        assert head.heartbeat_age(what, now) == max(0.0, now - what.head.updated_at)
    elif what.head is None:
        assert head.heartbeat_age(what, now) is None


def test_rate_follows_the_clock_and_bears_one_that_stands_still() -> None:
    meter = RateMeter(10.0, 5)
    assert meter.update(10.0, 6) == 0.0
    assert meter.update(20.0, 25) == pytest.approx(2.0)
    assert meter.update(20.0, 99) == pytest.approx(2.0)
    assert meter.update(15.0, 99) == pytest.approx(2.0)
    assert 2.0 < meter.update(30.0, 65) < 4.0
    # Idle for days: no overflow.
    for hour in range(1, 100):
        rate = meter.update(3600.0 * hour, 65)
    assert 0 <= rate < 1e-300
    assert "is waiting" in head.describe_producer(published("waiting", rate), 14, 100.0)


def test_producer_that_was_killed_is_told_from_one_that_is_slow(tmp_path: Path) -> None:
    produce(tmp_path, 4, end=False)
    killed = os.fork()
    if killed == 0:
        os._exit(0)
    os.waitpid(killed, 0)
    beat = {"state": "running", "rate": 100.0, "host": socket.gethostname(), "updated_at": time.time() - 100}
    for pid, told in ((killed, f"pid {killed} on .* is not there any more"), (os.getpid(), "is running")):
        edit("head.json", **beat, pid=pid)(tmp_path)
        with pytest.raises(WaitTimeout, match=told):
            StreamReader(tmp_path, max_wait=0).read(5)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("arrays", [False, True])
@pytest.mark.parametrize(("per_chunk", "words"), [(100, "with rows"), (40, "with rows"), (25, "and shows no row")])
def test_silent_producer_may_hold_rows(tmp_path: Path, per_chunk: int, words: str, arrays: bool, overlap: bool) -> None:
    writer = ChunkWriter(tmp_path, per_chunk, clock=lambda: time.time() - 20, overlap=overlap, arrays=arrays)
    for row in rows(0, 50):
        writer.write(row)
        writer.settle()
    with pytest.raises(WaitTimeout, match=f"for 20 s, {words}"):
        StreamReader(tmp_path, max_wait=0).read(50)
    assert has_unpublished_rows(tmp_path, writer.published_chunks) is (words == "with rows")
    writer.close(end=False)
    assert has_unpublished_rows(tmp_path, writer.published_chunks) is None
    # What cannot be seen is not denied.
    (tmp_path / "elsewhere" / "1.0").mkdir(parents=True)
    (tmp_path / ".tmp").symlink_to(tmp_path / "elsewhere")
    assert has_unpublished_rows(tmp_path, 0) is None
