"""What many tests of the producer need."""

from collections.abc import Iterator

import pytest

from tests.harness.processes.commands import Commands


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """Starts commands that are killed, quickly: forks of a process that has all modules loaded."""
    with Commands(tmp_path_factory.mktemp("nursery")) as nursery:
        yield nursery
