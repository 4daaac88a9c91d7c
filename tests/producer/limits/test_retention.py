"""A run that is held by its limits, let go by its consumers, deletes behind them or fills its disk: processes."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard.format.records import parse_chunk_name
from lazyshard.format.state import ReadingHint
from lazyshard.stream import StreamReader
from lazyshard.stream.cursor import write_reading
from lazyshard_producer.cli import main
from tests.harness.disks import SmallDisk, disk_fixture
from tests.harness.processes.commands import Commands
from tests.harness.processes.environment import DEADLINE_S
from tests.harness.processes.producing import assert_one_line, chunk_files, head, ids, published, rows, run_arguments
from tests.harness.scenes.rows import made
from tests.harness.scenes.sources import KINDS
from tests.harness.scenes.streams import Stream
from tests.producer.commands import Running, commit

PER_CHUNK: Final = 20
CONSUMED: Final = ("--retain", "consumed", "--consumers", "trainer")
MAKES: Final = ("--on-bad-row", "quarantine", "--transform", "tests.harness.scenes.rows:thirds")
disk = disk_fixture("size=256k")


def mounts(test: Any) -> Any:
    return pytest.mark.root(
        pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small filesystem")(test)
    )


def sized(count: int, size: int) -> bytes:
    """So many rows, with a text of this size in each."""
    return b"".join(b'{"id":%d,"text":"%s"}\n' % (number, b"x" * size) for number in range(count))


def need(out: Path, chunks: int) -> None:
    stream_id = json.loads((out / "stream.json").read_bytes())["stream_id"]
    assert write_reading(out, ReadingHint("trainer", stream_id, 1, 0, chunks, time.time()))


def on_disk(out: Path) -> list[int]:
    return sorted({parsed[0] for name in os.listdir(out) if (parsed := parse_chunk_name(name)) is not None})


def is_held(out: Path, run: Running, chunks: int, words: str) -> None:
    run.wait_until(lambda: published(out) == chunks and words in head(out).get("note", ""))
    assert head(out)["state"] == "waiting"


def test_a_run_is_held_let_go_and_deletes_behind_its_consumer(nursery: Commands, source: Path, out: Path) -> None:
    source.write_bytes(rows(0, 12 * PER_CHUNK))
    with Running(nursery, *run_arguments(out, [source], PER_CHUNK, "--max-ahead", 3, *CONSUMED)) as run:
        is_held(out, run, 3, "no consumer")
        # What a reader needs is never held back, whatever the limit.
        need(out, 7)
        is_held(out, run, 10, "'trainer' is at chunk 7")
        assert on_disk(out) == list(range(10))
        commit(out, 5, PER_CHUNK)
        run.wait_until(lambda: on_disk(out) == list(range(5, 10)))
        assert run.end(signal.SIGTERM)[0] == 0
    assert head(out)["state"] == "idle"
    assert main(run_arguments(out, [source], PER_CHUNK)) == 0
    assert head(out)["ended"] is True
    assert on_disk(out) == list(range(5, 12))


def test_full_disk_that_only_a_checkpoint_could_empty_is_told_as_a_deadlock(
    nursery: Commands, source: Path, out: Path
) -> None:
    source.write_bytes(rows(0, 10 * PER_CHUNK))
    # Room for three chunks, while the open window needs five before a first checkpoint can be.
    limits = ("--max-disk", "4000", "--retain", "consumed")
    with Running(nursery, *run_arguments(out, [source], PER_CHUNK, *limits)) as run:
        run.wait_until(lambda: published(out) > 0)
        commit(out, 0, PER_CHUNK)
        need(out, 5)
        run.wait_until(lambda: head(out).get("note", "").startswith("deadlock: --max-disk "))
        held_at = published(out)
        assert 0 < held_at < 5
        # Somebody forgets the window after all.
        commit(out, held_at, PER_CHUNK)
        run.wait_until(lambda: published(out) > held_at)


def size_if_there(path: Path) -> int:
    """Returns the size of a file that may be deleted meanwhile, 0 if it is."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


