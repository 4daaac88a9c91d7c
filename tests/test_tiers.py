"""A run of a tier takes what belongs to it, and is not green in silence."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import TIERS, is_full, is_taken

CONFTEST = """
from tests.conftest import pytest_addoption, pytest_configure
import tests.tiers

tests.tiers.SKIPS = {"^Skipped: for a reason": "why"}
tests.tiers.QUICK_S = 0.05

def pytest_collection_modifyitems(config, items):
    tests.tiers.select(items, config.getoption("--tier"))
"""


def test_a_test_belongs_to_tiers_by_one_marker() -> None:
    tiers = {
        (): ["quick", "full"],
        ("timeout",): ["quick", "full"],
        ("full",): ["full"],
        ("sweep",): ["sweep"],
        ("full", "sweep"): ["sweep"],
    }
    assert {markers: [tier for tier in TIERS if is_taken(tier, markers)] for markers in tiers} == tiers


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]", True),
        ("pytestmark = [\n    pytest.mark.root,\n    pytest.mark.full,\n]\n", True),
        ("pytestmark = [\n    pytest.mark.root,\n]\n\n\n@pytest.mark.full\ndef test_full(): pass", False),
        ("@pytest.mark.full\ndef test_full(): pass", False),
    ],
)
def test_a_file_of_which_the_quick_tier_takes_nothing_is_known_by_its_text(text: str, full: bool) -> None:
    assert is_full(f"import pytest\n\n{text}") is full


FILES = {
    "good": "def test_1(): pass\n\n@pytest.mark.full\ndef test_2(): pass\n\n@pytest.mark.sweep\ndef test_3(): pass",
    "few": "@pytest.mark.few(2)\n@pytest.mark.parametrize('n', range(6))\ndef test_few(n): pass",
    "explained": "def test_skipped(): pytest.skip('for a reason')",
    "unexplained": "def test_skipped(): pytest.skip('for no reason')",
    "module": "pytest.skip('for no reason', allow_module_level=True)",
    "slow": "def test_slow(): time.sleep(0.5)",
    "slow_full": "@pytest.mark.full\ndef test_slow(): time.sleep(0.5)",
}


@pytest.mark.parametrize(
    ("tier", "files", "options", "passed", "told"),
    [
        ("full", ["good", "few", "explained", "slow", "slow_full"], ["-n", "1"], 10, []),
        ("full", ["good", "unexplained", "module"], [], 2, ["module", "unexplained"]),
        ("quick", list(FILES), [], 4, ["module", "slow", "unexplained"]),
    ],
)
def test_a_run_fails_by_what_is_skipped_and_by_a_slow_file(
    tier: str, files: list[str], options: list[str], passed: int, told: list[str], tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in files:
        (tmp_path / f"test_{name}.py").write_text(f"import time, pytest\n\n{FILES[name]}\n")
    options = [*options, "-q", "--gate", "--tier", tier, "-p", "no:cacheprovider", "-W", "ignore"]
    command = [sys.executable, "-m", "pytest", *options, "-c", "/dev/null", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, f"{passed} passed" in done.stdout) == (bool(told), True), done.stdout
    found = re.findall(r"^test_(\w+)\.py", done.stdout.partition("gate: see")[2], re.MULTILINE)
    assert sorted(found) == told, done.stdout
