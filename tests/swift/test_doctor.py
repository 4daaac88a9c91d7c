"""Which ms-swift is found, and what `lazyshard doctor swift` says of it."""

import json
import site
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard.cli.doctor import Finding
from lazyshard_swift import doctor, hook, ms_swift
from tests.swift.programs import make_packages, package_folder, python, write
from tests.swift.warm import run_warm

INSTALLED: Final = """
import importlib
from lazyshard_swift import hook, ms_swift
# That of Megatron asks for a device; trainings refuse to start where it lacks something.
plain = [module for module in hook.EXTENSIONS if "megatron" not in module]
for module in plain:
    importlib.import_module(module)
assert ms_swift.outcomes == dict.fromkeys(plain, ""), ms_swift.outcomes
"""


@pytest.mark.full
def test_installed_ms_swift_has_all_that_is_extended(tmp_path: Path) -> None:
    version = ms_swift.version()
    assert version is not None, "ms-swift is not installed; run `scripts/environment full`"
    assert ms_swift.is_supported(version)
    run_warm(tmp_path, write(tmp_path / "program.py", INSTALLED))


def test_versions() -> None:
    for version, release, supported, too_old in (
        ("3.12.6", (3, 12), False, True),
        ("4.0.0.dev0", (4, 0), True, False),
        ("4.6.12", (4, 6), True, False),
        ("4.7.0", (4, 7), False, False),
        ("5", None, False, False),
    ):
        assert ms_swift.release(version) == release
        assert (ms_swift.is_supported(version), ms_swift.is_too_old(version)) == (supported, too_old)


def found(*paths: Path, before: str = "") -> str:
    """What a process without site-packages finds on this path: folder and version."""
    code = f"{before}\nfrom lazyshard_swift import ms_swift\nprint(ms_swift.folder(), ms_swift.version())"
    done = python(code, *paths, package_folder(), site=False)
    assert done.stderr == ""
    return done.stdout.strip()


def test_checkout_without_metadata_or_no_ms_swift(tmp_path: Path) -> None:
    folder = make_packages(tmp_path / "there", ["swift.version"], "__version__ = '4.5.0.dev0'\n") / "swift"
    assert found(tmp_path / "there") == f"{folder} 4.5.0.dev0"
    write(folder / "version.py", "from x import __version__\n")
    assert found(tmp_path / "there") == f"{folder} None"
    (folder / "version.py").unlink()
    assert found(tmp_path / "there") == f"{folder} None"
    assert found() == "None None"
    assert found(before="import sys, types; sys.modules['swift'] = types.ModuleType('swift')") == "None None"


ALL: Final = {"torch": "2.13.0", "transformers": "5.19.0", "megatron-core": "0.16.1", "mcore-bridge": "1.6.5"}
NEEDED: Final = ("megatron-core", "mcore-bridge")
MEGATRON: Final = "megatron sft --sharded_lazy true"
SWIFT: Final = "swift sft --sharded_lazy true"
RUNS: Final = "runs: every rank reads its own chunks"
REFUSES: Final = "refuses the option"
Examine = Callable[..., dict[str, Finding]]


@pytest.fixture
def examine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Examine:
    """Examines an environment that is made up, in which all is well but for what is missing."""

    def examine(version: str | None = "4.6.0", *missing: str) -> dict[str, Finding]:
        pth = write(tmp_path / "site" / "lazyshard_swift.pth")
        if "active" in missing:
            pth.unlink()
        monkeypatch.setattr(hook, "active", lambda: "active" not in missing)
        monkeypatch.setattr(ms_swift, "version", lambda: version)
        monkeypatch.setattr(ms_swift, "folder", lambda: None if version is None else tmp_path / "swift")
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in missing else name)
        distributions = {name: number for name, number in ALL.items() if name not in missing}
        monkeypatch.setattr(ms_swift, "distribution_version", distributions.get)
        monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path / "site")])
        monkeypatch.setattr(site, "ENABLE_USER_SITE", False)
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
    ("4.6.0", [*NEEDED], {*NEEDED}, {MEGATRON: "does not start", NEEDED[0]: f"not installed: pip install {NEEDED[0]}"}),
    ("4.6.0", ["transformer_engine"], set(), {MEGATRON: "does not start"}),
    # The bridge is not needed by older releases.
    ("4.0.0", ["mcore-bridge"], set(), {"mcore-bridge": "not installed, and not"}),
    ("4.7.0", [], {"ms-swift"}, {"ms-swift": "4.7.0 in ", MEGATRON: "may run", SWIFT: "may run"}),
    ("4.6.0", ["active"], {"lazyshard_swift.pth", "finder"}, {MEGATRON: REFUSES, SWIFT: REFUSES}),
    ("3.12.6", [], {"ms-swift"}, {"ms-swift": "3.12.6 in ", MEGATRON: REFUSES, SWIFT: REFUSES}),
]


def test_trouble(examine: Examine) -> None:
    for version, missing, bad, said in TROUBLES:
        found, answers = examine(version, *missing), {MEGATRON: RUNS, SWIFT: RUNS} | said
        assert not_ok(found) == bad | {command for command in (MEGATRON, SWIFT) if answers[command] != RUNS}
        assert [subject for subject, words in answers.items() if not found[subject].answer.startswith(words)] == []


def test_real_command() -> None:
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
