"""All benchmarks' results in one table and in pictures: none is lost, none is shown as what it is not."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks import bench
from scripts.benchmarks.bench_figures import BENCHMARKS, Figure, figures_of, markdown, number, with_unit
from scripts.benchmarks.bench_plots import OTHERS, OURS, draw, groups_of

LINES: dict[str, dict[str, Any]] = {
    "read": {
        "machine": "here",
        "reading": {
            "prose": [
                {"variant": "orjson floor", "us_a_row": 3.0, "ratio": 1.0, "ratios": [1.0, 1.0]},
                {"variant": "ds[i] in order", "us_a_row": 4.0, "ratio": 0.8, "ratios": [0.75, 0.85]},
            ]
        },
        "first_sample_ms": [1.5, 1.25],
        "memory_kb": [[20, 1000]],
    },
    "resume": {
        "machine": "here",
        "load": 1.0,
        "first": [
            {"draws": 5, "saved": 8, "ranks": 6, "window": 4, "live": True, "rescales": 2, "consumed": 40, "ms": [2.5]}
        ],
        "plan": [{"variant": "in order", "end_known": True, "scalar_s": [5e-7], "vector_s": [4e-9]}],
        "rescale": {"all ranks": [0.25]},
        "peers": [
            {"loader": "LazyShardedDataset", "version": "this", "ms": [[1.0], [2.0]], "peak_mb": 4.0},
            {"loader": "StatefulDataLoader", "version": "1", "ms": [[3.0], [4.0]], "peak_mb": 4.0},
        ],
        "worse": [],
    },
    "producer": {
        "machine": "here",
        "prose": [
            {"variant": "orjson.loads alone", "clock_ratios": [1.0]},
            {"variant": "ChunkWriter.write_lines", "clock_ratios": [0.6]},
        ],
        "plain": [],
        "latency_ms": {"ChunkWriter": [2.0, 3.0]},
        "memory_mb": {"the run": 50.0},
    },
    "startup": {"machine": "here", "pairs": 2, "outside of one": {"cost": {"clock": [0.25, 0.35]}, "noise": {}}},
    "loaders": {
        "machine": "here",
        "results": [
            {"data": "A", "case": "order", "loader": "orjson", "ratios": [1.0]},
            {"data": "A", "case": "order", "loader": "bytes", "ratios": [9.0]},
            {"data": "A", "case": "order", "loader": "grain", "ratios": [0.2]},
            {"data": "A", "case": "order", "loader": "lazyshard", "ratios": [0.9]},
        ],
    },
    "scatter": {
        "machine": "here",
        "A": {
            "measured": [{"ranks": 2, "variant": "lazyshard", "rounds": [{"slowest": 0.5, "rank": 0.25}]}],
            "model": {},
        },
    },
    "template": {"machine": "here", "orders": {"in order": {"loading_percent": [1.5], "processor_us": []}}},
    "blend": {
        "in order": {"one stream": [3.0, 3.2], "blend": [3.1, 3.3]},
        "windows of 4 chunks": {"one stream": [4.0], "blend": [4.2]},
        "table of 100": [14.0],
    },
    "pack": {
        "machine": "here",
        "lognormal, sigma 1": {"filled": [0.999], "over": [1], "ms": [5.0], "more": [0], "times": [80.0]},
        "buffer of 100": {"filled": [0.75], "us": [0.4]},
    },
    "balance": {
        "machine": "here",
        "micro batches of 2": {"before": {"overall": 5.3}, "dealt": {"overall": 1.01}, "ms": [8.0, 9.0]},
        "global batches of 512, cost": {
            "as they come": {"even": {"overall": 2.5}, "us": []},
            "dealt by cost, micro batches of 1": {"even": {"overall": 1.0}, "us": [0.5]},
        },
    },
    "wait": {
        "machine": "here",
        "latency": [{"case": "watched", "ms": [2.0]}],
        "idle": {"8": [0.001, 0.003]},
        "asking": {"2": [{"stat": 3, "open": 4}]},
        "memory": [],
    },
}

IN_ORDER_A = "A, one process, in order: speed against orjson.loads alone"

OF_THE_MEAN = "largest cost of a rank over the mean"

FIGURES = {
    "read": [
        Figure("read", "prose: speed against orjson.loads alone", "orjson floor", (1.0, 1.0), "x", True, False),
        Figure("read", "prose: speed against orjson.loads alone", "ds[i] in order", (0.75, 0.85), "x", True),
        Figure("read", "from construction to the first sample", "LazyShardedDataset", (1.5, 1.25), "ms"),
    ],
    "producer": [
        Figure("producer", "prose: speed against orjson.loads alone", "orjson.loads alone", (1.0,), "x", True, False),
        Figure("producer", "prose: speed against orjson.loads alone", "ChunkWriter.write_lines", (0.6,), "x", True),
        Figure("producer", "from the last row of a chunk to a waiting reader", "ChunkWriter", (2.0, 3.0), "ms"),
    ],
    "startup": [Figure("startup", "what the .pth adds to a start", "outside of one", (0.25, 0.35), "ms")],
    "loaders": [
        Figure("loaders-A", IN_ORDER_A, "grain", (0.2,), "x", True, False),
        Figure("loaders-A", IN_ORDER_A, "lazyshard", (0.9,), "x", True),
    ],
    "scatter": [Figure("scatter", "A: until the last rank has its batch", "lazyshard, 2 ranks", (0.5,), "ms")],
    "template": [Figure("template", "reading, of a worker's time", "in order", (1.5,), "%")],
    "blend": [
        Figure("blend", "in order: a row in batches of 8, processor time", "one stream", (3.0, 3.2), "us", ours=False),
        Figure("blend", "in order: a row in batches of 8, processor time", "blend", (3.1, 3.3), "us"),
        Figure(
            "blend",
            "windows of 4 chunks: a row in batches of 8, processor time",
            "one stream",
            (4.0,),
            "us",
            ours=False,
        ),
        Figure("blend", "windows of 4 chunks: a row in batches of 8, processor time", "blend", (4.2,), "us"),
        Figure("blend", "to build a table", "100 streams", (14.0,), "ms"),
    ],
    "pack": [
        Figure("pack", "to pack one buffer, processor time", "lognormal, sigma 1", (5.0,), "ms"),
        Figure("pack", "speed against binpacking", "lognormal, sigma 1", (80.0,), "x", True),
        Figure("pack", "of packs that is filled", "buffer of 100", (75.0,), "%", True),
    ],
    "balance": [
        Figure("balance", f"micro batches of 2: {OF_THE_MEAN}", "as they come", (5.3,), "x", ours=False),
        Figure("balance", f"micro batches of 2: {OF_THE_MEAN}", "dealt by cost", (1.01,), "x"),
        Figure("balance", "to deal a stripe", "micro batches of 2", (8.0, 9.0), "ms"),
        Figure("balance", f"global batches of 512, cost: {OF_THE_MEAN}", "as they come", (2.5,), "x", ours=False),
        Figure(
            "balance", f"global batches of 512, cost: {OF_THE_MEAN}", "dealt by cost, micro batches of 1", (1.0,), "x"
        ),
    ],
    "wait": [
        Figure("wait", "until a waiting reader has a chunk", "watched", (2.0,), "ms"),
        Figure("wait", "of a core, each waiting rank", "8 waiting", (0.1, 0.3), "%"),
        Figure("wait", "calls for names of the stream, all ranks", "2 waiting", (7.0,), "calls"),
    ],
}


@pytest.mark.parametrize("name", FIGURES)
def test_the_figures_of_a_benchmark_are_found(name: str) -> None:
    assert figures_of(name, LINES[name]) == FIGURES[name]


def test_units_of_a_resume_are_those_of_the_picture() -> None:
    found = [(one.name, one.values, one.unit, one.ours) for one in figures_of("resume", LINES["resume"])]
    assert found == [
        ("8 to 6 ranks, window 4, live, after 2 rescales, after 40", (2.5,), "ms", True),
        ("in order, end known", (pytest.approx(0.5),), "us", True),
        ("in order, end known", (pytest.approx(4.0),), "ns", True),
        ("all ranks", (250.0,), "ms", True),
        ("LazyShardedDataset", (2.0,), "ms", True),
        ("StatefulDataLoader", (4.0,), "ms", False),
    ]


def test_every_benchmark_has_a_line_here_a_script_and_a_quick_run() -> None:
    assert set(LINES) == set(BENCHMARKS) == set(bench.QUICK)
    assert {path.name for path in bench.SCRIPTS.glob("bench_*") if not path.suffix} >= {
        "bench_read",
        "bench_resume",
        "bench_producer",
        "bench_startup",
        "bench_loaders",
    }


@pytest.mark.parametrize("name", ["read", "producer", "loaders", "template"])
def test_a_line_of_another_form_is_told(name: str) -> None:
    with pytest.raises(ValueError, match=f"bench_{name}: a line that is not of the form that it writes"):
        figures_of(name, {"machine": "here"})


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.85, "0.85"), (0.000123, "0.000123"), (3.4567, "3.46"), (99.96, "100"), (12345.6, "12,346")],
)
def test_numbers_are_short_and_have_no_exponent(value: float, text: str) -> None:
    assert number(value) == text


def test_a_ratio_has_no_space_before_its_unit() -> None:
    assert (with_unit(0.85, "x"), with_unit(1.5, "ms")) == ("0.85x", "1.5 ms")


def test_the_table_tells_ours_from_others() -> None:
    assert markdown(FIGURES["loaders"] + FIGURES["startup"]).splitlines()[2:] == [
        f"| loaders-A | {IN_ORDER_A} | grain | 0.2x |  |",
        f"| loaders-A | {IN_ORDER_A} | **lazyshard** | 0.9x |  |",
        "| startup | what the .pth adds to a start | **outside of one** | 0.3 ms | 0.25 to 0.35 |",
    ]


def test_the_best_comes_first_whether_more_or_less_is_better() -> None:
    ones = [Figure("p", "g", name, (value,), "x", True) for name, value in (("a", 0.5), ("b", 0.75))]
    assert [one.name for one in groups_of(ones)["g"]] == ["b", "a"]
    ones = [Figure("p", "g", name, (value,), "ms") for name, value in (("a", 9.0), ("b", 7.0), ("c", 8.0))]
    assert [one.name for one in groups_of(ones)["g"]] == ["b", "c", "a"]


def test_a_benchmark_that_did_not_run_or_wrote_nonsense_is_named_and_the_others_are_there(tmp_path: Path) -> None:
    (tmp_path / "template.json").write_text('{"orders": {}}\n' + json.dumps(LINES["template"]) + "\n")
    (tmp_path / "read.json").write_text("[1]\n")
    (tmp_path / "wait.json").write_text("\n")
    figures, about, problems = bench.collect(["template", "read", "wait", "resume"], tmp_path)
    assert figures == FIGURES["template"]
    assert about == ["- template: here"]
    assert len(problems) == 3
    assert "expected a JSON object" in problems[0]
    assert "no line" in problems[1]
    assert "not there; run scripts/bench --only resume" in problems[2]


def arguments(**changes: Any) -> argparse.Namespace:
    given = {"out": Path("/out"), "dir": None, "peers": None, "no_peers": False, "quick": False} | changes
    return argparse.Namespace(**given)


def test_options_reach_only_the_benchmarks_that_have_them() -> None:
    given = arguments(dir=Path("/d"), peers=Path("/p"))
    loaders, startup, read = (bench.command_of(name, given)[1:] for name in ("loaders", "startup", "read"))
    assert loaders == ["--json", "/out/loaders.json", "--dir", "/d", "--peers", "/p"]
    assert startup == ["--json", "/out/startup.json"]
    assert read == ["--json", "/out/read.json", "--dir", "/d"]
    assert bench.command_of("loaders", arguments(no_peers=True))[-1] == "--no-peers"
    assert bench.command_of("startup", arguments(quick=True))[-2:] == ["--pairs", "10"]


def test_pictures_name_every_bar_and_ours_has_a_colour_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="only the pictures need matplotlib")
    files = draw(FIGURES["loaders"] + FIGURES["wait"], tmp_path)
    assert [file.name for file in files] == ["loaders-A.png", "loaders-A.svg", "wait.png", "wait.svg"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    text = files[1].read_text()
    for word in ("lazyshard", "grain", "0.9x", "0.2x", "more is better", OURS, OTHERS):
        assert word in text
    assert text.index(">lazyshard<") < text.index(">grain<")


def test_without_matplotlib_the_table_is_still_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "template.json").write_text(json.dumps(LINES["template"]))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("sys.argv", ["bench", "--draw", "--only", "template", "--out", str(tmp_path)])
    monkeypatch.setattr(bench, "BENCHMARKS", {"template": None})
    monkeypatch.setattr(bench, "SCRIPTS", tmp_path)
    (tmp_path / "bench_template").touch()
    assert bench.main() == 0
    said = capsys.readouterr()
    assert "no pictures: matplotlib is not installed" in said.err
    assert (
        "| template | reading, of a worker's time | **in order** | 1.5 % |  |" in (tmp_path / "results.md").read_text()
    )
