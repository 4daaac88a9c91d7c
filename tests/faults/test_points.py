"""Samples of the sweep of every crash point, and that it finds what it is there to find."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.disks import fast_folder, tool
from tests.harness.planted import points as points_mutants
from tests.harness.planted.points import MUTANTS, written_uncounted
from tests.harness.points.reader import Reader
from tests.harness.points.sweep import Stage, Sweeper, Trial
from tests.harness.points.traced import Traced, trace
from tests.harness.processes.commands import Commands
from tests.harness.processes.kill_points import ERRORS, WHENS, Fault, ways
from tests.harness.scenes.streams import Stream
from tests.harness.scenes.table import POINTS
from tests.harness.tally import Tally

pytestmark = pytest.mark.full


class Field:
    def __init__(self, place: Path, nursery: Commands, reader: Reader) -> None:
        self.place, self.nursery, self.reader = place, nursery, reader
        self._stages: dict[str, Stage] = {}

    def new_stage(self, scene: str, folder: str, broken: tuple[str, ...] = ()) -> Stage:
        return Stage(POINTS[scene], self.nursery, self.reader, self.place / folder, broken)

    def sweeper(self, scene: str, step: int, seed: int) -> tuple[Sweeper, Tally]:
        if scene not in self._stages:
            self._stages[scene] = self.new_stage(scene, f"of {scene}")
        tally = Tally(scene)
        return Sweeper(self._stages[scene], tally, scene, step=step, seed=seed), tally


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    with fast_folder(tmp_path_factory.mktemp("points")) as place, Commands(place) as nursery, Reader() as reader:
        yield Field(place, nursery, reader)


@pytest.mark.parametrize("scene", POINTS)
def test_killed_at_calls(scene: str, field: Field) -> None:
    number = list(POINTS).index(scene)
    sweeper, tally = field.sweeper(scene, 19, 5 * number)
    assert sweeper.at_every_call("kill", WHENS[number % 3]) > 0
    assert tally.violations == []


@pytest.mark.parametrize(
    ("scene", "kinds"),
    [
        *(("plain", ("EIO", "short")), ("made", ("ENOSPC", "EFBIG")), ("followed", ("EROFS", "EIO"))),
        *(("small disk", ("ENOSPC", "short")), ("encoded", ("EFBIG", "EROFS"))),
    ],
)
def test_error_at_calls(scene: str, kinds: tuple[str, ...], field: Field) -> None:
    for kind in kinds:
        number = list(POINTS).index(scene) + list(ERRORS).index(kind)
        sweeper, tally = field.sweeper(scene, 5 if kind in ("EFBIG", "short") else 43, 7 * number)
        assert sweeper.at_every_call(kind, ways(kind)[number % len(ways(kind))]) > 0
        assert sweeper.at_every_call(kind, ways(kind)[0], always=True) > 0
        assert tally.violations == []


def test_second_fault_in_recovery(field: Field) -> None:
    sweeper, tally = field.sweeper("plain", 23, 11)
    assert sweeper.twice("kill", "before", 13) >= 2
    assert tally.violations == []
    assert tally.faults >= 10


@pytest.mark.parametrize(("scene", "step", "second"), [("plain", 29, 23), ("followed", 43, 31), ("encoded", 67, 37)])
def test_two_at_a_time(scene: str, step: int, second: int, field: Field) -> None:
    sweeper, tally = field.sweeper(scene, step, 8)
    assert sweeper.in_pairs(second) > 0
    assert tally.violations == []
    assert tally.points > 2


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_found(name: str, field: Field) -> None:
    mutant = MUTANTS[name]
    stage = field.new_stage(mutant.scene, name, mutant.broken)  # It works as long as nothing happens
    tally = Tally(name)
    sweeper = Sweeper(stage, tally, mutant.scene, step=mutant.step, most=1, first=mutant.first)
    sweeper.at_every_call(mutant.kind, mutant.when)
    assert len(tally.violations) == 1
    assert mutant.found in tally.violations[0]


def traced(scene: str, field: Field, kill_at: int = 0, *broken: str) -> Traced:
    strace = tool("strace")
    folder = (field.place / f"traced-{scene}-{len(broken)}").resolve()
    folder.mkdir()
    stage = field.new_stage(scene, f"{folder.name}/stage")
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

    with contextlib.nullcontext() if not broken else pytest.raises(AssertionError):
        trial.finish(run)
    return found


_ALL = {"openat", "write", "fsync", "rename", "rmdir"}


@pytest.mark.parametrize(
    ("scene", "at", "calls"),
    [
        ("encoded", 0, _ALL | {"mkdir"}),
        ("retained while followed", 60, _ALL | {"unlink"}),  # Clears up, keeps refused rows, follows, deletes
    ],
)
def test_every_system_call_that_changes_a_file_is_counted(scene: str, at: int, calls: set[str], field: Field) -> None:
    found = traced(scene, field, at)
    assert found.uncounted == []
    assert calls - set(found.counted) == set()


def test_trace_finds_a_call_that_is_not_counted(field: Field) -> None:
    found = traced("plain", field, 0, f"{points_mutants.__name__}:{written_uncounted.__name__}")
    assert [line.partition("(")[0] for line in found.uncounted[:2]] == ["openat", "write"]
    assert all("/note" in line for line in found.uncounted)
