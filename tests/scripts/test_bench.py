"""The table of scripts/bench: which rows run, what a missed goal, a failure and a missing package come to."""

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from scripts.benchmarks import bench
from scripts.benchmarks.bench_harness import Benchmark, Failed, Missing, Result, Row, Setting, Side, bound, measure

ROOT: Final = Path(__file__).resolve().parents[2]


def no_package() -> dict[str, float]:
    raise Missing("no such package")


def fails() -> dict[str, float]:
    raise Failed("other rows than there are")


def tiny(*rows: Row) -> Benchmark:
    def prepare(setting: Setting) -> Mapping[str, Side]:
        return {"slow": lambda: {"us": 4.0}, "fast": lambda: {"us": 2.0}, "lost": no_package, "broken": fails}

    return Benchmark("tiny", "what is known", rows, prepare)


ROWS: Final = (
    Row("met", "fast", "slow", "us", 1.9),
    Row("missed", "slow", "fast", "us", 1.0),
    Row("told", "slow", "fast", "us"),
    Row("below.lost", "fast", "lost", "us", 1.0),
    Row("below.broken", "broken", "slow", "us", 1.0),
    bound("in-bounds", "slow", 4.5, "us"),
    bound("out-of-bounds", "slow", 3.5, "us"),
)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["tiny.met", "tiny.told", "tiny.in-bounds", "--check"], 0),
        (["tiny.met", "tiny.missed", "--check"], 1),
        (["tiny.out-of-bounds", "--check"], 1),
        (["tiny.missed", "tiny.out-of-bounds"], 0),
        (["tiny.below.lost", "--check"], 0),
        (["tiny.below"], 1),
        (["--list"], 0),
    ],
)
def test_missed_goals_and_failures(
    arguments: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "BENCHMARKS", [tiny(*ROWS)])
    assert bench.main([*arguments, "--dir", str(tmp_path), "--no-peers"]) == code
    assert list(tmp_path.iterdir()) == []


def test_sides_take_turns_and_a_first_round_is_not_counted(tmp_path: Path) -> None:
    turns: list[str] = []

    def prepare(setting: Setting) -> Mapping[str, Side]:
        def side(name: str) -> Side:
            def turn() -> dict[str, float]:
                turns.append(name)
                return {"us": float(len(turns))}

            return turn

        return {name: side(name) for name in ("a", "b", "not asked for")}

    row = Row("row", "a", "b", "us")
    found = measure(Benchmark("tiny", "", (row,), prepare), [row], Setting(tmp_path, rounds=2))
    assert turns == ["b", "a", "a", "b", "b", "a"]
    assert found == [Result(row, [3.0, 6.0], [4.0, 5.0])]
    assert found[0].ratios == [4 / 3, 5 / 6]


SAMPLE: Final = (
    *("read.order", "read.memory", "producer.command", "resume.first", "wait.idle", "encode.arrays"),
    *("loaders.text.loader.lazyshard-dicts", "pack.filled", "balance", "blend", "startup"),
)
"""Rows without other packages, of each kind."""

DIFFERENCES: Final = ("producer.command",)
"""Figures of these are what one process takes more than another: of a tiny size nothing that can be told from noise."""


@pytest.mark.full
@pytest.mark.timeout(600)  # some dozens of processes, while other tests keep the cores busy
def test_rows_of_each_kind_run_at_tiny_sizes(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    command = [sys.executable, "-m", "scripts.benchmarks.bench", "--quick", "--no-peers", "--json", str(file), *SAMPLE]
    done = subprocess.run(
        [*command, "--dir", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=590, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows: dict[str, dict[str, Any]] = {row["row"]: row for row in json.loads(file.read_text())["rows"]}
    assert len(rows) >= len(SAMPLE)
    for name, row in rows.items():
        if name in DIFFERENCES:
            assert row["ratios"], name
        elif "--no-peers" not in row.get("left_out", ""):
            assert all(0 < ratio < math.inf for ratio in row["ratios"]), name
