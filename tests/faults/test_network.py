"""Producer and readers on two mounts of one folder, which remember names, attributes and listings for seconds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lazyshard import ChunkWriter, LazyShardedDataset, StreamReader
from lazyshard.errors import StreamInvalid, StreamMissing
from lazyshard.store import durable
from lazyshard.stream import publishing
from tests.harness.network.mounts import CACHED, CACHED_S, DEFAULT, DEFAULT_S, Mount, Share, why_not
from tests.harness.network.sweep import (
    MARGIN_S,
    PER_CHUNK,
    ROWS,
    Child,
    Round,
    Sealed,
    arguments,
    check_whole,
    published,
    readers,
    run_rounds,
    source,
    wait_for,
)
from tests.harness.processes.commands import Commands
from tests.harness.tally import Tally
from tests.producer.commands import assert_one_line, ids
from tests.stream.streams import rows

pytestmark = [pytest.mark.full, pytest.mark.root, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]


class Site:
    """A share with three mounts: see `CACHED`, `DEFAULT`; `short` remembers all of it for 3 s."""

    def __init__(self, share: Share, stack: ExitStack) -> None:
        short = ("dcache_timeout=3", "entry_timeout=3", "negative_timeout=3", "attr_timeout=3")
        self.share = share
        self.cached, self.default, self.short = (
            stack.enter_context(share.mount(name, options))
            for name, options in (("cached", CACHED), ("default", DEFAULT), ("short", short))
        )

    def mount(self, name: str) -> Mount:
        found: Mount = getattr(self, name)
        if not found.is_up():
            found.bring_up()
        return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(Share(tmp_path_factory.mktemp("share")), stack)


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with Commands(tmp_path_factory.mktemp("nursery")) as nursery:
        yield nursery


@pytest.mark.parametrize(
    ("writes", "reads", "lag"), [("default", "cached", CACHED_S), ("cached", "default", DEFAULT_S)]
)
def test_readers_that_came_first_get_each_sample_once(
    writes: str, reads: str, lag: float, site: Site, nursery: Commands, tmp_path: Path
) -> None:
    # Before there is a stream: their mount remembers that there is none.
    with readers(site.mount(reads).point / f"from-{writes}", lag + MARGIN_S) as finish:
        pid = nursery.start(*arguments(site.mount(writes).point / f"from-{writes}", source(tmp_path), "--rate", 40))
        status, err = nursery.wait(pid)
        assert status == 0, err
        whole, ranks = finish()
    assert whole == list(range(ROWS))
    assert sorted(ranks) == list(range(ROWS))
    check_whole(site.share.real / f"from-{writes}")


@pytest.mark.parametrize(("first", "second"), [("cached", "default"), ("default", "cached")])
def test_second_producer_takes_over_and_the_first_is_fenced(
    first: str, second: str, site: Site, nursery: Commands, tmp_path: Path
) -> None:
    name = f"taken-{first}"
    real, path = site.share.real / name, source(tmp_path)
    with Sealed(real) as sealed:
        pid = nursery.start(*arguments(site.mount(first).point / name, path, "--rate", 8))
        wait_for(lambda: published(real) >= 2, "two chunks")
        os.kill(pid, signal.SIGSTOP)
        status, err = nursery.run(*arguments(site.mount(second).point / name, path))
        assert status == 0, err
        os.kill(pid, signal.SIGCONT)
        status, err = nursery.wait(pid)
    assert status == 6, err
    assert_one_line(err)
    assert sealed.wrong == []
    check_whole(real)


def test_taking_over_refreshes_a_listing_that_lags(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk is sealed while another mount has it listed without its seal; a producer goes on there at once."""
    here, there = site.mount("default").point / "lagging", site.mount("short").point / "lagging"
    writer = ChunkWriter(here, 2)
    for row in rows(0, 4):
        writer.write(row)
    sync = durable.sync_directory

    def list_elsewhere(directory: Path) -> None:
        sync(directory)
        assert "chunk_00002.jsonl" in os.listdir(there)

    with monkeypatch.context() as patch:
        patch.setattr(publishing, "sync_directory", list_elsewhere)
        for row in rows(4, 6):
            writer.write(row)
    with ChunkWriter(there) as other:
        for row in rows(other.published_samples, 10):
            other.write(row)
    # As one that was killed, it has tidied nothing up before.
    writer.close(end=False)
    assert ids(site.share.real / "lagging") == list(range(10))


