"""How `lazyshard doctor` shows what it is given. What is found about ms-swift: tests/swift/test_doctor.py."""

import errno
import importlib.metadata
import json
import platform
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Final
from unittest import mock

import pytest

from lazyshard.cli import doctor
from lazyshard.cli.doctor import GROUP, Finding
from tests.cli.commands import lazyshard
from tests.harness.processes.environment import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NOT_SUPPORTED: Final = OSError(errno.ENOTSUP, "Not supported")


def only(monkeypatch: pytest.MonkeyPatch, *areas: str) -> None:
    """Has just these be there to be examined, besides lazyshard itself."""
    values = {name: f"tests.cli.test_doctor:{name}" for name in areas} | {"gone": "no_such_module:examine"}
    found = [EntryPoint(name, values[name], GROUP) for name in areas]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: found)


@pytest.fixture(autouse=True)
def areas(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "bad", "gone", "good", "raising", "swift")


def examined(*arguments: object, code: int) -> dict[str, Finding]:
    done = lazyshard("doctor", "lazyshard", "--json", *arguments)
    (line,) = done.stdout.splitlines()
    assert done.returncode == code, line
    return {found["subject"]: Finding(**found) for found in json.loads(line)["findings"]}


def good() -> list[Finding]:
    runs = Finding("verdict", "command", "runs", True)
    return [Finding("versions", "python", "3.11"), Finding("versions", "longer name", "1.0", True), runs]


def bad() -> list[Finding]:
    return [*good(), Finding("verdict", "other", "line\nend", False)]


def raising() -> list[Finding]:
    raise KeyError("x")


@pytest.mark.parametrize(("areas", "code"), [(["good"], 0), (["good", "bad"], 1)])
def test_without_an_area_all_are_examined(areas: list[str], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, *areas)
    done = lazyshard("doctor", "--json")
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, [one["area"] for one in told]) == (code, ["lazyshard", *sorted(areas)])
    for one in told[1:]:
        found = [Finding(**finding) for finding in one["findings"]]
        assert (one["ok"], found) == ((True, good()) if one["area"] == "good" else (False, bad()))


@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["bad"], 1)])
def test_who_asks_for_what_is_not_there(arguments: list[str], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "bad")
    monkeypatch.setitem(globals(), "applies", lambda: False)
    done = lazyshard("doctor", *arguments)
    assert (done.returncode, done.stdout.splitlines()[-1].startswith("bad: not installed")) == (code, code == 0)


def test_lazyshard_itself_is_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("pyarrow", "orjson"):
            raise importlib.metadata.PackageNotFoundError(name)
        return there(name)

    found = examined(code=0)
    assert found["python"].answer.startswith(f"{platform.python_version()} in ")
    assert found["numpy"].answer == there("numpy")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(doctor.PURPOSES) == project["optional-dependencies"].keys() - {"all"} <= found.keys()
    monkeypatch.setattr(importlib.metadata, "version", version)
    found = examined(code=1)
    assert found["arrow"].ok is None
    assert "pip install 'lazyshard[arrow]' (for Parquet" in found["arrow"].answer
    assert [subject for subject, finding in found.items() if finding.ok is False] == ["orjson"]


def test_filesystem_of_a_stream(tmp_path: Path) -> None:
    for stream in (tmp_path, tmp_path / "not there yet"):
        before = sorted(tmp_path.iterdir())
        found = examined("--stream", stream, code=0)
        looks = ["directory", "rename replaces in one step", "fsync of a file", "fsync of a directory", "inotify"]
        looks += ["flock between the two", "hard link refuses an existing name"]
        assert [found[subject].ok for subject in looks] == [True] * 7
        assert found["type"].answer not in ("", "unknown")
        assert sorted(tmp_path.iterdir()) == before
    found = examined("--stream", tmp_path / "no" / "where", code=1)
    assert found["directory"].ok is False


@pytest.mark.parametrize(
    ("call", "does", "subject", "ok"),
    [
        ("os.replace", NOT_SUPPORTED, "rename over an existing file", False),
        ("os.link", NOT_SUPPORTED, "hard link refuses an existing name", None),
        ("os.fsync", NOT_SUPPORTED, "fsync of a directory", False),
        # Locks that do not meet are told, and not judged.
        ("fcntl.flock", None, "flock between the two", None),
    ],
)
def test_filesystem_that_lacks_something(
    call: str, does: OSError | None, subject: str, ok: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, mock.Mock(side_effect=does))
    found = examined("--stream", tmp_path, code=0 if ok is None else 1)
    assert found[subject].ok is ok


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
