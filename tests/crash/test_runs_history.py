"""What the run harness takes for every sample once, in order: told from small histories that are written out."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.runs.history import Lived, Step, check_kept, check_whole, read_steps
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


THREE: list[Step] = [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]]


@pytest.mark.parametrize(
    ("lives", "limit", "kind"),
    [
        ([life(TWO)], 12, None),
        ([life(TWO[:4]), life(TWO[2:], 2, (0, 2))], 12, None),
        ([life(TWO[:4]), life(ONE, 1, (0, 2))], 12, None),
        # One that trained nothing is no part of the course.
        ([life(TWO[:2]), life([], 3, (0, 2)), life(ONE, 1, (1, 0))], 12, None),
        # Fewer than a batch of every rank may be left over.
        ([life(THREE[:1], 3, batch_size=2)], 11, None),
        ([life(THREE[:1], 3, batch_size=2)], 12, "skipped"),
        ([life(TWO[:3]), life(TWO[2:], 2, (0, 3))], 12, "twice"),
        ([life(TWO[:3]), life(TWO[4:], 2, (0, 3))], 12, "skipped"),
        ([life([*TWO[:4], TWO[5], TWO[4]])], 12, "order"),
        ([life([step[::-1] for step in TWO])], 12, "order"),
        ([life([*TWO, [[12], [13]]])], 12, "order"),
    ],
)
def test_what_is_whole_and_what_is_not(lives: list[Lived], limit: int, kind: str | None) -> None:
    found = None
    try:
        check_whole(replace(RUN, limit=limit), lives)
    except RunViolation as error:
        found = error.kind
    assert found == kind


def test_needed_chunk_that_is_deleted_is_found() -> None:
    lives = [life(TWO)]
    check_kept(RUN, lives, 0, 2, 2)
    with pytest.raises(RunViolation):
        check_kept(RUN, lives, 0, 3, 3)


def test_steps_count_once_all_ranks_have_written_them_down(tmp_path: Path) -> None:
    (tmp_path / "rank-0").write_text("0 4 5\n1 6 7\n")
    assert read_steps(tmp_path, 2) == []
    (tmp_path / "rank-1").write_text("0 8 9\n")
    assert read_steps(tmp_path, 2) == [[[4, 5], [8, 9]]]
