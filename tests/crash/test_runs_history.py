"""What the run harness takes for every sample once, in order: told from small histories that are written out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.runs.history import Lived, Step, check_kept, check_whole, read_steps, survived
from tests.harness.runs.plan import LifePlan, make_plan
from tests.harness.tally import RunViolation

# Twelve samples, dealt in twos, in order
RUN = replace(make_plan(0), samples=12, per_chunk=2, unit=2, window=0, limit=12, indices=None)
# What two ranks then train, step by step
TWO: list[Step] = [[[0], [2]], [[1], [3]], [[4], [6]], [[5], [7]], [[8], [10]], [[9], [11]]]
# What one rank goes on with after two of these steps
ONE: list[Step] = [[[4]], [[5]], [[6]], [[7]], [[8]], [[9]], [[10]], [[11]]]


def life(steps: list[Step], dp: int = 2, origin: tuple[int, int] | None = None, batch_size: int = 1) -> Lived:
    plan = LifePlan(dp, batch_size, workers=0, iterable=False, early=False, every=1, back=0, kill=None)
    return Lived(plan, origin, steps)


def kind(*lives: Lived) -> str:
    with pytest.raises(RunViolation) as caught:
        check_whole(RUN, lives)
    return caught.value.kind


def test_history_is_what_each_checkpoint_was_resumed_from() -> None:
    lives = [life(TWO[:5]), life(ONE[:3], 1, (0, 2)), life(TWO[3:4], 2, (0, 3))]
    assert [steps for _, steps in survived(lives, 1, 2)] == [TWO[:2], ONE[:2]]
    assert [steps for _, steps in survived(lives, 2, 1)] == [TWO[:3], TWO[3:4]]


def test_whole_run_holds_with_and_without_a_change_of_ranks() -> None:
    check_whole(RUN, [life(TWO)])
    check_whole(RUN, [life(TWO[:4]), life(TWO[2:], 2, (0, 2))])
    check_whole(RUN, [life(TWO[:4]), life(ONE, 1, (0, 2))])


def test_life_that_trained_nothing_is_no_part_of_the_course() -> None:
    check_whole(RUN, [life(TWO[:2]), life([], 3, (0, 2)), life(ONE, 1, (1, 0))])


def test_fewer_than_a_batch_of_every_rank_may_be_left_over() -> None:
    three: list[Step] = [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]]
    check_whole(replace(RUN, limit=11), [life(three[:1], 3, batch_size=2)])
    assert kind(life(three[:1], 3, batch_size=2)) == "skipped"


def test_sample_trained_twice_is_found() -> None:
    assert kind(life(TWO[:3]), life(TWO[2:], 2, (0, 3))) == "twice"


def test_sample_skipped_is_found() -> None:
    assert kind(life(TWO[:3]), life(TWO[4:], 2, (0, 3))) == "skipped"


def test_other_order_is_found() -> None:
    assert kind(life([*TWO[:4], TWO[5], TWO[4]])) == "order"
    assert kind(life([step[::-1] for step in TWO])) == "order"
    assert kind(life([*TWO, [[12], [13]]])) == "order"


def test_needed_chunk_that_is_deleted_is_found() -> None:
    lives = [life(TWO)]
    check_kept(RUN, lives, 0, 2, 2)
    with pytest.raises(RunViolation, match=r"sample 5 of chunk 2 is still to be trained"):
        check_kept(RUN, lives, 0, 3, 3)


def test_steps_count_once_all_ranks_have_written_them_down(tmp_path: Path) -> None:
    (tmp_path / "rank-0").write_text("0 4 5\n1 6 7\n")
    assert read_steps(tmp_path, 2) == []
    (tmp_path / "rank-1").write_text("0 8 9\n")
    assert read_steps(tmp_path, 2) == [[[4, 5], [8, 9]]]
