"""Where streams are made whose writers are killed, and the process whose forks kill and check them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.disks import fast_folder
from tests.harness.processes.nursery import Nursery


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    with fast_folder(tmp_path) as directory:
        yield directory


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """It is small, having loaded neither torch nor other tests: a fork costs milliseconds."""
    with Nursery(tmp_path_factory.mktemp("forks"), "tests.harness.writers.crashes") as found:
        yield found
