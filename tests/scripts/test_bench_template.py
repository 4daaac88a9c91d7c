"""The arithmetic of scripts/bench_template: what is loading and what is not, and when it is too much."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import pytest

from scripts.benchmarks.bench_template import Shares, failures, main, report, run, shares

pytestmark = pytest.mark.full

ROOT: Final = Path(__file__).resolve().parents[2]


def test_what_is_not_in_the_encoder_is_loading() -> None:
    found = shares(whole=2.0, encoder=1.75, template=1.5, rows=1_000_000)
    assert found == Shares(loading_us=0.25, between_us=0.25, encode_us=1.5)
    assert found.loading_percent == 12.5


@pytest.mark.parametrize(
    ("whole", "encoder", "template"),
    [
        pytest.param(1.0, 2.0, 0.5, id="encoder longer than all"),
        pytest.param(2.0, 1.0, 1.5, id="template longer than the encoder"),
        pytest.param(2.0, 1.0, 0.0, id="nothing encoded"),
    ],
)
def test_times_that_cannot_be_are_refused(whole: float, encoder: float, template: float) -> None:
    with pytest.raises(ValueError, match="expected 0 < template <= encoder <= whole"):
        shares(whole, encoder, template, 8)


def test_a_share_of_five_percent_is_too_much_and_the_median_counts() -> None:
    assert failures({"in order": [4.9, 4.9, 99.0]}) == []
    assert failures({"in order": [1.0, 1.0, 1.0], "at random": [1.0, 5.0, 5.0]}) == [
        "at random: loading takes 5.0 % of a worker's processor time, asked for: under 5 %"
    ]


def test_a_report_judges_processor_time(capsys: pytest.CaptureFixture[str]) -> None:
    # Seconds by the clock and by the processor.
    one: dict[str, Any] = {"whole": [1.0, 1.0], "encoder": [0.5, 0.99], "template": [0.5, 0.99]}
    figures, worse = report({"in order": [one]}, 1000)
    assert worse == []
    assert figures["in order"]["loading_percent"] == [pytest.approx(1.0)]
    assert figures["in order"]["loading_percent_by_the_clock"] == [50.0]
    printed = capsys.readouterr().out.splitlines()[1].split()
    assert printed[:3] == ["in", "order", "10.0"]
    _, worse = report({"in order": [{**one, "encoder": [0.99, 0.5], "template": [0.99, 0.5]}]}, 1000)
    assert worse == ["in order: loading takes 50.0 % of a worker's processor time, asked for: under 5 %"]


def test_a_program_that_fails_is_shown(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys\nprint('got this far')\nsys.exit('no further')\n")
    with pytest.raises(SystemExit, match=r"program\.py failed with 1\ngot this far\nno further"):
        run([str(program)], tmp_path)


@pytest.mark.timeout(300)  # an import of ms-swift, while other tests keep the cores busy
def test_a_run_with_a_real_template_tells_what_it_found(tmp_path: Path) -> None:
    for name in ("ms-swift", "transformers"):
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            pytest.skip(f"not installed: {name} (see scripts/environment)")
    facts = tmp_path / "facts.json"
    command = [sys.executable, str(ROOT / "scripts/benchmarks/bench_template.py"), "--samples", "16", "--rows", "1200"]
    command += ["--rounds", "1", "--dir", str(tmp_path), "--json", str(facts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the rows encoded were those that were drawn, in each pass" in done.stdout
    orders = json.loads(facts.read_bytes())["orders"]
    assert list(orders) == ["in order", "windows of 4 chunks", "at random", "in order, --sharded_lazy true"]
    for figures in orders.values():
        assert all(value > 0 for value in figures["processor_us"][0].values())


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--samples", "7"], ["--samples", "9", "--rows", "9"]])
def test_wrong_arguments_are_told(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_template.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "--rounds is at least 1" in capsys.readouterr().err
