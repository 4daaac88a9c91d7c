"""Blends: the rule draw by draw, the periodic table of it, and both against Megatron Core's own."""

from __future__ import annotations

import importlib
import math
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.plan.blend import BlendTable, next_stream, shares, whole_parts
from tests.plan.oracle import turns

WEIGHTS = st.lists(st.floats(0.001, 1000), min_size=1, max_size=6)
PARTS = st.lists(st.integers(1, 12), min_size=1, max_size=20)

DRAWS = 1_000_000


def draw(weights: list[float], count: int) -> list[int]:
    """The order by the rule itself, in floats."""
    of, drawn, order = shares(weights), [0] * len(weights), []
    for _ in range(count):
        stream = next_stream(of, drawn)
        drawn[stream] += 1
        order.append(stream)
    return order


def order_of(table: BlendTable, count: int) -> list[int]:
    return [table.draw(position)[0] for position in range(count)]


def test_orders_are_pinned() -> None:
    assert draw([2, 1, 1], 8) == [0, 1, 2, 0, 0, 1, 2, 0]
    assert draw([0.9, 0.1], 12) == [0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    assert order_of(BlendTable([1, 3]), 12) == [1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1]
    assert order_of(BlendTable([4, 1]), 10) == [0, 1, 0, 0, 0, 0, 1, 0, 0, 0]


@given(WEIGHTS, st.integers(1, 300), st.data())
def test_no_stream_is_a_sample_per_stream_away_from_its_share(
    weights: list[float], count: int, data: st.DataObject
) -> None:
    order = draw(weights, count)
    for stream, share in enumerate(shares(weights)):
        assert abs(order.count(stream) - share * count) <= len(weights)
    among = sorted(data.draw(st.sets(st.integers(0, len(weights) - 1), min_size=1)))
    assert next_stream(shares(weights), [0] * len(weights), among) in among


@given(PARTS)
def test_the_table_is_the_rule_over_several_periods(parts: list[int]) -> None:
    table = BlendTable(parts)
    count = 3 * table.period + 1
    order = order_of(table, count)
    assert order == turns(parts, count)
    assert table.streams(0, count) == order
    assert [table.streams(at, at + 3) for at in range(count - 2)] == [order[at : at + 3] for at in range(count - 2)]
    draws = [table.draw(position)[1] for position in range(count)]
    assert draws == [order[:i].count(stream) for i, stream in enumerate(order)]


@given(PARTS, st.integers(0, 10**12), st.data())
def test_counts_and_positions_agree_however_far(parts: list[int], position: int, data: st.DataObject) -> None:
    table = BlendTable(parts)
    stream, nth = table.draw(position)
    before = table.counts(position)
    assert sum(before) == position
    assert before[stream] == nth
    assert table.position(stream, nth) == position
    assert [n + (i == stream) for i, n in enumerate(before)] == list(table.counts(position + 1))
    other = data.draw(st.integers(0, len(parts) - 1))
    next_of_other = table.position(other, before[other])
    assert next_of_other >= position
    assert table.counts(next_of_other)[other] == before[other]


@pytest.mark.parametrize(
    ("weights", "longest", "parts"),
    [
        ([0.8, 0.2], None, (4, 1)),
        ([1 / 3, 2 / 3], None, (1, 2)),
        ([0.1, 0.2, 0.7], None, (1, 2, 7)),
        ([1e-3, 1.0], None, (1, 1000)),
        ([7.0], None, (1,)),
        # A tiny one keeps one draw of a period.
        ([1.0, 1e-9], None, (16_383, 1)),
        ([1.0, 1e-9], 10, (9, 1)),
        ([1.0] * 20_000, None, (1,) * 20_000),
    ],
)
def test_weights_that_people_write_are_met_exactly(
    weights: list[float], longest: int | None, parts: tuple[int, ...]
) -> None:
    assert whole_parts(weights, longest) == parts


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=40))
def test_any_weights_are_met_as_nearly_as_the_period_allows(weights: list[float]) -> None:
    parts = whole_parts(weights)
    assert min(parts) >= 1
    assert sum(parts) <= 1 << 14
    wanted = [weight / math.fsum(weights) * sum(parts) for weight in weights]
    raised = sum(one < 1 for one in wanted)
    for one, part in zip(wanted, parts, strict=True):
        assert abs(part - one) < 1 + raised, (wanted, parts)


