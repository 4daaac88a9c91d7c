"""Smaller scripts, README of them all, and the table of scripts/bench."""

import importlib.machinery
import importlib.util
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

from scripts.benchmarks import bench
from scripts.benchmarks.bench_harness import Benchmark, Failed, Missing, Row, Setting, Side, bound
from scripts.checks import second_try

ONE, TWO, THREE, FOUR = (f"tests/data/test_a.py::test_{name}" for name in ("four", "one", "three", "two"))


@pytest.mark.parametrize(
    ("failed", "repeated"),
    [
        ([TWO, ONE], [ONE, TWO]),
        ([ONE, TWO, THREE], [ONE, TWO, THREE]),
        ([ONE, TWO, THREE, FOUR], []),  # Many have a cause
        ([ONE, "tests/crash/test_run.py::test_mutant[late]"], []),  # A lost sample and a file that does not load stand
        ([ONE, "tests/faults/test_soak.py::test_b"], []),
        ([ONE, "tests/data/test_a.py"], []),
    ],
)
def test_which_failures_are_looked_at_again(failed: list[str], repeated: list[str]) -> None:
    assert second_try.may_be_repeated(failed) == repeated


ROOT: Final = Path(__file__).resolve().parents[2]
SCRIPTS: Final = ROOT / "scripts"


def test_every_command_is_listed_once_and_every_folder_and_module_is_named() -> None:
    page = (SCRIPTS / "README.md").read_text(encoding="utf-8")
    commands = sorted(path.name for path in SCRIPTS.iterdir() if path.is_file() and os.access(path, os.X_OK))
    assert len(commands) >= 12
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == commands
    folders = {path.name for path in SCRIPTS.iterdir() if path.is_dir()} - {"__pycache__"}
    assert [name for name in sorted(folders) if f"`{name}`" not in page] == []
    assert [name for name in re.findall(r"`(\w+\.py)`", page) if not list(SCRIPTS.rglob(name))] == []


def test_the_lock_names_no_address_and_no_cuda() -> None:
    lines = (ROOT / "scripts/locked.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) > 200
    assert [line for line in lines if "://" in line or line.startswith("-") or "nvidia" in line or "cuda" in line] == []
    assert [line for line in lines if line.startswith("torch==")] == ["torch==2.13.0"]
    assert "pymdown-extensions==12.3 ; python_full_version < '3.11.5'" in lines


KNOWN: Final = {
    "name": "jinja2",
    "version": "2.4.1",
    "vulns": [{"id": "PYSEC-2014-8", "fix_versions": ["2.7.2"], "aliases": [], "description": ""}],
}
CLEAN: Final = {"name": "numpy", "version": "2.0", "vulns": []}
SKIPPED: Final = {"name": "torch", "skip_reason": "Dependency not found on PyPI and could not be audited"}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit_dependencies", ROOT / "scripts/checks/audit_dependencies.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Before it runs: its dataclass looks for its module by name
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("printed", "code"),
    [
        *[(json.dumps({"dependencies": packages}), 0) for packages in ([CLEAN], [CLEAN, SKIPPED])],
        (json.dumps({"dependencies": [KNOWN, CLEAN]}), 1),
        *[(json.dumps({"dependencies": packages}), 75) for packages in ([SKIPPED], [])],
        *[(printed, 75) for printed in ("", "[]", "null", '{"dependencies": 5}')],  # A service that does not answer
    ],
)
def test_verdict(printed: str, code: int, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = int(code == 1 or not printed.startswith('{"dependencies": ['))
    program = f"import sys\nsys.stderr.write('ERROR: refused\\n')\nprint({printed!r})\nsys.exit({failed})\n"
    (tmp_path / "pip-audit").write_text(f"#!{sys.executable}\n{program}")
    (tmp_path / "pip-audit").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert (script.main([]), script.main(["--if-possible"])) == (code, 0 if code == 75 else code)
    monkeypatch.setattr(script, "find_tool", lambda: None)  # A machine without the tool
    assert (script.main([]), script.main(["--if-possible"])) == (75, 0)


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
def test_benchmarks(arguments: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BENCHMARKS", [tiny(*ROWS)])
    assert bench.main([*arguments, "--dir", str(tmp_path), "--no-peers"]) == code
    assert list(tmp_path.iterdir()) == []


PIP_SETTINGS: Final = """[global]
index-url = https://first.example/simple
extra-index-url =
    https://second.example/simple
    file:///third/simple
find-links = /from/the/file
default-timeout = 180
quiet = 1
"""


def environment_script() -> Any:
    loader = importlib.machinery.SourceFileLoader("environment", str(SCRIPTS / "environment"))
    spec = importlib.util.spec_from_loader("environment", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_settings_of_pip_reach_uv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment = environment_script()
    (tmp_path / "pip.conf").write_text(PIP_SETTINGS)
    for name in ("SSL_CERT_FILE", "UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL", "UV_INDEX_STRATEGY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_CERT", "/from/the/variable.crt")
    monkeypatch.setenv("PIP_FIND_LINKS", "/from/the/variable /and/another")
    monkeypatch.setenv("UV_HTTP_TIMEOUT", "7")
    assert environment.pip_settings(sys.executable) == {
        "SSL_CERT_FILE": "/from/the/variable.crt",
        "UV_DEFAULT_INDEX": "https://first.example/simple",
        "UV_EXTRA_INDEX_URL": "https://second.example/simple file:///third/simple",
        "UV_FIND_LINKS": "/from/the/variable /and/another",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
