"""A writer killed at every durable step, and again while it recovers; and a proof that the harness sees mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lazyshard.store import durable
from lazyshard.stream import publishing
from tests.harness.disks import fast_folder
from tests.harness.planted.writers import MUTANTS, MUTANTS_OF_ARRAYS
from tests.harness.tally import Violation
from tests.harness.writers.crashes import WHEN, Mutant, check, finish, run, sweep

pytestmark = pytest.mark.full


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    with fast_folder(tmp_path) as directory:
        yield directory


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("when", WHEN)
def test_writer_killed_at_any_step_loses_repeats_and_tears_nothing(when: str, overlap: bool, root: Path) -> None:
    assert sweep(root, when, overlap=overlap) > 60


@pytest.mark.parametrize("overlap", [False, True])
def test_writer_killed_again_while_it_recovers_loses_repeats_and_tears_nothing(overlap: bool, root: Path) -> None:
    total = run(root / "whole", overlap=overlap)
    assert total is not None
    for first in range(2, total, 5):
        for second in range(1 + first % 4, total, 9):
            directory = root / f"{first}_{second}"
            run(directory, first, WHEN[first % 3], overlap=overlap)
            sealed = check(directory, {})
            run(directory, second, WHEN[second % 3], overlap=overlap)
            finish(directory, check(directory, sealed))


def test_writer_killed_over_and_over_at_its_first_steps_gets_through(root: Path) -> None:
    sealed: dict[str, bytes] = {}
    for at in range(1, 40):
        run(root / "stream", at, WHEN[at % 3])
        sealed = check(root / "stream", sealed)
    finish(root / "stream", sealed)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_harness_detects_a_writer_that_makes_a_mistake(mutant: Mutant, root: Path) -> None:
    finish(root / "whole", {}, mutant)  # it works as long as nothing happens
    with pytest.raises(Violation):
        for when in ("half", "after"):
            sweep(root, when, mutant)


def test_harness_finds_no_fault_where_nothing_was_changed(root: Path) -> None:
    def same() -> None:
        publishing.rename = durable.rename  # type: ignore[attr-defined]

    assert sweep(root, "after", same) > 60


@pytest.mark.parametrize(("when", "overlap"), [("half", True), ("after", False)])
def test_writer_of_arrays_killed_at_any_step_leaves_whole_chunks_and_nothing_else(
    when: str, overlap: bool, root: Path
) -> None:
    assert sweep(root, when, overlap=overlap, arrays=True) > 80


def test_writer_of_arrays_killed_again_while_it_recovers_leaves_whole_chunks_and_nothing_else(root: Path) -> None:
    total = run(root / "whole", arrays=True)
    assert total is not None
    for first in range(2, total, 17):
        for second in range(1 + first % 5, total, 23):
            directory = root / f"{first}_{second}"
            run(directory, first, WHEN[first % 3], arrays=True)
            sealed = check(directory, {})
            run(directory, second, WHEN[second % 3], arrays=True)
            finish(directory, check(directory, sealed), arrays=True)


@pytest.mark.parametrize("mutant", MUTANTS_OF_ARRAYS)
def test_harness_detects_a_writer_of_arrays_that_makes_a_mistake(mutant: Mutant, root: Path) -> None:
    finish(root / "whole", {}, mutant, arrays=True)
    with pytest.raises(Violation):
        sweep(root, "after", mutant, arrays=True)
