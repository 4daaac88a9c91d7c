"""Each row once: after kills and errors at any call that changes a file, where sources grow, in followed folders."""

import errno
import gzip
import itertools
import json
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.following import journal
from lazyshard_producer.sources.source import Line
from tests.harness.processes.commands import Commands
from tests.harness.processes.kill_points import WHENS
from tests.harness.processes.producing import assert_one_line
from tests.harness.scenes.rows import MANY, is_refused, made
from tests.harness.scenes.sources import KINDS, FedSource, FollowedSource
from tests.harness.scenes.streams import PER_CHUNK, Stream
from tests.producer.following.followed import Follower
from tests.producer.rows.draining import Taken, make, numbers, take
from tests.tiers import full

HERE: Final = "tests.harness.scenes.rows"
KEEPS: Final = ("--on-bad-row", "quarantine")
MAKES: Final = (*KEEPS, "--transform", f"{HERE}:thirds")
FILTERS: Final = (*MAKES, "--where", f"{HERE}:four_of_five")
PACKS: Final = (*KEEPS, "--transform", f"{HERE}:measured", "--pack", "48", "--pack-buffer", "30")
ENCODES: Final = (*MAKES, "--encode", f"{HERE}:encoded")
DEALS: Final = ("--balance", "2", "--cost-per-token-squared", "0.01")
CUTS: Final = (*KEEPS, "--transform", f"{HERE}:tokenized", "--split", "5")
RECIPES: Final = {"as they are": KEEPS, "made": FILTERS, "shuffled": (*FILTERS, "--shuffle", "16", "--seed", "3")}
MIXED: Final = {"as they are": KEEPS, "made": MAKES, "shuffled": (*MAKES, "--shuffle", "16"), "packs": PACKS}
TWICE = ("--on-bad-row", "quarantine", "--transform", "tests.producer.recipes:twice")
weightings = st.one_of(st.none(), st.lists(st.integers(1, 5), min_size=5, max_size=5))


@pytest.mark.parametrize(
    ("kind", "error", "step"),
    [("plain", errno.EIO, 83), *full(("plain", errno.ENOSPC, 23), ("followed", errno.EIO, 23))],
)
def test_any_call_fails(kind: str, error: int, step: int, nursery: Commands, tmp_path: Path) -> None:
    failures = 0
    for number in range(3, 250, step):
        folder = tmp_path / str(number)
        folder.mkdir()
        source = KINDS[kind](folder, 0)
        stream = Stream(nursery, folder / "out", [source], MAKES)
        status, err = stream.run(kill_at=number, when="half", error=error)
        stream.check({})
        if status != 0:
            assert status == 7, err
            assert_one_line(err, os.strerror(error), str(stream.out))
            failures += 1
            status, err = stream.run()
            # Else it was a hint to readers that was not written, and is written with the next chunk.
        assert status == 0, err
        expected = made(source.rows, transform=True, where=False)
        assert in_any_order(stream.rows()) == in_any_order(expected)
        lines = [(entry["source"], entry["line"]) for entry in stream.refused()]
        assert len(set(lines)) == len(lines) > 0
        assert stream.run()[0] == 0
        stream.check_ended()
    assert failures >= (4 if step == 23 else 2)


@pytest.mark.full
def test_killed_at_every_call(nursery: Commands, tmp_path: Path) -> None:
    """A chunk and a part of one, and a bad row in each: all that a longer run does."""
    ids = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert PER_CHUNK < len(ids) < 2 * PER_CHUNK
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"id":0}\n{"id":1}\nbad\n{"id":2}\n{"id":3}\n{"id":4}\nworse\n')
    for call in itertools.count(1):
        stream = Stream(nursery, tmp_path / f"{call}", [FedSource(str(path), [])], TWICE)
        when = WHENS[call % 3]
        status, err = stream.run(kill_at=call, when=when)
        # What is killed in a second run may be what a first one has left.
        if status and call % 4 == 0:
            stream.run(kill_at=1 + call % 7, when=when)
        stream.check({})
        assert stream.run()[0] == 0, err
        stream.check_ended()
        assert [one for one, _ in stream.rows()] == ids
        assert [(entry["line"], entry["row"]) for entry in stream.refused()] == [(3, "bad"), (7, "worse")]
        assert json.loads((stream.out / "head.json").read_bytes())["ended"] is True
        if status == 0:
            break
    assert call > 30


