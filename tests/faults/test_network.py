"""Producer and readers on two mounts of one folder, which remember names, attributes and listings for seconds."""

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
from tests.harness.network import sweep as network
from tests.harness.network.mounts import CACHED, CACHED_S, DEFAULT, DEFAULT_S, Mount, Share, why_not
from tests.harness.network.sweep import MARGIN_S, PER_CHUNK, ROWS, Child, Round, Sealed, wait_for
from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import assert_one_line, ids
from tests.harness.tally import Tally
from tests.stream.streams import raised, refusal_of, rows

pytestmark = [pytest.mark.full, pytest.mark.root, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]

ALL = list(range(ROWS))


class Site:
    """A share with three mounts, see `CACHED`, `DEFAULT`; `short` remembers all of it for 3 s. And producers there."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        short = ("dcache_timeout=3", "entry_timeout=3", "negative_timeout=3", "attr_timeout=3")
        (folder / "share").mkdir()
        self.share = Share(folder / "share")
        self.cached, self.default, self.short = (
            stack.enter_context(self.share.mount(name, options))
            for name, options in (("cached", CACHED), ("default", DEFAULT), ("short", short))
        )
        self.nursery = stack.enter_context(Commands(folder / "nursery"))
        self._source = network.source(folder)

    def at(self, mount: str, name: str) -> Path:
        found: Mount = getattr(self, mount)
        if not found.is_up():
            found.bring_up()
        return found.point / name

    def start(self, out: Path, *options: object) -> int:
        pid: int = self.nursery.start(*network.arguments(out, self._source, *options), no_answer_s=0.3)
        return pid

    def end(self, pid: int, status: int = 0) -> str:
        found: tuple[int, str] = self.nursery.wait(pid)
        assert found[0] == status, found
        return found[1]

    def published(self, name: str, chunks: int) -> None:
        wait_for(lambda: network.published(self.share.real / name) >= chunks, f"{chunks} chunks")

    def check_whole(self, name: str) -> None:
        network.check_whole(self.share.real / name)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(tmp_path_factory.mktemp("site"), stack)


def write(writer: ChunkWriter, first: int, stop: int) -> None:
    for row in rows(first, stop):
        writer.write(row)


def rank(directory: Path, **options: Any) -> LazyShardedDataset:
    given = {"dp_rank": 0, "dp_size": 1, "max_wait": CACHED_S + MARGIN_S, "max_total_samples": ROWS}
    return LazyShardedDataset(directory, **(given | options))


@pytest.mark.parametrize(
    ("writes", "reads", "lag"), [("default", "cached", CACHED_S), ("cached", "default", DEFAULT_S)]
)
def test_readers_that_came_first_get_each_sample_once(writes: str, reads: str, lag: float, site: Site) -> None:
    name = f"from-{writes}"
    with network.readers(site.at(reads, name), lag + MARGIN_S) as finish:  # It remembers that there is no stream
        site.end(site.start(site.at(writes, name), "--rate", 40))
        whole, ranks = finish()
    assert (whole, sorted(ranks)) == (ALL, ALL)
    site.check_whole(name)


@pytest.mark.parametrize(("first", "second"), [("cached", "default"), ("default", "cached")])
def test_second_producer_takes_over_and_the_first_is_fenced(first: str, second: str, site: Site) -> None:
    name = f"taken-{first}"
    with Sealed(site.share.real / name) as sealed:
        pid = site.start(site.at(first, name), "--rate", 8)
        site.published(name, 2)
        os.kill(pid, signal.SIGSTOP)
        site.end(site.start(site.at(second, name)))
        os.kill(pid, signal.SIGCONT)
        assert_one_line(site.end(pid, 6))
    assert sealed.wrong == []
    site.check_whole(name)


def test_taking_over_refreshes_a_listing_that_lags(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk is sealed while another mount has it listed without its seal; a producer continues there at once."""
    here, there = site.at("default", "lagging"), site.at("short", "lagging")
    writer = ChunkWriter(here, 2)
    write(writer, 0, 4)
    sync = durable.sync_directory

    def list_elsewhere(directory: Path) -> None:
        sync(directory)
        assert "chunk_00002.jsonl" in os.listdir(there)

    with monkeypatch.context() as patch:
        patch.setattr(publishing, "sync_directory", list_elsewhere)
        write(writer, 4, 6)
    with ChunkWriter(there) as other:
        write(other, other.published_samples, 10)
    writer.close(end=False)  # As one that was killed, it has tidied nothing up before
    assert ids(site.share.real / "lagging") == list(range(10))


def test_a_stream_that_is_remembered_as_missing_is_not_created_anew(site: Site) -> None:
    """It is created and written to while another mount remembers that there is none; there it is created too."""
    here, there = site.at("default", "unseen"), site.at("short", "unseen")
    (site.share.real / "unseen").mkdir()
    assert not (there / "stream.json").exists() and not os.listdir(there)
    write(ChunkWriter(here, 2), 0, 4)
    assert not (there / "stream.json").exists()
    raised(StreamInvalid, lambda: ChunkWriter(there, 2).close(end=False))
    reader = StreamReader(here)
    wait_for((there / "stream.json").exists, "the manifest")
    with ChunkWriter(there) as again:
        assert (again.stream_id, again.published_samples) == (reader.stream_id, 4)
        write(again, 4, 7)
    assert [row["id"] for row in reader] == list(range(7))