def test_what_cannot_be_is_refused() -> None:
    nan, inf = float("nan"), float("inf")
    wrong: list[list[float]] = [[], [0.0], [1.0, -1.0], [nan], [inf], [1e308, 1e308]]
    for weights in wrong:
        with pytest.raises(ValueError, match="weight"):
            shares(weights)
    with pytest.raises(ValueError, match=r"weight .* got 0"):
        whole_parts([1, 0])
    with pytest.raises(ValueError, match=r"period of 2 .* 3 streams"):
        whole_parts([1, 1, 1], 2)


def megatron(weights: Any, count: int) -> tuple[Any, Any]:
    """Streams and draws by Megatron Core's own helpers, compiled."""
    with warnings.catch_warnings():
        # Of Transformer Engine, which is not there.
        warnings.simplefilter("ignore")
        pytest.importorskip("megatron.core.datasets.helpers", exc_type=ImportError)
        build = importlib.import_module("megatron.core.datasets.helpers").build_blending_indices
    streams, draws = np.zeros(count, np.int16), np.zeros(count, np.int64)
    build(streams, draws, np.array(weights), len(weights), count, False)
    return streams, draws


@pytest.mark.full
@pytest.mark.parametrize("weights", [[1.0], [0.5, 0.5], [0.3, 0.5, 0.2, 1e-3], [1, 2, 3, 4, 5, 6, 7]])
def test_the_rule_is_megatrons(weights: list[float]) -> None:
    assert megatron(shares(weights), 20_000)[0].tolist() == draw(weights, 20_000)


EXACT = [
    (1, 1),
    (1, 3),
    (3, 5),
    (5, 2, 1),
    (1, 2, 4, 9),
    (47, 10, 23, 28, 20),
    (1, 1022, 1),
    *(whole_parts([(7 * i * i + seed) % 101 + 1 for i in range(size)], 8192) for size, seed in [(30, 1), (100, 2)]),
]
PEOPLES = [[0.8, 0.2], [0.2, 0.8], [0.5, 0.3, 0.2], [0.4, 0.3, 0.2, 0.1], [0.9, 0.1], [1.0] * 3, [2.0, 5.0, 3.0]]


@pytest.mark.parametrize(
    "parts", [*(parts for parts in EXACT if sum(parts) & (sum(parts) - 1) == 0), *map(whole_parts, PEOPLES)]
)
def test_equal_to_megatron_where_its_floats_are_exact_and_for_weights_as_people_write_them(
    parts: tuple[int, ...],
) -> None:
    table = BlendTable(parts)
    theirs = megatron(np.array(parts) / sum(parts), DRAWS)
    assert (np.array(table.streams(0, DRAWS)) == theirs[0]).all()
    assert [table.draw(position)[1] for position in range(0, DRAWS, 97)] == theirs[1][::97].tolist()


@pytest.mark.parametrize("weights", [[0.7, 0.3], [0.45, 0.25, 0.2, 0.05, 0.05], [18, 1, 29, 13, 22, 7, 14]])
def test_elsewhere_megatron_takes_another_of_equals_and_comes_back(weights: list[float]) -> None:
    parts = whole_parts(weights)
    period, count = sum(parts), DRAWS // sum(parts) * sum(parts)
    ours, theirs = np.array(BlendTable(parts).streams(0, count)), megatron(np.array(parts) / period, DRAWS)[0][:count]
    assert (ours != theirs).any(), "floats do not round here: this belongs to the test above"
    errors, each = np.array(parts), np.array(parts)
    for at, stream in enumerate(theirs[: 20 * period].tolist()):
        assert errors[stream] == errors.max(), f"draw {at} is not of the greatest error, counted exactly"
        errors[stream] -= period
        errors += each if at else 0
    for streams in (ours, theirs):
        by_period = np.array([np.bincount(one, minlength=len(parts)) for one in streams.reshape(-1, period)])
        assert (by_period == each).all(), "every period has its parts"
