"""Several named writers of one stream in an object store: real commands, an S3 server, kills of everything."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from lazyshard import LazyShardedDataset
from lazyshard.format.state import Cursor
from lazyshard.store.files import UrlPath
from lazyshard.stream import write_cursor
from tests.cli.commands import lazyshard
from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import rows
from tests.store.producing import ids, objects, until
from tests.store.server import Server

pytestmark = pytest.mark.full

SIZE = 3


class Writers:
    """Writers of a stream in a bucket, each on a machine of its own."""

    def __init__(self, nursery: Commands, server: Server, url: UrlPath, root: Path) -> None:
        self.nursery, self.server, self.url, self.root = nursery, server, url, root

    def arguments(self, name: str, first: int, stop: int, *more: object) -> list[object]:
        source = self.root / f"{name}.jsonl"
        source.write_bytes(rows(first, stop))
        spool = self.root / f"spool-{name}"
        given = ("--source", source, "--samples-per-chunk", SIZE, "--writer", name)
        return ["run", "--out", self.url, "--spool", spool, *given, *more]

    def start(self, name: str, first: int, stop: int, *more: object) -> int:
        return self.nursery.start(*self.arguments(name, first, stop, *more), most_s=60.0)

    def run(self, name: str, first: int, stop: int, *more: object) -> tuple[int, str]:
        return self.nursery.wait(self.start(name, first, stop, *more))

    def command(self, *arguments: object) -> tuple[int, str]:
        return self.nursery.wait(self.nursery.start(*arguments, most_s=60.0))

    def read(self, name: str) -> dict[str, Any]:
        """A record of the stream, empty while there is none."""
        try:
            return dict(json.loads(self.url.store.get(f"{self.url.key}/{name}")))
        except FileNotFoundError:
            return {}

    def ids(self) -> list[int]:
        return ids({name: data for name, data in objects(self.url).items() if "/" not in name})


@pytest.fixture
def writers(nursery: Commands, server: Server, bucket: UrlPath, tmp_path: Path) -> Writers:
    return Writers(nursery, server, bucket, tmp_path)


def start_slow(writers: Writers, name: str, first: int, stop: int, *more: object) -> int:
    """A writer that takes seconds for its rows."""
    return writers.start(name, first, stop, "--rate", 12, *more)


def check(writers: Writers, *spans: tuple[int, int]) -> None:
    """Whether the stream has ended and holds the rows of each writer once and in order, as training reads them."""
    found = writers.ids()
    for first, stop in spans:
        assert [one for one in found if first <= one < stop] == list(range(first, stop))
    assert len(found) == sum(stop - first for first, stop in spans)
    assert writers.read("stream.end")["samples"] == len(found)
    data = LazyShardedDataset(writers.url, dp_rank=0, dp_size=1)
    assert [data[index]["id"] for index in data.rank_indices] == found


def chunks(writers: Writers, name: str = "") -> int:
    return int(writers.read(f"{name and f'.writers/{name}/'}head.json").get("chunks", 0))


def test_two_writers_end_the_stream_together(writers: Writers) -> None:
    b = writers.start("b", 100, 107, "--writers", 2)
    code, said = writers.run("a", 0, 7, "--writers", 2)
    assert code == 0, said
    code, said = writers.nursery.wait(b)
    assert code == 0, said
    check(writers, (0, 7), (100, 107))
    # Only the newest piece is left of each: its seal holds the position to continue from.
    pieces = [name for name in objects(writers.url) if "/chunk_" in name]
    assert sorted(pieces) == [
        f".writers/{name}/chunk_00002.jsonl{seal}" for name in "ab" for seal in ("", ".completed")
    ]
    code, said = writers.run("a", 0, 7)
    assert code == 0
    assert f"already ended: {writers.url}/.writers/a holds 7 samples in 3 chunks; nothing to do" in said
    code, said = writers.run("a", 0, 9)
    assert code == 5
    assert "these rows are not in it" in said
    assert writers.command("end", writers.url)[1].splitlines()[-2:] == ["  a: 7 rows", "  b: 7 rows"]
    told = lazyshard("status", str(writers.url)).stdout
    assert "2 of 2: 2 finished" in told
    traced = json.loads(lazyshard("trace", str(writers.url), "--sample", writers.ids().index(104), "--json").stdout)
    [origin] = traced["origins"]
    assert (traced["writer"], traced["writer_row"]) == ("b", 4)
    assert (origin["path"], origin["lines"]) == (str(writers.root / "b.jsonl"), [5])
    assert lazyshard("verify", str(writers.url)).returncode == 0


@pytest.mark.parametrize("killed", ["the writer", "the sequencer", "both"])
def test_killed_processes_are_started_again(killed: str, writers: Writers) -> None:
    # Whoever starts first sequences.
    a = start_slow(writers, "a", 0, 40, "--writers", 2)
    until(lambda: chunks(writers) >= 2)
    b = start_slow(writers, "b", 100, 140)
    until(lambda: chunks(writers, "b") >= 2 and chunks(writers, "a") >= 4)
    assert writers.read(".writers/committed.json")["pid"] == a
    gone = {"the writer": [b], "the sequencer": [a], "both": [a, b]}[killed]
    for pid in gone:
        os.kill(pid, signal.SIGKILL)
    assert {writers.nursery.wait(pid)[0] for pid in gone} == {-9}
    if killed == "the sequencer":
        # The other writer goes on, and takes over.
        before = chunks(writers)
        until(lambda: chunks(writers) > before + 1)
        assert writers.read(".writers/committed.json")["pid"] == b
    again = [writers.start(name, first, first + 40) for name, pid, first in (("a", a, 0), ("b", b, 100)) if pid in gone]
    for pid in {a, b, *again} - {*gone}:
        code, said = writers.nursery.wait(pid)
        assert code == 0, said
    check(writers, (0, 40), (100, 140))


def test_a_writer_that_does_not_fit_leaves_nothing(writers: Writers) -> None:
    code, said = writers.run("a", 0, 4, "--writers", "a,b")
    assert code == 0, said
    before = objects(writers.url)
    for name, given, words in (
        ("b", ("--samples-per-chunk", SIZE + 1), "which never changes; got 4"),
        ("c", (), "'c' is none of its writers, a, b"),
        ("b", ("--writers", 3), "it was made for writers=('a', 'b'), not 3"),
    ):
        code, said = writers.run(name, 0, 4, *given)
        assert code == 5
        assert words in said
    code, said = writers.nursery.wait(
        writers.nursery.start(*writers.arguments("a", 0, 4)[:-2], "--spool", writers.root / "one", most_s=60.0)
    )
    assert code == 5
    assert "several writers, each with a name" in said
    assert (
        {name for name in objects(writers.url) if "stream.owner" in name}
        == {
            "stream.owner",
            ".writers/a/stream.owner",
        }
        >= {name for name in before if "stream.owner" in name}
    )


def test_a_second_process_of_a_name_takes_it_over(writers: Writers) -> None:
    first = start_slow(writers, "a", 0, 60, "--writers", 1)
    until(lambda: chunks(writers) >= 2)
    # On the same machine it is refused.
    code, said = writers.run("a", 0, 60)
    assert (code, "already produces into this stream" in said) == (6, True)
    second = start_slow(writers, "a", 0, 60, "--spool", writers.root / "elsewhere")
    code, said = writers.nursery.wait(first)
    assert (code, "has taken this stream over" in said) == (6, True)
    code, said = writers.nursery.wait(second)
    assert code == 0, said
    check(writers, (0, 60))


def test_end_refuses_while_a_writer_runs_and_leaves_out_what_it_has_not_published(writers: Writers) -> None:
    code, said = writers.run("a", 0, 7)
    assert code == 0, said
    b = start_slow(writers, "b", 100, 200)
    until(lambda: chunks(writers, "b") >= 2)
    code, said = writers.command("end", writers.url)
    assert code == 6
    assert "writer 'b' still runs" in said
    os.kill(b, signal.SIGTERM)
    assert writers.nursery.wait(b)[0] == 0
    published = chunks(writers, "b") * SIZE
    code, said = writers.command("end", writers.url)
    assert code == 0, said
    told = ", and rows that it had not published are left out"
    assert said.splitlines()[-2:] == ["  a: 7 rows", f"  b: {published} rows; it has not ended{told}"]
    check(writers, (0, 7), (100, 100 + published))
    code, said = writers.run("b", 100, 200)
    assert code == 5
    assert "rows of writer 'b' that are not in it" in said


def test_the_limits_of_the_sequencer_hold_back_all_writers(writers: Writers) -> None:
    limits = ("--max-ahead", 3, "--retain", "consumed", "--consumers", "trainer")
    alone = writers.nursery.start("sequence", writers.url, *limits, most_s=60.0)
    # The writer may be the sequencer at first, as it creates the stream.
    a = writers.start("a", 0, 20 * SIZE, "--writers", 1, *limits)
    until(lambda: writers.read("head.json").get("state") == "waiting" and chunks(writers, "a") == 3 + 8)
    assert chunks(writers) == 3
    plan = {"dp_size": 1, "batch_size": 1, "unit": SIZE, "window": SIZE, "seed": 0}
    write_cursor(
        writers.url, Cursor("trainer", writers.read("stream.json")["stream_id"], 2 * SIZE, 2, plan, time.time())
    )
    until(lambda: chunks(writers) == 5)
    until(lambda: writers.read("retired.json").get("chunks_before") == 2)
    until(lambda: not writers.url.store.exists(f"{writers.url.key}/chunk_00001.jsonl"))
    for pid in (a, alone):
        os.kill(pid, signal.SIGTERM)
    assert [writers.nursery.wait(pid)[0] for pid in (a, alone)] == [0, 0]
    code, said = writers.run("a", 0, 20 * SIZE)
    assert code == 0, said
    assert writers.read("stream.end")["samples"] == 20 * SIZE
