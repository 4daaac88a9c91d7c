"""A call that changes a file fails once, or is where a run is killed: nothing is half published, nothing is lost."""

import errno
import itertools
import json
from pathlib import Path

import pytest

from tests.harness.processes.commands import Commands
from tests.harness.processes.kill_points import WHENS
from tests.harness.processes.producing import assert_one_line
from tests.harness.scenes.rows import made
from tests.harness.scenes.sources import KINDS, FedSource
from tests.harness.scenes.streams import PER_CHUNK, Stream
from tests.tiers import full

MAKES = ("--on-bad-row", "quarantine", "--transform", "tests.harness.scenes.rows:thirds")
OPTIONS = ("--on-bad-row", "quarantine", "--transform", "tests.producer.recipes:twice")


@pytest.mark.parametrize(
    ("kind", "error", "step"),
    [("plain", errno.EIO, 83), *full(("plain", errno.ENOSPC, 23), ("followed", errno.EIO, 23))],
)
def test_any_call_fails(kind: str, error: int, step: int, nursery: Commands, tmp_path: Path) -> None:
    failures = 0
    for number in range(3, 250, step):
        folder = tmp_path / str(number)
        folder.mkdir()
        source = KINDS[kind](folder, 0)
        stream = Stream(nursery, folder / "out", [source], MAKES)
        status, err = stream.run(kill_at=number, when="half", error=error)
        stream.check({})
        if status != 0:
            assert status == 7, err
            assert_one_line(err, errno_text(error), str(stream.out))
            failures += 1
            status, err = stream.run()
            # Else it was a hint to readers that was not written, and is written with the next chunk.
        assert status == 0, err
        expected = made(source.rows, transform=True, where=False)
        assert sorted(map(str, stream.rows())) == sorted(map(str, expected))
        lines = [(entry["source"], entry["line"]) for entry in stream.refused()]
        assert len(set(lines)) == len(lines) > 0
        assert stream.run()[0] == 0
        stream.check_ended()
    assert failures >= (4 if step == 23 else 2)


def errno_text(error: int) -> str:
    return {errno.EIO: "Input/output error", errno.ENOSPC: "No space left on device"}[error]


@pytest.mark.full
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
