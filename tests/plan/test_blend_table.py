"""The periodic blend: against the rule it tabulates, draw by draw, and against Megatron Core's own."""

from __future__ import annotations

import importlib
import math
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.plan.blend import BlendTable, whole_parts
from tests.plan.oracle import turns

PARTS = st.lists(st.integers(1, 12), min_size=1, max_size=20)

DRAWS = 1_000_000


def order_of(table: BlendTable, count: int) -> list[int]:
    found: list[int] = table.draws(np.arange(count))[0].tolist()
    return found


@pytest.mark.parametrize(
    ("parts", "order"),
    [
        ([1], [0, 0, 0]),
        ([1, 3], [1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1]),
        ([4, 1], [0, 1, 0, 0, 0, 0, 1, 0, 0, 0]),
        ([2, 1, 1], [0, 1, 2, 0, 0, 1, 2, 0]),
    ],
)
def test_orders_are_pinned(parts: list[int], order: list[int]) -> None:
    assert order_of(BlendTable(parts), len(order)) == order


@given(PARTS)
def test_the_table_is_the_rule_over_several_periods(parts: list[int]) -> None:
    table = BlendTable(parts)
    count = 3 * table.period + 1
    order = order_of(table, count)
    assert order == turns(parts, count)
    assert table.streams(0, count) == order
    assert [table.streams(at, at + 3) for at in range(count - 2)] == [order[at : at + 3] for at in range(count - 2)]
    draws = table.draws(np.arange(count))[1].tolist()
    assert draws == [order[:i].count(stream) for i, stream in enumerate(order)]


@given(PARTS, st.integers(0, 10**12), st.data())
def test_counts_and_positions_agree_however_far(parts: list[int], position: int, data: st.DataObject) -> None:
    table = BlendTable(parts)
    (stream,), (draw,) = (found.tolist() for found in table.draws(np.array([position])))
    before = table.counts(position)
    assert sum(before) == position
    assert before[stream] == draw
    assert table.draw(position) == (stream, draw)
    assert table.position(stream, draw) == position
    assert [n + (i == stream) for i, n in enumerate(before)] == list(table.counts(position + 1))
    other = data.draw(st.integers(0, len(parts) - 1))
    next_of_other = table.position(other, before[other])
    assert next_of_other >= position
    assert table.counts(next_of_other)[other] == before[other]


@pytest.mark.parametrize(
    ("weights", "parts"),
    [
        ([0.8, 0.2], (4, 1)),
        ([1 / 3, 2 / 3], (1, 2)),
        ([3, 6, 9], (1, 2, 3)),
        ([0.1, 0.2, 0.7], (1, 2, 7)),
        ([1e-3, 1.0], (1, 1000)),
        ([7.0], (1,)),
    ],
)
def test_weights_that_people_write_are_met_exactly(weights: list[float], parts: tuple[int, ...]) -> None:
    assert whole_parts(weights) == parts


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=40))
def test_any_weights_are_met_as_nearly_as_the_period_allows(weights: list[float]) -> None:
    parts = whole_parts(weights)
    assert min(parts) >= 1
    assert sum(parts) <= 1 << 14
    wanted = [weight / math.fsum(weights) * sum(parts) for weight in weights]
    raised = sum(one < 1 for one in wanted)
    for one, part in zip(wanted, parts, strict=True):
        assert abs(part - one) < 1 + raised, (wanted, parts)


def test_a_tiny_weight_keeps_one_draw_of_a_period() -> None:
    assert whole_parts([1.0, 1e-9]) == (16_383, 1)
    assert whole_parts([1.0, 1e-9], 10) == (9, 1)
    assert len(whole_parts([1.0] * 20_000)) == 20_000


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="a weight is a finite number above 0, got 0"):
        whole_parts([1, 0])
    with pytest.raises(ValueError, match="a period of 2 has no part for each of 3 streams"):
        whole_parts([1, 1, 1], 2)
    for parts in ([], [1, 0]):
        with pytest.raises(ValueError, match="each stream of a blend has one draw of a period or more"):
            BlendTable(parts)


def megatron(parts: tuple[int, ...]) -> tuple[Any, Any]:
    """Streams and draws by Megatron Core's own helpers, compiled."""
    with warnings.catch_warnings():
        # Of Transformer Engine, which is not there.
        warnings.simplefilter("ignore")
        pytest.importorskip("megatron.core.datasets.helpers", exc_type=ImportError)
        build = importlib.import_module("megatron.core.datasets.helpers").build_blending_indices
    streams, draws = np.zeros(DRAWS, np.int16), np.zeros(DRAWS, np.int64)
    build(streams, draws, np.array(parts) / sum(parts), len(parts), DRAWS, False)
    return streams, draws


EXACT = [
    (1, 1),
    (1, 3),
    (3, 5),
    (5, 2, 1),
    (1, 2, 4, 9),
    (47, 10, 23, 28, 20),
    (1, 1022, 1),
    (8000, 100, 50, 30, 12),
    *(whole_parts([(7 * i * i + seed) % 101 + 1 for i in range(size)], 8192) for size, seed in [(30, 1), (100, 2)]),
]


@pytest.mark.parametrize("parts", [parts for parts in EXACT if sum(parts) & (sum(parts) - 1) == 0])
def test_equal_to_megatron_where_its_floats_are_exact(parts: tuple[int, ...]) -> None:
    streams, draws = BlendTable(parts).draws(np.arange(DRAWS))
    theirs = megatron(parts)
    assert (streams == theirs[0]).all()
    assert (draws == theirs[1]).all()


@pytest.mark.parametrize(
    "weights",
    [
        [0.8, 0.2],
        [0.2, 0.8],
        [0.5, 0.3, 0.2],
        [0.4, 0.3, 0.2, 0.1],
        [0.9, 0.1],
        [1, 1, 1],
        [2, 5, 3],
        [1, 2, 3, 4, 5, 6, 7],
    ],
)
def test_equal_to_megatron_for_weights_as_people_write_them(weights: list[float]) -> None:
    parts = whole_parts(weights)
    assert (BlendTable(parts).draws(np.arange(DRAWS))[0] == megatron(parts)[0]).all()


@pytest.mark.parametrize(
    "weights", [[0.7, 0.3], [0.33, 0.67], [0.45, 0.25, 0.2, 0.05, 0.05], [18, 1, 29, 13, 22, 7, 14]]
)
def test_elsewhere_megatron_takes_another_of_equals_and_comes_back(weights: list[float]) -> None:
    parts = whole_parts(weights)
    period, count = sum(parts), DRAWS // sum(parts) * sum(parts)
    ours, theirs = BlendTable(parts).draws(np.arange(count))[0], megatron(parts)[0][:count]
    assert (ours != theirs).any(), "floats do not round here: this belongs to the test above"
    errors, each = np.array(parts), np.array(parts)
    for draw, stream in enumerate(theirs[: 20 * period].tolist()):
        assert errors[stream] == errors.max(), f"draw {draw} is not of the greatest error, counted exactly"
        errors[stream] -= period
        errors += each if draw else 0
    for streams in (ours, theirs):
        by_period = np.array([np.bincount(one, minlength=len(parts)) for one in streams.reshape(-1, period)])
        assert (by_period == each).all(), "every period has its parts"
