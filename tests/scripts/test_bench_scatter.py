"""scripts/bench_scatter: a wrong fit, or ranks that miss samples without a word, would make its figures void."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Final

import pytest

from scripts.benchmarks.bench_scatter import main, make_data
from scripts.benchmarks.bench_scatter_figures import DISPATCHER, OURS, Data, Figures, Pass, by_ranks, figures, results
from scripts.benchmarks.bench_scatter_model import Line, each_round, failures, fit_constant, fit_line, misfit

pytestmark = pytest.mark.full

ROOT: Final = Path(__file__).resolve().parents[2]
DATA: Final = Data("A", Path("A"), batch=2, steps=2)


def took(*ms: float, begun: tuple[float, ...] = (0.0, 0.0), ids: tuple[int, ...] = ()) -> Pass:
    return Pass(list(begun), list(ms), [one / 2 for one in ms], [one / 4 for one in ms], list(ids))


def test_a_line_is_found_again() -> None:
    assert fit_line({2: 5.0, 4: 9.0, 8: 17.0}) == Line(1.0, 2.0)
    assert Line(1.0, 2.0).at(64) == 129.0
    assert Line(1.0, 2.0).at(1024) == 2049.0


def test_of_points_beside_a_line_the_squares_are_least() -> None:
    line = fit_line({1: 1.0, 2: 3.0, 3: 2.0})
    assert line.fixed == pytest.approx(1.0)
    assert line.each == pytest.approx(0.5)
    assert misfit(line, {1: 1.0, 2: 3.0, 3: 2.0}) == pytest.approx(0.5)


def test_a_constant_is_the_mean_and_stays_it() -> None:
    line = fit_constant({2: 0.25, 4: 0.5, 8: 0.75})
    assert line == Line(0.5, 0.0)
    assert line.at(1024) == 0.5
    assert misfit(line, {2: 0.25, 4: 0.5, 8: 0.75}) == 1.0


def test_one_number_of_ranks_makes_no_line() -> None:
    with pytest.raises(ValueError, match=r"two numbers of ranks or more, got \[2\]"):
        fit_line({2: 1.0})
    with pytest.raises(ValueError, match="got none"):
        fit_constant({})


def test_rounds_are_taken_apart() -> None:
    assert each_round({2: [1.0, 2.0], 4: [3.0, 4.0]}) == [{2: 1.0, 4: 3.0}, {2: 2.0, 4: 4.0}]


def test_a_dispatcher_that_is_slower_and_grows_holds() -> None:
    assert failures("A", {2: [2.0, 2.5], 4: [4.0, 4.5]}, {2: [1.0, 1.5], 4: [1.0, 1.5]}) == []


@pytest.mark.parametrize(
    ("scattered", "own", "found"),
    [
        pytest.param(
            {2: [1.0], 4: [4.0]},
            {2: [2.0], 4: [2.0]},
            ["data A, 2 ranks: the dispatcher takes 0.50 of our time, asked for: more than 1"],
            id="slower with 2 ranks",
        ),
        pytest.param(
            {2: [5.0], 4: [6.0]},
            {2: [1.0], 4: [4.0]},
            ["data A: each rank adds -1 ms more to the dispatcher's step than to ours, asked for: more than 0"],
            id="grows faster",
        ),
        pytest.param(
            {2: [1.0], 4: [1.0]},
            {2: [1.0], 4: [1.0]},
            [
                "data A, 2 ranks: the dispatcher takes 1.00 of our time, asked for: more than 1",
                "data A, 4 ranks: the dispatcher takes 1.00 of our time, asked for: more than 1",
                "data A: each rank adds 0 ms more to the dispatcher's step than to ours, asked for: more than 0",
            ],
            id="alike",
        ),
    ],
)
def test_what_does_not_hold_is_told(
    scattered: dict[int, list[float]], own: dict[int, list[float]], found: list[str]
) -> None:
    assert failures("A", scattered, own) == found


def test_ratios_are_taken_within_a_round() -> None:
    # The medians alone, 2 and 3, would say that the dispatcher is faster.
    assert failures("A", {2: [9.0, 2.0, 2.0], 4: [99.0] * 3}, {2: [1.0, 1.9, 1.9], 4: [1.0] * 3}) == []


def test_figures_of_a_round() -> None:
    # The first step is to warm up. Rank 1 begins later, and is later.
    rank_0 = took(50.0, 1.0, 2.0, 3.0, begun=(0.0, 100.0, 200.0, 300.0))
    rank_1 = took(50.0, 5.0, 1.0, 4.0, begun=(0.0, 101.0, 202.0, 304.0))
    assert figures([rank_0, rank_1], 3) == Figures(
        rank=2.5,
        slowest=4.0,
        whole=6.0,
        all_processor=3.0,
        busiest_processor=2.0,
        busiest_processor_mean=5.0 / 3,
        loading=0.5,
    )


def test_figures_are_found_by_data_ranks_and_variant() -> None:
    passes = [took(1.0, 1.0, ids=(0, 1, 4, 5)), took(3.0, 3.0, ids=(2, 3, 6, 7))]
    found = {(1, "A", 2, DISPATCHER): passes, (1, "A", 2, OURS): passes[::-1], (2, "A", 2, OURS): passes}
    rounds = results(found, [DATA], [2], 2)
    assert by_ranks(rounds, "A", OURS, "slowest") == {2: [3.0, 3.0]}
    assert by_ranks(rounds, "A", DISPATCHER, "loading") == {2: [0.25]}


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        pytest.param([(0, 1, 4, 5), (2, 3, 6, 6)], "1 are missing, 1 repeated, the ranks got [4, 4]", id="one twice"),
        pytest.param([(0, 1, 4, 5), (2, 3, 6, 8)], "1 are missing, 0 repeated, the ranks got [4, 4]", id="foreign"),
        pytest.param([(0, 1, 4, 5, 7), (2, 3, 6)], "0 are missing, 0 repeated, the ranks got [5, 3]", id="uneven"),
        pytest.param([(0, 1, 4, 5)], "4 are missing, 0 repeated, the ranks got [4]", id="a rank too few"),
    ],
)
def test_samples_that_do_not_come_once_stop_the_benchmark(ids: list[tuple[int, ...]], told: str) -> None:
    found = {(1, "A", 2, OURS): [took(1.0, 1.0, ids=one) for one in ids]}
    with pytest.raises(SystemExit) as stopped:
        results(found, [DATA], [2], 2)
    assert str(stopped.value) == (
        "scripts/bench_scatter: round 1, data A, 2 ranks, LazyShardedDataset: expected each of 8 samples once over 2 "
        "ranks; " + told
    )


def test_the_streams_are_whole_chunks_of_every_rank(tmp_path: Path) -> None:
    data = make_data("A", tmp_path, ranks=3, steps=2)
    assert data == Data("A", tmp_path / "A", batch=8, steps=8)
    chunks = sorted(data.directory.glob("chunk_*.jsonl"))
    assert [len(chunk.read_bytes().splitlines()) for chunk in chunks] == [16] * 12


@pytest.mark.timeout(300)  # an import of ms-swift, while other tests keep the cores busy
def test_a_run_over_real_ranks_tells_what_it_found(tmp_path: Path) -> None:
    for name in ("ms-swift", "transformers"):
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            pytest.skip(f"not installed: {name} (see scripts/environment)")
    facts = tmp_path / "facts.json"
    command = [sys.executable, str(ROOT / "scripts/benchmarks/bench_scatter.py"), "--ranks", "2", "3", "--steps", "3"]
    command += ["--rounds", "1", "--dir", str(tmp_path), "--json", str(facts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every sample once over the ranks, in each pass" in done.stdout
    found = json.loads(facts.read_bytes())
    for name in "AB":
        cases = [(one["ranks"], one["variant"], len(one["rounds"])) for one in found[name]["measured"]]
        assert cases == [(2, DISPATCHER, 1), (2, OURS, 1), (3, DISPATCHER, 1), (3, OURS, 1)]
        assert set(found[name]["model"][DISPATCHER]["extrapolated_ms"]) == {"64", "1024"}


@pytest.mark.parametrize("arguments", [["--ranks", "2"], ["--ranks", "1", "2"], ["--steps", "0"], ["--rounds", "0"]])
def test_wrong_arguments_are_told(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_scatter.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "--ranks are two different numbers or more" in capsys.readouterr().err
