"""A followed directory: which rows come when, by how files are known to be complete."""

import gzip
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.following.directory import FollowedDirectory
from tests.harness.processes.environment import environment
from tests.producer.following.followed import Follower


@pytest.fixture
def follow(tmp_path: Path) -> Iterator[Callable[..., Follower]]:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    made: list[Follower] = []

    def make(**settings: Any) -> Follower:
        made.append(Follower(tmp_path / "in", tmp_path / "out", **settings))
        return made[-1]

    yield make
    for follower in made:
        follower.close()


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_files_that_have_their_name_are_read_whole_and_in_order(
    follow: Callable[..., Follower], tmp_path: Path
) -> None:
    follower = follow()
    assert follower.take() == []
    for name in ("b.jsonl", "a.jsonl"):
        (tmp_path / "in" / name).write_bytes(b"%s1\n\n%s2\r\n" % (name.encode(), name.encode()))
    assert follower.take() == [b"a.jsonl1\n", b"a.jsonl2\r\n", b"b.jsonl1\n", b"b.jsonl2\r\n"]
    (tmp_path / "in" / "0.jsonl").write_bytes(b"0\n")
    assert follower.take() == [b"0\n"]
    assert follower.source.blank == 2
    assert follower.source.progress == (42, None)
    assert [(place.line, place.byte) for place in follower.places] == [(1, 0), (3, 10), (1, 0), (3, 10), (1, 0)]
    assert follower.places[-1].file == str(tmp_path / "in" / "0.jsonl")
    assert not follower.ended
    (tmp_path / "in" / "_END").touch()
    assert follower.take() == []
    assert follower.ended
    assert follower.source.read() is None


def test_compressed_files_are_read_among_the_others(follow: Callable[..., Follower], tmp_path: Path) -> None:
    follower = follow()
    (tmp_path / "in" / "a.jsonl.gz").write_bytes(gzip.compress(b"1\n2"))
    (tmp_path / "in" / "b.jsonl").write_bytes(b"3\n")
    (tmp_path / "in" / "c.jsonl.zst").write_bytes(zstandard.compress(b"4\n"))
    assert follower.take() == [b"1\n", b"2", b"3\n", b"4\n"]


def test_names_that_are_not_taken(follow: Callable[..., Follower], tmp_path: Path) -> None:
    follower = follow()
    for name in (
        ".a.jsonl",
        "a.jsonl.tmp",
        "a.jsonl~",
        "a.jsonl.part",
        "a.txt",
        "a.jsonl.done",
        "a.jsonl.xz",
        "_END.jsonl.x",
    ):
        (tmp_path / "in" / name).write_bytes(b"1\n")
    assert follower.take() == []
    (tmp_path / "in" / ".a.jsonl").rename(tmp_path / "in" / "a.jsonl")
    assert follower.take() == [b"1\n"]


