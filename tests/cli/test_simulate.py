"""Scale on paper: small runs worked out by hand, what holds of every run, a real run beside it, and the command."""

import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard import simulation
from lazyshard.cli.simulate import run_lines
from lazyshard.data import commits
from lazyshard_producer import loop
from lazyshard_producer.configuration.settings import parse_amount
from lazyshard_producer.limits import ahead_in_chunks
from tests.cli.commands import lazyshard
from tests.harness.simulated.real import measure
from tests.stream.streams import forked, produce

# 2 ranks, chunks of 4 rows, one every half second; a stripe is 2 chunks, of which 2 steps are trained.
SMALL = simulation.Setting(ranks=2, batch=2, samples_per_chunk=4, producer_rate=8.0, step_seconds=0.5, rows=64)
SMALL = replace(SMALL, workers=0, latency_s=0.0, woken=True, ranks_a_node=2)
TINY = replace(SMALL, samples_per_chunk=8, producer_rate=400.0, step_seconds=0.01, rows=83, window=2, row_bytes=60)
TINY = replace(TINY, retain="consumed", checkpoint_steps=4, woken=False, ranks_a_node=8)
ONE = {"ranks": 1, "samples_per_chunk": 1000}
COMMAND = ["--ranks", "2", "--batch", "2", "--step-seconds", "0.25", "--producer-rate", "8", "--samples-per-chunk", "4"]


def test_a_producer_that_may_be_two_chunks_ahead_waits_for_the_reader() -> None:
    setting = replace(SMALL, ranks=1, batch=1, samples_per_chunk=10, producer_rate=10.0, step_seconds=1.0, rows=60)
    producer = simulation.Producer(replace(setting, max_ahead="2 chunks"))
    assert producer.published.tolist() == [1.0, 2.0]
    # A hint before it is held; then a hint that it already has.
    for at in (0.0, 50.0):
        producer.receive_hint(1, at)
        assert producer.published.tolist() == [1.0, 2.0, 3.0]
    producer.receive_hint(3, 50.0)
    # Held for 47 s, it looks every 2 s, and makes up for one second.
    look = 3.0 + simulation.first_check(47.0)
    assert 50.0 <= look < 52.0
    assert producer.published.tolist()[3:] == [look, look + 1.0]
    assert producer.begun.tolist()[3:] == [look, look]


@pytest.mark.parametrize(
    ("changes", "peak"),
    [
        ({}, 16),
        ({"retain": "consumed"}, 16),
        # The stripe being trained, and the two chunks published meanwhile.
        ({"retain": "consumed", "checkpoint_steps": 2}, 4),
        ({"retain": "consumed", "checkpoint_steps": 8}, 10),
        ({"retain": "consumed", "checkpoint_steps": 2, "keep_checkpoints": 2}, 6),
    ],
)
def test_checkpoints_free_the_disk_and_bytes_count_the_seals(changes: Any, peak: int) -> None:
    found = simulation.disk_use(simulation.simulate(replace(SMALL, row_bytes=973, **changes)))
    assert (found["peak_chunks"], found["peak_bytes"]) == (peak, peak * 4 * 1000)
    assert (found["cursor_writes"] == 0) is ("checkpoint_steps" not in changes)


@pytest.mark.parametrize(
    ("figure", "changes", "expected"),
    [
        ("openings", {"workers": 0}, 1.0),
        # 4 rows in 2 batches of 2: one for each of two workers, and no third one comes.
        ("openings", {"workers": 2}, 2.0),
        ("openings", {"workers": 5}, 2.0),
        # A batch of 3 begins in each place of a chunk of 4 once: it touches 1, 1, 2, 2 chunks.
        ("openings", {"workers": 5, "batch": 3}, 2.0),
        ("openings", {"workers": 5, "batch": 8}, 1.0),
        # A window of more chunks than may be open opens them again and again.
        ("openings", {**ONE, "rows": 10**6, "window": 256}, 1.0),
        ("openings", {**ONE, "rows": 10**6, "window": 512}, 1 + 999 / 2),
        ("all_openings", {"rows": 64}, 16),
        # Two stripes, and a chunk that is dealt to both ranks row by row; then to as many of 9 ranks as it has rows.
        ("all_openings", {"rows": 20}, 4 + 2),
        ("all_openings", {"ranks": 9, "rows": 40}, 9 + 4),
        # Reading hides behind a step with workers; else half a chunk is opened, by four operations, and read by half.
        ("loaded_step_s", {"latency_s": 0.01, "workers": 2}, 0.5),
        ("loaded_step_s", {"latency_s": 0.01}, 0.5 + 0.01 * (2 + 0.5)),
    ],
)
def test_figures_of_a_setting(figure: str, changes: Any, expected: float) -> None:
    assert getattr(replace(SMALL, **changes), figure) == pytest.approx(expected)


