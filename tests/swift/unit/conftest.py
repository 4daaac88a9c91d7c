"""No test here imports ms-swift: its logger, the one thing that the integration takes from it, is a list."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest

from tests.swift.unit.runs import let_go_of_cursors


@pytest.fixture
def cautions() -> list[str]:
    """What the integration warns of through ms-swift's logger."""
    return []


@pytest.fixture(autouse=True)
def notices(monkeypatch: pytest.MonkeyPatch, cautions: list[str]) -> list[str]:
    """What the integration tells through ms-swift's logger."""
    told: list[str] = []
    swift, utils = ModuleType("swift"), ModuleType("swift.utils")
    logger = SimpleNamespace(
        info=lambda text, *values: told.append(text % values),
        warning=lambda text, *values: cautions.append(text % values),
    )
    vars(utils).update(get_logger=lambda: logger, to_device=lambda data, device: data)
    monkeypatch.setitem(sys.modules, "swift", swift)
    monkeypatch.setitem(sys.modules, "swift.utils", utils)
    return told


@pytest.fixture(autouse=True)
def another_process() -> Iterator[None]:
    """Lets go of the cursors that the test's run has, as the end of its process would."""
    yield
    let_go_of_cursors()
