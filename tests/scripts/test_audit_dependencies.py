"""What scripts/audit_dependencies makes of what pip-audit says; nobody is asked here."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
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


def stand_in(folder: Path, printed: str, code: int = 0, said: str = "") -> str:
    tool = folder / "pip-audit"
    program = f"import sys\nsys.stderr.write({said!r})\nprint({printed!r})\nsys.exit({code})\n"
    tool.write_text(f"#!{sys.executable}\n{program}")
    tool.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("packages", "code", "last"),
    [
        ([CLEAN], 0, "asked about 1 packages: 0 known vulnerabilities"),
        ([CLEAN, SKIPPED], 0, "asked about 1 packages: 0 known vulnerabilities"),
        ([KNOWN, CLEAN], 1, "asked about 2 packages: 1 known vulnerability"),
        ([SKIPPED], 75, "nobody could be asked about vulnerabilities: nothing is known of any of 1 packages"),
        ([], 75, "nobody could be asked about vulnerabilities: nothing is known of any of 0 packages"),
    ],
)
def test_verdict(
    packages: list[dict[str, Any]],
    code: int,
    last: str,
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", stand_in(tmp_path, json.dumps({"dependencies": packages, "fixes": []}), code % 75))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert script.main([]) == code
    assert capsys.readouterr().out.splitlines()[-1] == last
    assert script.main(["--if-possible"]) == (0 if code == 75 else code)


def test_each_vulnerability_is_a_line(script: ModuleType) -> None:
    code, lines = script.verdict(script.read_answer({"dependencies": [KNOWN, SKIPPED]}), "")
    assert code == 1
    assert lines[:2] == ["jinja2 2.4.1: PYSEC-2014-8; mended in 2.7.2", "not known to the service: torch"]


@pytest.mark.parametrize("printed", ["", "[]", "null", '{"dependencies": 5}'])
def test_service_that_does_not_answer_is_no_clean_bill(
    printed: str,
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", stand_in(tmp_path, printed, 1, "ERROR: connection refused\n"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert script.main([]) == 75
    assert capsys.readouterr().out == "nobody could be asked about vulnerabilities: ERROR: connection refused\n"


def test_machine_without_the_tool_is_told(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "find_tool", lambda: None)
    assert script.main([]) == 75
    assert script.main(["--if-possible"]) == 0
    assert "pip-audit is not installed" in capsys.readouterr().out
