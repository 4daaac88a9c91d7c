"""`lazyshard verify-filesystem`: what it makes of measurements, and what it finds on filesystems of this machine."""

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import pytest

from lazyshard.cli import exits
from lazyshard.cli.main import main as lazyshard
from lazyshard.cli.verify_filesystem import _CODES, Judged, conclude, judge
from lazyshard.filesystem.measuring import LOOKS, Far, Sightings, _sights, measure
from lazyshard.filesystem.side import Side, content, version_of
from tests.cli.commands import ROOT, environment
from tests.harness.disks import SmallDisk
from tests.harness.network.mounts import CACHED, DEFAULT, Share, why_not

pytestmark = pytest.mark.full

STORM: Final = {"reads": 900, "missing": 0, "torn": 0, "back": 0, "errors": {}, "seconds": 1.0}

GOOD: Final = Sightings(
    waited_s=90.0, near="nfs4", far="nfs4", round_trip_s=0.001, seen=dict.fromkeys(LOOKS, 0.002), storm=STORM
)


def main(arguments: list[str]) -> int:
    return lazyshard(["verify-filesystem", *arguments])


def seen(label: str, seconds: float | None) -> Sightings:
    return replace(GOOD, seen={**GOOD.seen, label: seconds})


def storm(**counts: Any) -> Sightings:
    return replace(GOOD, storm={**STORM, **counts})


def test_what_is_as_it_should_be_fits() -> None:
    assert {line.verdict for line in judge(GOOD)} == {"ok"}
    assert conclude(judge(GOOD)) == ("fits", "fits")


@pytest.mark.parametrize(
    ("measured", "code", "what", "verdict"),
    [
        (replace(GOOD, rename="ENOSYS"), 3, "rename over an existing file", "missing"),
        (storm(missing=1), 3, "rename replaces in one step", "missing"),
        (storm(torn=1), 0, "rename replaces in one step", "ok"),
        (storm(torn=3, reads=20), 0, "rename replaces in one step", "ok"),
        (storm(torn=46), 3, "rename replaces in one step", "missing"),
        (storm(back=1), 1, "rename replaces in one step", "limit"),
        (storm(errors={"ESTALE": 7}), 0, "rename replaces in one step", "ok"),
        (storm(errors={"EIO": 1}), 3, "rename replaces in one step", "missing"),
        (replace(GOOD, torn=1), 3, "a renamed file shows whole", "missing"),
        (replace(GOOD, errors={"EIO": 1}), 3, "a renamed file shows whole", "missing"),
        (replace(GOOD, errors={"ESTALE": 9}), 0, "a renamed file shows whole", "ok"),
        (seen("replaced, by open", 1.0), 0, "replaced, by open", "ok"),
        (seen("replaced, by open", 1.1), 1, "replaced, by open", "slow"),
        (seen("replaced, by open", 60.1), 3, "replaced, by open", "missing"),
        (seen("replaced, by open", None), 3, "replaced, by open", "missing"),
        (seen("new, by open", 60.0), 1, "new, by open", "slow"),
        (seen("new, by open", 61.0), 3, "new, by open", "missing"),
        (seen("new, by open, asked for before", 30.0), 1, "new, by open, asked for before", "slow"),
        (seen("new, by open, asked for before", None), 3, "new, by open, asked for before", "missing"),
        (seen("new, by listing", 61.0), 1, "new, by listing", "slow"),
        (seen("new, by listing", None), 1, "new, by listing", "limit"),
        (seen("grown, by open", None), 1, "grown, by open", "limit"),
        (replace(GOOD, sync_file="EIO"), 3, "fsync of a file", "missing"),
        (replace(GOOD, sync_folder="EINVAL"), 3, "fsync of a directory", "missing"),
        (replace(GOOD, lock="does not hold"), 1, "flock between the two", "limit"),
        (replace(GOOD, lock="ENOLCK"), 1, "flock between the two", "limit"),
        (GOOD, 0, "flock between the two", "ok"),
        (replace(GOOD, linked_over=True), 1, "hard link refuses a name that is there", "limit"),
        (replace(GOOD, linked_over=None), 1, "hard link refuses a name that is there", "limit"),
        (replace(GOOD, unlinked="ESTALE"), 0, "file that is removed while open", "ok"),
        (replace(GOOD, unlinked="EIO"), 1, "file that is removed while open", "limit"),
        (replace(GOOD, longest_name=226), 0, "length of names", "ok"),
        (replace(GOOD, longest_name=143), 1, "length of names", "limit"),
        (replace(GOOD, longest_name=0), 3, "length of names", "missing"),
    ],
)
def test_each_measurement_has_its_verdict(measured: Sightings, code: int, what: str, verdict: str) -> None:
    lines = judge(measured)
    line = next(line for line in lines if line.what == what)
    assert line.verdict == verdict
    assert _CODES[conclude(lines)[0]] == code
    # Whatever is not as it should be says what that is for lazyshard, and what to do.
    assert all(bool(line.means and line.remedy) == (line.verdict != "ok") for line in lines)


