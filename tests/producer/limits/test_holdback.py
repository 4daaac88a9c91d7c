"""A run at its limits: when it is held, what it deletes behind its consumers, and how often it looks at anything."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.errors import ProducerFenced
from lazyshard.format.records import chunk_name, seal_name
from lazyshard.format.state import Cursor, ReadingHint
from lazyshard.part import Part
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Rules
from lazyshard.stream import ChunkWriter, write_cursor
from lazyshard.stream.cursor import Consumer, forget_consumer, write_reading
from lazyshard.stream.head import retry_s
from lazyshard_producer.configuration.settings import Amount, Limits
from lazyshard_producer.limits import SILENT_S, Holdback, Shelf, Stock, why_kept
from tests.cli.commands import consumer
from tests.plan.cases import PROPERTY
from tests.stream.streams import raised, raising

SAMPLES_PER_CHUNK = 2
A5, B3, B_NEEDS = consumer("a", 0, done=5), consumer("b", 0, done=3), consumer("b", needs=9)


def chunks(number: int) -> Amount:
    return Amount(number=number, unit="chunks")


class Bench:
    """A stream in a folder, its producer's `Holdback` with clocks turned by hand, and what consumers leave there."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.now = 0.0
        self.warnings: list[str] = []
        self.writer = ChunkWriter(out, SAMPLES_PER_CHUNK, clock=lambda: 1e9)
        self.limited()

    def limited(self, check: Callable[[], None] = lambda: None, **limits: Any) -> None:
        self.holdback = Holdback(
            Limits(**limits),
            Shelf(self.out),
            SAMPLES_PER_CHUNK,
            check=check,
            warn=self.warnings.append,
            clock=lambda: self.now,
            wall_clock=lambda: 1e9 + self.now,
        )

    @property
    def stock(self) -> Stock:
        assert self.holdback.stock is not None
        return self.holdback.stock

    def ask(self, after_s: float = 1.0) -> Any:
        self.now += after_s
        return self.holdback.before_chunk(self.writer.published_chunks, self.writer.published_samples)

    def publish(self, chunks: int = 1, after_s: float = 1.0) -> list[int]:
        for _ in range(chunks):
            for _ in range(SAMPLES_PER_CHUNK):
                self.writer.write({"text": "x" * 100})
            self.now += after_s
            self.holdback.after_publish(self.writer.published_chunks)
        return self.chunks()

    def publish_while_allowed(self) -> int:
        while self.ask() is None:
            self.publish()
        return self.writer.published_chunks

    def commit(self, name: str, chunks_before: int, at: float = 0.0, stream_id: str | None = None) -> None:
        cursor = Cursor(name, stream_id or self.writer.stream_id, 0, chunks_before, {}, 1e9 + at)
        write_cursor(self.out, cursor)

    def need(self, name: str, chunks: int, at: float = 0.0, stream_id: str | None = None) -> None:
        assert write_reading(self.out, ReadingHint(name, stream_id or self.writer.stream_id, 1, 0, chunks, 1e9 + at))

    def chunks(self) -> list[int]:
        data = sorted(int(path.name[6:11]) for path in self.out.glob("chunk_*.jsonl"))
        assert data == sorted(int(path.name[6:11]) for path in self.out.glob("chunk_*.completed"))
        return data

    def size(self) -> int:
        return sum(path.stat().st_size for path in self.out.glob("chunk_*"))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "a stream")


def test_ahead_of_the_slowest_reader(bench: Bench) -> None:
    bench.limited(max_ahead=chunks(3))
    # A reading hint of another stream is nobody's need.
    bench.need("other", 50, stream_id="0" * 32)
    assert bench.publish_while_allowed() == 3
    forget_consumer(bench.out, "other")
    hold = bench.ask()
    assert (hold.deadlock, hold.stalled) == (False, False)
    assert hold.reason.startswith("--max-ahead ") and hold.reason.endswith("no consumer has registered yet")
    bench.need("slow", 2, at=4.0)
    bench.need("fast", 4, at=7.0)
    assert bench.publish_while_allowed() == 5
    hold = bench.ask()
    assert "'slow' is at chunk 2, last seen " in hold.reason
    bench.need("fast", 9)
    assert bench.publish_while_allowed() == 9
    forget_consumer(bench.out, "slow")
    bench.commit("slow", 7)
    assert bench.publish_while_allowed() == 10


