"""Where the programs of pages run, and what has imported their modules."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.processes.nursery import Nursery
from tests.packaging import guide_programs


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("nursery"), guide_programs.__name__, *guide_programs.MODULES) as made:
        yield made


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
