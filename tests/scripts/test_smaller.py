"""Smaller scripts: README, and what checks and environments are made with."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

from scripts.checks import count_reads, second_try

ONE, TWO, THREE, FOUR = (f"tests/data/test_a.py::test_{name}" for name in ("four", "one", "three", "two"))


@pytest.mark.parametrize(
    ("failed", "repeated"),
    [
        ([TWO, ONE], [ONE, TWO]),
        ([ONE, TWO, THREE], [ONE, TWO, THREE]),
        # Many have a cause.
        ([ONE, TWO, THREE, FOUR], []),
        # A lost sample and a file that does not load stand.
        ([ONE, "tests/crash/test_run.py::test_mutant[late]"], []),
        ([ONE, "tests/faults/test_soak.py::test_b"], []),
        ([ONE, "tests/data/test_a.py"], []),
    ],
)
def test_which_failures_are_looked_at_again(failed: list[str], repeated: list[str]) -> None:
    assert second_try.may_be_repeated(failed) == repeated


def test_prints_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = tmp_path / "v" / "cache"
    assert second_try.main([str(tmp_path)]) == 1
    cache.mkdir(parents=True)
    (cache / "lastfailed").write_text(json.dumps({ONE: True}))
    assert second_try.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{ONE}\n"


SCRIPTS: Final = Path(__file__).resolve().parents[2] / "scripts"
COMMANDS: Final = sorted(path.name for path in SCRIPTS.iterdir() if path.is_file() and os.access(path, os.X_OK))


def page() -> str:
    return (SCRIPTS / "README.md").read_text(encoding="utf-8")


def test_every_command_is_listed_once() -> None:
    assert len(COMMANDS) >= 12
    assert sorted(re.findall(r"^\| `(\w+)` \|", page(), re.MULTILINE)) == COMMANDS


def test_every_folder_and_module_is_named() -> None:
    folders = {path.name for path in SCRIPTS.iterdir() if path.is_dir()} - {"__pycache__"}
    assert [name for name in sorted(folders) if f"`{name}`" not in page()] == []
    gone = [name for name in re.findall(r"`(\w+\.py)`", page()) if not list(SCRIPTS.rglob(name))]
    assert gone == []


def counted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[list[str]]:
    """Runs it; returns the fields of each unit's line."""
    monkeypatch.setattr("sys.argv", ["count_reads", "--rows", "320", "--row-bytes", "100", *arguments])
    assert count_reads.main() == 0
    lines = capsys.readouterr().out.splitlines()
    return [line.split() for line in lines if line and not line.startswith(("320 rows", "unit"))]


def test_one_file_for_eight_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = counted(capsys, monkeypatch, "--chunks", "1", "--dir", str(tmp_path), "--units", "chunk", "batch", "auto")
    # Unit, samples, files, reads, MB, of its own, MB of seals; and what the first step waits for.
    assert [line[:4] for line in lines] == [
        ["chunk", "320", "1", "40"],
        ["batch", "4", "1", "10"],
        ["auto", "4", "1", "10"],
    ]
    assert {line[5] for line in lines} == {"1.00x"}
    assert [line[7:] for line in lines] == [["2,560", "rows"], ["32", "rows"], ["32", "rows"]]
    assert list(tmp_path.iterdir()) == []


def test_a_file_for_every_rank(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = counted(capsys, monkeypatch, "--chunks", "8", "--units", "chunk", "sample", "auto")
    assert [line[:3] for line in lines] == [["chunk", "40", "1"], ["sample", "1", "8"], ["auto", "40", "1"]]


def test_a_file_without_a_seal_is_read_to_find_its_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,) = counted(capsys, monkeypatch, "--chunks", "1", "--units", "batch", "--foreign")
    # An eighth of it is this rank's. The last file is read to count its rows, and to find them.
    assert (line[5], line[6]) == ("17.00x", "0.00")


@pytest.mark.parametrize("arguments", [["--chunks", "0"], ["--units", "row"], ["--ranks", "400"], ["--batch", "0"]])
def test_wrong_arguments_are_refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["count_reads", "--rows", "320", *arguments])
    with pytest.raises(SystemExit) as ended:
        count_reads.main()
    assert ended.value.code == 2


ROOT: Final = Path(__file__).resolve().parents[2]
SETTINGS: Final = """[global]
index-url = https://first.example/simple
extra-index-url =
    https://second.example/simple
    file:///third/simple
find-links = /from/the/file
default-timeout = 180
quiet = 1
"""


@pytest.fixture(scope="module")
def environment() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("environment", str(ROOT / "scripts/environment"))
    spec = importlib.util.spec_from_loader("environment", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_settings_of_pip_reach_uv(environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text(SETTINGS)
    for name in ("SSL_CERT_FILE", "UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL", "UV_INDEX_STRATEGY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_CERT", "/from/the/variable.crt")
    monkeypatch.setenv("PIP_FIND_LINKS", "/from/the/variable /and/another")
    monkeypatch.setenv("UV_HTTP_TIMEOUT", "7")
    found = environment.pip_settings(sys.executable)
    assert found == {
        "SSL_CERT_FILE": "/from/the/variable.crt",
        "UV_DEFAULT_INDEX": "https://first.example/simple",
        "UV_EXTRA_INDEX_URL": "https://second.example/simple file:///third/simple",
        "UV_FIND_LINKS": "/from/the/variable /and/another",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }


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
    # Before it runs: its dataclass looks for its module by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def answer(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], int]:
    """Has the service answer, and returns the script's code."""

    def run(printed: str, code: int) -> int:
        program = f"import sys\nsys.stderr.write('ERROR: refused\\n')\nprint({printed!r})\nsys.exit({code})\n"
        (tmp_path / "pip-audit").write_text(f"#!{sys.executable}\n{program}")
        (tmp_path / "pip-audit").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        found: int = script.main([])
        assert script.main(["--if-possible"]) == (0 if found == 75 else found)
        return found

    return run


@pytest.mark.parametrize(
    ("packages", "code"), [([CLEAN], 0), ([CLEAN, SKIPPED], 0), ([KNOWN, CLEAN], 1), ([SKIPPED], 75), ([], 75)]
)
def test_verdict(packages: list[dict[str, Any]], code: int, answer: Callable[[str, int], int]) -> None:
    assert answer(json.dumps({"dependencies": packages, "fixes": []}), code % 75) == code


def test_each_vulnerability_is_a_line(script: ModuleType) -> None:
    code, lines = script.verdict(script.read_answer({"dependencies": [KNOWN, SKIPPED]}), "")
    assert (code, lines[0].startswith("jinja2 2.4.1: PYSEC-2014-8; ")) == (1, True)


@pytest.mark.parametrize("printed", ["", "[]", "null", '{"dependencies": 5}'])
def test_service_that_does_not_answer_is_no_clean_bill(printed: str, answer: Callable[[str, int], int]) -> None:
    assert answer(printed, 1) == 75


def test_machine_without_the_tool_is_told(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "find_tool", lambda: None)
    assert (script.main([]), script.main(["--if-possible"])) == (75, 0)
