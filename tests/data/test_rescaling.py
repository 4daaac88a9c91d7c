"""Runs that continue with other ranks again and again, against lists of samples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.runs import State, open_ranks
from tests.plan import oracle
from tests.stream.streams import produce

PER_CHUNK = 4
TOTAL = 90

PROPERTY = settings(deadline=None, database=None, derandomize=True, max_examples=150)


@dataclass(frozen=True)
class Run:
    """A run over several parts: of each, ranks, micro batch and draws."""

    unit: int | str
    window: int
    seed: int
    layout: str
    parts: list[tuple[int, int, int]]

    def expected(self) -> list[list[list[tuple[int, int]]]]:
        """Returns epoch and sample of every draw, by part and rank."""
        unit = self.unit if isinstance(self.unit, int) else {"chunk": PER_CHUNK, "sample": 1}[self.unit]
        window = -(-self.window * PER_CHUNK // unit) * unit
        return oracle.course_of_draws(unit, window, self.seed, [(*part, []) for part in self.parts], TOTAL)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Any run of up to five parts and three epochs or so."""
    parts: list[tuple[int, int, int]] = []
    for _ in range(draw(st.integers(1, 5))):
        dp, batch_size = draw(st.integers(1, 5)), draw(st.integers(1, 3))
        # With the same it would continue in the same part.
        dp += bool(parts and parts[-1][:2] == (dp, batch_size))
        parts.append((dp, batch_size, draw(st.integers(1, 70)) // batch_size * batch_size or batch_size))
    units: list[int | str] = ["chunk", "sample", 3]
    unit = draw(st.sampled_from(units))
    layout = draw(st.sampled_from(["block", "strided"]))
    return Run(unit, draw(st.integers(0, 3)), draw(st.integers(0, 2)), layout, parts)


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return produce(tmp_path_factory.mktemp("stream") / "s", TOTAL, PER_CHUNK)


@PROPERTY
@given(runs(), st.integers(0, 60))
def test_any_chain_of_ranks_draws_what_lists_say(stream: Path, run: Run, stop: int) -> None:
    """A run that stops within a part and starts again, at the end of any micro batch, is the same run."""
    state: State | None = None
    consumed = 0
    common = {"unit": run.unit, "shuffle_window": run.window, "seed": run.seed, "num_samples": 100_000}
    for (dp, batch_size, draws), expected in zip(run.parts, run.expected(), strict=True):
        options: dict[str, Any] = {**common, "batch_size": batch_size}
        ranks = open_ranks(stream, dp, state, layout=run.layout, **options)
        for dataset, lane in zip(ranks, expected, strict=True):
            indices = dataset.rank_indices[:draws]
            assert [dataset.draw(index) for index in indices] == lane
            assert [row["id"] for row in dataset.__getitems__(list(indices))] == [sample for _, sample in lane]
        before = min(stop, draws) // batch_size * batch_size
        again = open_ranks(stream, dp, ranks[0].state_dict(consumed + dp * before), **options)
        for dataset, lane in zip(again, expected, strict=True):
            assert [dataset.draw(index) for index in dataset.rank_indices[: draws - before]] == lane[before:]
        assert ranks[0].consumed == consumed
        consumed += dp * draws
        state = ranks[0].state_dict(consumed)


def test_golden_order_of_a_run_on_two_three_and_one_ranks(stream: Path) -> None:
    """What users rely on from release to release."""
    state: State | None = None
    orders = []
    for dp, draws, consumed in ((2, 3, 6), (3, 4, 18), (1, 8, 26)):
        ranks = open_ranks(stream, dp, state, shuffle_window=1, seed=1)
        orders.append([[dataset[index]["id"] for index in dataset.rank_indices[:draws]] for dataset in ranks])
        state = ranks[0].state_dict(consumed)
    assert orders == GOLDEN


GOLDEN = [
    [[0, 3, 1], [5, 4, 7]],
    [[2, 8, 11, 9], [6, 13, 12, 15], [19, 18, 17, 16]],
    [[10, 14, 20, 23, 21, 22, 27, 26]],
]
