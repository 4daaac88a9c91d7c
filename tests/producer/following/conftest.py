"""A directory to follow, and who follows it."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.producer.following.followed import Follow, Follower


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


@pytest.fixture
def path(directory: Path) -> Path:
    return directory / "a.jsonl"


@pytest.fixture
def follow(directory: Path, tmp_path: Path) -> Iterator[Follow]:
    """Begins to follow the directory, with these settings; journals are in `out` beside it."""
    (tmp_path / "out").mkdir()
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(closing(Follower(directory, tmp_path / "out", **settings)))
