"""Two and three writers of one stream where file locks do not meet, stopped anywhere; old mistakes are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import ProducerFenced
from lazyshard.storage import durable, lock, recovery, workplace
from lazyshard.storage.workplace import Workplace
from tests.harness.disks import fast_folder
from tests.harness.writers.races import race_by_chance, race_in_pairs, without_locks


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    with fast_folder(tmp_path) as directory:
        yield directory


@pytest.mark.parametrize("arrays", [False, True], ids=["rows", "arrays"])
def test_two_writers(arrays: bool, root: Path) -> None:
    found: list[str] = []
    assert race_in_pairs(root, arrays=arrays, begun=arrays, step=19, first=3 + arrays, found=found.append) > 300
    assert found == []


def test_two_writers_stopped_before_looks_too(root: Path) -> None:
    found: list[str] = []
    assert race_in_pairs(root, looks=True, step=83, first=11, found=found.append) > 200
    assert found == []


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
    look = recovery._check_gaps

    def overtaken(*arguments: Any) -> None:
        with mock.patch.object(recovery, "_check_gaps", look), ChunkWriter(directory) as other:
            for number in range(3):
                other.write({"id": number})
        look(*arguments)

    with without_locks(), mock.patch.object(recovery, "_check_gaps", overtaken), pytest.raises(ProducerFenced):
        ChunkWriter(directory)
    assert [row["id"] for row in StreamReader(directory)] == [0, 1, 2]


def others_stay() -> Any:
    """Leaves it to those who came before to look at the owner before each rename, as the code once did."""
    return mock.patch.object(lock, "destroy", lambda directory: None)


def unsealed_unlinked() -> Any:
    """Removes what is not sealed in a way in which somebody fenced can, too."""
    return mock.patch.object(Workplace, "take_out", lambda self, path: durable.remove(path))


def owner_alone_believed() -> Any:
    """Fences the owner, and nobody who is about to become it."""
    return mock.patch.object(lock, "list_workplaces", lambda temporary: {})


def owner_first() -> Any:
    """Writes its name before all others are fenced, who may write theirs over it."""
    publish, destroyed = durable.publish_bytes, workplace.destroy
    waiting: list[Path] = []

    def publishing(data: bytes, target: Path, temporary: Path) -> None:
        publish(data, target, temporary)
        while waiting:
            destroyed(waiting.pop())

    return mock.patch.multiple(lock, destroy=waiting.append, publish_bytes=publishing)


def missing_file_told() -> Any:
    """Takes a directory that is gone for a mistake of the filesystem, as the code once did."""
    return mock.patch.object(Workplace, "is_gone", lambda self: False)


MISTAKES: Final[dict[Callable[[], Any], tuple[str, int]]] = {
    others_stay: ("sealed are", 40),
    unsealed_unlinked: ("sealed are", 13),
    owner_alone_believed: ("sealed", 6),
    owner_first: ("nobody has got through", 5),
    missing_file_told: ("No such file", 0),
}
"""What is said of each, and before which change of the first writer it is stopped then."""


class _Found(Exception):
    pass


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistake_is_found(mistake: Callable[[], Any], root: Path) -> None:
    words, first = MISTAKES[mistake]

    def found(what: str) -> None:
        if words in what:
            raise _Found

    with mistake(), pytest.raises(_Found):
        race_in_pairs(root, begun=mistake is unsealed_unlinked, first=first, found=found)