def test_a_dead_consumer_holds_until_it_is_forgotten(bench: Bench) -> None:
    bench.limited(max_ahead=chunks(1))
    bench.need("dead", 1)
    bench.need("alive", 2, at=SILENT_S)
    bench.publish_while_allowed()
    bench.now = SILENT_S - 1.0
    assert not bench.ask(0.0).stalled
    hold = bench.ask(1.0)
    assert hold.stalled
    assert f"`lazyshard forget '{bench.out}' dead`" in hold.reason
    forget_consumer(bench.out, "dead")
    assert bench.publish_while_allowed() == 3


def test_asked_again_ever_more_rarely_and_at_once_after_a_release(bench: Bench) -> None:
    assert [retry_s(held_s) for held_s in (0.0, 1.0, 5.0, 15.0, 20.0, 1e6)] == [0.2, 0.2, 0.5, 1.5, 2.0, 2.0]
    bench.limited(max_ahead=chunks(1))
    bench.publish()
    bench.need("a", 0)
    pauses = [bench.ask(after_s).retry_s for after_s in (1.0, 0.25, 5.0, 5.0, 100.0)]
    assert pauses == pytest.approx([0.2, 0.2, 0.525, 1.025, 2.0])
    bench.need("a", 1)
    assert bench.ask() is None
    bench.publish()
    assert bench.ask().retry_s == 0.2


def test_consumed_chunks_are_deleted_below_every_cursor_through_a_restart(bench: Bench) -> None:
    bench.limited(retain="consumed", max_disk=10**6)
    bench.publish(3)
    (bench.out / "cursors").mkdir()
    bench.publish(3)
    # Nobody consumes yet; then a cursor is torn.
    bench.commit("a", 5)
    (bench.out / "cursors" / "b.json").write_bytes(b"{")
    assert bench.publish() == [0, 1, 2, 3, 4, 5, 6]
    bench.commit("b", 3)
    assert bench.publish() == [3, 4, 5, 6, 7]
    bench.commit("b", 4)
    assert bench.publish() == [4, 5, 6, 7, 8]
    bench.writer.close(end=False)

    again = Bench(bench.out)
    again.limited(retain="consumed", max_disk=10**6)
    assert again.ask() is None
    assert (again.stock.first, again.stock.stop) == (4, 9)
    # Done with all there is: the newest chunk stays.
    again.commit("a", 10)
    again.commit("b", 10)
    assert again.publish() == [9]
    assert again.stock.size == again.size()
    again.limited(min_free_disk=1)
    assert again.ask() is None