# Each kind of source, each recipe, and each recipe with what is read in place, read again, or still growing.
ONE_SOURCE: Final = [
    *(("plain", "as they are"), ("plain", "shuffled"), ("gzip", "shuffled"), ("zstd", "made")),
    *(("pipe", "as they are"), ("pipe", "shuffled"), ("stdin", "made"), ("stdin that appends", "shuffled")),
    *(("generator", "shuffled"), ("parquet", "as they are"), ("parquet", "shuffled"), ("arrow", "made")),
    *(("hugging face", "shuffled"), ("stream", "as they are"), ("stream with arrays", "shuffled")),
    *(("live stream", "made"), ("live stream", "shuffled"), ("foreign stream", "shuffled")),
]
MOST_CALLS: Final = 90  # a start takes some 25 of them and a chunk 12, so a life publishes two chunks or so
# Packs and sequences are few: a start and a chunk or two. A chunk with arrays takes more calls.
PUT_TOGETHER: Final = [
    ("plain", PACKS, 60),
    ("pipe", (*PACKS, *DEALS), 60),
    ("plain", (*ENCODES, "--pack", "48", "--pack-buffer", "30", *DEALS), 80),
    ("parquet", (*ENCODES, "--pack", "48", "--pack-buffer-bytes", "1500", *DEALS), 80),
    ("zstd", (*ENCODES, *DEALS), 120),
    ("pipe", CUTS, 60),
    ("zstd", (*CUTS, "--shuffle", "16"), 60),
    ("gzip", (*CUTS, "--encode", f"{HERE}:encoded_tokens", "--split-eos", "0"), 90),
    ("pipe", (*RECIPES["shuffled"], "--workers", "2"), 180),
]
LEAST_KILLS: Final = 4


def check_killed(
    nursery: Commands, folder: Path, sources: Sequence[FedSource], options: Sequence[str], most_calls: int = MOST_CALLS
) -> Stream:
    """Makes a stream in one run and one in many, and compares them; returns the second."""
    whole = Stream(nursery, folder / "whole", sources, options)
    status, err = whole.run()
    assert status == 0, err
    stream = Stream(nursery, folder / "out", sources, options)
    assert stream.run_killed(str([sources[0].rows[0], *options]), most_calls) >= LEAST_KILLS
    assert stream.lines() == whole.lines()
    # An input that continues is another one each time, and its lines are counted anew.
    apart = {"source", "line", "byte"} if any("append" in source.arguments for source in sources) else set()
    for found, expected in ((stream.seals(), whole.seals()), (stream.refused(), whole.refused())):
        for one, other in zip(found, expected, strict=True):
            assert {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)} <= apart
    stream.check_ended()
    return stream


def in_any_order(rows: Sequence[object]) -> list[str]:
    return sorted(map(str, rows))


@pytest.mark.full
@pytest.mark.parametrize(("kind", "recipe"), ONE_SOURCE)
def test_one_source(kind: str, recipe: str, nursery: Commands, tmp_path: Path) -> None:
    source, options = KINDS[kind](tmp_path, 0), RECIPES[recipe]
    found = check_killed(nursery, tmp_path, [source], options).rows()
    expected = made(source.rows, transform=recipe != "as they are", where=recipe != "as they are")
    assert in_any_order(found) == in_any_order(expected)
    assert (found == expected) == (recipe != "shuffled")


