"""Two and three writers of one stream where file locks do not meet, stopped anywhere; old mistakes are found."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import ProducerFenced
from lazyshard.stream import lock
from tests.harness.planted.writers import MISTAKES
from tests.harness.writers.races import race_by_chance, race_in_pairs, without_locks
from tests.tiers import full


@pytest.mark.parametrize(
    ("arrays", "step", "least"), [(False, 57, 100), *full((False, 19, 300), (True, 19, 300))], ids=str
)
def test_two_writers(arrays: bool, step: int, least: int, root: Path) -> None:
    found: list[str] = []
    assert race_in_pairs(root, arrays=arrays, begun=arrays, step=step, first=3 + arrays, found=found.append) > least
    assert found == []


@pytest.mark.full
def test_two_writers_stopped_before_looks_too(root: Path) -> None:
    found: list[str] = []
    assert race_in_pairs(root, looks=True, step=83, first=11, found=found.append) > 200
    assert found == []


@pytest.mark.full
def test_three_writers(root: Path) -> None:
    found: list[str] = []
    race_by_chance(root, range(100), found=found.append)
    assert found == []


def test_one_that_is_overtaken_while_it_looks_is_fenced(root: Path) -> None:
    """Its listing is older than the end that it finds: not a damaged stream, but another producer's."""
    directory = root / "stream"
    with ChunkWriter(directory, 2) as first:
        first.write({"id": 0})
        first.close(end=False)
    look = lock.check_gaps

    def overtaken(*arguments: Any) -> None:
        with mock.patch.object(lock, "check_gaps", look), ChunkWriter(directory) as other:
            for number in range(3):
                other.write({"id": number})
        look(*arguments)

    with without_locks(), mock.patch.object(lock, "check_gaps", overtaken), pytest.raises(ProducerFenced):
        ChunkWriter(directory)
    assert [row["id"] for row in StreamReader(directory)] == [0, 1, 2]


class _Found(Exception):
    pass


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_found(name: str, root: Path) -> None:
    mistake, words, first, other = MISTAKES[name]

    def found(what: str) -> None:
        if words in what:
            raise _Found

    with mistake(), pytest.raises(_Found):
        race_in_pairs(root, begun=name == "unsealed_unlinked", first=first, other=other, found=found)