def test_a_cursor_of_another_stream_or_ahead_of_the_data_deletes_nothing(bench: Bench) -> None:
    bench.limited(retain="consumed", max_disk=1)
    bench.commit("a", 2)
    bench.commit("b", 3, stream_id="0" * 32)
    assert bench.publish(4) == [0, 1, 2, 3]
    hold = bench.ask()
    assert hold.stalled
    assert f"stream {'0' * 32}" in hold.reason
    bench.commit("b", 9)
    assert bench.publish(4) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert "b.json: has finished 9 chunks" in bench.ask().reason
    bench.commit("b", 7)
    assert bench.publish() == [2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("stuck", [0, 1])
def test_a_chunk_that_cannot_be_deleted_is_told_once_and_tried_again(bench: Bench, stuck: int) -> None:
    bench.publish()
    one = bench.size()
    bench.limited(retain="consumed", max_disk=4 * one)
    bench.publish(3)
    seal = bench.out / seal_name(stuck)
    content = seal.read_bytes()
    seal.unlink()
    seal.mkdir()
    bench.commit("a", 3)
    bench.need("a", 9)
    hold = bench.ask()
    # What was deleted before the error is free.
    assert bench.stock.first == 0
    assert bench.stock.size == 4 * one - stuck * one
    assert (hold is None) == (stuck == 1)
    if hold is not None:
        assert (hold.deadlock, hold.stalled) == (False, True)
        assert str(seal) in hold.reason
    bench.ask()
    # Of the wait as well, which may never end.
    assert bench.warnings[1:] == ([] if hold is None else [hold.reason])
    assert str(seal) in bench.warnings[0]
    seal.rmdir()
    seal.write_bytes(content)
    assert bench.ask() is None
    assert bench.chunks() == [3]
    assert bench.stock.size == bench.size()


def test_consumers_that_cannot_be_listed_are_told_once_and_nothing_is_deleted(bench: Bench) -> None:
    bench.limited(retain="consumed", max_ahead=chunks(9))
    (bench.out / "cursors").write_bytes(b"")
    bench.publish(3)
    assert bench.ask() is None
    (warning,) = bench.warnings
    assert "Not a directory" in warning
    assert bench.chunks() == [0, 1, 2]
    (bench.out / "cursors").unlink()
    bench.commit("a", 2)
    assert bench.publish() == [2, 3]


def test_many_chunks_are_deleted_bit_by_bit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyshard_producer.limits.DELETED_AT_ONCE", 2)
    bench.limited(retain="consumed")
    bench.publish(6)
    bench.commit("a", 5)
    assert [bench.ask() or bench.chunks()[0] for _ in range(4)] == [2, 4, 5, 5]


def test_a_producer_that_was_fenced_deletes_nothing(bench: Bench) -> None:
    bench.limited(raising(ProducerFenced("taken over")), retain="consumed")
    bench.commit("a", 1)
    bench.publish(after_s=0.0)
    raised(ProducerFenced, bench.publish)
    assert (bench.out / chunk_name(0)).exists()


def test_many_chunks_are_measured_by_some_unless_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for chunk in range(10, 310):
        (tmp_path / chunk_name(chunk)).write_bytes(bytes(90 + chunk % 2))
        (tmp_path / seal_name(chunk)).write_bytes(bytes(10))
    (tmp_path / "head.json").write_bytes(bytes(1000))
    assert Shelf(tmp_path).stock(10, 310, exact=True) == Stock(first=10, stop=310, size=300 * 100 + 150, largest=101)
    stat = Mock(wraps=os.stat)
    monkeypatch.setattr(os, "stat", stat)
    some = Shelf(tmp_path).stock(10, 310, exact=False)
    assert stat.call_count == 2 * 128
    assert (some.first, some.stop, some.largest) == (10, 310, 101)
    assert 30_000 <= some.size <= 30_300
    assert Shelf(tmp_path).stock(310, 310, exact=False) == Stock(first=310, stop=310, size=0, largest=0)


def consumed(*names: str) -> Limits:
    return Limits(retain="consumed", consumers=names)


@pytest.mark.parametrize(
    ("claims", "limits", "published", "may", "by", "names"),
    [
        ([A5], Limits(), 10, 0, "all", ""),
        ([], consumed(), 10, 0, "nobody", ""),
        ([A5], consumed(), 10, 5, "consumer", "a"),
        ([A5, B3], consumed(), 10, 3, "consumer", "b"),
        # Who has left no cursor that counts is done with nothing.
        ([A5, B_NEEDS], consumed(), 10, 0, "consumer", "b"),
        ([A5, Consumer("b", None, None, "torn")], consumed(), 10, 0, "consumer", "b"),
        ([A5], consumed("a", "c", "b"), 10, 0, "unregistered", "bc"),
        ([B_NEEDS, A5], consumed("b"), 10, 0, "unregistered", "b"),
        # The newest chunk stays, whatever was committed; so do the last ones that were asked for.
        ([consumer("a", 0, done=10)], consumed(), 10, 9, "last", ""),
        ([consumer("a", 0, done=8)], consumed(), 10, 8, "consumer", "a"),
        ([A5], Limits(retain=4), 10, 5, "consumer", "a"),
        ([consumer("a", 0, done=0)], consumed(), 0, 0, "last", ""),
    ],
)
def test_deletable_and_why_no_more(
    claims: list[Consumer], limits: Limits, published: int, may: int, by: Any, names: str
) -> None:
    kept = why_kept(claims, limits, published)
    assert (kept.by, kept.names, kept.before) == (by, tuple(names), may)


@PROPERTY
@given(*(st.integers(*bounds) for bounds in ((1, 5), (1, 7), (0, 3), (1, 9), (1, 12), (0, 40))))
def test_the_documented_room_covers_what_a_plan_needs_from_one_checkpoint_to_the_next(
    dp: int, samples_per_chunk: int, shuffle_window: int, batch_size: int, steps: int, checkpoint: int
) -> None:
    window = shuffle_window * samples_per_chunk
    course = Course(Rules(samples_per_chunk, window, 1), [Part(dp, batch_size)])
    interval = -(-steps * batch_size * dp // samples_per_chunk)
    room = interval + 2 * dp * max(1, shuffle_window)
    at = checkpoint * batch_size
    first = course.done_before(at, None) // samples_per_chunk
    # The last position before the next checkpoint needs most.
    needs = -(-course.needed(at + steps * batch_size - 1) // samples_per_chunk)
    assert needs - first <= room