@pytest.mark.full
@mounts
@pytest.mark.parametrize(("limit", "most"), [("--max-disk", 300_000), ("--min-free-disk", 200_000)])
def test_six_times_what_fits_goes_through_a_small_disk(
    limit: str, most: int, disk: SmallDisk, nursery: Commands, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    window, every, chunks = 2, 4, 120
    # What is deleted takes room for as long as a reader has it open; this one looks at every chunk whether to let go.
    monkeypatch.setattr("lazyshard.stream.reader._LET_GO_S", 0.0)
    # While it waits it still holds the last window, for which so small a disk has no room to spare.
    monkeypatch.setattr("lazyshard.stream.chunk.OPEN_CHUNKS", window)
    disk.change("size=512k")
    out, ids, spare = disk.point / "out", list[int](), list[int]()
    source.write_bytes(sized(chunks * PER_CHUNK, 1300))  # about 27,000 bytes a chunk
    with Running(nursery, *run_arguments(out, [source], PER_CHUNK, limit, most, *CONSUMED)) as run:
        run.wait_until(lambda: published(out) > 0)
        reader = StreamReader(out, max_wait=DEADLINE_S)
        for done in range(window, chunks + 1, window):
            need(out, done)
            reader.wait_for(done * PER_CHUNK)
            ids += [reader.read(sample)["id"] for sample in range(len(ids), done * PER_CHUNK)]
            if done % every == 0:
                commit(out, done, PER_CHUNK)
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


@mounts
def test_disk_full(disk: SmallDisk, nursery: Commands, source: Path) -> None:
    out = disk.point / "out"
    source.write_bytes(sized(1000, 900))
    arguments = run_arguments(out, [source], 50, "--no-progress")
    done: list[int] = []
    for _ in range(2):
        status, err = nursery.run(*arguments)
        assert status == 7
        assert_one_line(err, "No space left on device")
        done = done or ids(out)
        assert ids(out) == done == list(range(len(done)))
        assert (head(out)["state"], head(out)["chunks"] * 50) == ("failed", len(done))
        assert "No space left on device" in head(out)["note"]
        assert len(chunk_files(out)) * 50 == len(done) > 0

    disk.change("size=8m")
    assert nursery.run(*arguments)[0] == 0
    assert ids(out) == list(range(1000))


# A page or an inode more each time: what finds no room is another one each time.
@pytest.mark.full
@mounts
@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("followed while it grows", lambda step: f"size={24 + 4 * step}k"),
        ("plain", lambda step: f"size=8m,nr_inodes={3 + step}"),
    ],
    ids=["a followed directory", "no inode"],
)
def test_a_disk_that_is_full_at_any_write(kind: str, size: Callable[[int], str], tmp_path: Path) -> None:
    source, failures = KINDS[kind](tmp_path, 0), 0
    (tmp_path / "nursery").mkdir()
    # The nursery must not outlive the disk.
    with SmallDisk(tmp_path / "disk", size(0)) as disk, Commands(tmp_path / "nursery") as nursery:
        stream = Stream(nursery, disk.point / "out", [source], MAKES, 14)
        while True:
            status, err = stream.run()
            if status == 0:
                break
            assert status == 7, err
            assert_one_line(err, "No space left on device", str(stream.out))
            stream.check({})
            failures += 1
            disk.change(size(failures))
        assert failures > 10
        assert sorted(map(str, stream.rows())) == sorted(map(str, made(source.rows, transform=True, where=False)))
        lines = [(entry["source"], entry["line"]) for entry in stream.refused()]
        assert len(set(lines)) == len(lines) > 0
        stream.check_ended()


@pytest.mark.full
@mounts
@pytest.mark.parametrize("end", ["room", "signal where no room is left at all"])
def test_with_min_free_disk_it_waits_for_room_and_goes_on(
    end: str, nursery: Commands, source: Path, tmp_path: Path
) -> None:
    source.write_bytes(sized(1000, 500))
    out = tmp_path / "disk" / "out"
    arguments = run_arguments(out, [source], 50, "--min-free-disk", "100kB")
    with SmallDisk(tmp_path / "disk", "size=256k") as disk, Running(nursery, *arguments) as run:
        run.wait_until(lambda: "--min-free-disk" in head(out).get("note", ""))
        assert head(out)["state"] == "waiting"
        assert 0 < published(out) * 50 < 1000
        assert os.statvfs(disk.point).f_bavail * os.statvfs(disk.point).f_frsize >= 100_000
        if end == "room":
            disk.change("size=8m")
            status, err = run.end()
        else:
            disk.fill()
            status, err = run.end(signal.SIGTERM)
        assert status == 0, err
        if end != "room":
            assert head(out)["state"] == "idle"
            assert not (out / ".tmp").exists()
            disk.change("size=8m")
            assert main(run_arguments(out, [source], 50)) == 0
        assert ids(out) == list(range(1000))
