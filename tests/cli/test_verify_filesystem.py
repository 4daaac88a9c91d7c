"""`lazyshard verify-filesystem`: what it makes of measurements, and what it finds on filesystems of this machine."""

import errno
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard.cli import exits
from lazyshard.cli.main import main as lazyshard
from lazyshard.cli.verify_filesystem import (
    SIGHTS,
    Judged,
    conclude,
    judge_sight,
    judge_storm,
    judge_whole,
    measure,
)
from lazyshard.filesystem.side import Far, Side, content, version_of
from tests.cli.commands import ROOT, environment
from tests.harness.disks import SmallDisk
from tests.harness.network.mounts import CACHED, DEFAULT, Share, why_not

pytestmark = pytest.mark.full

STORM: Final = {"reads": 900, "missing": 0, "torn": 0, "back": 0, "errors": {}}


def main(arguments: list[str]) -> int:
    return lazyshard(["verify-filesystem", *arguments])


def storm(**counts: Any) -> Judged:
    return judge_storm({**STORM, **counts})


def looks(label: str = "new, by open", torn: int = 0, **errors: int) -> Judged:
    states: dict[str, dict[str, Any]] = {one: {"seconds": 0.1, "torn": 0, "errors": {}} for one in SIGHTS}
    return judge_whole({**states, label: {"seconds": 0.1, "torn": torn, "errors": errors}})


def seen(label: str, seconds: float | None) -> Judged:
    return judge_sight(label, seconds, 90.0)


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        (storm(), "ok"),
        (storm(missing=1), "missing"),
        (storm(torn=1), "ok"),
        (storm(torn=3, reads=20), "ok"),
        (storm(torn=46), "missing"),
        (storm(back=1), "limit"),
        (storm(errors={"ESTALE": 7}), "ok"),
        (storm(errors={"EIO": 1}), "missing"),
        (looks(), "ok"),
        (looks(torn=1), "missing"),
        # A file that was replaced may come cut.
        (looks("replaced, by open", torn=1), "ok"),
        (looks(EIO=1), "missing"),
        (looks(ESTALE=9), "ok"),
        (seen("replaced, by open", 0.002), "ok"),
        (seen("replaced, by open", 1.0), "ok"),
        (seen("replaced, by open", 1.1), "slow"),
        (seen("replaced, by open", 60.1), "missing"),
        (seen("replaced, by open", None), "missing"),
        (seen("new, by open", 60.0), "slow"),
        (seen("new, by open", 61.0), "missing"),
        (seen("new, by open, asked for before", 30.0), "slow"),
        (seen("new, by open, asked for before", None), "missing"),
        (seen("new, by listing", 61.0), "slow"),
        (seen("new, by listing", None), "limit"),
    ],
)
def test_each_measurement_has_its_verdict(line: Judged, verdict: str) -> None:
    assert line.verdict == verdict
    # Whatever is not as it should be says what that is for lazyshard, and what to do.
    assert bool(line.means and line.remedy) == (line.verdict != "ok")


class Lacking(Side):
    """A side of which an operation of a name fails, or gives something else."""

    lacks = ""

    def _refuse(self, *name: object) -> None:
        if self.lacks == " ".join(map(str, name)):
            raise OSError(errno.ENOTSUP, "Not supported")

    def put(self, name: str, version: int) -> None:
        self._refuse("put", name, version)
        super().put(name, version)

    def lock(self, name: str) -> int | None:
        self._refuse("lock")
        return None if self.lacks == "held" else super().lock(name)

    def link(self, source: str, name: str) -> None:
        self._refuse("link")
        if self.lacks == "linked over" and os.path.exists(self._path(name)):
            return
        super().link(source, name)

    def sync(self, name: str) -> None:
        self._refuse("sync", name)
        super().sync(name)


class Near(Far):
    """The other side in this process: all but what has to go on at the same time."""

    def __init__(self, folder: Path) -> None:
        self._side, self._answers = Lacking(str(folder)), list[Any]()

    def ask(self, *question: Any) -> None:
        self._answers.append(STORM)

    def answer(self) -> Any:
        return self._answers.pop()

    def do(self, *question: Any) -> Any:
        return self._side.answer(*question)


