"""How `lazyshard doctor` shows what it is given. What is found about ms-swift: tests/swift/test_doctor.py."""

import errno
import fcntl
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from lazyshard.cli import doctor, exits
from lazyshard.cli.main import main
from lazyshard.examination import GROUP, Finding
from tests.cli.commands import ROOT, lazyshard

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GOOD: Final = [
    Finding("versions", "python", "3.11"),
    Finding("versions", "longer name", "1.0", True),
    Finding("verdict", "command", "runs", True),
]
BAD: Final = [*GOOD, Finding("verdict", "other", "line\nend", False)]


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with three things to examine, beside those that are installed already."""
    folder = tmp_path / "patient-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: patient\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        f"[{GROUP}]\ngood = tests.cli.test_doctor:good\nbad = tests.cli.test_doctor:bad\n"
        "nothing = tests.cli.test_doctor:nothing\nraising = tests.cli.test_doctor:raising\n"
        "gone = no_such_module:examine\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def good() -> list[Finding]:
    return GOOD


def bad() -> list[Finding]:
    return BAD


def nothing() -> list[Finding]:
    return []


def raising() -> list[Finding]:
    raise KeyError("x")


def test_all_good(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "good"]) == 0
    assert capsys.readouterr().out == (
        "versions\n"
        "      python       3.11\n"
        "  ok  longer name  1.0\n"
        "verdict\n"
        "  ok  command  runs\n"
        "\n"
        "all is as it should be\n"
    )


def test_something_bad(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "bad"]) == exits.MISSING == 1
    assert capsys.readouterr().out == (
        "versions\n"
        "          python       3.11\n"
        "  ok      longer name  1.0\n"
        "verdict\n"
        "  ok      command  runs\n"
        "  NOT OK  other    line\\nend\n"
        "\n"
        "1 thing not as it should be\n"
    )


def test_nothing_to_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "nothing"]) == 0
    assert capsys.readouterr().out == "all is as it should be\n"


@pytest.mark.parametrize(("area", "code"), [("good", 0), ("bad", 1)])
def test_json(area: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", area, "--json"]) == code
    result = json.loads(capsys.readouterr().out)
    assert result.keys() == {"area", "ok", "findings"}
    assert (result["area"], result["ok"]) == (area, code == 0)
    assert [Finding(**finding) for finding in result["findings"]] == (GOOD if code == 0 else BAD)


@pytest.mark.parametrize(("areas", "code"), [(["good"], 0), (["good", "bad"], 1)])
def test_without_an_area_all_are_examined(
    areas: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [one for one in importlib.metadata.entry_points(group=GROUP) if one.name in areas]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: found)
    assert main(["doctor", "--json"]) == code
    assert [json.loads(line)["area"] for line in capsys.readouterr().out.splitlines()] == ["lazyshard", *sorted(areas)]


@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["bad"], 1)])
def test_what_is_not_there_is_examined_for_who_asks_for_it(
    arguments: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [one for one in importlib.metadata.entry_points(group=GROUP) if one.name == "bad"]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: found)
    monkeypatch.setitem(globals(), "applies", lambda: False)
    assert main(["doctor", *arguments]) == code
    told = "bad: not installed, so there is nothing to examine; `lazyshard doctor bad` tells what it needs\n"
    assert capsys.readouterr().out.endswith(f"\nall is as it should be\n{told}") is (code == 0)


def examined(capsys: pytest.CaptureFixture[str], *arguments: object, code: int) -> dict[str, Finding]:
    """What is found of lazyshard itself, where nothing else can be examined."""
    assert main(["doctor", "--json", *map(str, arguments)]) == code
    (line,) = capsys.readouterr().out.splitlines()
    return {found["subject"]: Finding(**found) for found in json.loads(line)["findings"]}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: [])


@pytest.mark.usefixtures("alone")
def test_lazyshard_itself_is_examined_where_there_is_nothing_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("pyarrow", "orjson"):
            raise importlib.metadata.PackageNotFoundError(name)
        return there(name)

    found = examined(capsys, code=0)
    assert found["python"].answer.startswith(f"{platform.python_version()} in ")
    assert found["numpy"].answer == there("numpy")
    assert {"torch", "arrow", "objects", "max_user_watches", "an instance"} <= found.keys()
    monkeypatch.setattr(importlib.metadata, "version", version)
    found = examined(capsys, code=1)
    assert found["arrow"].ok is None
    assert "pip install 'lazyshard[arrow]' (for Parquet" in found["arrow"].answer
    assert [subject for subject, finding in found.items() if finding.ok is False] == ["orjson"]


def test_requirements_are_those_of_the_package() -> None:
    """Of the extras, those that are for users."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(lines: list[str]) -> set[str]:
        return {re.split(r"[^A-Za-z0-9-]", line)[0] for line in lines if "python_version" not in line}

    assert set(doctor.NEEDED) == names(project["dependencies"])
    extras = {extra: names(lines) for extra, lines in project["optional-dependencies"].items() if extra != "all"}
    assert {extra: set(needed) for extra, (_, needed) in doctor.EXTRAS.items()} == extras


@pytest.mark.usefixtures("alone")
def test_filesystem_of_a_stream(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for stream in (tmp_path, tmp_path / "not there yet"):
        before = sorted(tmp_path.iterdir())
        found = examined(capsys, "--stream", stream, code=0)
        looks = ["directory", "rename over a file", "fsync", "file locks", "hard links", "inotify"]
        assert [found[subject].ok for subject in looks] == [True] * 6
        assert found["type"].answer not in ("", "unknown")
        assert sorted(tmp_path.iterdir()) == before
    found = examined(capsys, "--stream", tmp_path / "no" / "where", code=1)
    assert found["directory"].ok is False


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("call", "subject", "ok"),
    [("os.replace", "rename over a file", False), ("os.link", "hard links", None), ("os.fsync", "fsync", False)],
)
def test_filesystem_that_lacks_something(
    call: str,
    subject: str,
    ok: bool | None,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOTSUP, "Not supported")

    monkeypatch.setattr(call, refuse)
    found = examined(capsys, "lazyshard", "--stream", tmp_path, code=0 if ok is None else 1)
    assert found[subject].ok is ok
    assert found[subject].answer.startswith("does not work (Not supported): ")


@pytest.mark.usefixtures("alone")
def test_locks_that_do_not_meet_are_told_and_not_judged(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda fd, operation: None)
    assert examined(capsys, "--stream", tmp_path, code=0)["file locks"].ok is None


def test_stream_goes_with_lazyshard(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "swift", "--stream", "stream"]) == 2
    assert "--stream" in capsys.readouterr().err


def test_unknown_area(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "elsewhere"]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert "'elsewhere' is unknown; choose from: lazyshard, bad, " in shown.err


@pytest.mark.parametrize(("area", "error"), [("raising", "KeyError: 'x'"), ("gone", "ModuleNotFoundError: ")])
def test_examination_that_fails(area: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", area]) == 70
    assert f"lazyshard: error: unexpected {error}" in capsys.readouterr().err


def test_installed_package_can_be_examined() -> None:
    done: subprocess.CompletedProcess[str] = lazyshard("doctor", "swift")
    assert done.returncode in (0, 1)
    assert done.stderr == ""
    assert "swift sft --sharded_lazy true" in done.stdout
