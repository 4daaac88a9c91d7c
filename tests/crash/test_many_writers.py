"""Named writers and their sequencer killed, stopped and overtaken anywhere; what is planted is found."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.harness.disks import FILESYSTEMS, Disk, Filesystem, cut_power
from tests.harness.many import points, runs
from tests.harness.many.points import Work, both, cuts, overtake, sequence, sweep
from tests.harness.planted.many import MUTANTS, OVERTAKING
from tests.harness.processes.kill_points import WHENS, When
from tests.harness.processes.nursery import Nursery
from tests.tiers import full


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("forks"), points.__name__, runs.__name__) as found:
        yield found


@pytest.mark.parametrize("seed", [1, 2, *full(*range(3, 31))])
def test_rows_come_once_and_in_order_whoever_is_killed(seed: int, forks: Nursery, root: Path) -> None:
    forks.result(runs.play, seed, root / "run")


# Every call: `scripts/test_faults writers`.
@pytest.mark.parametrize(
    ("work", "when", "step"),
    [
        (sequence, "before", 23),
        *full(*((work, when, step) for work, step in ((sequence, 5), (both, 13)) for when in WHENS)),
    ],
)
def test_killed_at_any_call(work: Work, when: When, step: int, forks: Nursery, root: Path) -> None:
    assert forks.result(sweep, root, work, (when,), step) > (100 if work is sequence else 300)


@pytest.mark.full
@pytest.mark.parametrize(("work", "step", "again"), [(sequence, 19, 23), (both, 67, 71)])
def test_killed_again_in_the_recovery(work: Work, step: int, again: int, forks: Nursery, root: Path) -> None:
    forks.result(sweep, root, work, ("half",), step, again=again)


@pytest.mark.parametrize(("first", "second", "pairs"), [(71, 83, 4), *full((23, 29, 20))])
def test_two_sequencers_whose_locks_do_not_meet(
    first: int, second: int, pairs: int, forks: Nursery, root: Path
) -> None:
    assert forks.result(overtake, root, first, second) > pairs


@pytest.mark.full
@pytest.mark.parametrize("work", [sequence, both])
@pytest.mark.parametrize("filesystem", FILESYSTEMS)
def test_power_cut(filesystem: Filesystem, work: Work, tmp_path: Path) -> None:
    with Disk(tmp_path, filesystem) as disk:
        cut = partial(cut_power, str(disk.point))
        assert list(cuts(disk.point, work, cut, disk.restart, 7 if work is sequence else 19))


@pytest.mark.full
@pytest.mark.parametrize("name", MUTANTS)
def test_planted_mistake_is_found_by_kills(name: str, forks: Nursery, root: Path) -> None:
    mutant = MUTANTS[name]
    with pytest.raises(AssertionError):
        forks.result(sweep, root, mutant.work, ("after",), 3, mutant.install)


@pytest.mark.full
@pytest.mark.parametrize("name", OVERTAKING)
def test_planted_mistake_is_found_by_overtaking(name: str, forks: Nursery, root: Path) -> None:
    with pytest.raises(AssertionError):
        forks.result(overtake, root, 5, 7, OVERTAKING[name])
