"""A run at its limits: when it is held, and what it says."""

from pathlib import Path

import pytest

from lazyshard.stream.consumers import forget_consumer
from lazyshard_producer.configuration.quantities import Amount
from lazyshard_producer.holding.limits import SILENT_S
from tests.producer.holding.holdback_bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "stream")


def test_nobody_consumes(bench: Bench) -> None:
    bench.limited(max_ahead=Amount(number=3, unit="chunks"))
    assert bench.publish_while_allowed() == 3
    hold = bench.ask()
    assert (hold.kind, hold.deadlock, hold.stalled, hold.waits_for) == ("ahead", False, False, ())


def test_ahead_of_the_slowest_reading_mark(bench: Bench) -> None:
    bench.limited(max_ahead=Amount(number=3, unit="chunks"))
    bench.need("slow", 2, at=94.0)
    bench.need("fast", 4, at=97.0)
    assert bench.publish_while_allowed() == 5
    bench.now = 100.0
    hold = bench.ask(0.0)
    assert "consumer 'slow' is at chunk 2, heard of 6 s ago" in hold.reason
    assert (hold.waits_for, hold.needed) == (("slow",), 4)
    bench.need("slow", 3)
    assert bench.publish_while_allowed() == 6


def test_never_held_below_what_a_reader_needs(bench: Bench) -> None:
    bench.limited(max_ahead=Amount(number=1, unit="chunks"))
    bench.commit("slow", 0)
    bench.need("fast", 9)
    assert bench.publish_while_allowed() == 9


@pytest.mark.parametrize(("number", "chunks"), [(1, 1), (3, 1), (4, 2), (9, 4)])
def test_ahead_in_samples(bench: Bench, number: int, chunks: int) -> None:
    bench.limited(max_ahead=Amount(number=number, unit="samples"))
    assert bench.publish_while_allowed() == chunks


def test_ahead_in_bytes_of_the_chunks_on_disk(bench: Bench) -> None:
    bench.publish()
    one = bench.size()
    bench.limited(max_ahead=Amount(number=5 * one - 1, unit="bytes"))
    assert bench.publish_while_allowed() == 4
    bench.limited(max_ahead=Amount(number=5 * one + 4, unit="bytes"))
    assert bench.publish_while_allowed() == 5
    bench.limited(max_ahead=Amount(number=1, unit="bytes"))
    bench.need("a", 6)
    assert bench.publish_while_allowed() == 7


def test_a_consumer_that_has_left_only_a_cursor_counts_by_it(bench: Bench) -> None:
    bench.limited(max_ahead=Amount(number=3, unit="chunks"))
    bench.publish(3)
    bench.commit("a", 2)
    assert bench.publish_while_allowed() == 5


def test_a_dead_consumer_holds_until_it_is_forgotten(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "a stream")
    bench.limited(max_ahead=Amount(number=1, unit="chunks"))
    bench.need("dead", 1)
    bench.need("alive", 2, at=SILENT_S)
    bench.publish_while_allowed()
    bench.now = SILENT_S - 1.0
    assert not bench.ask(0.0).stalled
    hold = bench.ask(1.0)
    assert hold.stalled
    assert f"run `lazyshard forget '{tmp_path}/a stream' dead`" in hold.reason
    forget_consumer(bench.out, "dead")
    assert bench.publish_while_allowed() == 3


def test_a_reading_mark_of_another_stream_is_nobodys_need(bench: Bench) -> None:
    bench.limited(max_ahead=Amount(number=2, unit="chunks"))
    bench.need("a", 50, stream_id="0" * 32)
    assert bench.publish_while_allowed() == 2


def test_asked_again_ever_more_rarely_and_at_once_after_a_release(bench: Bench) -> None:
    bench.limited(max_ahead=Amount(number=1, unit="chunks"))
    bench.publish()
    bench.need("a", 0)
    pauses = [bench.ask(after_s).retry_s for after_s in (1.0, 0.25, 5.0, 5.0, 100.0)]
    assert pauses == pytest.approx([0.2, 0.2, 0.525, 1.025, 2.0])
    bench.need("a", 1)
    assert bench.ask() is None
    bench.publish()
    assert bench.ask().retry_s == 0.2


