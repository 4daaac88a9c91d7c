"""A run that is held by its limits, let go by its consumers, and deletes what they are done with: real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lazyshard.format.cursor import Cursor, ReadingMark
from lazyshard.format.names import chunk_name, seal_name
from lazyshard.stream import write_cursor
from lazyshard.stream.consumers import write_reading
from tests.harness.processes.producing import published, rows, run, run_arguments, start, wait_until

SIZE = 10


def stream_id(out: Path) -> str:
    found: str = json.loads((out / "stream.json").read_bytes())["stream_id"]
    return found


def head(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "head.json").read_bytes())
    return found


def commit(out: Path, chunks_before: int, name: str = "trainer") -> None:
    plan = {"dp_size": 1, "batch_size": 1, "unit": SIZE, "window": SIZE, "seed": 0}
    write_cursor(out, Cursor(name, stream_id(out), chunks_before * SIZE, chunks_before, plan, time.time()))


def read_up_to(out: Path, needs_chunks: int, name: str = "trainer") -> None:
    write_reading(out, ReadingMark(name, stream_id(out), 1, SIZE, needs_chunks, time.time()))


def chunks_on_disk(out: Path) -> list[int]:
    return [chunk for chunk in range(100) if (out / seal_name(chunk)).exists() or (out / chunk_name(chunk)).exists()]


@contextmanager
def begin(out: Path, source: Path, *more: object) -> Iterator[subprocess.Popen[str]]:
    with start(*run_arguments(out, [source], SIZE, *more)) as process:
        try:
            yield process
        finally:
            process.kill()


def is_held(out: Path, process: subprocess.Popen[str], chunks: int, words: str) -> None:
    wait_until(lambda: published(out) == chunks and words in head(out).get("note", ""), process)
    assert head(out)["state"] == "waiting"


def test_a_run_is_held_let_go_and_deletes_behind_its_consumer(tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(rows(0, 12 * SIZE))
    limits = ("--max-ahead", 3, "--retain", "consumed", "--consumers", "trainer")
    with begin(out, source, *limits) as process:
        is_held(out, process, 3, "no consumer has registered yet")
        # What a reader needs is never held back, whatever the limit.
        read_up_to(out, 7)
        is_held(out, process, 10, "'trainer' is at chunk 7")
        assert chunks_on_disk(out) == list(range(10))
        commit(out, 5)
        wait_until(lambda: chunks_on_disk(out) == list(range(5, 10)), process)
        read_up_to(out, 12)
        assert process.wait(60) == 0
    assert head(out)["ended"] is True
    assert chunks_on_disk(out) == list(range(5, 12))
    assert json.loads((out / "retired.json").read_bytes())["chunks_before"] == 5


def test_a_held_run_stops_at_once_and_goes_on_where_it_was(tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(rows(0, 6 * SIZE))
    with begin(out, source, "--max-ahead", 2) as process:
        is_held(out, process, 2, "--max-ahead 2 chunks")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert head(out)["state"] == "idle"
    done = run(*run_arguments(out, [source], SIZE))
    assert done.returncode == 0, done.stderr
    assert chunks_on_disk(out) == list(range(6))


def test_a_full_disk_that_only_a_checkpoint_could_empty_is_told_as_a_deadlock(tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(rows(0, 10 * SIZE))
    # Room for three chunks, while the open window needs five before a first checkpoint can be.
    with begin(out, source, "--max-disk", "3000", "--retain", "consumed") as process:
        wait_until(lambda: published(out) > 0, process)
        commit(out, 0)
        read_up_to(out, 5)
        wait_until(lambda: "deadlock" in head(out).get("note", ""), process)
        held_at = published(out)
        assert 0 < held_at < 5
        assert "raise --max-disk to" in head(out)["note"]
        # Somebody forgets the window after all.
        commit(out, held_at)
        wait_until(lambda: published(out) > held_at, process)
