"""Units: what a name stands for, and that "auto" is decided once and for all ranks alike, whenever they look."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.plan.deal import Deal, auto_unit, named_unit, window_positions
from tests.plan.cases import PROPERTY


@pytest.mark.parametrize(
    ("unit", "samples"), [("chunk", 100), ("sample", 1), ("batch", 8), (1, 1), (250, 250), ("auto", None)]
)
def test_what_a_unit_stands_for(unit: str | int, samples: int | None) -> None:
    assert named_unit(unit, 100, 8) == samples


@pytest.mark.parametrize("unit", ["row", "", "8", 0, -1, True, 1.0, None, ["chunk"]])
def test_other_units_are_refused_with_those_that_there_are(unit: Any) -> None:
    with pytest.raises(ValueError, match="unit is one of chunk, sample, batch, auto or a number from 1, got "):
        named_unit(unit, 100, 8)


@pytest.mark.parametrize(
    ("published", "ended", "limit", "unit"),
    [
        # Eight ranks with chunks of 100 and batches of 4.
        (800, True, None, 100),
        (100_000, False, None, 100),
        (799, True, None, 4),
        (0, True, None, 4),
        # It may grow, or end here.
        (799, False, None, None),
        (0, False, None, None),
        # Never more than the limit is drawn.
        (0, False, 799, 4),
        (100_000, True, 799, 4),
        (0, False, 800, None),
        (800, False, 800, 100),
        # A limit that was not reached.
        (799, True, 100_000, 4),
    ],
)
def test_chunks_are_taken_where_each_rank_has_a_full_one(
    published: int, ended: bool, limit: int | None, unit: int | None
) -> None:
    assert auto_unit(8, 100, 4, published, ended, limit) == unit


@PROPERTY
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.integers(0, 60), st.none() | st.integers(1, 60))
def test_whoever_looks_at_any_time_decides_as_one_who_comes_after_the_end(
    dp: int, size: int, batch: int, total: int, limit: int | None
) -> None:
    known = total if limit is None else min(total, limit)
    at_the_end = auto_unit(dp, size, batch, total, True, limit)
    assert at_the_end == (size if known >= dp * size else batch)
    looks = [auto_unit(dp, size, batch, published, False, limit) for published in range(total + 1)]
    assert set(looks) <= {None, at_the_end}
    # Nobody waits longer than a rank which draws chunks would for its first sample.
    assert looks[dp * size :] == [at_the_end] * len(looks[dp * size :])


@PROPERTY
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.integers(0, 60))
def test_auto_leaves_no_rank_without_a_whole_unit_of_what_is_drawn(dp: int, size: int, batch: int, total: int) -> None:
    unit = auto_unit(dp, size, batch, total, True, None)
    assert unit is not None
    whole = Deal(dp, unit).whole_positions(total)
    if unit == batch:
        assert whole == total // (dp * batch) * batch, "what is drawn and nothing else, so no row by itself"
    else:
        assert 2 * dp * whole > total, "less than half of the stream is tail"


def test_a_window_has_whole_units() -> None:
    assert [window_positions(2, 100, unit) for unit in (100, 1, 8, 7, 1000)] == [200, 200, 200, 203, 1000]
    assert window_positions(0, 100, 7) == 0