def test_thousands_of_ranks_and_a_million_chunks_are_simulated() -> None:
    large = simulation.Setting(ranks=4096, step_seconds=10.0, producer_rate=1500.0, rows=10**9, samples_per_chunk=1000)
    found = simulation.outcome(replace(large, micro_batches=4, retain="consumed", checkpoint_steps=500))
    assert found["limited_by"] == "producer"
    assert found["first_step_s"] == pytest.approx(4096 * 1000 / 1500, abs=6)
    assert found["end_s"] == pytest.approx(10**9 / 1500, rel=0.01)
    assert found["peak_chunks"] < found["chunks"]


@pytest.mark.parametrize(
    ("changes", "warnings"),
    [
        ({}, []),
        ({"producer_rate": 0.01, "retain": "consumed"}, ["max_wait", "--checkpoint-steps"]),
        ({"window": 9}, ["one window"]),
    ],
)
def test_the_table_warns(changes: Any, warnings: list[str]) -> None:
    setting = replace(SMALL, **changes)
    told = [line for line in run_lines(setting, simulation.outcome(setting)) if line.startswith("warning")]
    assert [word in line for word, line in zip(warnings, told, strict=True)] == [True] * len(told)


def test_the_command_prints_a_table_or_json() -> None:
    wanted = ["simulate", *COMMAND, "--rows", "64", "--workers", "0", "--latency", "0", "--woken"]
    out = lazyshard(*wanted).stdout
    for fact in ("first step                  1.0 s", "limited by                  producer", "stall share"):
        assert f"\n  {fact}" in out
    one = json.loads(lazyshard(*wanted, "--json").stdout)
    assert (one["window"], one["end_s"], one["stall_share"]) == (0, 8.5, pytest.approx(4.5 / 8.5))
    # Rows a second say what a step takes.
    rest = ["--batch", "2", "--producer-rate", "8", "--chunks", "16", "--samples-per-chunk", "4", "--json"]
    figures = json.loads(lazyshard("simulate", "--ranks", "2", "--rows-a-second", "16", *rest).stdout)
    assert (figures["step_seconds"], figures["rows"]) == (0.25, 64)


def test_rules_are_those_of_the_producer_and_the_readers() -> None:
    for text in ("7", "7chunks", "1 chunk", "2500 samples", "3samples", "100B", "20GB", "1.5MiB"):
        setting = replace(SMALL, max_ahead=text)
        expected = ahead_in_chunks(parse_amount(text), setting.samples_per_chunk, setting.chunk_bytes)
        assert setting.ahead_chunks == expected
    assert simulation.BURST_S == loop.BURST_S
    assert simulation.HINT_S == commits.PAUSE_S


def test_a_real_run_trains_every_row_once_and_opens_chunks_as_often_as_predicted(tmp_path: Path) -> None:
    found = measure(TINY, tmp_path)
    # The last one, with three rows, goes to both ranks.
    assert found.chunk_opens == simulation.outcome(TINY)["chunk_opens"] == 2 * 12
    assert 4 <= found.peak_chunks <= 11
    assert 0 < found.first_step_s < found.end_s
    # Each rank looks when it begins, and at the first window at the least.
    assert found.head_opens >= 4


def test_a_publish_opens_as_many_files_as_is_counted(tmp_path: Path) -> None:
    def publish() -> None:
        opens: list[object] = []
        sys.addaudithook(lambda event, arguments: opens.append(arguments[0]) if event == "open" else None)
        counts = []
        for chunks in (1, 3, 13):  # the first one opens modules too, and what a writer opens once goes off
            before = len(opens)
            produce(tmp_path / str(chunks), 2 * chunks)
            counts.append(len(opens) - before)
        assert (counts[2] - counts[1]) / 10 == simulation.PUBLISH_OPENS

    assert forked(publish) == 0