def test_a_stream_that_is_remembered_as_missing_is_not_created_anew(site: Site) -> None:
    """It is created and written to while another mount remembers that there is none; there it is created too."""
    here, there = (site.mount(name).point / "unseen" for name in ("default", "short"))
    (site.share.real / "unseen").mkdir()
    assert not (there / "stream.json").exists() and not os.listdir(there)
    writer = ChunkWriter(here, 2)
    for row in rows(0, 4):
        writer.write(row)
    assert not (there / "stream.json").exists()
    with pytest.raises(StreamInvalid):
        ChunkWriter(there, 2).close(end=False)
    reader = StreamReader(here)
    wait_for((there / "stream.json").exists, "the manifest")
    with ChunkWriter(there) as again:
        assert (again.stream_id, again.published_samples) == (reader.stream_id, 4)
        for row in rows(4, 7):
            again.write(row)
    assert [row["id"] for row in reader] == list(range(7))


def test_a_hung_share_is_named_by_both_sides_which_go_on(site: Site, nursery: Commands, tmp_path: Path) -> None:
    real, path = site.share.real / "hung", source(tmp_path)
    out, seen = site.mount("default").point / "hung", site.mount("cached").point / "hung"

    def read(send: Callable[[Any], None]) -> None:
        send([row["id"] for row in StreamReader(seen, max_wait=CACHED_S + MARGIN_S)])

    pid = nursery.start(*arguments(out, path, "--rate", 20), no_answer_s=0.3)
    wait_for(lambda: published(real) >= 1, "a chunk")
    with Child(read, tmp_path / "said") as child:
        wait_for(lambda: published(real) >= 3, "three chunks")
        with site.cached.hanging():
            wait_for(lambda: "no answer for " in child.said(), "the reader's word")
        with site.default.hanging():
            wait_for(lambda: "no answer for " in nursery.said(pid), "the producer's word")
        assert child.get() == list(range(ROWS))
        assert str(seen) in child.said()
        wait_for(lambda: "answered after " in child.said(), "the reader's second word")
    status, err = nursery.wait(pid)
    assert status == 0, err
    assert f"writing to {out}" in err
    check_whole(real)


