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
            if name != "hook points" or not (self.version is None or ms_swift.is_too_old(self.version))
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
    assert found["finder"].answer == "active in this interpreter"
    assert found["swift.cli.main.cli_main"].answer == "swift/cli/main.py:4 (the command line)"
    assert found[MEGATRON] == Finding("verdict", MEGATRON, RUNS, True)
    assert found[SWIFT] == Finding("verdict", SWIFT, RUNS, True)


def test_no_ms_swift(place: Place) -> None:
    place.version = None
    found = place.examine()
    assert not_ok(found) == {"ms-swift", MEGATRON, SWIFT}
    assert found["ms-swift"].answer == "not installed: pip install 'ms-swift>=4.0,<4.7'"
    assert found[SWIFT].answer == "cannot start: ms-swift is not installed"


def test_no_megatron(place: Place) -> None:
    del place.distributions["megatron-core"], place.distributions["mcore-bridge"]
    found = place.examine()
    assert not_ok(found) == {"megatron-core", "mcore-bridge", MEGATRON}
    assert found[MEGATRON].answer == (
        "does not start, with or without the option: megatron-core and mcore-bridge are not installed"
    )
    assert found["megatron-core"].answer == "not installed: pip install megatron-core"
    assert found[SWIFT].answer == RUNS


def test_bridge_is_not_needed_by_older_releases(place: Place) -> None:
    place.version = "4.0.0"
    del place.distributions["mcore-bridge"]
    found = place.examine()
    assert not_ok(found) == set()
    assert found["mcore-bridge"].answer == "not installed, and not needed by this ms-swift"


def test_not_active(place: Place) -> None:
    (place.folder / "site" / "lazyshard_swift.pth").unlink()
    sys.meta_path[:] = [finder for finder in sys.meta_path if not hasattr(finder, hook.MARK)]
    found = place.examine()
    assert not_ok(found) == {"lazyshard_swift.pth", "finder", MEGATRON, SWIFT}
    assert found["lazyshard_swift.pth"].answer == (
        f"not in {place.folder}/site: install lazyshard with pip into this environment"
    )
    assert found[SWIFT].answer.endswith("does not know: lazyshard is not active in this interpreter")


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
    assert ": there is no " in found[point.title].answer
    for command, text in ((MEGATRON, megatron), (SWIFT, swift or megatron)):
        assert found[command].answer == (
            text if text == RUNS else f"{text}{point.title} is missing; install lazyshard and ms-swift again"
        )
        assert found[command].ok is (text == RUNS)


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
        assert words in found[command].answer
        assert found[command].answer.endswith(
            f": lazyshard_swift.{name} is missing; install lazyshard and ms-swift again"
        )


def test_other_version(place: Place) -> None:
    place.version = "4.7.0"
    found = place.examine()
    assert not_ok(found) == {"ms-swift", MEGATRON, SWIFT}
    assert (
        found["ms-swift"].answer
        == f"4.7.0 in {place.folder}/swift; lazyshard is made for 4.0 to 4.6: pip install 'ms-swift>=4.0,<4.7'"
    )
    assert found[SWIFT].answer == ("may run: all hook points are there, but nobody has tried it with ms-swift 4.7.0")


def test_version_that_is_too_old(place: Place) -> None:
    place.version = "3.12.6"
    del place.distributions["mcore-bridge"]
    found = place.examine()
    assert not_ok(found) == {"ms-swift", MEGATRON, SWIFT}
    for command in (MEGATRON, SWIFT):
        assert found[command].answer.startswith("stops before training: ")
        assert all(words in found[command].answer for words in ("3.12.6", "4.0.0", "pip install"))


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
