"""A run of a tier takes what belongs to it, and is not green in silence."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import TIERS, is_full, is_taken

PROGRAM = """
import time, pytest

def test_quick(): pass

@pytest.mark.full
def test_full(): pass

@pytest.mark.sweep
def test_sweep(): pass
"""
FEW = "@pytest.mark.few({})\n@pytest.mark.parametrize('n', range(6))\n"
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


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("tier", "body", "code"),
    [
        ("full", "", 0),
        ("full", "def test_skipped(): pytest.skip('for a reason')", 0),
        ("full", "def test_skipped(): pytest.skip('for no reason')", 1),
        ("full", "pytest.skip('for no reason', allow_module_level=True)", 1),
        ("full", "def test_long(): time.sleep(0.5)", 0),
        ("quick", "def test_long(): time.sleep(0.5)", 1),
        ("quick", "@pytest.mark.full\ndef test_long(): time.sleep(0.5)", 0),
        ("quick", f"{FEW.format(2)}def test_long(n): assert n in (0, 3)", 0),
        ("full", f"{FEW.format(2)}def test_long(n): assert n in (0, 3)", 1),
    ],
)
@pytest.mark.few(4)
def test_a_run_fails_by_what_is_skipped_and_by_a_slow_file(tier: str, body: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_all.py").write_text(PROGRAM)
    (tmp_path / "test_one.py").write_text(PROGRAM + body)
    options = ["-q", "-n", "1", "--gate", "--tier", tier, "-p", "no:cacheprovider", "-W", "ignore"]
    command = [sys.executable, "-m", "pytest", *options, "-c", "/dev/null", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stdout