@pytest.mark.parametrize(
    ("lacks", "code", "what", "verdict"),
    [
        ("", 0, "", ""),
        ("put rename 2", 3, "rename over an existing file", "missing"),
        ("sync rename", 3, "fsync of a file", "missing"),
        ("sync ", 3, "fsync of a directory", "missing"),
        ("lock", 1, "flock between the two", "limit"),
        ("held", 1, "flock between the two", "limit"),
        ("link", 1, "hard link refuses a name that is there", "limit"),
        ("linked over", 1, "hard link refuses a name that is there", "limit"),
    ],
)
def test_what_a_filesystem_lacks(
    lacks: str, code: int, what: str, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lacking, "lacks", lacks)
    monkeypatch.setattr("lazyshard.cli.verify_filesystem.Side", Lacking)
    lines = measure(str(tmp_path), Near(tmp_path), 5.0, print).lines
    assert {line.what: line.verdict for line in lines if line.verdict != "ok"} == ({what: verdict} if what else {})
    assert conclude(lines)[0] == code
    assert all(bool(line.means and line.remedy) == (line.verdict != "ok") for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_conclusion_names_what_is_worst() -> None:
    ok, slow, missing = Judged("a", "", "ok"), Judged("b", "", "slow"), Judged("c", "", "missing")
    assert conclude([ok]) == (0, "fits", "fits")
    assert conclude([ok, slow]) == (1, "limited", "works with limits: b")
    assert conclude([ok, slow, missing]) == (3, "unfit", "does not fit: c")


def test_versions_are_told_from_torn_ones() -> None:
    assert [version_of(content(version)) for version in (0, 1, 9, 200)] == [0, 1, 9, 200]
    for data in (b"", b"9", content(9)[:-1], content(9) + b"x", content(3)[:20] + content(9)[20:], b"x" * 50):
        assert version_of(data) is None


def test_names_lead_nowhere_else(tmp_path: Path) -> None:
    side = Side(str(tmp_path))
    for name in ("../x", "a/../../x", "/etc/x", "a//b", "."):
        with pytest.raises(ValueError):
            side.put(name, 1)
    for operation in ("_path", "answer", "no_such"):
        with pytest.raises(ValueError):
            side.answer(operation)
    assert list(tmp_path.iterdir()) == []


def test_a_local_folder_fits_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--json", "--longest", "20"]) == exits.DONE
    assert list(tmp_path.iterdir()) == []
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], [line["verdict"] for line in found["lines"]]) == ("fits", ["ok"] * 10)


def test_what_the_other_side_leaves_is_removed_or_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = Side(str(tmp_path)), Side(str(tmp_path))
    near.make("mine")
    assert near.enter("mine", 5.0) and far.enter("mine", 5.0)
    far.put("file", 1)
    assert (near.clear(), list(tmp_path.iterdir())) == ([], [])
    monkeypatch.setattr("lazyshard.filesystem.side._CLOSING_S", 0.01)
    other = Side(str(tmp_path))
    other.make("mine")
    (tmp_path / "mine" / "somebody's").mkdir()
    assert other.clear() == [str(tmp_path / "mine")]


class Broken(Side):
    """A filesystem on which a replacement takes two steps, as on some object stores."""

    def put(self, name: str, version: int) -> None:
        path = Path(self._folder, name)
        path.unlink(missing_ok=True)
        super().put(name, version)


def test_a_replacement_in_two_steps_is_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyshard.cli.verify_filesystem.Side", Broken)
    with Far([sys.executable, "-m", "lazyshard.filesystem.side", str(tmp_path)]) as far:
        lines = measure(str(tmp_path), far, 20.0, print).lines
    assert "found nothing" in next(line.found for line in lines if line.what == "rename replaces in one step")
    assert conclude(lines)[0] == 3


def test_two_folders_that_are_not_the_same_are_told_from_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyshard.cli.verify_filesystem.ENTER_S", 0.1)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 4
    assert list((tmp_path / "a").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["/tmp", "--far", "true"], 4),
        (["/tmp", "--far", "/nowhere/command"], 4),
        (["/tmp", "--far", "echo hello"], 4),
    ],
)
def test_silent_other_side(arguments: list[str], code: int) -> None:
    assert main(arguments) == code


def test_the_other_side_runs_over_a_command_without_extras(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lean = (
        "import runpy, sys; sys.modules.update(typer=None, rich=None, torch=None); "
        "runpy.run_module('lazyshard.filesystem.side', run_name='__main__')"
    )
    for program in (["-c", lean], ["-m", "lazyshard.cli", "verify-filesystem", "--serve"]):
        far = shlex.join(["env", f"PYTHONPATH={ROOT}", sys.executable, *program, str(tmp_path)])
        assert main([str(tmp_path), "--far", far]) == exits.DONE
        assert "\nok       rename replaces in one step" in capsys.readouterr().out


@pytest.mark.root
@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_two_sshfs_mounts_work_with_limits(tmp_path: Path) -> None:
    share = Share(tmp_path)
    script = [sys.executable, "-m", "lazyshard.cli", "verify-filesystem"]
    with share.mount("cached", CACHED) as cached, share.mount("default", DEFAULT) as default:
        running = [
            subprocess.Popen([*script, near.point, far.point, "--json"], stdout=subprocess.PIPE, env=environment())
            for near, far in ((default, cached), (cached, default))
        ]
        told = [each.communicate()[0] for each in running]
        assert [each.returncode for each in running] == [1, 1]
        assert list(share.real.iterdir()) == []
    of_cached, of_default = ({line["what"]: line for line in json.loads(one)["lines"]} for one in told)
    for found in (of_cached, of_default):
        limits = {what for what, line in found.items() if line["verdict"] != "ok"}
        assert limits - {"new, by listing", "new, by open, asked for before"} == {"flock between the two"}
        assert found["flock between the two"]["found"] == "does not hold"
    # What the caches are seen by; a busy machine may make it longer.
    assert seconds(of_cached, "new, by open, asked for before") > 5
    assert seconds(of_cached, "new, by listing") < seconds(of_default, "new, by listing")
    assert seconds(of_default, "new, by listing") > 15


def seconds(found: dict[str, Any], what: str) -> float:
    text = found[what]["found"]
    return 0.0 if text == "at once" else float(text.removesuffix(" s"))


@pytest.mark.root
def test_a_full_disk_says_nothing_of_the_filesystem(tmp_path: Path) -> None:
    with SmallDisk(tmp_path / "mount", "size=64k") as disk:
        disk.fill()
        assert main([str(disk.point)]) == exits.UNTRIED