@pytest.mark.full
@pytest.mark.parametrize(
    ("kinds", "recipe"),
    [
        (["plain", "zstd", "parquet"], "shuffled"),
        (["pipe", "gzip", "arrow"], "made"),
        (["generator", "stdin", "plain"], "as they are"),
        (["live stream", "plain", "stream"], "shuffled"),
    ],
)
def test_mixed_by_weights(kinds: list[str], recipe: str, nursery: Commands, tmp_path: Path) -> None:
    sources = [KINDS[kind](tmp_path, MANY * number) for number, kind in enumerate(kinds)]
    for source, weight in zip(sources, (5, 2, 3), strict=True):
        source.arguments += ["--weight", str(weight)]
    stream = check_killed(nursery, tmp_path, sources, MIXED[recipe], 2 * MOST_CALLS)
    rows = [row for source in sources for row in source.rows]
    assert in_any_order(stream.rows()) == in_any_order(made(rows, transform=recipe != "as they are", where=False))


@pytest.mark.full
@pytest.mark.parametrize(("kind", "options", "most_calls"), PUT_TOGETHER)
def test_rows_that_are_put_together_or_made_in_workers(
    kind: str, options: tuple[str, ...], most_calls: int, nursery: Commands, tmp_path: Path
) -> None:
    assert check_killed(nursery, tmp_path, [KINDS[kind](tmp_path, 0)], options, most_calls).lines() != []


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        *(("followed", "as they are"), ("followed", "packs")),
        *(("followed while it grows", "made"), ("followed while it grows", "shuffled")),
    ],
)
def test_a_followed_directory_mixed_with_a_file(kind: str, recipe: str, nursery: Commands, tmp_path: Path) -> None:
    followed, plain = KINDS[kind](tmp_path, 0), KINDS["plain"](tmp_path, MANY)
    assert isinstance(followed, FollowedSource)
    for source in (followed, plain):
        source.arguments += ["--weight", "1"]
    stream = Stream(nursery, tmp_path / "out", [followed, plain], MIXED[recipe])
    assert stream.run_killed(kind + recipe, 2 * MOST_CALLS) >= LEAST_KILLS
    stream.check_ended()
    found, makes = stream.rows(), recipe != "as they are"
    expected = made(followed.rows + plain.rows, transform=makes, where=False)
    if recipe == "packs":
        assert in_any_order(found) == in_any_order([one for one in expected if one[0] % MANY % 50 < 48])
        return
    assert in_any_order(found) == in_any_order(expected)
    if recipe != "shuffled":
        for rows in (*followed.files, plain.rows):
            of_file = made(rows, transform=makes, where=False)
            assert [row for row in found if row in of_file] == of_file
    bad = [(entry["source"], entry["line"]) for entry in stream.refused()]
    refused = [row for row in followed.rows + plain.rows if is_refused(row, transform=makes)]
    assert len(set(bad)) == len(bad) == len(refused)


def grow(directory: Path, counts: Sequence[int]) -> list[Path]:
    """Files of so many rows each; those that are there are added to."""
    paths = [directory / f"{file}.jsonl" for file in range(len(counts))]
    for file, (path, count) in enumerate(zip(paths, counts, strict=True)):
        with path.open("ab") as opened:
            begin = opened.tell() // len(b'{"id":[0,0]}\n')
            opened.write(b"".join(b'{"id":[%d,%d]}\n' % (file, number) for number in range(begin, count)))
    return paths


