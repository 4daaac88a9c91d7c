"""Scale on paper: small runs that can be worked out by hand, and the command."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lazyshard.cli.main import main as lazyshard
from lazyshard.cli.simulate import parse_axes, parse_axis, run_lines, sweep
from lazyshard.data import commits as reading_marks
from lazyshard.simulation.run import (
    BURST_S,
    DELETED_AT_ONCE,
    LOOK_S,
    MARK_S,
    PUBLISH_OPENS,
    Producer,
    count_files,
    disk_use,
    first_look,
    outcome,
    retry_s,
    simulate,
)
from lazyshard.simulation.setting import Setting
from lazyshard_producer import loop
from lazyshard_producer.configuration.quantities import parse_amount
from lazyshard_producer.holding import holdback
from lazyshard_producer.holding.limits import ahead_in_chunks

# 2 ranks, chunks of 4 rows, one every half second; a stripe is 2 chunks, of which 2 steps are trained.
SMALL = Setting(
    ranks=2,
    batch=2,
    samples_per_chunk=4,
    producer_rate=8.0,
    step_seconds=0.5,
    rows=64,
    workers=0,
    latency_s=0.0,
    woken=True,
    ranks_a_node=2,
)
COMMAND = ["--ranks", "2", "--batch", "2", "--step-seconds", "0.25", "--producer-rate", "8", "--samples-per-chunk", "4"]


def test_a_trainer_as_fast_as_its_producer_waits_for_the_first_stripe_alone() -> None:
    timeline = simulate(SMALL)
    assert timeline.published.tolist() == [chunk / 2 for chunk in range(1, 17)]
    assert (timeline.after_wait.tolist(), timeline.began.tolist()) == ([0], [1.0])
    assert (timeline.first_step_s, timeline.end_s, timeline.stalled_s) == (1.0, 9.0, 1.0)


def test_a_faster_trainer_waits_for_each_stripe() -> None:
    timeline = simulate(replace(SMALL, step_seconds=0.25))
    assert timeline.after_wait.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    assert timeline.began.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert timeline.waits.tolist() == [1.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]
    assert (timeline.end_s, timeline.stalled_s) == (8.5, 4.5)


def test_a_head_start_lasts_until_the_trainer_has_caught_up() -> None:
    timeline = simulate(replace(SMALL, step_seconds=0.25, head_start=24))
    assert timeline.published.tolist()[:7] == [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5]
    # Three stripes are there, then one is published a second, and trained in half of one.
    assert timeline.after_wait.tolist() == [0, 10, 12, 14]
    assert timeline.began.tolist() == [0.0, 3.0, 4.0, 5.0]
    assert (timeline.first_step_s, timeline.end_s) == (0.0, 5.5)


def test_windows_make_the_first_step_wait_for_all_their_chunks() -> None:
    assert simulate(replace(SMALL, window=4)).first_step_s == 4.0
    assert simulate(replace(SMALL, window=1)).first_step_s == 1.0


def test_what_fills_no_stripe_is_trained_at_the_end_of_the_stream() -> None:
    setting = replace(SMALL, rows=13, step_seconds=0.25)
    timeline = simulate(setting)
    assert (setting.steps, setting.chunks) == (3, 4)
    assert timeline.published.tolist() == [0.5, 1.0, 1.5, 1.625]
    assert timeline.began.tolist() == [1.0, 1.625]


def test_files_that_are_seen_late_are_trained_late() -> None:
    assert simulate(replace(SMALL, visibility_s=3.0)).first_step_s == 4.0


def test_a_polling_reader_finds_a_chunk_within_a_tenth_of_the_time_that_it_takes() -> None:
    timeline = simulate(replace(SMALL, step_seconds=0.25, woken=False))
    late = timeline.began - np.arange(1, 9)
    assert (late >= 0).all() and (late > 0).any()
    assert late[1:].max() <= 0.1 * 0.5 + 0.02
    # The first one knows no rate: a tenth of what was waited.
    assert late[0] <= 0.1 + 0.02


def test_a_producer_that_may_be_two_chunks_ahead_waits_for_the_reader() -> None:
    setting = Setting(
        ranks=1,
        samples_per_chunk=10,
        producer_rate=10.0,
        step_seconds=1.0,
        rows=60,
        max_ahead="2 chunks",
    )
    producer = Producer(setting)
    assert producer.published.tolist() == [1.0, 2.0]
    producer.tell(1, 0.0)
    # Told before it was held at all.
    assert producer.published.tolist() == [1.0, 2.0, 3.0]
    producer.tell(1, 50.0)
    assert len(producer.published) == 3
    producer.tell(3, 50.0)
    # Held for 47 s, it looks every 2 s, and makes up for one second.
    look = 3.0 + first_look(47.0)
    assert 50.0 <= look < 52.0
    assert producer.published.tolist()[3:] == [look, look + 1.0]
    assert producer.begun.tolist()[3:] == [look, look]


def test_a_held_producer_looks_ever_more_rarely() -> None:
    assert first_look(0.0) == 0.0
    assert first_look(0.1) == pytest.approx(0.2)
    assert 10.0 <= first_look(10.0) < 11.0
    assert 1000.0 <= first_look(1000.0) < 1002.0


def test_checkpoints_free_the_disk() -> None:
    def peak(**changes: Any) -> int:
        return disk_use(simulate(replace(SMALL, **changes))).peak_chunks

    assert peak() == 16
    assert peak(retain="consumed") == 16
    # The stripe being trained, and the two chunks published meanwhile.
    assert peak(retain="consumed", checkpoint_steps=2) == 4
    assert peak(retain="consumed", checkpoint_steps=8) == 10
    assert peak(retain="consumed", checkpoint_steps=2, keep_checkpoints=2) == 6


def test_disk_bytes_count_the_seals() -> None:
    found = disk_use(simulate(replace(SMALL, row_bytes=973)))
    assert (found.peak_chunks, found.peak_bytes, found.cursor_writes) == (16, 16 * 4 * 1000, 0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"workers": 0}, 1.0),
        # 4 rows in 2 batches of 2: one for each of two workers, and no third one comes.
        ({"workers": 2}, 2.0),
        ({"workers": 5}, 2.0),
        # A batch of 3 begins in each place of a chunk of 4 once: it touches 1, 1, 2, 2 chunks.
        ({"workers": 5, "batch": 3}, 2.0),
        ({"workers": 5, "batch": 8}, 1.0),
    ],
)
def test_a_chunk_is_opened_by_each_worker_that_a_batch_of_it_comes_to(changes: Any, expected: float) -> None:
    assert replace(SMALL, **changes).openings == expected


def test_chunks_of_the_tail_are_opened_by_each_rank_that_has_a_row_of_them() -> None:
    assert replace(SMALL, rows=64).all_openings == 16
    # Two stripes, and a chunk that is dealt to both ranks row by row; then to as many of 9 ranks as it has rows.
    assert replace(SMALL, rows=20).all_openings == 4 + 2
    assert replace(SMALL, ranks=9, rows=40).all_openings == 9 + 4


def test_a_window_of_more_chunks_than_may_be_open_opens_them_again_and_again() -> None:
    many = replace(SMALL, ranks=1, rows=10**6, samples_per_chunk=1000, window=512)
    assert replace(many, window=256).openings == 1.0
    assert many.openings == pytest.approx(1 + 999 / 2)


def test_reading_adds_to_a_step_without_workers_and_hides_behind_it_with_them() -> None:
    slow = replace(SMALL, latency_s=0.01)
    assert replace(slow, workers=2).loaded_step_s == 0.5
    # Half a chunk is opened, by four operations, and read by half an operation.
    assert slow.loaded_step_s == pytest.approx(0.5 + 0.01 * (2 + 0.5))


def test_operations_are_counted() -> None:
    setting = replace(SMALL, step_seconds=0.25, retain="consumed", checkpoint_steps=4)
    timeline = simulate(setting)
    disk = disk_use(timeline)
    files = count_files(timeline, disk)
    assert (files.processes, files.nodes) == (2, 1)
    # Two opens for each of 16 chunks, which one rank reads.
    assert files.chunk_opens == 32
    assert files.head_opens == 2 * timeline.looks + timeline.shared + 2 + disk.cursor_writes
    # And a stat for each of them; the producer's come on top.
    read = files.head_opens + 32 + 16 + timeline.asides
    assert files.metadata_a_second_and_node == pytest.approx(read / timeline.end_s)
    assert files.metadata_operations > read + 16 * PUBLISH_OPENS


@pytest.mark.parametrize(("window", "draws"), [(0, 1.0), (1, 1001 / 3), (8, 8001 / 3)])
def test_neighbours_in_a_window_are_a_third_of_it_apart(window: int, draws: float) -> None:
    one = replace(SMALL, ranks=1, samples_per_chunk=1000, window=window, rows=96_000)
    assert one.neighbour_draws == pytest.approx(draws, abs=1)


def test_thousands_of_ranks_and_a_million_chunks_are_simulated() -> None:
    setting = Setting(
        ranks=4096,
        micro_batches=4,
        step_seconds=10.0,
        producer_rate=1500.0,
        rows=10**9,
        samples_per_chunk=1000,
        retain="consumed",
        checkpoint_steps=500,
    )
    found = outcome(setting)
    assert found.limited_by == "producer"
    assert found.timeline.first_step_s == pytest.approx(4096 * 1000 / 1500, abs=6)
    assert found.timeline.end_s == pytest.approx(10**9 / 1500, rel=0.01)
    assert found.disk.peak_chunks < setting.chunks


def test_the_table_warns_of_waits_that_readers_do_not_last() -> None:
    slow = replace(SMALL, producer_rate=0.01, retain="consumed")
    told = [line for line in run_lines(outcome(slow)) if line.startswith("warning")]
    assert any("raise max_wait" in line for line in told)
    assert any("no cursor is written" in line for line in told)
    assert not any(line.startswith("warning") for line in run_lines(outcome(SMALL)))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("window=0,1,4", [0, 1, 4]),
        ("samples-per-chunk=100:1500", [100, 200, 500, 1000, 1500]),
        ("producer_rate=0.5:2", [0.5, 1.0, 2.0]),
    ],
)
def test_axes_of_a_sweep(text: str, values: list[float]) -> None:
    assert parse_axis(text)[1] == values


def test_a_sweep_changes_its_last_axis_fastest() -> None:
    axes = parse_axes(["samples_per_chunk=4,8", "window=0,2"])
    found = [(one.samples_per_chunk, one.window) for one in sweep(SMALL, axes)]
    assert found == [(4, 0), (4, 2), (8, 0), (8, 2)]


def main(arguments: Sequence[str]) -> int:
    return lazyshard(["simulate", *arguments])


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = [*COMMAND, "--rows", "64", "--workers", "0", "--latency", "0", "--woken"]
    assert main(wanted) == 0
    out = capsys.readouterr().out
    assert "first step after 1.0 s" in out and "limited by       producer" in out
    assert main([*wanted, "--json"]) == 0
    assert main([*wanted, "--sweep", "window=0,2", "--json"]) == 0
    figures = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["window"] for one in figures] == [0, 0, 2]
    assert figures[0]["end_s"] == 8.5
    assert figures[0]["stall_share"] == pytest.approx(4.5 / 8.5)


ROWS = ["--rows", "64"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--ranks"),
        (COMMAND, "--rows"),
        ([*COMMAND, *ROWS, "--chunks", "16"], "--chunks"),
        ([*COMMAND, *ROWS, "--rows-a-second", "8"], "--rows-a-second"),
        ([*COMMAND, "--rows", "3"], "--rows"),
        ([*COMMAND, "--chunks", "0"], "--chunks"),
        ([*COMMAND, *ROWS, "--samples-per-chunk", "0"], "--samples-per-chunk"),
        ([*COMMAND, *ROWS, "--latency", "-1"], "--latency"),
        ([*COMMAND, *ROWS, "--visibility", "-1"], "--visibility"),
        ([*COMMAND, *ROWS, "--window", "-1"], "--window"),
        ([*COMMAND, *ROWS, "--max-ahead", "much"], "--max-ahead"),
        ([*COMMAND, *ROWS, "--sweep", "seed=1,2"], "seed"),
        ([*COMMAND, *ROWS, "--sweep", "window=a"], "window=a"),
        ([*COMMAND, *ROWS, "--sweep", "window=-1"], "--window"),
        ([*COMMAND, *ROWS, "--sweep", "window=1", "--sweep", "window=2"], "different settings"),
    ],
)
def test_wrong_arguments_are_named(arguments: Sequence[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert (shown.out, len(shown.err.splitlines())) == ("", 1)
    assert named in shown.err


def test_rows_a_second_say_what_a_step_takes(capsys: pytest.CaptureFixture[str]) -> None:
    rest = ["--batch", "2", "--producer-rate", "8", "--chunks", "16", "--samples-per-chunk", "4", "--json"]
    assert main(["--ranks", "2", "--rows-a-second", "16", *rest]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["step_seconds"], figures["rows"]) == (0.25, 64)


@pytest.mark.parametrize("text", ["7", "7chunks", "1 chunk", "2500 samples", "3samples", "100B", "20GB", "1.5MiB"])
def test_amounts_are_those_of_the_producer(text: str) -> None:
    setting = replace(SMALL, max_ahead=text)
    expected = ahead_in_chunks(parse_amount(text), setting.samples_per_chunk, setting.chunk_bytes)
    assert setting.ahead_chunks == expected


def test_rules_are_those_of_the_producer_and_the_readers() -> None:
    assert [retry_s(held) for held in (0.0, 5.0, 1e6)] == [holdback.retry_s(held) for held in (0.0, 5.0, 1e6)]
    assert (BURST_S, LOOK_S, DELETED_AT_ONCE) == (loop.BURST_S, holdback.LOOK_S, holdback.DELETED_AT_ONCE)
    assert MARK_S == reading_marks.PAUSE_S