def test_conclusion_names_what_is_worst() -> None:
    ok, slow, missing = Judged("a", "", "ok"), Judged("b", "", "slow"), Judged("c", "", "missing")
    assert conclude([ok, slow]) == ("limited", "works with limits: b")
    assert conclude([ok, slow, missing]) == ("unfit", "does not fit: c")


def test_versions_are_told_from_torn_ones() -> None:
    assert [version_of(content(version)) for version in (0, 1, 9, 200)] == [0, 1, 9, 200]
    for data in (b"", b"9", content(9)[:-1], content(9) + b"x", content(3)[:20] + content(9)[20:], b"x" * 50):
        assert version_of(data) is None


@pytest.mark.parametrize(("label", "torn"), [("new, by open", 1), ("replaced, by open", 0), ("grown, by open", 0)])
def test_a_file_that_was_replaced_may_come_cut_and_a_new_one_may_not(label: str, torn: int, tmp_path: Path) -> None:
    class Told:
        def do(self, operation: str, *_: object) -> object:
            states = {one: {"seconds": 0.1, "torn": int(one == label), "errors": {}} for one in LOOKS}
            return states if operation == "watch" else None

    assert _sights(Side(str(tmp_path)), cast(Far, Told()), 1.0)[1] == torn


def test_names_lead_nowhere_else(tmp_path: Path) -> None:
    side = Side(str(tmp_path))
    for name in ("../x", "a/../../x", "/etc/x", "a//b", "."):
        with pytest.raises(ValueError):
            side.put(name, 1)
    for operation in ("_path", "answer", "no_such"):
        with pytest.raises(ValueError):
            side.answer(operation, [])
    assert list(tmp_path.iterdir()) == []


def test_a_local_folder_fits_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--json", "--longest", "20"]) == exits.DONE
    assert list(tmp_path.iterdir()) == []
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["measured"]["rename"], len(found["lines"])) == ("fits", "", 14)
    # What was really waited, not what --longest allows.
    assert 0 < found["measured"]["waited_s"] < 20


def test_what_the_other_side_leaves_is_removed_or_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = Side(str(tmp_path)), Side(str(tmp_path))
    near.make_folder("mine")
    assert far.enter("mine", 5.0)
    far.put("file", 1)
    assert (near.clear(), list(tmp_path.iterdir())) == ([], [])
    monkeypatch.setattr("lazyshard.filesystem.side._CLOSING_S", 0.01)
    other = Side(str(tmp_path))
    other.make_folder("mine")
    (tmp_path / "mine" / "somebody's").mkdir()
    assert other.clear() == [str(tmp_path / "mine")]


class Broken(Side):
    """A filesystem on which a replacement takes two steps, as on some object stores."""

    def put(self, name: str, version: int) -> None:
        path = Path(self._folder, name)
        path.unlink(missing_ok=True)
        super().put(name, version)


def test_a_replacement_in_two_steps_is_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyshard.filesystem.measuring.Side", Broken)
    with Far([sys.executable, "-m", "lazyshard.filesystem.side", str(tmp_path)]) as far:
        measured = measure(str(tmp_path), far, 20.0, print)
    assert measured.storm["missing"] > 0
    assert conclude(judge(measured))[0] == "unfit"


def test_two_folders_that_are_not_the_same_are_told_from_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyshard.filesystem.measuring.ENTER_S", 0.1)
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
    of_cached, of_default = (json.loads(one)["measured"] for one in told)
    for measured in (of_cached, of_default):
        # What the protocol rests on.
        assert measured["seen"]["replaced, by open"] < 1
        assert measured["seen"]["new, by open"] < 1
        assert measured["rename"] == measured["sync_file"] == measured["sync_folder"] == ""
        assert measured["linked_over"] is False
        assert measured["lock"] == "does not hold"
        assert (measured["unlinked"], measured["replaced"]) == ("read on", "read on")
    # What the caches are seen by; a busy machine may make it longer.
    assert of_cached["seen"]["new, by open, asked for before"] > 5
    assert of_cached["seen"]["new, by listing"] < of_default["seen"]["new, by listing"]
    assert of_default["seen"]["new, by listing"] > 15


@pytest.mark.root
def test_a_full_disk_says_nothing_of_the_filesystem(tmp_path: Path) -> None:
    with SmallDisk(tmp_path / "mount", "size=64k") as disk:
        disk.fill()
        assert main([str(disk.point)]) == exits.UNTRIED