@hypothesis_settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_growth_more_sources_and_other_weights(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("run")
    before = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
    growth = data.draw(st.lists(st.integers(0, 4), min_size=3, max_size=3))
    added = data.draw(st.lists(st.integers(0, 4), max_size=2))
    weights = data.draw(weightings)
    weights_then: Any = data.draw(st.just("same") | weightings)
    shuffle, transform = data.draw(st.sampled_from([0, 4, 100])), data.draw(st.sampled_from([None, "twice"]))
    stop, again = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 10))
    more: dict[str, Any] = {"shuffle": shuffle, "transform": transform and f"tests.producer.recipes:{transform}"}
    first = make(directory / "out", grow(directory, before), weights and weights[: len(before)], **more)
    taken = list(itertools.islice(take(first), stop))
    position = taken[-1].position if taken else None

    then = [*(count + more for count, more in zip(before, growth, strict=False)), *added]
    chosen = weights if weights_then == "same" else weights_then
    second = make(directory / "out", grow(directory, then), chosen and chosen[: len(then)], **more)
    middle = list(itertools.islice(take(second, position), again))
    rest = list(take(second, middle[-1].position if middle else position))
    found = Counter(tuple(one.row["id"]) for one in [*taken, *middle, *rest])
    there = [(file, number) for file, count in enumerate(then) for number in range(count)]
    assert found == Counter(dict.fromkeys(there, 2 if transform else 1))
    assert [one.line for one in take(second, position)] == [one.line for one in [*middle, *rest]]


def piped(given: Sequence[int], run: Settings, start: Any, warnings: list[str]) -> Iterator[Taken]:
    """The rows of a run whose pipe gives these."""
    pipe = Path(run.sources[0].path)
    text = b"".join(b'{"id":[0,%d]}\n' % number for number in given)
    feeder = threading.Thread(target=lambda: pipe.write_bytes(text))
    feeder.start()
    yield from take(run, start, warnings=warnings)
    feeder.join()