def test_max_disk_that_nobody_can_make_room_for(bench: Bench) -> None:
    bench.publish()
    one = bench.size()
    bench.limited(retain="all", max_disk=3 * one)
    assert bench.publish_while_allowed() == 3
    hold = bench.ask()
    assert (hold.kind, hold.deadlock, hold.stalled) == ("disk", False, True)


def test_a_deadlock_by_max_disk_is_told_at_once_with_the_numbers(bench: Bench) -> None:
    bench.publish()
    one = bench.size()
    bench.limited(retain="consumed", max_disk=5 * one)
    bench.commit("sft", 1, at=-90.0)
    bench.need("sft", 4)
    assert bench.publish_while_allowed() == 6
    bench.now = 30.0
    hold = bench.ask(0.0)
    assert (hold.deadlock, hold.stalled) == (False, False)

    bench.need("sft", 8, at=bench.now)
    hold = bench.ask()
    assert (hold.kind, hold.deadlock, hold.stalled) == ("disk", True, False)
    assert (hold.waiting, hold.waits_for, hold.needed) == (("sft",), ("sft",), 8)
    assert hold.suggested == 8 * one
    assert hold.reason.startswith("deadlock: ")
    assert f"raise --max-disk to {8 * one} bytes" in hold.reason
    # It goes on as soon as it can: here the consumer commits after all.
    bench.commit("sft", 3)
    assert bench.ask() is None
    assert bench.chunks() == [3, 4, 5]


def test_the_suggested_limit_ends_the_deadlock(bench: Bench) -> None:
    bench.publish()
    bench.limited(retain="consumed", max_disk=5 * bench.size())
    bench.need("sft", 8)
    bench.publish_while_allowed()
    suggested = bench.ask().suggested
    bench.limited(retain="consumed", max_disk=suggested)
    assert bench.publish_while_allowed() >= 8


def test_a_slow_consumer_that_has_its_data_is_no_deadlock(bench: Bench) -> None:
    bench.publish()
    one = bench.size()
    bench.limited(retain="consumed", max_disk=4 * one)
    bench.commit("slow", 0)
    bench.need("slow", 2)
    bench.commit("fast", 3)
    bench.need("fast", 9)
    assert bench.publish_while_allowed() == 4
    hold = bench.ask()
    assert (hold.deadlock, hold.stalled, hold.waiting, hold.waits_for) == (False, False, ("fast",), ("slow",))
    bench.now = SILENT_S
    hold = bench.ask(0.0)
    assert (hold.deadlock, hold.stalled) == (False, True)
    assert hold.reason.endswith(f"; if 'slow' will not come back, run `lazyshard forget {bench.out} slow`")


def test_a_consumer_named_that_has_not_come(bench: Bench) -> None:
    bench.publish()
    bench.limited(retain="consumed", consumers=("a", "b"), max_disk=2 * bench.size())
    bench.publish_while_allowed()
    assert bench.ask().waits_for == ("a", "b")
    bench.commit("a", 1)
    bench.need("a", 3)
    hold = bench.ask()
    assert (hold.deadlock, hold.waits_for) == (True, ("b",))
    assert hold.reason.endswith(" or more or take it out of --consumers")


def test_many_consumers_are_counted(bench: Bench) -> None:
    bench.limited(max_ahead=Amount(number=0, unit="chunks"))
    for name in "edcba":
        bench.need(name, 0)
    hold = bench.ask()
    assert hold.waits_for == ("a", "b", "c", "d", "e")
    assert "; consumers 'a', 'b', 'c' and 2 more are at chunk 0" in hold.reason
    # Of those that may be dead, the one that was silent for longest is the first to forget.
    bench.need("b", 0, at=-1.0)
    bench.now = 2 * SILENT_S
    bench.need("c", 0, at=2 * SILENT_S)
    assert bench.ask().reason.endswith(f"; if 'b' will not come back, run `lazyshard forget {bench.out} b`")


def test_a_name_with_a_line_end_leaves_the_reason_one_line(bench: Bench) -> None:
    bench.limited(max_ahead=Amount(number=0, unit="chunks"))
    bench.need("a\u2028b", 0)
    bench.now = SILENT_S
    reason = bench.ask().reason
    assert len(reason.splitlines()) == 1
    assert "lazyshard forget" in reason
