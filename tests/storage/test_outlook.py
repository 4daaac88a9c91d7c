"""What looks mean: rates, lags, and when something runs out. No clock and no files: looks are made here."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.format import Cursor, Head, Manifest, ProducerState, ReadingMark
from lazyshard.storage.census import Census
from lazyshard.storage.consumers import Consumer
from lazyshard.storage.disk_use import DiskUse, canonical_names
from lazyshard.storage.outlook import Looks, Supply, outlook_of_reader, producer_state
from lazyshard.storage.survey import Survey

NOW: Final = 1_700_000_000.0
ID: Final = "0" * 32
MANIFEST: Final = Manifest(ID, 10, NOW)
HEAD: Final = Head(20, 200, False, "running", 5.0, "node", 7, NOW)


def survey(
    consumers: tuple[Consumer, ...] = (),
    at: float = NOW,
    head: Head | None = HEAD,
    manifest: Manifest | None = MANIFEST,
    retired: int = 0,
    chunks: int = 20,
    **values: Any,
) -> Survey:
    ended = head is not None and head.ended
    samples = None if manifest is None else chunks * 10
    return Survey(
        directory=Path("stream"),
        looked_at=at,
        census=Census(head is not None, manifest, head, chunks, samples, ended, retired, canonical_names),
        gone=values.get("gone"),
        consumers=consumers,
        unread_since=values.get("unread_since", {}),
        disk=DiskUse(2000, True, values.get("chunk_size", 100.0), ()),
        free=values.get("free", 10_000),
        quarantine=None,
        problems=(),
    )


def consumer(
    name: str = "sft",
    consumed: int | None = None,
    done: int = 0,
    needs: int | None = None,
    at: float = NOW,
    problem: str | None = None,
) -> Consumer:
    cursor = None if consumed is None else Cursor(name, ID, consumed, done, {}, at)
    reading = None if needs is None else ReadingMark(name, ID, 1, 0, needs, at)
    return Consumer(name, cursor, reading, problem)


@pytest.mark.parametrize(
    ("state", "age", "gone", "expected"),
    [
        ("running", 60.0, False, "running"),
        ("running", 60.1, False, "dead"),
        ("waiting", 60.1, False, "dead"),
        ("running", 15.0, True, "running"),
        ("running", 15.1, True, "dead"),
        ("idle", 1e6, True, "idle"),
        ("failed", 1e6, True, "failed"),
        ("finished", 1e6, True, "finished"),
    ],
)
def test_state_of_a_producer(state: ProducerState, age: float, gone: bool, expected: str) -> None:
    assert producer_state(replace(HEAD, state=state), age, gone) == expected


def test_producer_whose_process_is_known_to_have_ended_is_dead_at_once() -> None:
    told: list[ProducerState] = ["running", "waiting", "idle", "failed", "finished"]
    states = [producer_state(replace(HEAD, state=state), 0.0, True, ended=True) for state in told]
    assert states == ["dead", "dead", "idle", "failed", "finished"]


@pytest.mark.parametrize(
    ("ahead", "taking", "coming", "ended", "expected"),
    [
        (6, 3.0, 1.0, False, ("shrinking", 3.0)),
        (0, 3.0, 1.0, False, ("shrinking", 0.0)),
        (6, 1.0, 1.0, False, ("steady", None)),
        (6, 1.0, 3.0, False, ("steady", None)),
        (-1, 1.0, 3.0, False, ("dry", 0.0)),
        (-1, None, None, False, ("dry", 0.0)),
        (6, None, 1.0, False, ("unknown", None)),
        (6, 1.0, None, False, ("unknown", None)),
        (None, 1.0, 1.0, False, ("unknown", None)),
        (6, 3.0, 1.0, True, ("complete", None)),
        (None, None, None, True, ("complete", None)),
        (6, 5e-324, 0.0, False, ("steady", None)),
    ],
)
def test_outlook_of_a_reader(
    ahead: int | None, taking: float | None, coming: float | None, ended: bool, expected: tuple[Supply, float | None]
) -> None:
    assert outlook_of_reader(ahead, taking, coming, ended) == expected


def test_one_look_tells_lags_and_what_the_producer_tells() -> None:
    found = Looks().add(
        survey((consumer("sft", consumed=95, done=9, needs=12, at=NOW - 4),), unread_since={"sft": NOW - 30})
    )
    assert (found.state, found.heartbeat_age_s, found.clock_ahead_s) == ("running", 0.0, 0.0)
    assert (found.chunk_rate, found.byte_rate, found.full_in_s) == (0.5, 50.0, 200.0)
    one = found.consumers[0]
    assert (one.checkpoint_age_s, one.reading_age_s) == (4.0, 4.0)
    assert (one.lag_chunks, one.lag_samples, one.lag_s, one.ahead_chunks) == (11, 105, 30.0, 8)
    assert (one.chunk_rate, one.supply, one.dry_in_s) == (None, "unknown", None)


def test_consumer_in_its_second_epoch_has_no_lag() -> None:
    one = Looks().add(survey((consumer(consumed=250, done=20),))).consumers[0]
    assert (one.lag_chunks, one.lag_samples, one.lag_s) == (0, 0, 0.0)


def test_consumer_without_a_checkpoint_lags_by_everything() -> None:
    one = Looks().add(survey((consumer(needs=3),))).consumers[0]
    assert (one.lag_chunks, one.lag_samples, one.lag_s, one.ahead_chunks) == (20, 200, None, 17)


def test_lag_of_a_consumer_with_a_problem_is_not_known() -> None:
    one = Looks().add(survey((consumer(needs=3, problem="torn"),))).consumers[0]
    assert (one.lag_chunks, one.lag_samples, one.lag_s, one.ahead_chunks) == (None, None, None, 17)


def test_mark_below_the_consumers_own_cursor_is_an_old_one() -> None:
    one = Looks().add(survey((consumer(consumed=150, done=15, needs=12),))).consumers[0]
    assert one.ahead_chunks == 5


def test_rate_of_a_reader_takes_two_marks() -> None:
    looks = Looks()
    looks.add(survey((consumer(needs=10, at=NOW),)))
    same = looks.add(survey((consumer(needs=10, at=NOW),), at=NOW + 2)).consumers[0]
    assert same.chunk_rate is None
    one = looks.add(survey((consumer(needs=14, at=NOW + 4),), at=NOW + 5)).consumers[0]
    assert (one.chunk_rate, one.supply, one.dry_in_s) == (1.0, "shrinking", 12.0)


def test_rate_of_a_consumer_without_marks_is_that_of_its_checkpoints() -> None:
    looks = Looks()
    looks.add(survey((consumer(consumed=100, done=9, at=NOW),)))
    one = looks.add(survey((consumer(consumed=140, done=13, at=NOW + 2),), at=NOW + 2)).consumers[0]
    assert (one.chunk_rate, one.supply) == (2.0, "unknown")


def test_rates_of_two_readers_are_kept_apart() -> None:
    looks = Looks()
    looks.add(survey((consumer("a", needs=1), consumer("b", needs=10))))
    found = looks.add(survey((consumer("a", needs=2, at=NOW + 2), consumer("b", needs=14, at=NOW + 2)), at=NOW + 2))
    assert [one.chunk_rate for one in found.consumers] == [0.5, 2.0]


@pytest.mark.parametrize(
    ("head", "state"),
    [
        (replace(HEAD, state="idle"), "idle"),
        (replace(HEAD, state="failed"), "failed"),
        (replace(HEAD, updated_at=NOW - 100), "dead"),
        (replace(HEAD, updated_at=NOW - 30, open=4, row_at=NOW - 31), "running"),
    ],
)
def test_nothing_comes_from_a_producer_that_does_not_work(head: Head, state: str) -> None:
    looks = Looks()
    looks.add(survey((consumer(needs=10),), head=head))
    found = looks.add(survey((consumer(needs=14, at=NOW + 4),), at=NOW + 4, head=head))
    assert (found.state, found.chunk_rate, found.byte_rate, found.full_in_s) == (state, 0.0, 0.0, None)
    assert (found.consumers[0].supply, found.consumers[0].dry_in_s) == ("shrinking", 6.0)


def test_ended_stream_grows_no_more() -> None:
    found = Looks().add(survey((consumer(needs=30),), head=replace(HEAD, ended=True, state="finished")))
    assert (found.chunk_rate, found.full_in_s, found.consumers[0].supply) == (0.0, None, "complete")


def test_rate_of_a_stream_without_a_head_takes_two_changes() -> None:
    looks = Looks()
    rates = [
        looks.add(survey(at=NOW + second, head=None, manifest=None, chunks=chunks)).chunk_rate
        for second, chunks in ((0, 5), (2, 5), (4, 6), (6, 6), (8, 8))
    ]
    assert rates == [None, None, None, None, 0.5]


def test_unknown_rate_of_a_head_is_not_zero() -> None:
    assert Looks().add(survey(head=replace(HEAD, rate=0.0))).chunk_rate is None


def test_deletion_takes_two_changes_to_have_a_rate() -> None:
    looks = Looks()
    found = [
        looks.add(survey(at=NOW + second, head=replace(HEAD, updated_at=NOW + second), retired=retired))
        for second, retired in ((0, 4), (2, 6), (4, 10))
    ]
    assert [one.byte_rate for one in found] == [None, None, 50.0 - 200.0]
    assert [one.full_in_s for one in found] == [None, None, None]


@pytest.mark.parametrize("missing", [{"free": None}, {"chunk_size": None}])
def test_time_to_full_is_not_guessed(missing: dict[str, Any]) -> None:
    assert Looks().add(survey(**missing)).full_in_s is None


def test_faded_rate_fills_nothing() -> None:
    found = Looks().add(survey(head=replace(HEAD, rate=5e-324)))
    assert found.full_in_s is None


def test_clock_of_the_producer_that_is_ahead() -> None:
    found = Looks().add(survey(head=replace(HEAD, updated_at=NOW + 90)))
    assert (found.state, found.heartbeat_age_s, found.clock_ahead_s) == ("running", 0.0, 90.0)


def test_slowest_reader() -> None:
    readers = (consumer("a", needs=7), consumer("b", needs=3), consumer("c", consumed=0))
    found = Looks().add(survey(readers)).slowest
    assert found is not None
    assert (found.consumer.name, found.ahead_chunks) == ("b", 17)
    assert Looks().add(survey((consumer(consumed=0),))).slowest is None


@given(rate=st.floats(0, 1e12), free=st.integers(0, 2**62))
def test_time_to_full_is_finite(rate: float, free: int) -> None:
    found = Looks().add(survey(head=replace(HEAD, rate=rate), free=free)).full_in_s
    assert found is None or math.isfinite(found)
