"""What `lazyshard doctor swift` finds; how it is shown: tests/cli/test_doctor.py."""

from __future__ import annotations

import json
import site
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard.examination import Finding
from lazyshard_swift import doctor, hook, ms_swift
from tests.swift.programs import python
from tests.swift.stand_ins import make_swift

ALL: Final = {"torch": "2.13.0", "transformers": "5.19.0", "megatron-core": "0.16.1", "mcore-bridge": "1.6.5"}
MEGATRON: Final = "megatron sft --sharded_lazy true"
SWIFT: Final = "swift sft --sharded_lazy true"
RUNS: Final = "runs: every rank reads its own chunks"
REFUSES: Final = "refuses the option, which ms-swift does not know: "
STOPS: Final = "stops before training: "

Examine = Callable[..., dict[str, Finding]]


@pytest.fixture
def examine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Examine:
    """Examines an environment that is made up, in which all is well but for what is missing."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    hook.install()

    def examine(version: str | None = "4.6.0", *missing: str) -> dict[str, Finding]:
        folder = tmp_path / "swift" if version is not None else None
        monkeypatch.setattr(ms_swift, "version", lambda: version)
        monkeypatch.setattr(ms_swift, "folder", lambda: folder)
        distributions = {name: number for name, number in ALL.items() if name not in missing}
        monkeypatch.setattr(ms_swift, "distribution_version", distributions.get)
        monkeypatch.setattr(doctor, "__file__", str(tmp_path / "lazyshard_swift" / "doctor.py"))
        monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path / "site")])
        monkeypatch.setattr(site, "ENABLE_USER_SITE", False)
        files = [f"{name.replace('.', '/')}.py" for name in hook.EXTENSIONS.values() if name not in missing]
        for name in ["site/lazyshard_swift.pth", *files]:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        if "active" in missing:
            (tmp_path / "site" / "lazyshard_swift.pth").unlink()
            sys.meta_path[:] = [finder for finder in sys.meta_path if not hasattr(finder, hook.MARK)]
        make_swift(tmp_path, [point for point in ms_swift.POINTS if point.name not in missing])
        findings = doctor.examine()
        sections = list(dict.fromkeys(finding.section for finding in findings))
        points = ["hook points"] if version is not None else []
        assert sections == ["versions", "start-up", "extensions", *points, "verdict"]
        found = {finding.subject: finding for finding in findings}
        assert len(found) == len(findings)
        return found

    return examine


def not_ok(found: dict[str, Finding]) -> set[str]:
    return {subject for subject, finding in found.items() if finding.ok is False}


def test_all_is_well(examine: Examine, tmp_path: Path) -> None:
    found = examine()
    assert not_ok(found) == set()
    assert found["ms-swift"].answer == f"4.6.0 in {tmp_path}/swift"
    assert found["torch"] == Finding("versions", "torch", "2.13.0", True)
    assert found["lazyshard_swift.pth"].answer == f"{tmp_path}/site/lazyshard_swift.pth"
    assert found["swift.cli.main.cli_main"].answer == "swift/cli/main.py:4 (the command line)"
    for command in (MEGATRON, SWIFT):
        assert found[command] == Finding("verdict", command, RUNS, True)


# Version, what is missing, what is found not to be in order besides the commands, and what is said of some.
TROUBLES: list[tuple[str | None, list[str], set[str], dict[str, str]]] = [
    (None, [], {"ms-swift"}, {"ms-swift": "not installed: pip", MEGATRON: "cannot start", SWIFT: "cannot start"}),
    (
        "4.6.0",
        ["megatron-core", "mcore-bridge"],
        {"megatron-core", "mcore-bridge"},
        {MEGATRON: "does not start", "megatron-core": "not installed: pip install megatron-core", SWIFT: RUNS},
    ),
    # The bridge is not needed by older releases.
    ("4.0.0", ["mcore-bridge"], set(), {"mcore-bridge": "not installed, and not", MEGATRON: RUNS, SWIFT: RUNS}),
    ("4.7.0", [], {"ms-swift"}, {"ms-swift": "4.7.0 in ", MEGATRON: "may run", SWIFT: "may run"}),
    ("4.6.0", ["active"], {"lazyshard_swift.pth", "finder"}, {MEGATRON: REFUSES, SWIFT: REFUSES}),
    ("4.6.0", ["__post_init__"], {"__post_init__"}, {MEGATRON: REFUSES, SWIFT: REFUSES}),
    ("4.6.0", ["_show_dataset"], {"_show_dataset"}, {MEGATRON: STOPS, SWIFT: STOPS}),
    ("4.6.0", ["_prepare_dataloader"], {"_prepare_dataloader"}, {MEGATRON: STOPS, SWIFT: RUNS}),
    ("4.6.0", ["get_train_dataloader"], {"get_train_dataloader"}, {MEGATRON: RUNS, SWIFT: STOPS}),
    *(
        ("4.6.0", [name], {name}, {MEGATRON: megatron, SWIFT: swift})
        for name, megatron, swift in (
            ("lazyshard_swift.arguments", REFUSES, REFUSES),
            ("lazyshard_swift.megatron", STOPS, RUNS),
            ("lazyshard_swift.huggingface", RUNS, STOPS),
        )
    ),
]


@pytest.mark.parametrize(("version", "missing", "bad", "answers"), TROUBLES)
def test_trouble(
    examine: Examine, version: str | None, missing: list[str], bad: set[str], answers: dict[str, str]
) -> None:
    found = examine(version, *missing)
    titles = {point.title for point in ms_swift.POINTS if point.name in bad}
    named = titles or bad
    assert not_ok(found) == named | {command for command in (MEGATRON, SWIFT) if answers[command] != RUNS}
    assert [subject for subject, words in answers.items() if not found[subject].answer.startswith(words)] == []
    # Of what stops it the verdict names the hook point or the extension.
    for command in (MEGATRON, SWIFT):
        if answers[command] in (REFUSES, STOPS) and missing != ["active"]:
            assert all(name in found[command].answer for name in named)


def test_real_command() -> None:
    """In this environment, with whatever it has; it must find ms-swift and its hook points."""
    pytest.importorskip("typer")
    code = """
import sys
from lazyshard.cli.main import main
main(["doctor", "swift", "--json"])
print([name for name in sys.modules if name.partition(".")[0] in {"swift", "torch", "transformers"}])
"""
    done = python(code)
    assert done.stderr == ""
    result, imported = done.stdout.splitlines()
    found: dict[str, dict[str, Any]] = {finding["subject"]: finding for finding in json.loads(result)["findings"]}
    assert imported == "[]"
    assert found["ms-swift"]["answer"].startswith(f"{ms_swift.version()} in {ms_swift.folder()}")
    assert {finding["ok"] for finding in found.values() if finding["section"] == "hook points"} == {True}
    assert found["finder"]["ok"] is found["lazyshard_swift.pth"]["ok"] is True
