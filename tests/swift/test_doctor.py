"""Which ms-swift is found, and what `lazyshard doctor swift` says of it."""

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
from tests.swift.stand_ins import make_packages, package_folder, write


@pytest.mark.full
def test_installed_ms_swift_has_all_that_is_extended() -> None:
    version = ms_swift.version()
    assert version is not None, "ms-swift is not installed; run `scripts/environment full`"
    assert ms_swift.is_supported(version)
    # That of Megatron asks for a device; trainings refuse to start where it lacks something.
    plain = [module for module in hook.EXTENSIONS if "megatron" not in module]
    code = f"""
import importlib
from lazyshard_swift import ms_swift
for module in {plain}:
    importlib.import_module(module)
print(ms_swift.outcomes == dict.fromkeys({plain}, ""), ms_swift.outcomes)
"""
    done = python(code)
    assert (done.returncode, done.stdout.splitlines()[-1][:5]) == (0, "True "), (done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("version", "release", "supported", "too_old"),
    [
        ("3.12.6", (3, 12), False, True),
        ("4.0.0.dev0", (4, 0), True, False),
        ("4.6.12", (4, 6), True, False),
        ("4.7.0", (4, 7), False, False),
        ("5", None, False, False),
    ],
)
def test_versions(version: str, release: tuple[int, int] | None, supported: bool, too_old: bool) -> None:
    assert ms_swift.release(version) == release
    assert (ms_swift.is_supported(version), ms_swift.is_too_old(version)) == (supported, too_old)


FOUND = "from lazyshard_swift import ms_swift; print(ms_swift.folder(), ms_swift.version())"


@pytest.mark.parametrize(
    ("file", "version"),
    [("__version__ = '4.5.0.dev0'\n", "4.5.0.dev0"), ("", None), ("from x import __version__\n", None)],
)
def test_checkout_without_metadata_or_no_ms_swift(file: str, version: str | None, tmp_path: Path) -> None:
    folder = make_packages(tmp_path / "there", ["swift.version"], file) / "swift"
    done = python(FOUND, tmp_path / "there", package_folder(), site=False)
    assert (done.stdout, done.stderr) == (f"{folder} {version}\n", "")
    if file:
        (folder / "version.py").unlink()
        assert python(FOUND, tmp_path / "there", package_folder(), site=False).stdout == f"{folder} None\n"
    for before in ("", "import sys, types; sys.modules['swift'] = types.ModuleType('swift')\n"):
        done = python(before + FOUND, package_folder(), site=False)
        assert (done.stdout, done.stderr) == ("None None\n", "")


ALL: Final = {"torch": "2.13.0", "transformers": "5.19.0", "megatron-core": "0.16.1", "mcore-bridge": "1.6.5"}
MEGATRON: Final = "megatron sft --sharded_lazy true"
SWIFT: Final = "swift sft --sharded_lazy true"
RUNS: Final = "runs: every rank reads its own chunks"
REFUSES: Final = "refuses the option"
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
        monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path / "site")])
        monkeypatch.setattr(site, "ENABLE_USER_SITE", False)
        write(tmp_path / "site" / "lazyshard_swift.pth")
        if "active" in missing:
            (tmp_path / "site" / "lazyshard_swift.pth").unlink()
            sys.meta_path[:] = [finder for finder in sys.meta_path if not hasattr(finder, hook.MARK)]
        findings = doctor.examine()
        sections = list(dict.fromkeys(finding.section for finding in findings))
        assert sections == ["versions", "start-up", "extensions", "verdict"]
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
    assert found["swift.cli.main"].answer == "extended by lazyshard_swift.commands"
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
    ("3.12.6", [], {"ms-swift"}, {"ms-swift": "3.12.6 in ", MEGATRON: REFUSES, SWIFT: REFUSES}),
]


@pytest.mark.parametrize(("version", "missing", "bad", "answers"), TROUBLES)
def test_trouble(
    examine: Examine, version: str | None, missing: list[str], bad: set[str], answers: dict[str, str]
) -> None:
    found = examine(version, *missing)
    assert not_ok(found) == bad | {command for command in (MEGATRON, SWIFT) if answers[command] != RUNS}
    assert [subject for subject, words in answers.items() if not found[subject].answer.startswith(words)] == []


def test_real_command() -> None:
    """In this environment, with whatever it has; it must find ms-swift."""
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
    assert found["finder"]["ok"] is found["lazyshard_swift.pth"]["ok"] is True
