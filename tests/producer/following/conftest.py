"""A directory to follow, and who follows it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.producer.following.followed import Follow, Follower


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


@pytest.fixture
def follow(directory: Path, tmp_path: Path) -> Iterator[Follow]:
    """Begins to follow the directory, with these settings; journals are in `out` beside it."""
    (tmp_path / "out").mkdir()
    made: list[Follower] = []

    def make(**settings: Any) -> Follower:
        made.append(Follower(directory, tmp_path / "out", **settings))
        return made[-1]

    yield make
    for follower in made:
        follower.close()
