"""Two producers of a stream: the second is refused; a stopped one whose stream was taken over changes nothing more."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Final

import pytest

from lazyshard.format.cursor import Cursor
from lazyshard.format.names import QUARANTINE
from lazyshard.stream import write_cursor
from tests.harness.processes.commands import Commands
from tests.harness.processes.kill_points import WHENS
from tests.harness.processes.producing import (
    assert_one_line,
    ids,
    published,
    rows,
    run,
    run_arguments,
    start,
    wait_until,
)
from tests.harness.scenes.rows import made
from tests.harness.scenes.sources import KINDS
from tests.harness.scenes.streams import Stream

pytestmark = pytest.mark.full

MAKES: Final = ("--on-bad-row", "quarantine", "--transform", "tests.harness.scenes.rows:thirds")


def snapshot(out: Path) -> dict[str, bytes]:
    """All files; of the lock's nothing but its name is of interest."""
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def let_in(out: Path) -> None:
    """Lets another producer in, as on a machine where the lock of this one does not hold."""
    (out / ".producer.lock").unlink(missing_ok=True)


@pytest.mark.parametrize("kind", ["plain", "followed"])
def test_stopped_at_any_call_and_taken_over(kind: str, nursery: Commands, tmp_path: Path) -> None:
    fenced = 0
    for number in range(200):
        folder = tmp_path / str(number)
        folder.mkdir()
        source = KINDS[kind](folder, 0)
        if kind == "followed":
            with source.fed(None):
                deadline = time.monotonic() + 60
                while not Path(source.arguments[1], "_END").exists():
                    assert time.monotonic() < deadline
                    time.sleep(0.002)
        stream = Stream(nursery, folder / "out", [source], MAKES)
        first = stream.start(kill_at=2 + 19 * number, when=WHENS[number % 3], by=signal.SIGSTOP)
        if not nursery.wait_for_stop(first):
            assert nursery.wait(first)[0] == 0
            break
        let_in(stream.out)
        status, err = stream.run()
        assert status == 0, err
        before, refused = snapshot(stream.out), stream.refused()
        os.kill(first, signal.SIGCONT)
        status, err = nursery.wait(first)
        if status != 0:
            assert status == 6, err
            assert_one_line(err)
            fenced += 1
        elif "already ended: " in err:
            # It was not the owner yet when it was stopped, and has become it of a stream that had ended.
            for name in ("head.json", "stream.owner"):
                before[name] = (stream.out / name).read_bytes()
        # Of the rows in quarantine it may have written those anew that it was about to write: with its own time.
        assert snapshot(stream.out) | {QUARANTINE: b""} == before | {QUARANTINE: b""}
        assert stream.refused() == refused
        expected = made(source.rows, transform=True, where=False)
        assert sorted(map(str, stream.rows())) == sorted(map(str, expected))
        lines = [(entry["source"], entry["line"]) for entry in refused]
        assert len(set(lines)) == len(lines)
        # `let_in` took it away, and whoever finds that the stream has ended makes none.
        (stream.out / ".producer.lock").touch()
        stream.check_ended()
    assert fenced >= 5


def test_one_that_wakes_deletes_nothing(tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(rows(0, 60))
    limits = ("--max-ahead", 2, "--retain", "consumed", "--consumers", "trainer")
    with start(*run_arguments(out, [source], 10, *limits)) as old:
        wait_until(lambda: published(out) == 2, old)
        old.send_signal(signal.SIGSTOP)
        let_in(out)
        assert run(*run_arguments(out, [source], 10)).returncode == 0
        stream_id = json.loads((out / "stream.json").read_bytes())["stream_id"]
        plan = {"dp_size": 1, "batch_size": 1, "unit": 10, "window": 10, "seed": 0}
        write_cursor(out, Cursor("trainer", stream_id, 40, 4, plan, time.time()))
        before = snapshot(out)
        old.send_signal(signal.SIGCONT)
        _, err = old.communicate(timeout=60)
        assert old.returncode == 6
        assert_one_line(err, "has taken this stream over")
    assert snapshot(out) == before
    assert ids(out) == list(range(60))


def test_the_second_one_changes_nothing_of_the_first(tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(rows(0, 12) + b"bad\n" + rows(12, 100))
    # The bad row is in the quarantine's file, and no seal counts it yet: a start would cut it off.
    options = ("--on-bad-row", "quarantine", "--max-ahead", 2)
    with start(*run_arguments(out, [source], 10, *options)) as first:
        wait_until(lambda: published(out) == 2, first)
        before = snapshot(out)
        second = run(*run_arguments(out, [source], 10, *options))
        assert second.returncode == 6
        assert_one_line(second.stderr, f"process {first.pid} on ", "already producing into this stream")
        after = snapshot(out)
        for names in (before, after):
            names.pop("head.json")  # which tells that the first one is alive
        assert after == before
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=60)
        assert first.returncode == 0
