"""Samples of the sweep of every crash point, and that it finds what it is there to find."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.disks import fast_folder, tool
from tests.harness.planted import points as points_mutants
from tests.harness.planted.points import MUTANTS, written_uncounted
from tests.harness.points.reader import Reader
from tests.harness.points.sweep import Sweeper
from tests.harness.points.traced import Traced, trace
from tests.harness.points.trial import Stage, Trial
from tests.harness.processes.commands import Commands
from tests.harness.processes.kill_points import ERRORS, WHENS, Fault, parse_faults, ways
from tests.harness.scenes.streams import Stream
from tests.harness.scenes.table import POINTS
from tests.harness.tally import Tally, Violation

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with fast_folder(tmp_path_factory.mktemp("points")) as directory:
        yield directory


@pytest.fixture(scope="module")
def nursery(place: Path) -> Iterator[Commands]:
    with Commands(place) as nursery:
        yield nursery


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    with Reader() as reader:
        yield reader


@pytest.fixture(scope="module")
def stages(place: Path, nursery: Commands, reader: Reader) -> dict[str, Stage]:
    return {}


def staged(name: str, stages: dict[str, Stage], place: Path, nursery: Commands, reader: Reader) -> Stage:
    if name not in stages:
        stages[name] = Stage(POINTS[name], nursery, reader, place / f"stage-{len(stages)}")
    return stages[name]


@pytest.mark.parametrize("scene", POINTS)
def test_killed_at_calls(scene: str, stages: dict[str, Stage], place: Path, nursery: Commands, reader: Reader) -> None:
    tally = Tally(scene)
    number = list(POINTS).index(scene)
    sweeper = Sweeper(staged(scene, stages, place, nursery, reader), tally, scene, step=19, seed=5 * number)
    assert sweeper.at_every_call("kill", WHENS[number % 3]) > 0
    assert tally.violations == []


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("scene", ["plain", "made", "followed", "small disk", "encoded"])
def test_error_at_calls(
    scene: str, kind: str, stages: dict[str, Stage], place: Path, nursery: Commands, reader: Reader
) -> None:
    tally = Tally(scene)
    stage = staged(scene, stages, place, nursery, reader)
    number = list(POINTS).index(scene) + list(ERRORS).index(kind)
    sweeper = Sweeper(stage, tally, scene, step=5 if kind in ("EFBIG", "short") else 43, seed=7 * number)
    assert sweeper.at_every_call(kind, ways(kind)[number % len(ways(kind))]) > 0
    assert sweeper.at_every_call(kind, ways(kind)[0], always=True) > 0
    assert tally.violations == []


def test_second_fault_in_recovery(stages: dict[str, Stage], place: Path, nursery: Commands, reader: Reader) -> None:
    tally = Tally("plain")
    sweeper = Sweeper(staged("plain", stages, place, nursery, reader), tally, "plain", step=23, seed=11)
    assert sweeper.twice("kill", "before", 9) >= 2
    assert tally.violations == []
    assert tally.faults >= 15


@pytest.mark.parametrize(("scene", "steps"), [("plain", (23, 19)), ("followed", (37, 23)), ("encoded", (61, 29))])
def test_two_at_a_time(
    scene: str, steps: tuple[int, int], stages: dict[str, Stage], place: Path, nursery: Commands, reader: Reader
) -> None:
    tally = Tally(scene)
    sweeper = Sweeper(staged(scene, stages, place, nursery, reader), tally, scene, step=steps[0], seed=8)
    assert sweeper.in_pairs(steps[1]) > 0
    assert tally.violations == []
    assert tally.points > 4


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_found(name: str, place: Path, nursery: Commands, reader: Reader) -> None:
    mutant = MUTANTS[name]
    # It works as long as nothing happens, or there would be no stage.
    stage = Stage(POINTS[mutant.scene], nursery, reader, place / name, mutant.broken)
    tally = Tally(name)
    sweeper = Sweeper(stage, tally, mutant.scene, step=mutant.step, most=1, first=mutant.first)
    sweeper.at_every_call(mutant.kind, mutant.when)
    assert len(tally.violations) == 1
    assert mutant.found in tally.violations[0]


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_reader_that_dies_or_says_nothing_is_a_violation(
    by: signal.Signals, stages: dict[str, Stage], place: Path, nursery: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.harness.points.reader._ANSWER_S", 0.2)
    with Reader() as reader:
        stage = Stage(POINTS["plain"], nursery, reader, place / by.name)
        tally = Tally("plain")
        sweeper = Sweeper(stage, tally, "plain")
        os.kill(reader.pid, by)
        sweeper.play([Fault("kill", 30)])
    assert len(tally.violations) == 1
    assert "reader has died or is silent" in tally.violations[0]


def test_faults_are_read_as_they_are_written() -> None:
    text = "kill@17/half EIO@3+/before short@1/half"
    assert " ".join(map(str, parse_faults(text))) == text
    with pytest.raises(ValueError, match="KIND@NUMBER/WHEN"):
        parse_faults("kill17")


def traced(scene: str, place: Path, kill_at: int, nursery: Commands, reader: Reader, *broken: str) -> Traced:
    """The last run of a trial, under strace."""
    strace = tool("strace")
    folder = (place / f"traced-{scene}-{kill_at}-{len(broken)}").resolve()
    folder.mkdir()
    stage = Stage(POINTS[scene], nursery, reader, folder / "stage")
    trial = Trial(stage)
    assert not kill_at or trial.suffer(Fault("kill", kill_at))
    found = Traced()

    def run(stream: Stream) -> tuple[int, str]:
        nonlocal found
        with stream.fed():
            found = trace(strace, stream.out, folder / "calls", stream.arguments, (*stage.prepare, *broken))
        if found.refused:
            pytest.skip(f"nothing can be traced here: {found.refused}")
        return found.status, found.said

    with contextlib.nullcontext() if not broken else pytest.raises(Violation, match="left over"):
        trial.finish(run)
    return found


@pytest.mark.parametrize("scene", ["plain", "encoded"])
def test_every_system_call_that_changes_a_file_is_counted(
    scene: str, place: Path, nursery: Commands, reader: Reader
) -> None:
    found = traced(scene, place, 0, nursery, reader)
    assert found.uncounted == []
    expected = {"openat", "write", "fsync", "rename", "mkdir", "rmdir"}
    assert expected - set(found.counted) == set()


def test_every_system_call_after_a_kill_is_counted_too(place: Path, nursery: Commands, reader: Reader) -> None:
    """That of a run that clears up, keeps refused rows, follows a directory and deletes chunks."""
    found = traced("retained while followed", place, 60, nursery, reader)
    assert found.uncounted == []
    assert {"openat", "write", "fsync", "rename", "unlink", "rmdir"} - set(found.counted) == set()


def test_trace_finds_a_call_that_is_not_counted(place: Path, nursery: Commands, reader: Reader) -> None:
    found = traced("plain", place, 0, nursery, reader, f"{points_mutants.__name__}:{written_uncounted.__name__}")
    assert [line.partition("(")[0] for line in found.uncounted[:2]] == ["openat", "write"]
    assert all("/note" in line for line in found.uncounted)


def test_trace_takes_unknown_system_calls_for_changes() -> None:
    found = Traced()
    lines = [
        'openat(AT_FDCWD</>, "/s/a", O_RDONLY|O_CLOEXEC) = 3</s/a>',
        'read(3</s/a>, ""..., 10) = 10',
        'newfstatat(AT_FDCWD</>, "/m/begin/write", 0x7ff, 0) = -1 ENOENT (No such file or directory)',
        'write(4</s/b>, ""..., 10) = 10',
        'newfstatat(AT_FDCWD</>, "/m/end/write", 0x7ff, 0) = -1 ENOENT (No such file or directory)',
        'write(4</s/b>, ""..., 10) = 10',
        'openat(AT_FDCWD</>, "/s/c", O_WRONLY|O_CREAT, 0644) = -1 EROFS (Read-only file system)',
        "newcall(4</s/b>) = 0",
        "mmap(NULL, 4096, PROT_READ|PROT_WRITE, MAP_SHARED, 4</s/b>, 0) = 0x7f00",
        "mmap(NULL, 4096, PROT_READ, MAP_SHARED, 3</s/a>, 0) = 0x7f00",
    ]
    found.add(lines, Path("/s"), Path("/m"))
    assert found.counted == {"write": 1}
    assert found.uncounted == [lines[5], lines[7], lines[8]]
