"""What the benchmark compares with: Megatron's rules give out every row, as they are told to do."""

from __future__ import annotations

import numpy as np
import pytest

from lazyshard.plan.balance import Cost
from scripts.benchmarks.bench_balance import group, main, padded, read
from scripts.benchmarks.bench_balance_megatron import cp_balanced, cp_balanced_costs, dp_balanced_costs

TOKENS = Cost(1.0, 0.0).of


def test_the_rule_of_dp_balanced_packs_rows_as_they_come() -> None:
    # Up to 10 tokens: 4 + 5, 9, 3 + 3 + 3 and 2 are four packs, two for each rank.
    assert dp_balanced_costs(2, [4, 5, 9, 3, 3, 3, 2], 10, TOKENS).tolist() == [[9, 9], [9, 2]]
    # Without the last one there are three: the last row of the last pack is one of its own.
    assert dp_balanced_costs(2, [4, 5, 9, 3, 3, 3], 10, TOKENS).tolist() == [[9, 9], [6, 3]]


def test_megatrons_scheduler_gives_out_every_row_once_and_shares_long_ones() -> None:
    pytest.importorskip("megatron.core")
    lengths = [9, 8, 7, 5, 4, 3, 2, 1]
    costs = cp_balanced_costs(cp_balanced(4, 10), lengths, TOKENS)
    assert costs.sum() == sum(lengths)
    shared = cp_balanced_costs(cp_balanced(4, 4), lengths, TOKENS)
    assert shared.sum() == pytest.approx(sum(lengths))
    assert shared.max() < np.max(lengths)


def test_rows_grouped_by_length_are_all_there_and_meet_rows_of_their_length() -> None:
    lengths = np.arange(1, 33)
    steps = group(lengths, 2, 4)
    assert (steps.shape, sorted(steps.ravel().tolist())) == ((4, 2, 4), lengths.tolist())
    # A quarter of all is a piece, and here a step: sorted, and given to the ranks in turn.
    for step in steps:
        assert sorted(step.ravel().tolist(), reverse=True) == step.T.ravel().tolist()


def test_what_padding_takes() -> None:
    # Two ranks: rows of 1 and 3 tokens beside 2 and 2: 10 tokens are computed for 8, 6 by the slower rank, not 4.
    share, takes = padded(np.array([[[1, 3], [2, 2]]]), Cost(1.0, 0.0))
    assert (share, takes) == pytest.approx((0.2, 1.5))
    lengths = np.arange(16)
    # Chunks of 4: rank 0 reads rows 0 to 3, rank 1 rows 4 to 7.
    assert read(lengths, 2, 4, 2)[:2].tolist() == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_the_benchmark_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "--ranks",
        "4",
        "--samples-per-chunk",
        "80",
        "--stripes",
        "1",
        "--global-batches",
        "1",
        "--rounds",
        "1",
    )
    monkeypatch.setattr("sys.argv", ["bench_balance.py", *arguments, "--global-batch", "32"])
    assert main() == 0
    printed = capsys.readouterr().out
    for order in (
        "1 a micro batch, as they come",
        "8 a micro batch, dealt by cost",
        "8 a micro batch, grouped by length",
        "dealt by their samples",
        "DpBalancedScheduler's rule",
    ):
        assert order in printed
