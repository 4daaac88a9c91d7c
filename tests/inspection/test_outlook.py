"""What looks mean: rates, lags, what runs out when, and what is left. No clock and no files: looks are made here."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from lazyshard.format.records import Head, Manifest, ProducerState
from lazyshard.format.seal import DealtByCost, Made, SourceRows
from lazyshard.format.state import Cursor, RunState
from lazyshard.inspection.inspection import FEW_ROWS, Overview, Training, advise, training_of, unevenness
from lazyshard.inspection.outlook import Growth, Looks, Remainder, Supply, outlook_of_reader, remainder
from lazyshard.inspection.row_facts import Lengths
from lazyshard.inspection.survey import DiskUse, Survey, producer_state
from lazyshard.part import Part
from lazyshard.stream import Published
from lazyshard.stream.cursor import Consumer
from tests.cli.commands import ID, NOW
from tests.cli.commands import consumer as made_up_consumer
from tests.cli.commands import survey as made_up

HEAD: Final = Head(20, 200, False, "running", 5.0, "node", 7, NOW)
FASTER: Final = [(second, second) for second in range(1000)] + [(second, 10 * second) for second in range(1000, 1121)]
consumer = partial(made_up_consumer, at=NOW)


def survey(consumers: tuple[Consumer, ...] = (), at: float = NOW, **values: Any) -> Survey:
    """A look at 20 chunks of 10 samples, of 100 bytes each; 10,000 bytes are free."""
    chunks, retired = values.pop("chunks", 20), values.pop("retired", 0)
    census: dict[str, Any] = {"chunks": chunks, "samples": 10 * chunks, "retired": retired}
    if values.get("manifest", 0) is None:
        census |= {"manifest": values.pop("manifest"), "samples": None}
    disk = DiskUse(2000, True, values.pop("chunk_size", 100.0), ())
    common: dict[str, Any] = {"consumers": consumers, "looked_at": at, "disk": disk, "free": 10_000, "head": HEAD}
    return made_up(census=census, **(common | values))


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
    ended = "dead" if state in ("running", "waiting") else state  # Known to have ended: dead at once
    assert producer_state(replace(HEAD, state=state), 0.0, True, ended=True) == ended


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


@pytest.mark.parametrize(
    ("one", "lag_chunks", "lag_samples", "lag_s", "ahead"),
    [
        (consumer(consumed=250, done=20), 0, 0, 0.0, None),  # No lag in its second epoch, all without a checkpoint
        (consumer(needs=3), 20, 200, None, 17),
        (consumer(needs=3, problem="torn"), None, None, None, 17),
        (consumer(consumed=150, done=15, needs=12), 5, 50, None, 5),  # A mark below the own cursor is an old one
    ],
)
def test_lags(one: Consumer, lag_chunks: int, lag_samples: int, lag_s: float | None, ahead: int | None) -> None:
    found = Looks().add(survey((one,))).consumers[0]
    lags = (found.lag_chunks, found.lag_samples, found.lag_s, found.ahead_chunks)
    assert lags == (lag_chunks, lag_samples, lag_s, ahead)


@pytest.mark.parametrize(
    ("values", "rate"),
    [
        ({"free": None}, 0.5),
        ({"chunk_size": None}, 0.5),
        ({"head": replace(HEAD, rate=5e-324)}, 5e-325),
        ({"head": replace(HEAD, rate=0.0)}, None),
    ],
)
def test_time_to_full_is_not_guessed(values: dict[str, Any], rate: float | None) -> None:
    found = Looks().add(survey(**values))
    assert (found.full_in_s, found.chunk_rate) == (None, rate)


def test_a_rate_takes_two_marks_of_the_reader_and_one_without_marks_has_that_of_its_checkpoints() -> None:
    looks = Looks()
    first = (consumer("a", needs=1), consumer("b", needs=10), consumer("c", consumed=100, done=9))
    rates = [[one.read_chunks_per_s for one in looks.add(survey(first, NOW + at)).consumers] for at in (0, 1)]
    assert rates == [[None] * 3] * 2
    at = NOW + 2
    told = consumer("a", needs=2, at=at), consumer("b", needs=14, at=at), consumer("c", consumed=140, done=13, at=at)
    readers = looks.add(survey(told, NOW + 3)).consumers
    found = [(one.read_chunks_per_s, one.supply, one.starving_in_s) for one in readers]
    assert found == [(0.5, "steady", None), (2.0, "shrinking", 4.0), (2.0, "unknown", None)]


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
    assert (found.consumers[0].supply, found.consumers[0].starving_in_s) == ("shrinking", 6.0)


def test_rates_that_nobody_tells_take_two_changes() -> None:  # Of deletion, and of what a stream without a head gets
    looks = Looks()
    found = [
        looks.add(survey(at=NOW + second, head=replace(HEAD, updated_at=NOW + second), retired=retired))
        for second, retired in ((0, 4), (2, 6), (4, 10))
    ]
    assert [(one.byte_rate, one.full_in_s) for one in found] == [(None, None), (None, None), (-150.0, None)]
    looks = Looks()
    rates = [
        looks.add(survey(at=NOW + second, head=None, manifest=None, chunks=chunks)).chunk_rate
        for second, chunks in ((0, 5), (2, 5), (4, 6), (6, 6), (8, 8))
    ]
    assert rates == [None, None, None, None, 0.5]


def test_clock_that_is_ahead_a_stream_that_has_ended_and_the_slowest_reader() -> None:
    found = Looks().add(survey(head=replace(HEAD, updated_at=NOW + 90)))
    assert (found.state, found.heartbeat_age_s, found.clock_ahead_s) == ("running", 0.0, 90.0)
    found = Looks().add(survey((consumer(needs=30),), head=replace(HEAD, ended=True, state="finished")))
    assert (found.chunk_rate, found.full_in_s, found.consumers[0].supply) == (0.0, None, "complete")
    slowest = Looks().add(survey((consumer("a", needs=7), consumer("b", needs=3), consumer("c", consumed=0)))).slowest
    assert slowest is not None
    assert (slowest.consumer.name, slowest.ahead_chunks) == ("b", 17)
    assert Looks().add(survey((consumer(consumed=0),))).slowest is None


@pytest.mark.parametrize(
    ("steps", "now", "rate"),
    [
        ([], 0, None),  # It takes two steps to different moments
        ([(10, 5), (10, 5)], 20, None),
        ([(10, 5), (20, 25)], 20, 2.0),
        ([(0, 0), (10, 20)], 30, 2.0),  # What stands still fades
        ([(0, 0), (10, 20)], 31, 20 / 31),
        ([(0, 0), (10, 20)], 2000, 0.01),
        ([(0, 0), (10, 20), (2000, 20)], 2000, 0.0),
        ([(10, 5), (20, 25), (21, 4)], 21, None),  # After a step back, of the number or of the clock, it begins anew
        ([(10, 5), (20, 25), (21, 4), (23, 6)], 23, 1.0),
        ([(10, 5), (20, 25), (19, 40)], 19, None),
        ([(10, 5), (20, 25), (19, 40), (21, 42)], 21, 1.0),
        (FASTER, 1120, 10.0),  # It follows a change, and of rare steps the last two count
        ([(0, 0), (3600, 1), (3610, 11)], 3610, 1.0),
    ],
)
def test_growth(steps: list[tuple[float, float]], now: float, rate: float | None) -> None:
    growth = Growth()
    for at, value in steps:
        growth.step(at, value)
    assert growth.rate(now) == rate


def told(draws: int, done: int, draws_per_step: int = 0, limit: int | None = None) -> Cursor:
    """The cursor of 2 ranks with micro batches of 2, over chunks of 4, which says in its state where they are."""
    part = Part(2, 2, draws, draws_per_step=draws_per_step)
    state = RunState(ID, 4, 4, 0, 0, limit, (part,), 2 * draws)
    plan = {"dp_size": 2, "batch_size": 2, "unit": 4, "window": 0, "seed": 0}
    return Cursor("sft", ID, 2 * draws, done, plan, 1.0, state)


def bare(consumed: int, done: int, **plan: int) -> Cursor:
    return Cursor("sft", ID, consumed, done, plan, 1.0)


@pytest.mark.parametrize(
    ("ended", "cursor", "expected"),
    [
        (True, told(20, 10), Remainder(3, 10)),  # The last chunks are needed by what is left over
        (True, told(20, 6), Remainder(3, 10)),  # An older checkpoint needs those from 6 on
        (True, told(18, 8, draws_per_step=4), Remainder(7, 8)),  # A step of 2 micro batches: 7 samples are none
        (True, told(18, 8), None),
        (True, told(0, 0), None),
        (True, told(8, 4, limit=18), Remainder(2, 4, limited=True)),  # It takes no more than 18 for all
        (True, told(9, 4, limit=18), Remainder(0, 11, limited=True)),
        (True, told(20, 10, limit=43), Remainder(3, 10)),
        (True, bare(40, 6, dp_size=2, batch_size=2), Remainder(3, 6)),  # Of the micro batch of all ranks
        (True, bare(39, 6, dp_size=2, batch_size=2), None),
        (True, bare(42, 6), None),
        (True, bare(43, 11), Remainder(0, 11)),  # All of it, once or more often
        (True, bare(100, 0), Remainder(0, 11)),
        (False, told(20, 6), Remainder(0, 10)),  # What the newest checkpoint does not need an older one does
        (False, told(19, 6), Remainder(2, 8)),
        (False, told(18, 6), None),
        (False, told(20, 10, limit=40), Remainder(0, 10, limited=True)),  # It will take no more
        (False, told(9, 4, limit=18), Remainder(0, 10, limited=True)),
        (False, told(9, 4, limit=50), None),
        (False, bare(40, 6, dp_size=2, batch_size=2), Remainder(0, 6)),
    ],
)
def test_remainder(ended: bool, cursor: Cursor, expected: Remainder | None) -> None:
    samples, chunks = (43, 11) if ended else (40, 10)
    census = made_up().census._replace(samples=samples, chunks=chunks, ended=ended)
    assert remainder(Consumer("sft", cursor, None, None), census) == expected


def counted(*lengths: int) -> Lengths:
    return Lengths(np.array(lengths))


def stream(**values: Any) -> Overview:
    """A stream of 100 chunks of 100 full, shuffled rows, of which nothing is to be said."""
    chunks, ended = values.pop("chunks", 100), values.pop("ended", False)
    made = Overview(Path("/data/s"), Manifest(ID, 100, 0.0), 100, Published(chunks, 100 * chunks, ended), 0)
    made.lengths, made.tokens, made.made = counted(*[2000] * 9), counted(*[500] * 9), Made(None, None, True)
    return replace(made, **values)


FULL: Final = Made("pack", 1000, True)
SPREAD: Final = counted(*[40] * 9, 1000)
DEALT: Final = DealtByCost(4, 1, "length", 1, 0)

CASES: Final[dict[str, tuple[Overview, Training, list[str]]]] = {
    "nothing to change": (stream(), Training(), []),
    "few rows": (stream(tokens=Lengths(), chunks=FEW_ROWS // 100 - 1), Training(), []),
    "no lengths": (stream(tokens=Lengths()), Training(), ["--source /data/s --out NEW --measure"]),
    "no lengths of a foreign directory": (stream(tokens=Lengths(), manifest=None), Training(), ["--measure"]),
    "padding": (stream(made=Made("pad", 1000, True)), Training(), ["--pack 1000"]),
    "little padding": (stream(made=Made("pad", 510, True)), Training(), []),
    "packs half full": (stream(made=FULL, packs=9), Training(), ["--pack-buffer"]),
    "packs full of patches": (stream(made=FULL._replace(patches=9), patches=80, packs=9), Training(), []),
    "full packs": (stream(made=Made("pack", 510, True), packs=9), Training(), []),
    "packs of unknown size": (stream(made=Made("pack", None, True), packs=9), Training(), []),
    "short rows": (stream(tokens=counted(*[300] * 9)), Training(), ["--pack 512"]),
    "packs of another program": (stream(tokens=counted(*[300] * 9), packs=9), Training(), []),
    "uneven rows": (stream(tokens=SPREAD), Training(4, 2, 0), ["--pack 1024", "--balance 4 --micro-batch-size 2"]),
    "dealt by cost": (stream(tokens=SPREAD, dealt=DEALT), Training(), ["--pack 1024"]),
    "one rank": (stream(tokens=SPREAD), Training(1, 1, 0), ["--pack 1024"]),
    "in order": (stream(made=Made()), Training(8, 1, 0), ["shuffle_window=8"]),
    "in order, few chunks a rank": (stream(made=Made()), Training(30), ["shuffle_window=3"]),
    "in order, one chunk a rank": (stream(made=Made()), Training(60), []),
    "in windows": (stream(made=Made()), Training(8, 1, 2), []),
    "in order, dealt by cost": (stream(made=Made(), dealt=DEALT), Training(8, 1, 0), []),
    "fewer chunks than ranks": (stream(chunks=4, ended=True), Training(), ["--samples-per-chunk 25"]),
    "fewer chunks than ranks so far": (stream(chunks=4), Training(), []),
    "large chunks": (stream(lengths=counted(40_000_000)), Training(), ["--samples-per-chunk 6"]),
    "small chunks": (stream(lengths=counted(100), chunks=10_000), Training(), ["--samples-per-chunk 10000"]),
    "few small chunks": (stream(lengths=counted(100), chunks=9999), Training(), []),
    "refused rows": (stream(source_rows=SourceRows(90, 3, True)), Training(), ["quarantine /data/s"]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_advised(name: str) -> None:
    found, training, settings = CASES[name]
    advice = advise(found, training)
    assert len(advice) == len(settings)
    for one, setting in zip(advice, settings, strict=True):
        assert one.setting.endswith(setting) or f"{setting} " in one.setting, one


def test_steps_of_even_rows_are_even_and_of_long_and_short_ones_are_not() -> None:
    assert unevenness(counted(700, 700), Training(64)) == 1.0
    assert unevenness(SPREAD, Training(1)) == 1.0
    assert 1 < unevenness(SPREAD, Training(8, 8)) < unevenness(SPREAD, Training(8)) < 8
    assert unevenness(counted(0), Training()) == 1.0


def run(name: str, at: float, ranks: int, window: int) -> Consumer:
    state = RunState(ID, 10, 10, window, 0, None, (Part(ranks, 3, 5),), 5 * ranks)
    return Consumer(name, Cursor(name, ID, 5 * ranks, 0, {}, at, state), None, None)


def test_training_is_that_of_the_newest_checkpoint() -> None:
    assert training_of([run("a", 5.0, 4, 20), run("b", 4.0, 2, 0)], 10) == Training(4, 3, 2)
    assert training_of([Consumer("a", None, None, None)], 10) == training_of([], 10) == Training(8, 1, None)