def test_a_hung_share_is_named_by_both_sides_which_go_on(site: Site, tmp_path: Path) -> None:
    out, seen = site.at("default", "hung"), site.at("cached", "hung")

    def read(send: Callable[[Any], None]) -> None:
        send([row["id"] for row in StreamReader(seen, max_wait=CACHED_S + MARGIN_S)])

    pid = site.start(out, "--rate", 20)
    site.published("hung", 1)
    with Child(read, tmp_path / "said") as child:
        site.published("hung", 3)
        with site.cached.hanging():
            wait_for(lambda: "no answer for " in child.said(), "the reader's word")
        with site.default.hanging():
            wait_for(lambda: "no answer for " in site.nursery.said(pid), "the producer's word")
        assert child.get() == ALL
        assert str(seen) in child.said()
        wait_for(lambda: "answered after " in child.said(), "the reader's second word")
    assert f"writing to {out}" in site.end(pid)
    site.check_whole("hung")


def test_a_share_that_hangs_costs_no_wait_its_time(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing is answered, neither `max_wait` nor the grace for files that do not show yet passes."""
    monkeypatch.setattr("lazyshard.stream.reader._ANSWER_S", 0.1)
    directory = site.at("cached", "waits")
    writer = ChunkWriter(directory, 2)
    write(writer, 0, 2)

    def read(send: Callable[[Any], None]) -> None:
        reader = StreamReader(directory, max_wait=2.0)
        for sample in (0, 2):  # The second one is answered only after longer than it may wait
            send(reader.read(sample)["id"])

    with Child(read, tmp_path / "said") as child:
        assert child.get() == 0
        with site.cached.hanging():
            wait_for(lambda: child.said().count("no answer for ") >= 4, "2.4 s without an answer")
        write(writer, 2, 4)
        assert child.get() == 2
    writer.close()


def test_a_client_that_dies_ends_both_sides_with_a_word_and_both_go_on_after_it_is_back(site: Site) -> None:
    out = site.at("short", "dead")
    pid = site.start(out, "--rate", 20)
    site.published("dead", 3)
    dataset = rank(out)
    read = [dataset[index]["id"] for index in range(6)]
    state = dataset.state_dict(6)
    site.short.kill()
    try:
        assert_one_line(site.end(pid, 7), str(out))
        refusal_of(OSError, out.name, lambda: [dataset[index] for index in range(6, ROWS)])
    finally:
        site.short.revive()
    assert dataset[6]["id"] == 6  # A chunk that was open is opened again
    site.end(site.start(out))
    again = rank(out)
    again.load_state_dict(state)
    assert read + [again[index]["id"] for index in again.rank_indices] == ALL
    site.check_whole("dead")


def test_a_mount_that_is_taken_away_is_told_from_a_stream_that_waits(site: Site) -> None:
    out = site.at("short", "away")
    with ChunkWriter(site.at("default", "away"), 2) as writer:
        write(writer, 0, 6)
        reader = StreamReader(out, max_wait=MARGIN_S)
        assert reader.read(0) == {"id": 0}
        site.short.detach()
        assert reader.read(1) == {"id": 1}  # what is open stays open
        raised(StreamMissing, reader.read, 2)
        site.short.revive()
        assert [row["id"] for row in (reader.read(2), reader.read(5))] == [2, 5]


def test_consumed_chunks_are_deleted_on_one_mount_while_the_other_reads_and_commits(site: Site) -> None:
    real, seen = site.share.real / "retained", site.at("default", "retained")
    options = ("--retain", "consumed", "--max-ahead", "4 chunks", "--consumers", "sft")
    pid = site.start(site.at("cached", "retained"), *options)
    with Sealed(real) as sealed:
        lagging = StreamReader(seen, max_wait=CACHED_S + MARGIN_S)
        assert lagging.read(0)["id"] == 0
        dataset = rank(seen, consumer="sft")
        read = []
        for index in range(ROWS):
            read.append(dataset[index]["id"])
            if len(read) % PER_CHUNK == 0:
                assert dataset.commit(len(read), last_epoch=True)
        site.end(pid)
    assert (read, sealed.wrong) == (ALL, [])
    left = sorted(path.name for path in real.glob("chunk_*.jsonl"))
    assert left and "chunk_00000.jsonl" not in left
    assert lagging.read_published(1, 2)[0]["id"] == 1  # Open since before it was deleted


@pytest.mark.timeout(600)
def test_rounds_of_kills_and_hangs_lose_nothing(tmp_path: Path) -> None:
    tally = Tally("network")
    network.run_rounds(tally, tmp_path, 0, 2)
    assert (tally.trials, tally.violations) == (2, [])


@pytest.mark.timeout(300)
def test_a_consumer_that_forgets_its_state_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = LazyShardedDataset.commit
    resumed: list[Any] = []

    def waits_to_be_killed(dataset: LazyShardedDataset, *args: Any, **options: Any) -> bool:
        while not resumed:
            time.sleep(1)
        return commit(dataset, *args, **options)

    monkeypatch.setattr(LazyShardedDataset, "commit", waits_to_be_killed)  # Who comes after it has to continue
    monkeypatch.setattr(LazyShardedDataset, "load_state_dict", lambda dataset, state: resumed.append(state))
    monkeypatch.setattr(Round, "faults", lambda one: [(lambda: None) if one.done else one._kill_consumer])
    tally = Tally("network")
    network.run_rounds(tally, tmp_path, 0, 1)
    found = [one.partition("): ")[2] for one in tally.violations]  # Refused, without its chunks, or trained again
    caught = ("the consumer has ended with ValueError: ", "the consumer has ended with ChunkRetired: ")
    assert found and all(one.startswith((*caught, "the consumer has trained")) for one in found), tally.violations
