"""A run at its limits: processes; then a producer and readers in memory, against each other in every order."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshard.format.state import Cursor, ReadingHint
from lazyshard.stream import StreamReader
from lazyshard.stream.cursor import Consumer
from lazyshard_producer.cli import main
from lazyshard_producer.configuration.settings import Amount, Limits
from lazyshard_producer.limits import Hold, Holdback, Shelf, Stock
from tests.harness.disks import SmallDisk, disk_fixture
from tests.harness.processes.commands import Commands
from tests.harness.processes.environment import DEADLINE_S
from tests.harness.processes.producing import assert_one_line, chunk_files, head, ids, published, rows, run_arguments
from tests.plan.cases import PROPERTY
from tests.producer.commands import Running, commit
from tests.stream.damage import reads

PER_CHUNK: Final = 20
CONSUMED: Final = ("--retain", "consumed", "--consumers", "trainer")
STREAM: Final = "5f0c1a9be7d24c3f8a6b0e1d2c3b4a59"
SAMPLES_PER_CHUNK: Final = 10
disk = disk_fixture("size=256k")


def sized(count: int, size: int) -> bytes:
    """So many rows, with a text of this size in each."""
    return b"".join(b'{"id":%d,"text":"%s"}\n' % (number, b"x" * size) for number in range(count))


def test_full_disk_that_only_a_checkpoint_could_empty_is_a_deadlock(nursery: Commands, source: Path, out: Path) -> None:
    source.write_bytes(rows(0, 10 * PER_CHUNK))
    # Room for three chunks, while the open window needs five before a first checkpoint can be.
    limits = ("--max-disk", "4000", "--retain", "consumed")
    with Running(nursery, *run_arguments(out, [source], PER_CHUNK, *limits)) as run:
        run.wait_until(lambda: published(out) > 0)
        commit(out, 0, PER_CHUNK)
        reads(out, "trainer", 5, time.time())
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
@pytest.mark.root
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
            reads(out, "trainer", done, time.time())
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


@pytest.mark.root
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


@pytest.mark.full
@pytest.mark.root
@pytest.mark.parametrize("end", ["room", "signal where no room is left at all"])
def test_min_free_disk_waits_for_room_and_goes_on(end: str, nursery: Commands, source: Path, tmp_path: Path) -> None:
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


@dataclass(kw_only=True)
class Reader:
    """Trains chunk after chunk, window by window, and commits a checkpoint every so many chunks.

    `keeps` checkpoints stay resumable: its cursor never passes the oldest of them.
    """

    name: str
    window: int
    every: int
    keeps: int = 1
    at: int = 0
    checkpoints: list[int] = field(default_factory=list)
    needs: int | None = None

    @property
    def cursor(self) -> int | None:
        return self.checkpoints[-self.keeps :][0] // self.window * self.window if self.checkpoints else None

    def step(self, published: int, ended: bool) -> bool:
        needs = (self.at // self.window + 1) * self.window
        moved, self.needs = self.needs != needs, needs
        if published < needs and not (ended and self.at < published):
            return moved
        self.at += 1
        if self.at - (self.checkpoints or [0])[-1] == self.every:
            self.checkpoints.append(self.at)
        return True

    def consumer(self) -> Consumer:
        cursor = None if self.cursor is None else Cursor(self.name, STREAM, self.at, self.cursor, {}, 0.0)
        reading = None if self.needs is None else ReadingHint(self.name, STREAM, 1, 0, self.needs, 0.0)
        return Consumer(self.name, cursor, reading, None)


class World:
    """Everything there is. `sizes` are the chunks that the producer is given; with the last one the stream ends."""

    def __init__(self, limits: Limits, readers: Sequence[Reader], sizes: Sequence[int], *, capacity: int = 0) -> None:
        self.readers = list(readers)
        self.sizes = sizes
        self.capacity = capacity
        self.now = 1000.0
        self.first = 0
        self.published = 0
        self.ended = False
        self.limits = limits
        self.hold: Hold | None = None
        self.holds: list[Hold] = []
        self.holdback = Holdback(limits, Disk(self), SAMPLES_PER_CHUNK, clock=lambda: self.now, wall_clock=lambda: 0.0)

    @property
    def used(self) -> int:
        return sum(self.sizes[self.first : self.published])

    @property
    def finished(self) -> bool:
        return self.ended and all(reader.at == self.published for reader in self.readers)

    def produce(self) -> bool:
        """One try to publish the next chunk, as late after the last one as it asks for."""
        if self.ended:
            return False
        if self.published == len(self.sizes):
            self.ended = True
            return True
        self.now += 0.01 if self.hold is None else self.hold.retry_s
        self.hold = self.holdback.before_chunk(self.published, self.published * SAMPLES_PER_CHUNK)
        if self.hold is not None:
            self.holds.append(self.hold)
            return False
        assert not any(hold.deadlock for hold in self.holds), "it continued after it had been called a deadlock"
        self.published += 1
        self.holdback.after_publish(self.published)
        # By how much the newest chunk is larger than all before it nobody could know.
        *before, newest = self.sizes[: self.published]
        excess = max(0, newest - max(before, default=0))
        if self.limits.max_disk is not None:
            assert self.used <= self.limits.max_disk + excess
        if self.limits.min_free_disk is not None:
            assert self.capacity - self.used >= self.limits.min_free_disk - excess
        return True

    def run(self, turns: Sequence[int]) -> None:
        """The producer (0) and readers take steps in this order, then in turn until nobody can take one any more."""

        def move(who: int) -> bool:
            return self.produce() if who == 0 else self.readers[who - 1].step(self.published, self.ended)

        for turn in turns:
            move(turn % (len(self.readers) + 1))
        stuck = 0
        # What the producer knows of the readers may be a moment old: hence a few rounds.
        while stuck < 4:
            moved = [move(who) for who in range(len(self.readers) + 1)]
            stuck = 0 if any(moved) else stuck + 1


class Disk(Shelf):
    def __init__(self, world: World) -> None:
        super().__init__(Path("/stream"))
        self.world = world

    def first(self) -> int:
        return self.world.first

    def consumers(self, published: int) -> tuple[Consumer, ...]:
        assert published == self.world.published
        found = [one.consumer() for one in self.world.readers if one.cursor is not None or one.needs is not None]
        return tuple(sorted(found, key=lambda consumer: consumer.name))

    def retire(self, chunks_before: int, published: int, check: Callable[[], Path | None]) -> None:
        limits, readers = self.world.limits, self.world.readers
        assert limits.retain != "all"
        assert set(limits.consumers) <= {reader.name for reader in readers if reader.cursor is not None}
        for reader in readers:
            if reader.needs is not None or reader.cursor is not None:
                assert chunks_before <= (reader.cursor or 0)
        kept = limits.retain if isinstance(limits.retain, int) else 1
        assert self.world.first < chunks_before <= published - kept
        self.world.first = chunks_before

    def stock(self, first: int, stop: int, *, exact: bool) -> Stock:
        assert (first, stop) == (self.world.first, self.world.published)
        return Stock(first=first, stop=stop, size=self.world.used, largest=max(self.world.sizes[first:stop], default=0))

    def chunk_size(self, chunk: int) -> int:
        return self.world.sizes[chunk] if self.world.first <= chunk < self.world.published else 0

    def free_bytes(self) -> int:
        return self.world.capacity - self.world.used


chunks_ahead = st.builds(Amount, number=st.integers(0, 12), unit=st.just("chunks"))
in_samples = st.builds(Amount, number=st.integers(0, 120), unit=st.just("samples"))
in_bytes = st.builds(Amount, number=st.integers(0, 1200), unit=st.just("bytes"))
amounts = st.one_of(chunks_ahead, in_samples, in_bytes)
retention: Any = st.one_of(st.sampled_from(["all", "consumed"]), st.integers(1, 5))
sizes = st.lists(st.integers(1, 200), min_size=1, max_size=25)
turns = st.lists(st.integers(0, 3), max_size=60)


@st.composite
def readers(draw: st.DrawFn) -> list[Reader]:
    window, every, keeps = st.integers(1, 6), st.integers(1, 12), st.integers(1, 3)
    return [
        Reader(name=f"r{number}", window=draw(window), every=draw(every), keeps=draw(keeps))
        for number in range(draw(st.integers(1, 3)))
    ]


@settings(PROPERTY, max_examples=300)
@given(st.data())
def test_limits_are_kept_and_a_deadlock_is_told_from_a_wait(data: st.DataObject) -> None:
    """That nothing is published after a deadlock was told, and nothing beyond a limit, is checked at each step."""
    kind, who = data.draw(st.sampled_from(["ahead", "disk", "free"])), data.draw(readers())
    both, named = data.draw(st.booleans()), data.draw(st.booleans())
    size, spare = data.draw(st.integers(1, 2000)), data.draw(st.integers(0, 200))
    ahead = data.draw(amounts)
    limits = Limits(
        max_ahead=ahead if both or kind == "ahead" else None,
        max_disk=size if kind == "disk" else None,
        min_free_disk=spare if kind == "free" else None,
        retain=data.draw(retention),
        consumers=tuple(reader.name for reader in who) if named else (),
    )
    world = World(limits, who, data.draw(sizes), capacity=200 + size)
    world.run(data.draw(turns))
    if world.finished:
        assert kind != "ahead" or not any(hold.deadlock for hold in world.holds)
        return
    # Whatever its value, --max-ahead is never a deadlock.
    assert world.hold is not None
    assert kind != "ahead" and world.hold.deadlock
    assert f"--{'max-disk' if kind == 'disk' else 'min-free-disk'} " in world.hold.reason
    suggested = re.search(r"--max-disk to (\d+) bytes", world.hold.reason)
    assert kind == "free" or (suggested is not None and int(suggested[1]) > size)