@pytest.mark.parametrize("new", [[5, 6, 7, 8], [0, 1, 2, 3, 4, 9]])
def test_an_appended_input_goes_on_with_new_rows_or_with_those_that_it_repeats(new: list[int], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    run = make(tmp_path / "out", [tmp_path / "pipe"], shuffle=5)
    run = replace(run, sources=(replace(run.sources[0], resume="append"),))
    warnings: list[str] = []
    first = list(piped(range(5), run, None, warnings))
    assert first[1].position["skip"] == 2
    second = list(piped(new, run, first[1].position, warnings))
    if new[0] == 0:
        # Begun by an earlier run, the block comes out as it did there.
        assert [one.line for one in second[:3]] == [one.line for one in first[2:]]
        assert (len(second), warnings) == (4, [])
    else:
        assert sorted(numbers(second)) == new
        assert [text.partition(": ")[0] for text in warnings] == [run.sources[0].path]


class Writer:
    """A file that is written piece by piece: rows that name it, blank lines, both kinds of line ends, both ends."""

    def __init__(self, directory: Path, number: int, finished_by: str) -> None:
        self.name = f"{'abcdef'[number]}.jsonl" + (".gz" if number == 3 and finished_by != "idle" else "")
        self.path = directory / self.name
        self.finished_by = finished_by
        ends = (b"\n", b"\r\n", b"\n\n", b"\n\r\n")
        self.rows = [b"%s-%d" % (self.name.encode(), row) + b"x" * (row * 7 % 23) for row in range(12)]
        text = b"".join(row + ends[(number + at) % 4] for at, row in enumerate(self.rows))
        self.text = (b"\xef\xbb\xbf" if number == 1 else b"") + (text.rstrip(b"\r\n") if number == 2 else text)
        self.written = 0
        self.finished = False

    def write(self, count: int) -> None:
        """Appends so many bytes; of what has to appear whole nothing."""
        if self.finished_by == "rename" or self.name.endswith(".gz") or self.finished:
            return
        with self.path.open("ab") as file:
            file.write(self.text[self.written : self.written + count])
        self.written = min(len(self.text), self.written + count)

    def end_line(self) -> None:
        """Appends the rest of a line that has begun: a file that is known by idling must not idle within one."""
        if not self.text[: self.written].endswith(b"\n"):
            self.write(self.text[self.written :].find(b"\n") + 1 or len(self.text))

    def finish(self) -> None:
        if self.finished:
            return
        self.finished = True
        rest = self.text[self.written :]
        if self.finished_by == "rename" or self.name.endswith(".gz"):
            hidden = self.path.with_name(f".{self.name}")
            hidden.write_bytes(gzip.compress(rest[:50]) + gzip.compress(rest[50:]) if "gz" in self.name else rest)
            hidden.rename(self.path)
        else:
            with self.path.open("ab") as file:
                file.write(rest)
        if self.finished_by == "marker":
            self.path.with_name(f"{self.name}.done").touch()


FILES = st.integers(0, 4)
STEPS = st.one_of(
    st.tuples(st.just("write"), FILES, st.integers(1, 200)),
    st.tuples(st.just("finish"), FILES, st.just(0)),
    st.tuples(st.just("read"), st.integers(1, 8), st.integers(0, 1)),
    st.tuples(st.just("publish"), st.integers(0, 40), st.just(0)),
    st.tuples(st.just("publish"), st.just(1000), st.just(0)),
    st.tuples(st.just("kill"), st.just(0), st.just(0)),
    st.tuples(st.just("tear"), st.integers(0, 400), st.just(0)),
    st.tuples(st.just("wait"), st.sampled_from([1, 3, 30, 70]), st.just(0)),
    st.tuples(st.just("clean"), FILES, st.just(0)),
)
TWICE_AT_ONE_PLACE = [("finish", 0), ("wait", 1), ("publish", 1), ("publish", 0), ("kill", 0)]  # of the journal


def rows_of(lines: list[Line]) -> list[bytes]:
    assert all(isinstance(line, bytes) for line in lines)
    return [line.rstrip(b"\r\n") for line in lines if isinstance(line, bytes)]


def clean(follower: Follower, writer: Writer) -> None:
    """Deletes a file as somebody would who knows that all of it is published."""
    follower.take(100)
    follower.take(100)
    follower.publish()
    if writer.finished and writer.path.exists():
        assert set(rows_of(follower.published)) >= set(writer.rows)
        writer.path.unlink()


def tear(follower: Follower, count: int) -> None:
    """Has the journal continue, and be torn, before a seal that is never published."""
    follower.publish(0)
    journal = follower.journal if follower.entry["journal"] else None
    size = journal.stat().st_size if journal else 0
    follower.step()
    follower.source.entry(follower.mark)
    if journal is not None:
        os.truncate(journal, max(size, journal.stat().st_size - count))


@hypothesis_settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    long_bytes=st.sampled_from([1, 4 << 20]),  # short journals, or one journal
    finished_by=st.sampled_from(["rename", "marker", "idle"]),
    steps=st.lists(STEPS, max_size=40),
)
@example(1, "idle", [(step, count, 0) for step, count in TWICE_AT_ONE_PLACE])
@example(4 << 20, "idle", [(step, count, 0) for step, count in TWICE_AT_ONE_PLACE])
def test_each_row_once_whatever_is_killed(long_bytes: int, finished_by: Any, steps: list[tuple[str, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "_LONG_BYTES", long_bytes)
        directory = Path(folder) / "in"
        directory.mkdir()
        writers = [Writer(directory, number, finished_by) for number in range(5)]
        with closing(Follower(directory, finished_by=finished_by)) as follower:
            for step, first, second in steps:
                if step == "write":
                    writers[first].write(second)
                elif step == "finish":
                    writers[first].finish()
                elif step == "read":
                    follower.now += second
                    for _ in range(first):
                        follower.step()
                elif step == "publish":
                    follower.publish(first)
                elif step in ("kill", "tear"):
                    if step == "tear":
                        tear(follower, first)
                    follower.kill()
                else:
                    for writer in writers:
                        writer.end_line()
                    if step == "wait":
                        follower.take(first)
                    else:
                        clean(follower, writers[first])
            for writer in writers:
                writer.finish()
            follower.take()
            (directory / "_END").touch()
            for _ in range(3):
                follower.take(100)
            assert follower.ended
            follower.publish()
        rows = rows_of(follower.published)
        assert sorted(rows) == sorted(row for writer in writers for row in writer.rows)
        for writer in writers:
            mine = [row for row in rows if row.startswith(writer.name.encode() + b"-")]
            assert mine == writer.rows