def test_what_is_no_plain_file_is_passed_over_with_one_warning(
    follow: Callable[..., Follower], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inside = tmp_path / "in"
    (inside / "directory.jsonl").mkdir()
    os.mkfifo(inside / "pipe.jsonl")
    (tmp_path / "outside.jsonl").write_bytes(b"1\n")
    (inside / "out.jsonl").symlink_to(tmp_path / "outside.jsonl")
    (inside / "nothing.jsonl").symlink_to(inside / "none")
    (inside / "a.jsonl").write_bytes(b"2\n")
    (inside / "twice.jsonl").symlink_to("a.jsonl")
    (inside / "hidden").mkdir()
    (inside / "hidden" / "b").write_bytes(b"3\n")
    (inside / "link.jsonl").symlink_to("hidden/b")
    follower = follow()
    with caplog.at_level(logging.WARNING, "lazyshard"):
        assert follower.take() == [b"2\n", b"3\n"]
        assert follower.take() == []
    found = sorted(message.getMessage().replace(str(tmp_path), "") for message in caplog.records)
    assert found == [
        "/in/directory.jsonl is passed over: expected a plain file, found a directory, pipe, socket or device",
        "/in/nothing.jsonl is passed over: expected a plain file, found a link to /in/none, which is none",
        "/in/out.jsonl is passed over: expected a plain file, found a link out of the directory, to /outside.jsonl",
        "/in/pipe.jsonl is passed over: expected a plain file, found a directory, pipe, socket or device",
        "/in/twice.jsonl is passed over: expected a plain file, found a link to /in/a.jsonl, which is taken itself",
    ]


def test_a_last_line_without_newline_is_taken_once_it_is_still(follow: Callable[..., Follower], tmp_path: Path) -> None:
    (tmp_path / "in" / "a.jsonl").write_bytes(b"1\n2")
    (tmp_path / "in" / "b.jsonl").write_bytes(b"3\n")
    follower = follow()
    assert follower.take(0.1) == [b"1\n", b"3\n"]
    assert follower.take(0.5) == []
    assert follower.take(0.6) == [b"2"]
    assert follower.take() == []


def test_a_file_written_under_its_name_is_told_and_its_rest_taken_by_idle(
    follow: Callable[..., Follower], tmp_path: Path
) -> None:
    path = tmp_path / "in" / "a.jsonl"
    for torn in (b"", b"2"):
        path.write_bytes(b"1\n" + torn)
        follower = follow()
        assert follower.take(0.1) == [b"1\n"]
        follower.publish()
        append(path, b"2\n")
        with pytest.raises(SourceRefused, match=r"a.jsonl: taken for complete at .* it was still being written"):
            follower.take(0.5)
        follower.publish()
        follower.close()
        again = follow(finished_by="idle")
        again.position = follower.position
        again.kill()
        assert again.take() == [torn + b"2\n"]
        path.unlink()


def test_growing_files_take_turns_line_by_line(follow: Callable[..., Follower], tmp_path: Path) -> None:
    follower = follow(finished_by="marker")
    a, b = tmp_path / "in" / "a.jsonl", tmp_path / "in" / "b.jsonl"
    a.write_bytes(b"1\n2\n3")
    b.write_bytes(b"x\n")
    assert follower.take() == [b"1\n", b"2\n", b"x\n"]
    append(a, b"3")
    assert follower.take() == []
    append(a, b"3\n4")
    append(b, b"y\n")
    assert sorted(map(repr, follower.take())) == [repr(b"333\n"), repr(b"y\n")]
    (tmp_path / "in" / "a.jsonl.done").touch()
    assert follower.take() == [b"4"]
    assert follower.source.waits_for() == f"new lines in {tmp_path}/in (1 file unfinished), or _END there"


def test_turns_are_of_a_megabyte(follow: Callable[..., Follower], tmp_path: Path) -> None:
    follower = follow(finished_by="idle")
    for name in ("a", "b"):
        (tmp_path / "in" / f"{name}.jsonl").write_bytes((name.encode() * 1023 + b"\n") * 3000)
    order = [line[:1] for line in follower.take() if isinstance(line, bytes)]
    changes = [at for at in range(1, 6000) if order[at] != order[at - 1]]
    assert changes == [1024, 2048, 3072, 4096, 5048]


def test_a_marked_file_must_not_grow(follow: Callable[..., Follower], tmp_path: Path) -> None:
    follower = follow(finished_by="marker", marker="ok-{name}")
    path = tmp_path / "in" / "a.jsonl"
    path.write_bytes(b"1\n")
    (tmp_path / "in" / "ok-a.jsonl").touch()
    assert follower.take() == [b"1\n"]
    append(path, b"2\n")
    with pytest.raises(SourceRefused, match="taken for complete at 2 bytes, and now it has 4"):
        follower.take()


def test_one_marker_for_all_files(follow: Callable[..., Follower], tmp_path: Path) -> None:
    follower = follow(finished_by="marker", marker="_SUCCESS", pattern="*")
    (tmp_path / "in" / "a").write_bytes(b"1\n2")
    (tmp_path / "in" / "b.gz").write_bytes(gzip.compress(b"3\n"))
    assert follower.take() == [b"1\n"]
    (tmp_path / "in" / "_SUCCESS").touch()
    assert sorted(map(repr, follower.take())) == [repr(b"2"), repr(b"3\n")]


def test_compressed_files_wait_until_they_are_complete(follow: Callable[..., Follower], tmp_path: Path) -> None:
    for finished_by, seconds in (("marker", 1000.0), ("idle", 59.0)):
        follower = follow(finished_by=finished_by)
        path = tmp_path / "in" / f"{finished_by}.jsonl.gz"
        path.write_bytes(gzip.compress(b"1\n")[:-3])
        assert follower.take() == []
        assert follower.take(seconds) == []
        path.write_bytes(gzip.compress(b"1\n"))
        assert follower.take() == []
        (tmp_path / "in" / "marker.jsonl.gz.done").touch()
        assert follower.take(60.0) == [b"1\n"]
        path.unlink()


def test_idle_files_are_taken_to_the_end_and_may_grow_again(follow: Callable[..., Follower], tmp_path: Path) -> None:
    follower = follow(finished_by="idle", idle_s=10.0)
    path = tmp_path / "in" / "a.jsonl"
    path.write_bytes(b"1\n2")
    assert follower.take(0) == [b"1\n"]
    assert follower.take(9.9) == []
    append(path, b"2")
    assert follower.take(9.9) == []
    assert follower.take(9.9) == []
    assert follower.take(2) == [b"22"]
    assert follower.source.waits_for().endswith("in (0 files unfinished), or _END there")
    follower.publish()
    for newline in (b"\n", b"\r\n"):
        append(path, newline + b"3\n4")
        assert follower.take() == [b"3\n"]
        assert follower.take(10) == [b"4"]
    assert [place.line for place in follower.places] == [1, 2, 3, 4, 5, 6]
    append(path, b"4\n")
    with pytest.raises(SourceRefused, match=r"a.jsonl:6: .*continued"):
        follower.take()


def test_the_end_marker_completes_what_is_there(follow: Callable[..., Follower], tmp_path: Path) -> None:
    follower = follow(finished_by="idle")
    (tmp_path / "in" / "a.jsonl").write_bytes(b"1\n2")
    (tmp_path / "in" / "b.jsonl.gz").write_bytes(gzip.compress(b"3"))
    assert follower.take() == [b"1\n"]
    (tmp_path / "in" / "c.jsonl").write_bytes(b"4")
    (tmp_path / "in" / "_END").touch()
    assert sorted(map(repr, follower.take())) == [repr(b"2"), repr(b"3"), repr(b"4")]
    assert follower.ended


def test_asked_to_end_it_gives_what_is_complete(
    follow: Callable[..., Follower], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    follower = follow(finished_by="marker")
    (tmp_path / "in" / "a.jsonl").write_bytes(b'{"a":1}\n{"a":')
    (tmp_path / "in" / "b.jsonl").write_bytes(b'{"b":1}\n{"b":2}')
    (tmp_path / "in" / "c.jsonl.gz").write_bytes(gzip.compress(b"3")[:9])
    assert follower.take() == [b'{"a":1}\n', b'{"b":1}\n']
    (tmp_path / "in" / "d.jsonl").write_bytes(b'{"d":1}\n')
    follower.source.end()
    with caplog.at_level(logging.WARNING, "lazyshard"):
        assert sorted(map(repr, follower.take(0))) == [repr(b'{"b":2}'), repr(b'{"d":1}\n')]
    assert follower.ended
    found = sorted(message.getMessage().rpartition("/")[2] for message in caplog.records)
    assert found == ["a.jsonl: its last line is incomplete and left out", "c.jsonl.gz is left out: it is not complete"]


def test_lines_that_are_too_long_are_passed_over_however_they_grow(
    follow: Callable[..., Follower], tmp_path: Path
) -> None:
    follower = follow(finished_by="marker")
    follower.context = follower.context._replace(max_row_bytes=100)
    follower.kill()
    path = tmp_path / "in" / "a.jsonl"
    path.write_bytes(b"1\n")
    for _ in range(5):
        append(path, b"x" * 900_000)
        follower.take()
    append(path, b"\n2\n")
    follower.take()
    first, error, last = follower.read
    assert (first, last) == (b"1\n", b"2\n")
    assert "longer than the 100 bytes" in str(error)
    assert [(place.line, place.byte) for place in follower.places] == [(1, 0), (2, 2), (3, 4_500_003)]


def test_a_directory_that_goes_away_is_refused(follow: Callable[..., Follower], tmp_path: Path) -> None:
    follower = follow()
    follower.take()
    (tmp_path / "in").rmdir()
    with pytest.raises(SourceRefused, match="no such file or directory"):
        follower.take()


def test_names_that_are_no_utf8_are_read_and_known_again(follow: Callable[..., Follower], tmp_path: Path) -> None:
    follower = follow(finished_by="marker")
    path = os.fsencode(tmp_path / "in") + b"/\xff\xfe.jsonl"
    with open(path, "wb") as file:
        file.write(b"1\n2\n")
    assert follower.take() == [b"1\n", b"2\n"]
    assert follower.places[0].file == f"{tmp_path}/in/\\udcff\\udcfe.jsonl"
    follower.publish(1)
    follower.kill()
    assert follower.take() == [b"2\n"]
    follower.publish()
    (tmp_path / "in" / "_END").touch()
    assert follower.take() == []
    follower.publish()
    follower.kill()
    assert follower.take() == []


def test_a_nul_tail_is_given_as_a_line(follow: Callable[..., Follower], tmp_path: Path) -> None:
    (tmp_path / "in" / "a.jsonl").write_bytes(b"{}\n" + bytes(5000))
    follower = follow()
    assert follower.take(0) == [b"{}\n"]
    assert follower.take(1) == [bytes(5000)]


@pytest.mark.parametrize("finished_by", ["rename", "marker"])
def test_a_line_of_a_gigabyte_takes_bounded_memory(finished_by: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with (tmp_path / "in" / "a.jsonl").open("wb") as file:
        file.seek(1 << 30)
        file.write(b"\n{}\n")
    program = """
import resource, sys
from pathlib import Path
from lazyshard_producer.following.directory import FollowedDirectory
from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.sources.source import Context
settings = SourceSettings(path=sys.argv[1], follow=True, finished_by=sys.argv[2])
source = FollowedDirectory(settings, None, Context(Path(sys.argv[1]), 1 << 20))
source.read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = []
while len(found) < 2:
    found += source.read().lines
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, source.progress[0], *found)
source.close()
"""
    command = [sys.executable, "-c", program, str(tmp_path / "in"), finished_by]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    grown, read, *words = done.stdout.split()
    assert int(read) == (1 << 30) + 4
    assert "NUL" in words
    assert words[-1] == "b'{}\\n'"
    assert int(grown) < 32 << 10


def test_a_pipe_that_takes_the_place_of_a_file_does_not_block(follow: Callable[..., Follower], tmp_path: Path) -> None:
    follower = follow(finished_by="marker")
    path = tmp_path / "in" / "a.jsonl"
    path.write_bytes(b"1\n")
    assert follower.take() == [b"1\n"]
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(SourceRefused, match=r"a.jsonl: expected the plain file that it was, found something else"):
        follower.take()


def test_waiting_ends_when_a_file_appears(follow: Callable[..., Follower], tmp_path: Path) -> None:
    follower = follow()
    source = FollowedDirectory(follower.settings, None, follower.context)
    try:
        rows = source.read()
        assert rows is not None
        source.wait(0.001)  # begins to watch
        (tmp_path / "a.jsonl").write_bytes(b"1\n")
        thread = threading.Thread(target=lambda: (tmp_path / "a.jsonl").rename(tmp_path / "in" / "a.jsonl"))
        thread.start()
        while rows is not None and not rows.lines:
            source.wait(60)
            rows = source.read()
        thread.join()
        assert rows is not None
        assert rows.lines == [b"1\n"]
    finally:
        source.close()
