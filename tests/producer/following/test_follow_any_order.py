"""A followed directory across restarts: every row once, in the same order where that was already decided."""

import gzip
import os
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lazyshard_producer.following import journal
from lazyshard_producer.sources.source import Line
from tests.producer.following.followed import Follower

BOM = b"\xef\xbb\xbf"


class Writer:
    """A file that is written piece by piece: rows that name it, blank lines, both kinds of line ends, both ends."""

    def __init__(self, directory: Path, number: int, finished_by: str) -> None:
        self.name = f"{'abcdef'[number]}.jsonl" + (".gz" if number == 3 and finished_by != "idle" else "")
        self.path = directory / self.name
        self.finished_by = finished_by
        ends = (b"\n", b"\r\n", b"\n\n", b"\n\r\n")
        self.rows = [b"%s-%d" % (self.name.encode(), row) + b"x" * (row * 7 % 23) for row in range(12)]
        text = b"".join(row + ends[(number + at) % 4] for at, row in enumerate(self.rows))
        self.text = (BOM if number == 1 else b"") + (text.rstrip(b"\r\n") if number == 2 else text)
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
        """Has all of it there, and says so."""
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


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
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
