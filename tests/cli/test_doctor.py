"""How `lazyshard doctor` shows what it is given. What is found about ms-swift: tests/swift/test_doctor.py."""

import errno
import fcntl
import importlib.metadata
import json
import platform
import sys
from pathlib import Path
from typing import Final
from unittest import mock

import pytest

from lazyshard.cli import doctor, exits
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

METADATA: Final = "Metadata-Version: 2.1\nName: patient\nVersion: 1.0\n"
ENTRY_POINTS: Final = f"""[{GROUP}]
good = tests.cli.test_doctor:good
bad = tests.cli.test_doctor:bad
nothing = tests.cli.test_doctor:nothing
raising = tests.cli.test_doctor:raising
gone = no_such_module:examine
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with things to examine, beside those that are installed already."""
    folder = tmp_path / "patient-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(METADATA)
    (folder / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)


def good() -> list[Finding]:
    return GOOD


def bad() -> list[Finding]:
    return BAD


def nothing() -> list[Finding]:
    return []


def raising() -> list[Finding]:
    raise KeyError("x")


def test_findings_are_told_as_lines() -> None:
    done = lazyshard("doctor", "good")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "all is as it should be")
    assert lazyshard("doctor", "nothing").stdout == done.stdout.splitlines(keepends=True)[-1]
    done = lazyshard("doctor", "bad")
    assert done.returncode == exits.MISSING == 1
    assert done.stdout == (
        "versions\n"
        "          python       3.11\n"
        "  ok      longer name  1.0\n"
        "verdict\n"
        "  ok      command  runs\n"
        "  NOT OK  other    line\\nend\n"
        "\n"
        "1 thing not as it should be\n"
    )


@pytest.mark.parametrize(("area", "code", "findings"), [("good", 0, GOOD), ("bad", 1, BAD)])
def test_json(area: str, code: int, findings: list[Finding]) -> None:
    done = lazyshard("doctor", area, "--json")
    result = json.loads(done.stdout)
    assert (done.returncode, result.pop("area"), result.pop("ok")) == (code, area, code == 0)
    assert [Finding(**finding) for finding in result.pop("findings")] == findings
    assert result == {}


def only(monkeypatch: pytest.MonkeyPatch, *areas: str) -> None:
    found = [one for one in importlib.metadata.entry_points(group=GROUP) if one.name in areas]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: found)


@pytest.mark.parametrize(("areas", "code"), [(["good"], 0), (["good", "bad"], 1)])
def test_without_an_area_all_are_examined(areas: list[str], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, *areas)
    done = lazyshard("doctor", "--json")
    told = [json.loads(line)["area"] for line in done.stdout.splitlines()]
    assert (done.returncode, told) == (code, ["lazyshard", *sorted(areas)])


@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["bad"], 1)])
def test_who_asks_for_what_is_not_there(arguments: list[str], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "bad")
    monkeypatch.setitem(globals(), "applies", lambda: False)
    done = lazyshard("doctor", *arguments)
    assert (done.returncode, done.stdout.splitlines()[-1].startswith("bad: not installed")) == (code, code == 0)


def examined(*arguments: object, code: int) -> dict[str, Finding]:
    """What is found of lazyshard itself, where nothing else can be examined."""
    done = lazyshard("doctor", "--json", *arguments)
    (line,) = done.stdout.splitlines()
    assert done.returncode == code, line
    return {found["subject"]: Finding(**found) for found in json.loads(line)["findings"]}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)


@pytest.mark.usefixtures("alone")
def test_lazyshard_itself_is_examined_where_there_is_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("pyarrow", "orjson"):
            raise importlib.metadata.PackageNotFoundError(name)
        return there(name)

    found = examined(code=0)
    assert found["python"].answer.startswith(f"{platform.python_version()} in ")
    assert found["numpy"].answer == there("numpy")
    assert {"torch", "arrow", "objects", "inotify"} <= found.keys()
    monkeypatch.setattr(importlib.metadata, "version", version)
    found = examined(code=1)
    assert found["arrow"].ok is None
    assert "pip install 'lazyshard[arrow]' (for Parquet" in found["arrow"].answer
    assert [subject for subject, finding in found.items() if finding.ok is False] == ["orjson"]


def test_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert set(doctor.PURPOSES) == project["optional-dependencies"].keys() - {"all"}


@pytest.mark.usefixtures("alone")
def test_filesystem_of_a_stream(tmp_path: Path) -> None:
    for stream in (tmp_path, tmp_path / "not there yet"):
        before = sorted(tmp_path.iterdir())
        found = examined("--stream", stream, code=0)
        looks = ["directory", "rename replaces in one step", "fsync of a file", "fsync of a directory", "inotify"]
        looks += ["flock between the two", "hard link refuses a name that is there"]
        assert [found[subject].ok for subject in looks] == [True] * 7
        assert found["type"].answer not in ("", "unknown")
        assert sorted(tmp_path.iterdir()) == before
    found = examined("--stream", tmp_path / "no" / "where", code=1)
    assert found["directory"].ok is False


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("call", "subject", "ok"),
    [
        ("os.replace", "rename over an existing file", False),
        ("os.link", "hard link refuses a name that is there", None),
        ("os.fsync", "fsync of a directory", False),
    ],
)
def test_filesystem_that_lacks_something(
    call: str, subject: str, ok: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, mock.Mock(side_effect=OSError(errno.ENOTSUP, "Not supported")))
    found = examined("lazyshard", "--stream", tmp_path, code=0 if ok is None else 1)
    assert found[subject].ok is ok


@pytest.mark.usefixtures("alone")
def test_locks_that_do_not_meet_are_told_and_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda fd, operation: None)
    assert examined("--stream", tmp_path, code=0)["flock between the two"].ok is None


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        # That option goes with lazyshard.
        (["swift", "--stream", "stream"], 2, "--stream"),
        (["elsewhere"], 2, "choose from: lazyshard, bad, "),
        (["raising"], 70, "KeyError: 'x'"),
        (["gone"], 70, "ModuleNotFoundError: "),
    ],
)
def test_refusal(arguments: list[str], code: int, told: str) -> None:
    done = lazyshard("doctor", *arguments)
    assert (done.returncode, done.stdout, told in done.stderr) == (code, "", True)


def test_installed_package_can_be_examined() -> None:
    done = lazyshard("doctor", "swift")
    assert (done.returncode in (0, 1), done.stderr) == (True, "")
    assert "swift sft --sharded_lazy true" in done.stdout
