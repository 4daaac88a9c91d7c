"""A writer killed at every call that changes a file, and again while it recovers; what is planted is found."""

from pathlib import Path

import pytest

from tests.harness.planted.writers import MUTANTS, MUTANTS_OF_ARRAYS
from tests.harness.processes.nursery import Nursery
from tests.harness.writers.crashes import finish, killed_over_and_over, sweep, sweep_recovery

pytestmark = pytest.mark.full


@pytest.mark.parametrize(("overlap", "arrays", "steps"), [(False, False, 60), (True, False, 60), (True, True, 80)])
def test_writer_killed_at_any_step_loses_repeats_and_tears_nothing(
    overlap: bool, arrays: bool, steps: int, forks: Nursery, root: Path
) -> None:
    assert forks.result(sweep, root, overlap=overlap, arrays=arrays) > steps


@pytest.mark.parametrize(
    ("overlap", "arrays", "first", "second"), [(False, False, 11, 13), (True, False, 17, 19), (False, True, 23, 29)]
)
def test_writer_killed_again_while_it_recovers_loses_repeats_and_tears_nothing(
    overlap: bool, arrays: bool, first: int, second: int, forks: Nursery, root: Path
) -> None:
    forks.result(sweep_recovery, root, first, second, overlap=overlap, arrays=arrays)


def test_writer_killed_over_and_over_at_its_first_steps_gets_through(forks: Nursery, root: Path) -> None:
    forks.result(killed_over_and_over, root / "stream", 40)


@pytest.mark.parametrize("name", [*MUTANTS, *MUTANTS_OF_ARRAYS])
def test_harness_detects_a_writer_that_makes_a_mistake(name: str, forks: Nursery, root: Path) -> None:
    arrays = name in MUTANTS_OF_ARRAYS
    mutant, first = (MUTANTS | MUTANTS_OF_ARRAYS)[name]
    forks.result(finish, root / "whole", {}, mutant, arrays=arrays)  # it works as long as nothing happens
    with pytest.raises(AssertionError):
        forks.result(sweep, root, mutant, arrays=arrays, first=first)
