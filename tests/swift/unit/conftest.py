"""No test here imports ms-swift: its logger, the one thing that the integration takes from it, is a list."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest


@pytest.fixture(autouse=True)
def notices(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the integration tells through ms-swift's logger."""
    told: list[str] = []
    swift, utils = ModuleType("swift"), ModuleType("swift.utils")
    logger = SimpleNamespace(info=lambda text, *values: told.append(text % values))
    vars(utils).update(get_logger=lambda: logger, to_device=lambda data, device: data)
    monkeypatch.setitem(sys.modules, "swift", swift)
    monkeypatch.setitem(sys.modules, "swift.utils", utils)
    return told
