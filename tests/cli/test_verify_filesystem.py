"""`lazyshard verify-filesystem`: what it makes of measurements, and what it finds on filesystems of this machine."""

import errno
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard.cli import exits
from lazyshard.cli.main import main as lazyshard
from lazyshard.cli.verify_filesystem import SIGHTS, Judged, conclude, judge_sight, judge_storm, judge_whole, measure
from lazyshard.filesystem.side import Far, Side, content, version_of
from tests.harness.disks import SmallDisk
from tests.harness.network.mounts import CACHED, DEFAULT, Share, why_not
from tests.harness.processes.environment import ROOT, environment
from tests.stream.streams import raised

pytestmark = pytest.mark.full

STORM: Final = {"reads": 900, "missing": 0, "torn": 0, "back": 0, "errors": {}}
LINK, PUT = Side.link, Side.put


def main(arguments: list[str]) -> int:
    return lazyshard(["verify-filesystem", *arguments])


def storm(**counts: Any) -> Judged:
    return judge_storm({**STORM, **counts})


def whole(label: str, torn: int = 0, **errors: int) -> Judged:
    states: dict[str, dict[str, Any]] = {one: {"seconds": 0.1, "torn": 0, "errors": {}} for one in SIGHTS}
    return judge_whole({**states, label: {"seconds": 0.1, "torn": torn, "errors": errors}})


def sight(label: str, seconds: float | None) -> Judged:
    return judge_sight(label, seconds, 90.0)


NEW, REPLACED, ASKED = "new, by open", "replaced, by open", "new, by open, asked for before"
JUDGED: Final = [
    *((storm(), "ok"), (storm(missing=1), "missing"), (storm(back=1), "limit")),
    *((storm(torn=1), "ok"), (storm(torn=3, reads=20), "ok"), (storm(torn=46), "missing")),
    *((storm(errors={"ESTALE": 7}), "ok"), (storm(errors={"EIO": 1}), "missing")),
    # A file that was replaced may come cut.
    *((whole(NEW), "ok"), (whole(NEW, 1), "missing"), (whole(REPLACED, 1), "ok")),
    *((whole(NEW, EIO=1), "missing"), (whole(NEW, ESTALE=9), "ok")),
    *((sight(REPLACED, 0.002), "ok"), (sight(REPLACED, 1.0), "ok"), (sight(REPLACED, 1.1), "slow")),
    *((sight(REPLACED, 60.1), "missing"), (sight(REPLACED, None), "missing")),
    *((sight(NEW, 60.0), "slow"), (sight(NEW, 61.0), "missing")),
    *((sight(ASKED, 30.0), "slow"), (sight(ASKED, None), "missing")),
    *((sight("new, by listing", 61.0), "slow"), (sight("new, by listing", None), "limit")),
]


@pytest.mark.parametrize(("judged", "verdict"), JUDGED)
def test_verdicts_on_measurements(judged: Judged, verdict: str) -> None:
    assert judged.verdict == verdict
    # Whatever is not as it should be says what that is for lazyshard, and what to do.
    assert bool(judged.means and judged.remedy) == (verdict != "ok")


def fails(*_: object) -> None:
    raise OSError(errno.ENOTSUP, "Not supported")


def links_over(side: Side, source: str, name: str) -> None:
    if not os.path.exists(side._path(name)):
        LINK(side, source, name)


def replaces_in_two_steps(side: Side, name: str, version: int) -> None:
    """As on some object stores."""
    Path(side._path(name)).unlink(missing_ok=True)
    PUT(side, name, version)


def lack(monkeypatch: pytest.MonkeyPatch, operation: str, given: tuple[object, ...], does: Callable[..., None]) -> None:
    """Has an operation do something else where these are its first arguments."""
    real = getattr(Side, operation)

    def changed(side: Side, *arguments: object) -> object:
        return (does if arguments[: len(given)] == given else real)(side, *arguments)

    monkeypatch.setattr(Side, operation, changed)


class Near(Far):
    """The other side in this process: all but what has to continue at the same time."""

    def __init__(self, folder: Path) -> None:
        self._side, self._answers = Side(str(folder)), list[Any]()

    def ask(self, *question: Any) -> None:
        self._answers.append(STORM)

    def answer(self) -> Any:
        return self._answers.pop()

    def do(self, *question: Any) -> Any:
        return self._side.answer(*question)


@pytest.mark.parametrize(
    ("operation", "given", "does", "what", "verdict"),
    [
        ("put", ("rename", 3), fails, "", "ok"),
        ("put", ("rename", 2), fails, "rename over an existing file", "missing"),
        ("sync", ("rename",), fails, "fsync of a file", "missing"),
        ("sync", ("",), fails, "fsync of a directory", "missing"),
        ("lock", (), fails, "flock between the two", "limit"),
        ("lock", (), lambda *_: None, "flock between the two", "limit"),
        ("link", (), fails, "hard link refuses an existing name", "limit"),
        ("link", (), links_over, "hard link refuses an existing name", "limit"),
    ],
)
def test_what_a_filesystem_lacks(
    operation: str, given: Any, does: Any, what: str, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lack(monkeypatch, operation, given, does)
    lines = measure(str(tmp_path), Near(tmp_path), 5.0, print).lines
    assert {line.what: line.verdict for line in lines if line.verdict != "ok"} == ({what: verdict} if what else {})
    assert conclude(lines)[0] == {"ok": 0, "limit": 1, "missing": 3}[verdict]
    assert all(bool(line.means and line.remedy) == (line.verdict != "ok") for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_names_lead_nowhere_else_and_versions_are_told_from_torn_ones(tmp_path: Path) -> None:
    side = Side(str(tmp_path))
    for name in ("../x", "a/../../x", "/etc/x", "a//b", "."):
        raised(ValueError, side.put, name, 1)
    for operation in ("_path", "answer", "no_such"):
        raised(ValueError, side.answer, operation)
    assert list(tmp_path.iterdir()) == []
    assert [version_of(content(version)) for version in (0, 1, 9, 200)] == [0, 1, 9, 200]
    for data in (b"", b"9", content(9)[:-1], content(9) + b"x", content(3)[:20] + content(9)[20:], b"x" * 50):
        assert version_of(data) is None


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


def test_a_replacement_in_two_steps_is_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lack(monkeypatch, "put", (), replaces_in_two_steps)
    with Far([sys.executable, "-m", "lazyshard.filesystem.side", str(tmp_path)]) as far:
        lines = measure(str(tmp_path), far, 20.0, print).lines
    assert "found no file" in next(line.found for line in lines if line.what == "rename replaces in one step")
    assert conclude(lines)[0] == 3


@pytest.mark.parametrize("other", ["--far true", "--far /nowhere/command", "--far 'echo hello'", "another"])
def test_another_side_that_is_silent_or_elsewhere(other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lazyshard.cli.verify_filesystem.ENTER_S", 0.1)
    for name in ("one", "another"):
        (tmp_path / name).mkdir()
    assert main(["one", *shlex.split(other)]) == 4
    assert list((tmp_path / "one").iterdir()) == []


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
