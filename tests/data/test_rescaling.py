"""Runs that go on with other ranks again and again, against lists of samples, and on a stream that grows meanwhile."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshard import ChunkWriter
from lazyshard.errors import WaitTimeout
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
        unit = {"chunk": PER_CHUNK, "sample": 1}.get(str(self.unit), self.unit)
        assert isinstance(unit, int)
        window = -(-self.window * PER_CHUNK // unit) * unit
        nothing: list[tuple[int, int]] = []
        parts: list[tuple[int, int, int, list[tuple[int, int]]]]
        parts = [(dp, batch_size, draws, nothing) for dp, batch_size, draws in self.parts]
        return oracle.course_of_draws(unit, window, self.seed, parts, TOTAL)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Any run of up to five parts and three epochs or so."""
    parts: list[tuple[int, int, int]] = []
    for _ in range(draw(st.integers(1, 5))):
        dp, batch_size = draw(st.integers(1, 5)), draw(st.integers(1, 3))
        if parts and parts[-1][:2] == (dp, batch_size):
            # It would go on in the same part.
            dp += 1
        parts.append((dp, batch_size, draw(st.integers(1, 70)) // batch_size * batch_size or batch_size))
    units: list[int | str] = ["chunk", "sample", 3]
    return Run(
        draw(st.sampled_from(units)),
        draw(st.integers(0, 3)),
        draw(st.integers(0, 2)),
        draw(st.sampled_from(["block", "strided"])),
        parts,
    )


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return produce(tmp_path_factory.mktemp("stream") / "s", TOTAL, PER_CHUNK)


@PROPERTY
@given(runs())
def test_any_chain_of_ranks_draws_what_lists_say(stream: Path, run: Run) -> None:
    state: State | None = None
    consumed = 0
    for (dp, batch_size, draws), expected in zip(run.parts, run.expected(), strict=True):
        ranks = open_ranks(
            stream,
            dp,
            state,
            unit=run.unit,
            shuffle_window=run.window,
            seed=run.seed,
            layout=run.layout,
            batch_size=batch_size,
            num_samples=100_000,
        )
        for dataset, lane in zip(ranks, expected, strict=True):
            indices = dataset.rank_indices[:draws]
            assert [dataset.draw(index) for index in indices] == lane
            assert [row["id"] for row in dataset.__getitems__(list(indices))] == [sample for _, sample in lane]
        consumed += dp * draws
        assert ranks[0].consumed == consumed - dp * draws
        state = ranks[0].state_dict(consumed)


@PROPERTY
@given(runs(), st.integers(0, 60))
def test_run_that_stops_in_a_part_and_starts_again_is_the_same_run(stream: Path, run: Run, stop: int) -> None:
    """Goes on in the last part from somewhere in it."""
    options = {"unit": run.unit, "shuffle_window": run.window, "seed": run.seed, "num_samples": 100_000}
    state: State | None = None
    consumed = 0
    for dp, batch_size, draws in run.parts:
        begun, state_before = consumed, state
        consumed += dp * draws
        state = open_ranks(stream, dp, state, batch_size=batch_size, **options)[0].state_dict(consumed)
    # At the end of a micro batch.
    stop = min(stop, draws) // batch_size * batch_size
    ranks = open_ranks(stream, dp, state_before, batch_size=batch_size, **options)
    again = open_ranks(stream, dp, ranks[0].state_dict(begun + dp * stop), batch_size=batch_size, **options)
    for dataset, lane in zip(again, run.expected()[-1], strict=True):
        assert [dataset.draw(index) for index in dataset.rank_indices[: draws - stop]] == lane[stop:]


@pytest.mark.parametrize("window", [0, 1])
def test_resumed_again_and_again_while_the_stream_grows(tmp_path: Path, window: int) -> None:
    """Each part reads until data is missing, which is at the same step for all ranks."""
    directory = tmp_path / "s"
    writer = ChunkWriter(directory, PER_CHUNK)
    state: State | None = None
    seen: list[int] = []
    for number, dp in enumerate((2, 3, 1, 4, 4, 2, 3)):
        for row in range(writer.published_samples, 24 * (number + 1)):
            writer.write({"id": row})
        if number == 6:
            writer.close()
        options = {"max_total_samples": 200, "shuffle_window": window, "max_wait": 0.0, "layout": "strided"}
        ranks = open_ranks(directory, dp, state, **options)
        drawn: list[list[int]] = [[] for _ in ranks]
        for dataset, lane in zip(ranks, drawn, strict=True):
            try:
                for index in dataset.rank_indices:
                    if not dataset.in_epoch(index):
                        break
                    lane.append(dataset[index]["id"])
            except WaitTimeout:
                assert number < 6
        assert len({len(lane) for lane in drawn}) == 1
        seen += chain(*drawn)
        state = ranks[0].state_dict(len(seen))
    assert Counter(seen) == Counter(range(168))


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
