"""What `lazyshard doctor swift` finds; how it is shown: tests/cli/test_doctor.py."""

import json
import site
import sys
from collections.abc import Iterator
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


class Place:
    """An environment that is made up, in which all is well at first."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.version: str | None = "4.6.0"
        self.distributions: dict[str, str] = dict(ALL)
        self.points = list(ms_swift.POINTS)
        self.extensions = {name.rpartition(".")[2] for name in hook.EXTENSIONS.values()}
        monkeypatch.setattr(ms_swift, "version", lambda: self.version)
        monkeypatch.setattr(ms_swift, "folder", lambda: folder / "swift" if self.version is not None else None)
        monkeypatch.setattr(ms_swift, "distribution_version", lambda name: self.distributions.get(name))
        monkeypatch.setattr(doctor, "__file__", str(folder / "lazyshard_swift" / "doctor.py"))
        monkeypatch.setattr(site, "getsitepackages", lambda: [str(folder / "site")])
        monkeypatch.setattr(site, "ENABLE_USER_SITE", False)
        (folder / "site").mkdir()
        (folder / "site" / "lazyshard_swift.pth").touch()

    def examine(self) -> dict[str, Finding]:
        (self.folder / "lazyshard_swift").mkdir()
        for name in self.extensions:
            (self.folder / "lazyshard_swift" / f"{name}.py").touch()
        make_swift(self.folder, self.points)
        findings = doctor.examine()
        sections = list(dict.fromkeys(finding.section for finding in findings))
        assert sections == [
            name
            for name in ("versions", "start-up", "extensions", "hook points", "verdict")
            if name != "hook points" or self.version is not None
        ]
        found = {finding.subject: finding for finding in findings}
        assert len(found) == len(findings)
        return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    hook.install()
    yield Place(tmp_path, monkeypatch)


def not_ok(found: dict[str, Finding]) -> set[str]:
    return {subject for subject, finding in found.items() if finding.ok is False}


def test_all_is_well(place: Place) -> None:
    found = place.examine()
    assert not_ok(found) == set()
    assert found["ms-swift"].answer == f"4.6.0 in {place.folder}/swift"
    assert found["torch"] == Finding("versions", "torch", "2.13.0", True)
    assert found["lazyshard_swift.pth"].answer == f"{place.folder}/site/lazyshard_swift.pth"
    assert found["swift.cli.main.cli_main"].answer == "swift/cli/main.py:4 (the command line)"
    for command in (MEGATRON, SWIFT):
        assert found[command] == Finding("verdict", command, RUNS, True)


# Version, distributions that are missing, what is found not to be in order, and words of the answers about some.
TROUBLES: list[tuple[str | None, list[str], set[str], dict[str, str]]] = [
    (None, [], {"ms-swift", MEGATRON, SWIFT}, {"ms-swift": "pip install 'ms-swift>=4.0,<4.7'", SWIFT: "cannot start"}),
    (
        "4.6.0",
        ["megatron-core", "mcore-bridge"],
        {"megatron-core", "mcore-bridge", MEGATRON},
        {MEGATRON: "megatron-core and mcore-bridge", "megatron-core": "pip install megatron-core", SWIFT: RUNS},
    ),
    # The bridge is not needed by older releases.
    ("4.0.0", ["mcore-bridge"], set(), {"mcore-bridge": "not needed"}),
    ("4.7.0", [], {"ms-swift", MEGATRON, SWIFT}, {"ms-swift": "'ms-swift>=4.0,<4.7'", SWIFT: "may run"}),
]


@pytest.mark.parametrize(("version", "missing", "bad", "answers"), TROUBLES)
def test_versions_that_do_not_do(
    place: Place, version: str | None, missing: list[str], bad: set[str], answers: dict[str, str]
) -> None:
    place.version = version
    for name in missing:
        del place.distributions[name]
    found = place.examine()
    assert not_ok(found) == bad
    assert [subject for subject, words in answers.items() if words not in found[subject].answer] == []


def test_not_active(place: Place) -> None:
    (place.folder / "site" / "lazyshard_swift.pth").unlink()
    sys.meta_path[:] = [finder for finder in sys.meta_path if not hasattr(finder, hook.MARK)]
    assert not_ok(place.examine()) == {"lazyshard_swift.pth", "finder", MEGATRON, SWIFT}


@pytest.mark.parametrize(
    ("name", "megatron", "swift"),
    [
        ("__post_init__", "refuses the option, which ms-swift does not know: ", None),
        ("_show_dataset", "stops before training: ", None),
        ("cli_main", "stops before training: ", None),
        ("_prepare_dataloader", "stops before training: ", RUNS),
        ("get_train_dataloader", RUNS, "stops before training: "),
    ],
)
def test_hook_point_that_is_missing(name: str, megatron: str, swift: str | None, place: Place) -> None:
    (point,) = (point for point in place.points if point.name == name)
    place.points.remove(point)
    found = place.examine()
    assert point.title in not_ok(found)
    for command, text in ((MEGATRON, megatron), (SWIFT, swift or megatron)):
        assert found[command].answer.startswith(text) and found[command].ok is (text == RUNS)
        assert text == RUNS or point.title in found[command].answer


@pytest.mark.parametrize(
    ("name", "words", "commands"),
    [
        ("arguments", "which ms-swift does not know", {MEGATRON, SWIFT}),
        ("megatron", "stops before training", {MEGATRON}),
        ("huggingface", "stops before training", {SWIFT}),
    ],
)
def test_extension_that_is_missing(name: str, words: str, commands: set[str], place: Place) -> None:
    place.extensions.remove(name)
    found = place.examine()
    assert not_ok(found) == {f"lazyshard_swift.{name}", *commands}
    for command in commands:
        assert words in found[command].answer and f"lazyshard_swift.{name} " in found[command].answer


def test_real_command(tmp_path: Path) -> None:
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
