"""What a report says and proposes, of literal facts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lazyshard.cli.report_advice import (
    LITTLE,
    Change,
    Finding,
    balance_finding,
    in_order,
    lengths_finding,
    packing_finding,
    percent,
)
from lazyshard.cli.report_advice_order import shuffle_finding
from lazyshard.cli.report_advice_run import (
    damage_finding,
    disk_finding,
    rates_finding,
    refusals_finding,
    waits_finding,
)
from lazyshard.format import Manifest
from lazyshard.format.dealt import DealtByCost
from lazyshard.format.source_rows import SourceRows
from lazyshard.inspection.disk_use import DiskUse
from lazyshard.inspection.inspection_balance import BalanceReport, RanksReport, Training
from lazyshard.inspection.inspection_shuffle import Expected, Reading, ShuffleReport, WindowReport
from lazyshard.inspection.report_chunks import Made
from lazyshard.inspection.report_course import At, Dry, Pause
from lazyshard.inspection.report_packing import Packing
from lazyshard.inspection.report_refusals import Refusals, RefusedFor, RefusedRow
from lazyshard.inspection.report_training import TrainingFacts
from lazyshard.inspection.row_facts import Lengths
from lazyshard.plan.balance import Cost, Evenness
from lazyshard.plan.shuffle_measured import Measured
from tests.cli.looks import HEAD, ID, NOW, consumer, outlook, survey

NODE = TrainingFacts(8, 2, "nobody")


def counted(*lengths: int) -> Lengths:
    found = Lengths()
    found.add(np.array(lengths))
    return found


def commands(found: Finding) -> list[str]:
    return [change.command for change in found.changes]


def weights(found: Finding) -> list[float]:
    return [round(change.weight, 3) for change in found.changes]


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0 %"), (0.0001, "0.01 %"), (0.0123, "1.2 %"), (0.384, "38 %"), (0.9999, "99.9 %"), (1.0, "100 %")],
)
def test_a_share_in_percent(share: float, text: str) -> None:
    assert percent(share) == text


def test_the_weightiest_change_comes_first_whatever_part_it_is_of() -> None:
    small, large, urgent = Change(0.01, "a"), Change(0.4, "b"), Change(2.0, "c")
    assert in_order([Finding("", (small, urgent)), Finding(""), Finding("", (large,))]) == [urgent, large, small]


# Lengths


def test_lengths_in_tokens_leave_nothing_to_change() -> None:
    found = lengths_finding("s", counted(90, 40), counted(9, 4), native=True, objects=False)
    assert found == Finding("Half of the rows have at most 4 tokens, 99 of 100 at most 9, and the longest 9.")
    some = lengths_finding("s", counted(90, 40, 50, 60), counted(9), native=True, objects=False)
    assert some.text == "All rows have 9 tokens. They are known of 25 %."


@pytest.mark.parametrize(
    ("native", "objects", "command"),
    [
        (True, False, "lazyshard measure '/a b' --tokenizer DIR"),
        (False, False, "lazyshard-producer run --source '/a b' --out NEW --measure DIR"),
        (True, True, "lazyshard-producer run … --encode …"),
    ],
)
def test_unknown_tokens_are_to_be_measured(native: bool, objects: bool, command: str) -> None:
    found = lengths_finding("/a b", counted(90, 40), Lengths(), native=native, objects=objects)
    assert commands(found) == [command]
    assert found.text.endswith("How long they are in tokens is not known.")


def test_no_rows_are_not_judged() -> None:
    assert not lengths_finding("s", Lengths(), Lengths(), native=True, objects=False).known


# Packing


def test_packing_is_proposed_with_what_it_saves() -> None:
    found = packing_finding(Packing(None, 4096, False, 100, 0.97, packs=62), Made())
    assert found.text == (
        "Packed to 4,096 tokens, rows would need 38 % fewer micro batches than with one row each, and the packs would "
        "be 97 % full."
    )
    assert found.changes == (
        Change(
            1 - 62 / 100,
            "Pack the rows: 38 % fewer micro batches of 4,096 tokens at the most",
            "lazyshard-producer run … --pack 4096",
        ),
    )


def test_packing_that_saves_little_is_not_proposed() -> None:
    found = packing_finding(Packing(None, 4096, True, 101, 0.97, packs=90, too_long=1), Made())
    assert found == Finding(
        "Packed to 4,096 tokens, rows would need only 10 % fewer micro batches. 1 row of 101 would not fit."
    )


def test_full_packs_are_left_and_half_empty_ones_get_more_rows_to_choose_from() -> None:
    assert packing_finding(Packing("pack", 4096, False, 10, 0.982), Made("pack")).changes == ()
    found = packing_finding(Packing("pack", 4096, False, 10, 0.7), Made("pack"))
    assert found.text == "Packs of 4,096 tokens are 70 % full."
    assert (commands(found), weights(found)) == (["lazyshard-producer run … --pack-buffer 100000"], [0.3])


def test_padded_rows_are_to_be_packed_and_cut_ones_stay() -> None:
    found = packing_finding(Packing("pad", 512, False, 10, 0.25), Made("pad"))
    assert found.text == "Rows are padded to 512 tokens, and 75 % of that is padding."
    assert (commands(found), weights(found)) == (["lazyshard-producer run … --pack 512"], [0.75])
    assert packing_finding(Packing("split", 512, False, 10, 0.5), Made("split")).changes == ()


def test_packing_of_unknown_lengths_is_not_judged() -> None:
    assert packing_finding(None, Made()) == Finding("Not known, since the lengths in tokens are not.", known=False)
    assert not packing_finding(None, Made("pack")).known
    none = packing_finding(Packing(None, 8, True, 3, 0.0, packs=0, too_long=3), Made())
    assert none.text == "No row fits into packs of 8 tokens."


# Balance


def even(overall: float) -> Evenness:
    return Evenness(10, overall, overall, overall, 2 * overall, 1.0)


def balance(
    as_it_is: float | None, dealt: float | None, made: DealtByCost | None = None, size: int = 8
) -> BalanceReport:
    ranks = RanksReport(
        8,
        None if as_it_is is None else even(as_it_is),
        None if as_it_is is None else even(as_it_is),
        None if dealt is None else even(dealt),
    )
    return BalanceReport(80, True, size, made, Training(8, 2, "length", Cost()), 80, 80, 0, False, (ranks,))


DEALT = DealtByCost(8, 2, "length", 1.0, 4e-5)


def test_uneven_ranks_are_to_be_dealt_by_cost() -> None:
    found = balance_finding(balance(2.0, 1.1), "", NODE)
    assert found.text == (
        "With 8 ranks that meet after each micro batch, training takes 2.00 times as long as with even ones: the "
        "others wait for the slowest."
    )
    assert (commands(found), weights(found)) == (["lazyshard-producer run … --balance 8 --micro-batch-size 2"], [0.45])


def test_where_ranks_meet_after_a_global_batch_that_counts() -> None:
    found = balance_finding(balance(2.0, 1.1), "", NODE, balance(1.25, None))
    assert "after each global batch, training takes 1.25 times" in found.text
    assert weights(found) == [0.12]


def test_even_ranks_are_left() -> None:
    assert balance_finding(balance(1.02, 1.01), "", NODE).changes == ()
    dealt = balance_finding(balance(1.011, None, DEALT), "", NODE)
    assert dealt.text.endswith("The stream is dealt for these ranks.")
    assert dealt.changes == ()
    assert balance_finding(balance(1.0, None), "", replace(NODE, ranks=8)).changes == ()


def test_a_stream_that_is_dealt_is_to_be_read_in_order() -> None:
    found = balance_finding(balance(1.9, None, DEALT), "", replace(NODE, window=2))
    assert commands(found) == ["shuffle_window=0"]


def test_chunks_of_no_whole_micro_batches_cannot_be_dealt() -> None:
    found = balance_finding(balance(2.0, None, size=7), "", NODE)
    assert [change.text for change in found.changes] == [
        "Make chunks of whole micro batches of 2, and have them dealt by cost"
    ]


def test_balance_that_is_not_known_is_not_judged() -> None:
    assert balance_finding(None, "", NODE).text == "Not known, since the lengths in tokens are not."
    assert balance_finding(None, "no answer", NODE).text == "Not known: no answer"
    assert balance_finding(balance(None, None), "", NODE).text == "There are too few rows for a step of 8 ranks."


# Shuffle


def shuffled(*windows: tuple[int, float]) -> ShuffleReport:
    found = [
        WindowReport(window, window * 10, Expected(9.0, 9.0, 1.0), Measured(distance, 9.0, 1.0, 100))
        for window, distance in windows
    ]
    return ShuffleReport(100, True, 10, Reading(8, "chunk", 4), 10, 10, 9, tuple(found))


WINDOWS = shuffled((0, 2.0), (2, 64.0), (8, 240.0))


def test_a_run_that_reads_in_order_is_to_shuffle() -> None:
    found = shuffle_finding(WINDOWS, "", replace(NODE, window=0), dealt=False, made=Made())
    assert found.text == "Read in order, two neighbours of the stream are trained 0.5 steps apart."
    assert (commands(found), weights(found)) == (["shuffle_window=8"], [5 * LITTLE])


def test_where_nobody_tells_how_it_is_read_that_is_said() -> None:
    found = shuffle_finding(WINDOWS, "", NODE, dealt=False, made=Made())
    assert found.text.startswith("How it is read is not known. Read in order")
    assert weights(found) == [LITTLE]


@pytest.mark.parametrize(
    ("window", "dealt", "made", "text"),
    [
        (2, False, Made(), "Read in windows of 2 chunks, two neighbours of the stream are trained 16 steps apart."),
        (0, False, Made(shuffled=True), "The producer has shuffled the rows."),
        (0, True, Made(), "read them in order."),
    ],
)
def test_what_is_shuffled_already_is_left(window: int, dealt: bool, made: Made, text: str) -> None:
    found = shuffle_finding(WINDOWS, "", replace(NODE, window=window), dealt=dealt, made=made)
    assert found.text.endswith(text)
    assert found.changes == ()


def test_windows_that_bring_little_are_not_proposed_and_the_smallest_of_the_good_ones_is() -> None:
    found = shuffle_finding(shuffled((0, 2.0), (2, 2.9), (8, 2.9)), "", NODE, dealt=False, made=Made())
    assert found.changes == ()
    found = shuffle_finding(shuffled((0, 2.0), (2, 64.0), (8, 66.0)), "", NODE, dealt=False, made=Made())
    assert commands(found) == ["shuffle_window=2"]


@pytest.mark.parametrize(
    ("samples", "ended", "unit", "proposed"),
    [
        (79, True, None, ['unit="auto"']),
        (79, True, 10, ['unit="auto"']),
        (79, True, 2, []),
        (79, False, None, []),
        (80, True, None, []),
    ],
)
def test_fewer_chunks_than_ranks_are_to_be_dealt_by_micro_batches(
    samples: int, ended: bool, unit: int | None, proposed: list[str]
) -> None:
    found = replace(shuffled((0, 2.0)), samples=samples, ended=ended)
    finding = shuffle_finding(found, "", replace(NODE, unit=unit), dealt=False, made=Made())
    assert commands(finding) == proposed


def test_a_shuffle_that_is_not_known_is_not_judged() -> None:
    assert not shuffle_finding(None, "", NODE, dealt=False, made=Made()).known
    assert shuffle_finding(None, "why", NODE, dealt=False, made=Made()).text == "Not known: why"
    assert not shuffle_finding(shuffled((8, 9.0)), "", replace(NODE, window=3), dealt=False, made=Made()).known


# Rates


def test_rates_of_publishing_and_training() -> None:
    rows, sizes = [At(0.0, 0), At(100.0, 1000)], [At(0.0, 0), At(100.0, 1_000_000)]
    found = rates_finding(rows, sizes, {"sft": [At(0.0, 0), At(10.0, 50)], "eval": [At(5.0, 9)]}, ended=False)
    assert found == Finding(
        "10.0 rows/s (10.0 kB/s) were published in the mean, over 1 min 40 s. sft trained 5.0 rows/s."
    )


def test_publishing_that_has_slowed_is_to_be_looked_into_unless_the_stream_has_ended() -> None:
    rows = [At(float(second), amount) for second, amount in enumerate([0, 10, 20, 30, 40, 50, 60, 61, 62])]
    found = rates_finding(rows, rows, {}, ended=False)
    assert found.text.endswith("In the last quarter of that time it was 1.0 rows/s.")
    assert [change.text for change in found.changes] == [
        "Find out what has slowed the producer to 13 % of its mean: see its log and its sources"
    ]
    assert rates_finding(rows, rows, {}, ended=True).changes == ()


def test_no_rate_is_not_judged() -> None:
    assert not rates_finding([], [], {}, ended=False).known
    assert not rates_finding([At(1.0, 5)], [At(1.0, 5)], {}, ended=False).known


# Waits


def test_a_producer_that_is_gone_is_to_be_started_again_first() -> None:
    found = waits_finding(outlook(survey(replace(HEAD, state="idle"))), [], 0.0, [], 0)
    assert found.text == "The producer was stopped 2 s ago: start it again to go on; no consumer has registered."
    assert weights(found) == [1.5]
    (full,) = waits_finding(outlook(survey(replace(HEAD, state="idle"), free=9_999)), [], 0.0, [], 0).changes
    assert full.text.startswith("Make room, the disk is full, and start the producer again with the same command")
    failed = replace(HEAD, state="failed", note="s: No space left on device")
    (mend,) = waits_finding(outlook(survey(failed)), [], 0.0, [], 0).changes
    assert mend.text.startswith("Mend what it has failed at, and start the producer again")
    ended = waits_finding(outlook(survey(replace(HEAD, state="finished", ended=True))), [], 0.0, [], 0)
    assert ended.changes == ()


def test_a_reader_that_waits_for_a_running_producer_needs_a_faster_one() -> None:
    found = waits_finding(outlook(survey(consumers=(consumer("sft", needs=1240),))), [], 0.0, [], 0)
    assert found.text == "The producer is running; waiting for data: 'sft' for 6 chunks."
    assert [change.text for change in found.changes] == [
        "Make the producer faster, or start training later: 'sft' waits for data. With --transform, --workers N makes "
        "rows side by side; else its source sets the pace"
    ]
    assert commands(found) == [""]


def test_workers_are_proposed_where_they_make_the_rows() -> None:
    manifest = Manifest(ID, 10, NOW, True, {"kind": "swift"})
    encoded = survey(census={"manifest": manifest}, consumers=(consumer("sft", needs=1240),))
    assert commands(waits_finding(outlook(encoded), [], 0.0, [], 0)) == ["lazyshard-producer run … --workers N"]


def test_pauses_are_worth_a_look_at_the_log_and_weigh_more_where_training_came_up_with_them() -> None:
    live, pause = outlook(survey()), [Pause(100.0, 160.0, 7), Pause(10.0, 30.0, 2)]
    found = waits_finding(live, pause, 200.0, [], 4)
    assert (
        "Publishing stood still 2 times, for 1 min 20 s in all, the longest before chunk 7 for 1 min 0 s." in found.text
    )
    assert weights(found) == [LITTLE]
    dry = waits_finding(live, pause, 200.0, [Dry("sft", 120.0, 1.0)], 4)
    assert "At 1 of 4 checkpoints training had used up all that was published." in dry.text
    assert weights(dry) == [0.125, 0.4]
    assert waits_finding(live, pause, 20_000.0, [], 4).changes == ()


# Bad rows


def refused(rows: int, *, complete: bool = True) -> Refusals:
    first = RefusedRow("a.jsonl", 3, "no answer", "{}")
    others = [RefusedFor("torn", 1, 1, first)] if rows > 1 else []
    return Refusals(rows, (RefusedFor("no answer", max(1, rows - 1), 1, first), *others), 0, complete)


def test_refused_rows_are_to_be_looked_at_and_weigh_what_they_are_of_all() -> None:
    found = refusals_finding("s", refused(50), Made(source_rows=SourceRows(1000, 50, True)))
    assert found.text == "50 rows were refused, 5.0 % of those read; most of them, 49, for “no answer”."
    assert (commands(found), weights(found)) == (["lazyshard-producer quarantine s"], [0.05])
    one = refusals_finding("s", refused(1, complete=False), Made())
    assert one.text == "At least 1 row was refused; the reason: “no answer”."


def test_rows_that_were_refused_without_a_trace_are_to_be_kept() -> None:
    found = refusals_finding("s", None, Made(source_rows=SourceRows(1000, 3, True)))
    assert found.text == "3 rows were refused, and none of them was kept for a look."
    assert commands(found) == ["lazyshard-producer run … --on-bad-row quarantine"]
    assert refusals_finding("s", None, Made()) == Finding("No row was refused.")


# Disk


def test_what_every_consumer_is_done_with_is_to_be_deleted() -> None:
    found = disk_finding("s", outlook(survey(consumers=(consumer("b", 9000, 1200), consumer("a", 9000, 1000)))))
    assert found.text == (
        "The stream takes 12.3 MB, and 2.0 GB are free. At the rate of now the disk is full in 11 h 6 min. Every "
        "consumer is done with 1,000 chunks that are there."
    )
    assert commands(found) == [
        "lazyshard-producer run … --min-free-disk SIZE",
        "lazyshard-producer run … --retain consumed --consumers b,a",
    ]
    assert weights(found) == [1.2, 2 * LITTLE]


def test_a_stream_that_has_ended_keeps_its_chunks() -> None:
    ended = survey(replace(HEAD, state="finished", ended=True), consumers=(consumer("a", 9000, 1200),))
    assert disk_finding("s", outlook(ended)) == Finding("The stream takes 12.3 MB, and 2.0 GB are free.")


def test_a_consumer_without_a_sign_for_days_is_to_be_forgotten() -> None:
    gone = survey(free=None, consumers=(consumer("old run", 10, 1, at=NOW - 3 * 86400),))
    found = disk_finding("/s", outlook(gone))
    assert commands(found) == ["lazyshard forget /s 'old run'"]
    assert found.changes[0].text == "Forget 'old run', unless it will come back: it has given no sign for 3 days 0 h"


def test_sizes_from_some_chunks_are_about() -> None:
    found = disk_finding("s", outlook(survey(free=None, disk=DiskUse(12_340_000, False, 10_000.0, ()))))
    assert found.text.startswith("The stream takes about 12.3 MB.")


# Damage


def test_damage_comes_before_all_else() -> None:
    assert damage_finding("s", [], 0) is None
    found = damage_finding(str(Path("/a b")), ["x"], 2)
    assert found is not None
    assert (
        found.text
        == "Not all could be read: 2 chunks and 1 problem with other files. What follows is told of the rest."
    )
    assert found.changes == (Change(2.0, "Look for damage, and restore what it names", "lazyshard verify '/a b'"),)
