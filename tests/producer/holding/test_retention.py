"""A producer that deletes behind its consumer: real processes that are killed, and a real small filesystem."""

import contextlib
import json
import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard.format.cursor import Cursor, ReadingMark
from lazyshard.format.names import parse_chunk_name
from lazyshard.stream import StreamReader, write_cursor
from lazyshard.stream.consumers import write_reading
from tests.harness.disks import SmallDisk, disk_fixture
from tests.harness.processes.environment import DEADLINE_S
from tests.harness.processes.producing import published, run_arguments, start, wait_until

pytestmark = pytest.mark.full

PER_CHUNK: Final = 20
WINDOW: Final = 2
"""Chunks in a window of the consumer."""


def wide_rows(count: int, width: int) -> bytes:
    return b"".join(b'{"id":%d,"text":"%s"}\n' % (number, b"x" * width) for number in range(count))


def chunk_bytes(out: Path) -> int:
    """Bytes of all chunks and seals; those that are deleted meanwhile count or not."""
    size = 0
    for name in os.listdir(out):
        if parse_chunk_name(name) is not None:
            try:
                size += (out / name).stat().st_size
            except FileNotFoundError:
                continue
    return size


class Trainer:
    """Draws sample after sample, whole windows at a time, and commits every so many chunks."""

    def __init__(self, out: Path, every: int) -> None:
        self.out = out
        self.every = every
        self.reader = StreamReader(out, max_wait=DEADLINE_S)
        self.ids: list[int] = []
        manifest = json.loads((out / "stream.json").read_bytes())
        self.stream_id: str = manifest["stream_id"]

    def need(self, chunks: int) -> None:
        assert write_reading(self.out, ReadingMark("trainer", self.stream_id, 1, 0, chunks, time.time()))

    def commit(self, chunks: int) -> None:
        write_cursor(
            self.out, Cursor("trainer", self.stream_id, chunks * PER_CHUNK, chunks // WINDOW * WINDOW, {}, time.time())
        )

    def train(self, chunks: int) -> None:
        """Trains the next so many chunks, a multiple of the window, waiting for them."""
        at = len(self.ids) // PER_CHUNK
        for first in range(at, at + chunks, WINDOW):
            self.need(first + WINDOW)
            self.reader.wait_for((first + WINDOW) * PER_CHUNK)
            for chunk in range(first, first + WINDOW):
                self.ids += [
                    self.reader.read(sample)["id"] for sample in range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK)
                ]
                if (chunk + 1) % self.every == 0:
                    self.commit(chunk + 1)


@contextlib.contextmanager
def producing(source: Path, out: Path, *limits: object) -> "Iterator[subprocess.Popen[str]]":
    """A producer, killed at the end if it is still there."""
    consumers = ("--retain", "consumed", "--consumers", "trainer")
    with start(*run_arguments(out, [source], PER_CHUNK, *consumers, *limits)) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("seed", range(2))
def test_killed_over_and_over_while_it_deletes(seed: int, tmp_path: Path) -> None:
    source, out, dice = tmp_path / "a.jsonl", tmp_path / "out", random.Random(seed)
    chunks = 120
    source.write_bytes(wide_rows(chunks * PER_CHUNK, 100))
    room = 30_000  # of about 3,000 bytes a chunk: the window that is open, 3 between checkpoints, and some more
    limits = ("--max-disk", room, "--max-ahead", "3 chunks")
    with producing(source, out, *limits) as process:
        wait_until(lambda: published(out) > 0, process)
        trainer = Trainer(out, every=3)
    for _ in range(8):
        with producing(source, out, *limits):
            trainer.train(dice.choice((2, 4, 6)))
            # The clock only picks the point: while it deletes, publishes, waits or starts.
            time.sleep(dice.random() * 0.02)
        assert chunk_bytes(out) <= room
    with producing(source, out, *limits) as process:
        trainer.train(chunks - len(trainer.ids) // PER_CHUNK)
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, errors
    assert trainer.ids == list(range(chunks * PER_CHUNK))
    assert chunk_bytes(out) <= room
    assert not (out / "chunk_00000.jsonl").exists()


root = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small filesystem"),
]


disk = disk_fixture("size=1m")


def free(point: Path) -> int:
    found = os.statvfs(point)
    return found.f_bavail * found.f_frsize


@pytest.mark.parametrize("limit", [pytest.param(limit, marks=root) for limit in ("--max-disk", "--min-free-disk")])
def test_six_times_what_fits_goes_through_a_small_disk(
    limit: str, disk: SmallDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is deleted takes room for as long as a reader has it open; this one looks at every chunk whether to let go.
    monkeypatch.setattr("lazyshard.stream.reader._LET_GO_S", 0.0)
    # While it waits it still holds the last window, for which so small a disk has no room to spare.
    monkeypatch.setattr("lazyshard.stream.chunk.OPEN_CHUNKS", WINDOW)
    source, out = tmp_path / "a.jsonl", disk.point / "out"
    chunks = 240
    source.write_bytes(wide_rows(chunks * PER_CHUNK, 1300))  # about 27,000 bytes a chunk
    with producing(source, out, limit, 600_000) as process:
        wait_until(lambda: published(out) > 0, process)
        trainer = Trainer(out, every=4)
        spare = []
        for _ in range(chunks // WINDOW):
            trainer.train(WINDOW)
            spare.append(600_000 - chunk_bytes(out) if limit == "--max-disk" else free(disk.point) - 600_000)
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, errors
    assert trainer.ids == list(range(chunks * PER_CHUNK))
    # Files are made of blocks: the last page of each, and of head and cursors, is not in their sizes.
    assert min(spare) >= (0 if limit == "--max-disk" else -32_768)


def head(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"note": ""} | json.loads((out / "head.json").read_bytes())
    return found


def deadlocked(process: "subprocess.Popen[str]", out: Path, limit: str) -> None:
    """Brings a run at its limit into a deadlock: a consumer needs more than there is room for between checkpoints."""
    wait_until(lambda: published(out) > 0, process)
    trainer = Trainer(out, every=100)
    trainer.need(2)
    trainer.commit(0)
    wait_until(lambda: limit in head(out)["note"], process)
    assert not head(out)["note"].startswith("deadlock: ")
    held = published(out)
    assert held < 25
    trainer.need(40)
    wait_until(lambda: head(out)["note"].startswith(f"deadlock: {limit} "), process)
    assert "consumer 'trainer' waits for 40 chunks" in head(out)["note"]
    assert published(out) == held


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small filesystem")
def test_a_deadlock_by_min_free_disk_is_told_and_ends_when_there_is_room(disk: SmallDisk, tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", disk.point / "out"
    source.write_bytes(wide_rows(60 * PER_CHUNK, 1300))
    with producing(source, out, "--min-free-disk", 500_000) as process:
        deadlocked(process, out, "--min-free-disk")
        disk.change("size=8m")
        wait_until(lambda: published(out) >= 40, process)


def test_a_deadlock_by_max_disk_is_told_and_ends_with_the_suggested_limit(tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(wide_rows(60 * PER_CHUNK, 1300))
    with producing(source, out, "--max-disk", 500_000) as process:
        deadlocked(process, out, "--max-disk")
    suggested = head(out)["note"].split("raise --max-disk to ")[1].split()[0]
    with producing(source, out, "--max-disk", suggested) as process:
        wait_until(lambda: published(out) >= 40, process)
