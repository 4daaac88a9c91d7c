"""Two producers of a stream: the second is refused; a stopped one whose stream was taken over changes nothing more.

Stopped at any call while the other one is at any: tests/faults/test_points.py.
"""

import json
import signal
import time
from pathlib import Path

import pytest

from lazyshard.format.state import Cursor
from lazyshard.stream import write_cursor
from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import assert_one_line, ids, published, rows, run_arguments
from tests.producer.commands import Running

pytestmark = pytest.mark.full


def snapshot(out: Path) -> dict[str, bytes]:
    """All files; of the lock's nothing but its name is of interest."""
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_one_that_wakes_deletes_nothing(nursery: Commands, tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(rows(0, 60))
    limits = ("--max-ahead", 2, "--retain", "consumed", "--consumers", "trainer")
    with Running(nursery, *run_arguments(out, [source], 10, *limits)) as old:
        old.wait_until(lambda: published(out) == 2)
        old.send(signal.SIGSTOP)
        # Lets another producer in, as on a machine where the lock of this one does not hold.
        (out / ".producer.lock").unlink()
        assert nursery.run(*run_arguments(out, [source], 10))[0] == 0
        stream_id = json.loads((out / "stream.json").read_bytes())["stream_id"]
        plan = {"dp_size": 1, "batch_size": 1, "unit": 10, "window": 10, "seed": 0}
        write_cursor(out, Cursor("trainer", stream_id, 40, 4, plan, time.time()))
        before = snapshot(out)
        status, err = old.end(signal.SIGCONT)
        assert status == 6
        assert_one_line(err, "has taken this stream over")
    assert snapshot(out) == before
    assert ids(out) == list(range(60))


def test_the_second_one_changes_nothing_of_the_first(nursery: Commands, tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(rows(0, 12) + b"bad\n" + rows(12, 100))
    # The bad row is in the quarantine's file, and no seal counts it yet: a start would cut it off.
    arguments = run_arguments(out, [source], 10, "--on-bad-row", "quarantine", "--max-ahead", 2)
    with Running(nursery, *arguments) as first:
        first.wait_until(lambda: published(out) == 2)
        before = snapshot(out)
        status, err = nursery.run(*arguments)
        assert status == 6
        assert_one_line(err, f"process {first.pid} on ", "already producing into this stream")
        after = snapshot(out)
        for names in (before, after):
            names.pop("head.json")  # which tells that the first one is alive
        assert after == before
        assert first.end(signal.SIGTERM)[0] == 0
