"""How often a waiting reader looks and reports, and what it says of the producer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import WaitTimeout
from lazyshard.format.records import Head, ProducerState
from lazyshard.stream.head import RateMeter
from lazyshard.stream.listing import Published, has_unpublished_rows
from lazyshard.stream.pacing import (
    describe_producer,
    expected_wait,
    format_seconds,
    heartbeat_age,
    next_poll,
    next_report,
)
from tests.stream.streams import produce, rows


def published(state: ProducerState = "running", rate: float = 2.0, updated_at: float = 100.0, **more: Any) -> Published:
    head = Head(5, 10, state == "finished", state, rate, "node7", 42, updated_at, **more)
    return Published(5, 10, head.ended, head)


@pytest.mark.parametrize(
    ("waited", "expected", "pause"),
    [
        (0.0, None, 0.005),
        (1.0, None, 0.1),
        (49.0, None, 4.9),
        (10_000.0, None, 5.0),
        (0.0, 1.0, 0.1),
        (0.0, 0.0, 0.005),
        (0.0, 1e300, 5.0),
        (100.0, 0.0, 1.0),
        (100.0, 20.0, 2.0),
        (1e9, 0.0, 5.0),
    ],
)
def test_pause_is_a_tenth_of_what_is_waited_or_expected_within_bounds(
    waited: float, expected: float | None, pause: float
) -> None:
    assert next_poll(waited, expected) == pytest.approx(pause)


def test_reports_come_ever_more_rarely() -> None:
    due = [0.0]
    for _ in range(9):
        due.append(next_report(due[-1]))
    assert due[1:] == [10, 30, 70, 150, 310, 630, 1230, 1830, 2430]


@pytest.mark.parametrize(
    ("state", "rate", "samples", "wait"),
    [
        ("running", 2.0, 14, 2.0),
        ("waiting", 2.0, 14, 2.0),
        ("running", 2.0, 3, 0.0),
        ("running", 0.0, 14, None),
        ("running", 1e-320, 14, None),
        ("running", 1e-9, 14, None),
        ("idle", 2.0, 14, None),
        ("failed", 2.0, 14, None),
        ("finished", 2.0, 14, None),
    ],
)
def test_expected_wait_by_rate_and_state(state: ProducerState, rate: float, samples: int, wait: float | None) -> None:
    assert expected_wait(samples, published(state, rate)) == wait


def test_expected_wait_of_an_unknown_producer_is_unknown() -> None:
    assert expected_wait(4, Published(1, 2, False)) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (125, "2 min 5 s"),
        (4800, "1 h 20 min"),
        (360_000, "100 h 0 min"),
        (float("inf"), "no limit"),
    ],
)
def test_durations_are_written_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("now", "age"), [(130.0, 30.0), (100.0, 0.0), (50.0, 0.0)])
def test_age_of_a_heartbeat_is_never_negative(now: float, age: float) -> None:
    assert heartbeat_age(published(updated_at=100.0), now) == age
    assert heartbeat_age(Published(0, 0, False), now) is None


@pytest.mark.parametrize(
    ("what", "now", "parts"),
    [
        (published(), 101.0, ["pid 42 on node7", "is running at 2.0 samples/s", "expect it in about 1 s"]),
        (published(rate=0.0), 161.0, ["no new row for 1 min 1 s", "is 1 min 1 s old, it may be dead"]),
        (published(), 121.0, ["no new row for 21 s", "its last heartbeat is 21 s old"]),
        (published(rate=8.0, updated_at=100.5), 101.0, ["it should be there by now"]),
        (
            published(rate=5875.0, open=3, row_at=85.0),
            101.0,
            ["no new row for 16 s", "3 rows or more in its open chunk"],
        ),
        (published(rate=0.01, open=1, row_at=70.0), 101.0, ["in about 6 min 39 s", "for 31 s", "1 row or more"]),
        (published("idle"), 7300.0, ["was stopped; start it again", "2 h 0 min old"]),
        (published("failed"), 101.0, ["has failed"]),
        (published("failed", note="a.jsonl:6: no object"), 101.0, ["has failed: a.jsonl:6: no object"]),
        (published("waiting", rate=0.0, note="--max-ahead 5 chunks"), 101.0, ["is waiting (--max-ahead 5 chunks)"]),
        (
            Published(3, 6, False, gap=3),
            0.0,
            ["nothing is known of the producer", "chunk 3 lacks its data or its marker"],
        ),
    ],
)
def test_producer_is_described_with_what_to_do(what: Published, now: float, parts: list[str]) -> None:
    text = describe_producer(what, 14, now)
    assert [part for part in parts if part not in text] == [], text
    assert ("may be dead" in text) is (now == 161.0)


def test_producer_without_a_process_is_said_to_be_gone() -> None:
    assert "is not there any more" in describe_producer(published(), 14, 121.0, gone=True)


def test_producer_that_has_been_idle_for_days_is_described_without_overflow() -> None:
    meter = RateMeter(0.0)
    meter.update(1.0, 100)
    for hour in range(1, 100):
        rate = meter.update(3600.0 * hour, 100)
    assert 0 <= rate < 1e-300
    assert "is waiting" in describe_producer(published("waiting", rate), 14, 100.0)


def test_rate_follows_the_clock_and_bears_one_that_stands_still() -> None:
    meter = RateMeter(10.0, 5)
    assert meter.update(10.0, 6) == 0.0
    assert meter.update(20.0, 25) == pytest.approx(2.0)
    assert meter.update(20.0, 99) == pytest.approx(2.0)
    assert meter.update(15.0, 99) == pytest.approx(2.0)
    assert 2.0 < meter.update(30.0, 65) < 4.0


def test_counts_are_written_for_people() -> None:
    many = Published(1234, 1_234_000, False, published().head, short=1400)
    text = describe_producer(many, 1_235_000, 101.0)
    assert "1,234,000 samples are published" in text
    assert "the newest chunk holds only 1,400 rows" in text
    assert "1,234 chunks are complete" in describe_producer(Published(1234, 1_234_000, False), 1_235_000, 101.0)


def test_producer_that_was_killed_is_told_from_one_that_is_slow(tmp_path: Path) -> None:
    produce(tmp_path, 4, end=False)
    killed = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    killed.kill()
    killed.communicate()
    path = tmp_path / "head.json"
    head = json.loads(path.read_bytes())
    beat = {"state": "running", "rate": 100.0, "host": socket.gethostname(), "updated_at": time.time() - 100}
    path.write_text(json.dumps(head | beat | {"pid": killed.pid}))
    with pytest.raises(WaitTimeout, match=f"pid {killed.pid} on .* is not there any more"):
        StreamReader(tmp_path, max_wait=0).read(5)
    path.write_text(json.dumps(head | beat | {"pid": os.getpid()}))
    with pytest.raises(WaitTimeout, match="is running"):
        StreamReader(tmp_path, max_wait=0).read(5)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("arrays", [False, True])
@pytest.mark.parametrize(
    ("per_chunk", "words"),
    [(100, ", with rows in its open chunk"), (40, ", with rows in its open chunk"), (25, ", and shows no row in")],
)
def test_reader_is_told_whether_a_silent_producer_holds_rows(
    tmp_path: Path, per_chunk: int, words: str, arrays: bool, overlap: bool
) -> None:
    writer = ChunkWriter(tmp_path, per_chunk, clock=lambda: time.time() - 20, overlap=overlap, arrays=arrays)
    for row in rows(0, 50):
        writer.write(row)
        writer.settle()
    assert "open" not in json.loads((tmp_path / "head.json").read_bytes())
    with pytest.raises(WaitTimeout, match=f"no new row for 20 s{words}"):
        StreamReader(tmp_path, max_wait=0).read(50)
    assert (words[2:6] == "with") is has_unpublished_rows(tmp_path, writer.published_chunks)
    writer.close(end=False)
    assert has_unpublished_rows(tmp_path, writer.published_chunks) is None


def test_rows_of_a_producer_that_cannot_be_seen_are_not_denied(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "1.0").mkdir(parents=True)
    (tmp_path / ".tmp").symlink_to(tmp_path / "elsewhere")
    assert has_unpublished_rows(tmp_path, 0) is None
    silent = published(rate=5875.0)
    assert "with rows, if any, in its open chunk" in describe_producer(silent, 14, 121.0)
    assert "2 rows or more" in describe_producer(published(open=2), 14, 121.0, open_rows=False)