@st.composite
def settings(draw: st.DrawFn, *, limited: bool = True) -> simulation.Setting:
    """Small runs of whole eighths of a second; `limited` with or without a limit of the producer."""
    ranks, batch, micro = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    size, ahead = draw(st.integers(1, 12)), draw(st.none() | st.integers(0, 12)) if limited else None
    values: dict[str, Any] = {"ranks": ranks, "batch": batch, "micro_batches": micro, "samples_per_chunk": size}
    # A chunk takes eighths of a second.
    values |= {"step_seconds": draw(st.integers(1, 16)) / 8, "producer_rate": size * 8 / draw(st.integers(1, 16))}
    values |= {"rows": draw(st.integers(ranks * batch * micro, 400)), "window": draw(st.integers(0, 4))}
    values |= {"head_start": draw(st.integers(0, 10)) * size, "max_ahead": None if ahead is None else f"{ahead} chunks"}
    values |= {"retain": draw(st.sampled_from(["all", "consumed"])), "checkpoint_steps": draw(st.integers(0, 6))}
    values |= {"keep_checkpoints": draw(st.integers(1, 3)), "visibility_s": draw(st.sampled_from([0.0, 0.25]))}
    return simulation.Setting(workers=0, latency_s=0.0, woken=draw(st.booleans()), **values)


def run(setting: simulation.Setting) -> simulation.Timeline:
    with patch.object(simulation, "find_wait", lambda *_: simulation.WaitEnd(0.0, 1, 0, 0)):
        return simulation.simulate(setting)


def starts(timeline: simulation.Timeline) -> list[float]:
    steps = np.arange(timeline.setting.steps)
    return [float(end) - timeline.setting.loaded_step_s for end in timeline.ends(steps)]


@given(settings(), st.data())
def test_closed_forms_are_what_the_plan_says(setting: simulation.Setting, data: st.DataObject) -> None:
    chunks, position = data.draw(st.integers(0, setting.chunks)), data.draw(st.integers(0, 500))
    needing = (step for step in range(setting.steps) if setting.needed_chunks(step) > chunks)
    assert setting.first_step_after(chunks) == next(needing, setting.steps)
    assert position // setting.span * setting.span_rows == setting.course.done_before(position, None)


@given(settings(limited=False))
def test_steps_begin_when_a_walk_through_all_of_them_says_so(setting: simulation.Setting) -> None:
    timeline = run(setting)
    published = [
        max(0.0, min(chunk * setting.samples_per_chunk, setting.rows) - setting.head_start) / setting.producer_rate
        for chunk in range(1, setting.chunks + 1)
    ]
    assert np.allclose(timeline.published, published)
    end = 0.0
    for step, start in enumerate(starts(timeline)):
        earliest = max(end, published[setting.needed_chunks(step) - 1] + setting.visibility_s)
        assert abs(start - earliest) < 1e-6
        end = earliest + setting.step_seconds


@given(settings())
def test_no_step_begins_before_its_rows_are_there_or_the_step_before_has_ended(setting: simulation.Setting) -> None:
    timeline = simulation.simulate(setting)
    began = starts(timeline)
    assert setting.needed_chunks(setting.steps - 1) <= len(timeline.published) <= setting.chunks
    assert (np.diff(timeline.published) >= -1e-9).all()
    assert (timeline.begun <= timeline.published + 1e-9).all()
    for step, start in enumerate(began):
        assert start >= timeline.published[setting.needed_chunks(step) - 1] + setting.visibility_s - 1e-6
    assert all(late >= early + setting.step_seconds - 1e-6 for early, late in pairwise(began))


@given(settings(), st.integers(1, 20))
def test_a_producer_is_never_further_ahead_than_it_may_be(setting: simulation.Setting, ahead: int) -> None:
    timeline = simulation.simulate(replace(setting, max_ahead=f"{ahead} chunks"))
    began = np.array(starts(timeline))
    for chunk, at in enumerate(timeline.begun.tolist()):
        # A step is asked for when the one before has ended, so at most the one after those that have begun.
        step = min(int((began <= at + 1e-6).sum()), setting.steps - 1)
        assert chunk < setting.needed_chunks(step) + ahead


@given(st.integers(1, 40), st.floats(0.001, 100), st.floats(0.01, 1000), st.floats(0, 5), st.booleans())
def test_when_a_wait_is_found_to_be_over(missing: int, period: float, share: float, blind: float, woken: bool) -> None:
    setting = simulation.Setting(
        ranks=2, step_seconds=1, samples_per_chunk=10, producer_rate=10 / period, rows=1000, latency_s=0.0, woken=woken
    )
    phase = max(1, round(1000 * min(1.0, share)))
    found, first = simulation.find_wait(setting, missing, phase, blind), phase / 1000 * period
    waited = first + (missing - 1) * period
    assert 0 <= found.late_s <= min(5.0, max(0.005, 0.1 * max(waited + period, blind))) + 0.05
    assert found.own >= 1
    # And when a producer that is held looks again.
    assert waited - 1e-6 <= simulation.first_check(waited) <= waited + 2.0 + 1e-6
