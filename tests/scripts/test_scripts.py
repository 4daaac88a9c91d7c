"""The scripts: what they check, print and measure; `scripts/demo`, whole, as a newcomer runs it."""

import importlib.machinery
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard import StreamReader
from scripts.benchmarks import bench
from scripts.benchmarks.bench_harness import Benchmark, Failed, Missing, Row, Setting, Side, bound
from scripts.checks import audit_dependencies, second_try
from scripts.demonstration import demo
from scripts.demonstration.demo_report import Findings, RankFindings, check
from scripts.demonstration.demo_settings import FolderRefused, take_folder

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


@pytest.mark.parametrize(
    ("printed", "code"),
    [
        *[(json.dumps({"dependencies": packages}), 0) for packages in ([CLEAN], [CLEAN, SKIPPED])],
        (json.dumps({"dependencies": [KNOWN, CLEAN]}), 1),
        *[(json.dumps({"dependencies": packages}), 75) for packages in ([SKIPPED], [])],
        *[(printed, 75) for printed in ("", "[]", "null", '{"dependencies": 5}')],  # A service that does not answer
    ],
)
def test_verdict(printed: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = int(code == 1 or not printed.startswith('{"dependencies": ['))
    program = f"import sys\nsys.stderr.write('ERROR: refused\\n')\nprint({printed!r})\nsys.exit({failed})\n"
    (tmp_path / "pip-audit").write_text(f"#!{sys.executable}\n{program}")
    (tmp_path / "pip-audit").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    audit = audit_dependencies.main
    assert (audit([]), audit(["--if-possible"])) == (code, 0 if code == 75 else code)
    monkeypatch.setattr(audit_dependencies, "find_tool", lambda: None)  # A machine without the tool
    assert (audit([]), audit(["--if-possible"])) == (75, 0)


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


def test_a_folder_of_the_demo_is_cleared(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "demo"
    with take_folder(folder):
        (folder / "stream").mkdir()
        (folder / "stream" / "chunk_00000.jsonl").touch()
        (folder / "elsewhere").symlink_to(tmp_path)
        marker = {path.name for path in folder.iterdir()} - {"stream", "elsewhere"}
    with take_folder(folder):
        assert {path.name for path in folder.iterdir()} == marker
    assert tmp_path.is_dir()


def test_a_folder_of_somebody_else_or_in_use_and_a_file_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with take_folder(tmp_path / "demo"):
        for path in (tmp_path, tmp_path / "thesis.txt", tmp_path / "thesis.txt" / "below", tmp_path / "demo"):
            with pytest.raises(FolderRefused):
                take_folder(path)
    assert (tmp_path / "thesis.txt").exists()


def test_without_torch_it_says_so_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    handlers = {number: signal.getsignal(number) for number in demo.SIGNALS}
    assert demo.main(["--dir", str(tmp_path / "demo")]) == 1
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert not (tmp_path / "demo").exists()


SOURCE = list(range(11))
CHUNKS = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]]
GOOD = [[0, 1, 4, 5, 8], [2, 3, 6, 7, 9]]


def found(trained: Sequence[Sequence[int]], chunks: Sequence[Sequence[int]] = CHUNKS) -> Findings:
    return check(SOURCE, chunks, trained, samples_per_chunk=2, step_samples=2)


@pytest.mark.parametrize(
    ("trained", "chunks", "field", "value"),
    [
        ([[0, 1, 4, 5], [2, 3, 6, 7]], CHUNKS, "missing", 2),
        ([[0, 1, 4, 4, 8], [2, 3, 6, 7, 9]], CHUNKS, "repeated", [4]),
        ([[0, 1, 4, 5, 8], [2, 3, 6, 7, 8]], CHUNKS, "repeated", [8]),
        ([[0, 1, 4, 5, 8], [2, 3, 6, 7, 11]], CHUNKS, "unknown", [11]),
        ([[0, 1, 4, 5, 8, 9], [2, 3, 6, 7]], CHUNKS, "uneven", True),
        (GOOD, [[0, 1], [3, 2], *CHUNKS[2:]], "unlike_source", True),  # Other order; a chunk less; one more
        (GOOD, CHUNKS[:-1], "unlike_source", True),
        (GOOD, [*CHUNKS, [11]], "unlike_source", True),
    ],
)
def test_not_exactly_once(trained: list[list[int]], chunks: list[list[int]], field: str, value: object) -> None:
    findings = found(trained, chunks)
    assert getattr(findings, field) == value
    assert not findings.exactly_once


def test_a_good_run_is_found_good_and_a_chunk_of_another_rank_is_found() -> None:
    findings = found(GOOD)
    assert findings.exactly_once and findings.own_chunks
    assert findings.untrained == [10]
    assert findings.ranks == [RankFindings(5, 2, [], 1), RankFindings(5, 2, [], 1)]
    findings = found([[0, 1, 4, 6, 8], [2, 3, 5, 7, 9]])
    assert (findings.exactly_once, findings.own_chunks) == (True, False)
    assert [rank.foreign for rank in findings.ranks] == [[3], [2]]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_every_sample_of_the_source_is_published_and_every_check_holds(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    numbers = ["--samples", "1000", "--rate", "100", "--samples-per-chunk", "50", "--ranks", "2"]
    command = [str(ROOT / "scripts" / "demo"), *numbers, "--dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert (done.returncode, "FAILED" in done.stdout) == (0, False), done.stdout + done.stderr
    source = [json.loads(line) for line in (folder / "source.jsonl").read_bytes().splitlines()]
    reader = StreamReader(folder / "stream", max_wait=0)
    assert len(source) == 1000
    assert [row["id"] for row in reader] == [row["id"] for row in source]
    assert reader.seen.ended and reader.samples_per_chunk == 50
