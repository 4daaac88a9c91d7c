"""A run that is held by its limits, let go by its consumers, and deletes what they are done with: real processes."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Final

import pytest

from lazyshard.format.records import parse_chunk_name
from lazyshard.format.state import Cursor, ReadingHint
from lazyshard.stream import StreamReader, write_cursor
from lazyshard.stream.cursor import write_reading
from lazyshard_producer.cli import main
from tests.harness.disks import SmallDisk, disk_fixture
from tests.harness.processes.commands import Commands
from tests.harness.processes.environment import DEADLINE_S
from tests.harness.processes.producing import head, published, rows, run_arguments
from tests.producer.commands import Running

PER_CHUNK: Final = 20
CONSUMED: Final = ("--retain", "consumed", "--consumers", "trainer")


def commit(out: Path, chunks: int) -> None:
    stream_id = json.loads((out / "stream.json").read_bytes())["stream_id"]
    write_cursor(out, Cursor("trainer", stream_id, chunks * PER_CHUNK, chunks, {}, time.time()))


def need(out: Path, chunks: int) -> None:
    stream_id = json.loads((out / "stream.json").read_bytes())["stream_id"]
    assert write_reading(out, ReadingHint("trainer", stream_id, 1, 0, chunks, time.time()))


def on_disk(out: Path) -> list[int]:
    return sorted({parsed[0] for name in os.listdir(out) if (parsed := parse_chunk_name(name)) is not None})


def is_held(out: Path, run: Running, chunks: int, words: str) -> None:
    run.wait_until(lambda: published(out) == chunks and words in head(out).get("note", ""))
    assert head(out)["state"] == "waiting"


def test_a_run_is_held_let_go_and_deletes_behind_its_consumer(nursery: Commands, tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(rows(0, 12 * PER_CHUNK))
    with Running(nursery, *run_arguments(out, [source], PER_CHUNK, "--max-ahead", 3, *CONSUMED)) as run:
        is_held(out, run, 3, "no consumer")
        # What a reader needs is never held back, whatever the limit.
        need(out, 7)
        is_held(out, run, 10, "'trainer' is at chunk 7")
        assert on_disk(out) == list(range(10))
        commit(out, 5)
        run.wait_until(lambda: on_disk(out) == list(range(5, 10)))
        assert run.end(signal.SIGTERM)[0] == 0
    assert head(out)["state"] == "idle"
    assert main(run_arguments(out, [source], PER_CHUNK)) == 0
    assert head(out)["ended"] is True
    assert on_disk(out) == list(range(5, 12))


def test_full_disk_that_only_a_checkpoint_could_empty_is_told_as_a_deadlock(nursery: Commands, tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(rows(0, 10 * PER_CHUNK))
    # Room for three chunks, while the open window needs five before a first checkpoint can be.
    limits = ("--max-disk", "4000", "--retain", "consumed")
    with Running(nursery, *run_arguments(out, [source], PER_CHUNK, *limits)) as run:
        run.wait_until(lambda: published(out) > 0)
        commit(out, 0)
        need(out, 5)
        run.wait_until(lambda: head(out).get("note", "").startswith("deadlock: --max-disk "))
        held_at = published(out)
        assert 0 < held_at < 5
        # Somebody forgets the window after all.
        commit(out, held_at)
        run.wait_until(lambda: published(out) > held_at)


disk = disk_fixture("size=512k")


def size_if_there(path: Path) -> int:
    """Returns the size of a file that may be deleted meanwhile, 0 if it is."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


@pytest.mark.full
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small filesystem")
@pytest.mark.parametrize(("limit", "most"), [("--max-disk", 300_000), ("--min-free-disk", 200_000)])
def test_six_times_what_fits_goes_through_a_small_disk(
    limit: str, most: int, disk: SmallDisk, nursery: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    window, every, chunks = 2, 4, 120
    # What is deleted takes room for as long as a reader has it open; this one looks at every chunk whether to let go.
    monkeypatch.setattr("lazyshard.stream.reader._LET_GO_S", 0.0)
    # While it waits it still holds the last window, for which so small a disk has no room to spare.
    monkeypatch.setattr("lazyshard.stream.chunk.OPEN_CHUNKS", window)
    source, out, ids, spare = tmp_path / "a.jsonl", disk.point / "out", list[int](), list[int]()
    text = b"x" * 1300  # about 27,000 bytes a chunk
    source.write_bytes(b"".join(b'{"id":%d,"text":"%s"}\n' % (number, text) for number in range(chunks * PER_CHUNK)))
    with Running(nursery, *run_arguments(out, [source], PER_CHUNK, limit, most, *CONSUMED)) as run:
        run.wait_until(lambda: published(out) > 0)
        reader = StreamReader(out, max_wait=DEADLINE_S)
        for done in range(window, chunks + 1, window):
            need(out, done)
            reader.wait_for(done * PER_CHUNK)
            ids += [reader.read(sample)["id"] for sample in range(len(ids), done * PER_CHUNK)]
            if done % every == 0:
                commit(out, done)
            if limit == "--max-disk":
                spare.append(most - sum(map(size_if_there, out.glob("chunk_*"))))
            else:
                found = os.statvfs(disk.point)
                spare.append(found.f_bavail * found.f_frsize - most)
        status, err = run.end()
        assert status == 0, err
    assert ids == list(range(chunks * PER_CHUNK))
    # Files are made of blocks: the last page of each, and of head and cursors, is not in their sizes.
    assert min(spare) >= (0 if limit == "--max-disk" else -32_768)