def test_a_share_that_hangs_for_long_costs_no_wait_its_time(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While nothing is answered, neither `max_wait` nor the grace for files that do not show yet passes."""
    monkeypatch.setattr("lazyshard.stream.waiting._ANSWER_S", 0.1)
    directory = site.mount("cached").point / "waits"
    writer = ChunkWriter(directory, 2)
    writer.write({"id": 0})
    writer.write({"id": 1})

    def read(send: Callable[[Any], None]) -> None:
        reader = StreamReader(directory, max_wait=2.0)
        send(reader.read(0)["id"])
        # Answered only after longer than it may wait.
        send(reader.read(2)["id"])

    with Child(read, tmp_path / "said") as child:
        assert child.get() == 0
        with site.cached.hanging():
            wait_for(lambda: child.said().count("no answer for ") >= 4, "2.4 s without an answer")
        writer.write({"id": 2})
        writer.write({"id": 3})
        assert child.get() == 2
    writer.close()


def test_a_client_that_dies_ends_both_sides_with_a_word_and_both_go_on_after_it_is_back(
    site: Site, nursery: Commands, tmp_path: Path
) -> None:
    real, path = site.share.real / "dead", source(tmp_path)
    out = site.mount("short").point / "dead"
    pid = nursery.start(*arguments(out, path, "--rate", 20))
    wait_for(lambda: published(real) >= 3, "three chunks")
    dataset = LazyShardedDataset(out, dp_rank=0, dp_size=1, max_wait=MARGIN_S, max_total_samples=ROWS)
    read = [dataset[index]["id"] for index in range(6)]
    state = dataset.state_dict(6)
    site.short.kill()
    try:
        status, err = nursery.wait(pid)
        assert status == 7, err
        assert_one_line(err, str(out), "not connected")
        with pytest.raises(OSError, match=out.name):
            [dataset[index] for index in range(6, ROWS)]
    finally:
        site.short.revive()
    # A chunk that was open is opened again.
    assert dataset[6]["id"] == 6
    status, err = nursery.run(*arguments(out, path))
    assert status == 0, err
    again = LazyShardedDataset(out, dp_rank=0, dp_size=1, max_wait=MARGIN_S, max_total_samples=ROWS)
    again.load_state_dict(state)
    read += [again[index]["id"] for index in again.rank_indices]
    assert read == list(range(ROWS))
    check_whole(real)


def test_a_mount_that_is_taken_away_is_told_from_a_stream_that_waits(site: Site) -> None:
    out = site.mount("short").point / "away"
    with ChunkWriter(site.mount("default").point / "away", 2) as writer:
        for row in rows(0, 6):
            writer.write(row)
        reader = StreamReader(out, max_wait=MARGIN_S)
        assert reader.read(0) == {"id": 0}
        site.short.detach()
        assert reader.read(1) == {"id": 1}  # what is open stays open
        with pytest.raises(StreamMissing):
            reader.read(2)
        site.short.revive()
        assert [row["id"] for row in (reader.read(2), reader.read(5))] == [2, 5]


def test_consumed_chunks_are_deleted_on_one_mount_while_the_other_reads_and_commits(
    site: Site, nursery: Commands, tmp_path: Path
) -> None:
    real, path = site.share.real / "retained", source(tmp_path)
    options = ("--retain", "consumed", "--max-ahead", "4 chunks", "--consumers", "sft")
    pid = nursery.start(*arguments(site.mount("cached").point / "retained", path, *options))
    seen = site.mount("default").point / "retained"
    with Sealed(real) as sealed:
        lagging = StreamReader(seen, max_wait=CACHED_S + MARGIN_S)
        assert lagging.read(0)["id"] == 0
        dataset = LazyShardedDataset(
            seen, dp_rank=0, dp_size=1, max_wait=CACHED_S + MARGIN_S, max_total_samples=ROWS, consumer="sft"
        )
        read = []
        for index in range(ROWS):
            read.append(dataset[index]["id"])
            if len(read) % PER_CHUNK == 0:
                assert dataset.commit(len(read), last_epoch=True)
        status, err = nursery.wait(pid)
    assert status == 0, err
    assert read == list(range(ROWS))
    assert sealed.wrong == []
    left = sorted(path.name for path in real.glob("chunk_*.jsonl"))
    assert left and "chunk_00000.jsonl" not in left
    # Open since before it was deleted: here its rows can still be read.
    assert lagging.read_published(1, 2)[0]["id"] == 1


@pytest.mark.timeout(300)
def test_rounds_of_kills_and_hangs_lose_nothing(site: Site, tmp_path: Path) -> None:
    tally = Tally("network")
    run_rounds(tally, tmp_path, 0, 2)
    assert tally.violations == []
    assert tally.trials == 2


@pytest.mark.timeout(300)
def test_a_consumer_that_forgets_its_state_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = LazyShardedDataset.commit
    resumed: list[Any] = []

    def waits_to_be_killed(dataset: LazyShardedDataset, *args: Any, **options: Any) -> bool:
        while not resumed:
            time.sleep(1)
        return commit(dataset, *args, **options)

    # The first consumer leaves a checkpoint of a part and comes no further, so that another one has to go on.
    monkeypatch.setattr(LazyShardedDataset, "commit", waits_to_be_killed)
    monkeypatch.setattr(LazyShardedDataset, "load_state_dict", lambda dataset, state: resumed.append(state))
    monkeypatch.setattr(Round, "faults", lambda one: [one._kill_consumer])
    tally = Tally("network")
    run_rounds(tally, tmp_path, 0, 1)
    assert len(tally.violations) == 1
    assert "round 0 of --seed 0 (kill consumer" in tally.violations[0]
