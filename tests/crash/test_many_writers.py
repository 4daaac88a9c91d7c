"""Named writers and their sequencer killed, stopped and overtaken anywhere; what is planted is found."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import ProducerFenced
from lazyshard.stream import lock
from tests.harness.disks import FILESYSTEMS, Disk, Filesystem, cut_power
from tests.harness.many import points, runs
from tests.harness.many.points import Work, both, cuts, overtake, sequence, sweep
from tests.harness.planted.many import MUTANTS, OVERTAKING
from tests.harness.planted.writers import MISTAKES
from tests.harness.processes.kill_points import WHENS, When
from tests.harness.processes.nursery import Nursery
from tests.harness.writers.races import race_by_chance, race_in_pairs, without_locks
from tests.tiers import full

LOADED = (points.__name__, runs.__name__)  # By the process that is forked


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
def test_two_sequencers_without_locks(first: int, second: int, pairs: int, forks: Nursery, root: Path) -> None:
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


@pytest.mark.parametrize(
    ("arrays", "step", "least"), [(False, 57, 100), *full((False, 19, 300), (True, 19, 300))], ids=str
)
def test_two_writers(arrays: bool, step: int, least: int, root: Path) -> None:
    found: list[str] = []
    assert race_in_pairs(root, arrays=arrays, begun=arrays, step=step, first=3 + arrays, found=found.append) > least
    assert found == []


@pytest.mark.full
def test_two_writers_stopped_before_looks_too(root: Path) -> None:
    found: list[str] = []
    assert race_in_pairs(root, looks=True, step=83, first=11, found=found.append) > 200
    assert found == []


@pytest.mark.full
def test_three_writers(root: Path) -> None:
    found: list[str] = []
    race_by_chance(root, range(100), found=found.append)
    assert found == []


def test_one_that_is_overtaken_while_it_looks_is_fenced(root: Path) -> None:
    """Its listing is older than the end that it finds: not a damaged stream, but another producer's."""
    directory = root / "stream"
    with ChunkWriter(directory, 2) as first:
        first.write({"id": 0})
        first.close(end=False)
    look = lock.check_gaps

    def overtaken(*arguments: Any) -> None:
        with mock.patch.object(lock, "check_gaps", look), ChunkWriter(directory) as other:
            for number in range(3):
                other.write({"id": number})
        look(*arguments)

    with without_locks(), mock.patch.object(lock, "check_gaps", overtaken), pytest.raises(ProducerFenced):
        ChunkWriter(directory)
    assert [row["id"] for row in StreamReader(directory)] == [0, 1, 2]


class _Found(Exception):
    pass


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_found(name: str, root: Path) -> None:
    mistake, words, first, other = MISTAKES[name]

    def found(what: str) -> None:
        if words in what:
            raise _Found

    with mistake(), pytest.raises(_Found):
        race_in_pairs(root, begun=name == "unsealed_unlinked", first=first, other=other, found=found)
