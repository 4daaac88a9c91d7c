"""What holds for every test: a machine that is busy fails none of them, and what takes longest begins first."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Time says nothing here: cores are shared, and Hypothesis' first imports count as slow generation.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

_LONG = ("swift", "crash", "faults", "objects", "packaging", "producer")
"""Folders whose files take longest, first of all. Where files are dealt out to several processes, one that takes
minutes and begins last leaves the others with nothing to do."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files of those folders first, all else in its order."""
    here = Path(__file__).parent

    def turn(item: pytest.Item) -> int:
        folder = item.path.relative_to(here).parts[0]
        return _LONG.index(folder) if folder in _LONG else len(_LONG)

    items.sort(key=turn)
