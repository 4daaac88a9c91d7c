"""A small run is killed at each of the calls that change a file, and once more in the run after that."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.processes.commands import Commands
from tests.harness.processes.kill_points import WHENS
from tests.harness.scenes.sources import FedSource
from tests.harness.scenes.streams import PER_CHUNK, Stream

pytestmark = pytest.mark.full

OPTIONS = ("--on-bad-row", "quarantine", "--transform", "tests.producer.recipes:twice")


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with Commands(tmp_path_factory.mktemp("nursery")) as nursery:
        yield nursery


def test_killed_at_every_call(nursery: Commands, tmp_path: Path) -> None:
    """A chunk and a part of one, and a bad row in each: all that a longer run does."""
    ids = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert PER_CHUNK < len(ids) < 2 * PER_CHUNK
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"id":0}\n{"id":1}\nbad\n{"id":2}\n{"id":3}\n{"id":4}\nworse\n')
    for call in itertools.count(1):
        stream = Stream(nursery, tmp_path / f"{call}", [FedSource(str(path), [])], OPTIONS)
        when = WHENS[call % 3]
        status, err = stream.run(kill_at=call, when=when)
        # What is killed in a second run may be what a first one has left.
        if status and call % 4 == 0:
            stream.run(kill_at=1 + call % 7, when=when)
        stream.check({})
        assert stream.run()[0] == 0, err
        stream.check_ended()
        assert [one for one, _ in stream.rows()] == ids
        assert [(entry["line"], entry["row"]) for entry in stream.refused()] == [(3, "bad"), (7, "worse")]
        assert json.loads((stream.out / "head.json").read_bytes())["ended"] is True
        if status == 0:
            break
    assert call > 30
