from __future__ import annotations

import importlib
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.plan.blend import next_stream, shares

WEIGHTS = st.lists(st.floats(0.001, 1000), min_size=1, max_size=6)


def draw(weights: list[float], count: int) -> list[int]:
    of, drawn, order = shares(weights), [0] * len(weights), []
    for _ in range(count):
        stream = next_stream(of, drawn)
        drawn[stream] += 1
        order.append(stream)
    return order


def test_order_of_draws_is_pinned() -> None:
    assert draw([2, 1, 1], 8) == [0, 1, 2, 0, 0, 1, 2, 0]
    assert draw([0.9, 0.1], 12) == [0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]


@given(WEIGHTS, st.integers(1, 300))
def test_no_stream_is_a_sample_per_stream_away_from_its_share(weights: list[float], count: int) -> None:
    order = draw(weights, count)
    for stream, share in enumerate(shares(weights)):
        assert abs(order.count(stream) - share * count) <= len(weights)


@given(WEIGHTS.filter(lambda weights: len(weights) > 1), st.data())
def test_streams_that_are_left_out_are_never_chosen(weights: list[float], data: st.DataObject) -> None:
    among = sorted(data.draw(st.sets(st.integers(0, len(weights) - 1), min_size=1)))
    assert next_stream(shares(weights), [0] * len(weights), among) in among


@pytest.mark.parametrize("weights", [[], [0.0], [1.0, -1.0], [float("nan")], [float("inf")], [1e308, 1e308]])
def test_weights_that_cannot_be_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weight"):
        shares(weights)


@pytest.mark.parametrize("weights", [[1.0], [0.5, 0.5], [0.3, 0.5, 0.2, 1e-3], [1, 2, 3, 4, 5, 6, 7]])
def test_same_order_as_megatron_core(weights: list[float]) -> None:
    with warnings.catch_warnings():
        # Of Transformer Engine, which is not there.
        warnings.simplefilter("ignore")
        helpers: Any = pytest.importorskip("megatron.core.datasets.helpers", exc_type=ImportError)
    count = 20_000
    stream, sample = np.zeros(count, np.int16), np.zeros(count, np.int64)
    build = importlib.import_module(helpers.__name__).build_blending_indices
    build(stream, sample, np.array(shares(weights)), len(weights), count, False)
    assert stream.tolist() == draw(weights, count)
