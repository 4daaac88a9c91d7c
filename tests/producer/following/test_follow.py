"""A followed directory: which rows come when, by how files are known to be complete; its parts."""

import base64
import contextlib
import gzip
import logging
import os
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from lazyshard_producer.following.directory import FollowedDirectory
from lazyshard_producer.following.listing import DirectoryWatch, FinishedFiles, NameRules
from lazyshard_producer.position import FilePosition
from tests.producer.following.followed import Follow, append
from tests.producer.sources.reading import refusal
from tests.stream.streams import refusal_of

LINES = ("*.jsonl", "{name}.done", "_END")


def test_files_that_have_their_name_are_read_whole_and_in_order(follow: Follow, directory: Path) -> None:
    follower = follow()
    assert follower.take() == []
    for name in ("b.jsonl", "a.jsonl"):
        (directory / name).write_bytes(b"%s1\n\n%s2\r\n" % (name.encode(), name.encode()))
    assert follower.take() == [b"a.jsonl1\n", b"a.jsonl2\r\n", b"b.jsonl1\n", b"b.jsonl2\r\n"]
    (directory / "0.jsonl").write_bytes(b"0\n")
    assert follower.take() == [b"0\n"]
    assert follower.source.blank == 2
    assert follower.source.progress == (42, None)
    assert [(place.line, place.byte) for place in follower.places] == [(1, 0), (3, 10), (1, 0), (3, 10), (1, 0)]
    assert follower.places[-1].file == str(directory / "0.jsonl")
    assert not follower.ended
    (directory / "_END").touch()
    assert follower.take() == []
    assert follower.ended
    assert follower.source.read() is None


def test_what_is_no_file(follow: Follow, directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (directory / "directory.jsonl").mkdir()
    os.mkfifo(directory / "pipe.jsonl")
    (tmp_path / "outside.jsonl").write_bytes(b"1\n")
    (directory / "out.jsonl").symlink_to(tmp_path / "outside.jsonl")
    (directory / "nothing.jsonl").symlink_to(directory / "none")
    (directory / "a.jsonl").write_bytes(b"2\n")
    (directory / "twice.jsonl").symlink_to("a.jsonl")
    (directory / "hidden").mkdir()
    (directory / "hidden" / "b").write_bytes(b"3\n")
    (directory / "link.jsonl").symlink_to("hidden/b")
    follower = follow()
    with caplog.at_level(logging.WARNING, "lazyshard"):
        assert follower.take() == [b"2\n", b"3\n"]
        assert follower.take() == []
    told = sorted(Path(message.split()[0]).name for message in caplog.messages)
    assert told == ["directory.jsonl", "nothing.jsonl", "out.jsonl", "pipe.jsonl", "twice.jsonl"]


def test_a_name_that_is_gone_while_it_is_looked_at_is_read_once_it_is_there(
    follow: Follow, path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # An entry of a listing that tells no kinds, as that of a large directory on NFS: each is looked up.
    entry = Mock(path=str(path), is_symlink=path.is_symlink, is_file=lambda **_: path.is_file(), stat=path.stat)
    entry.name = path.name
    follower = follow()
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", lambda path: contextlib.nullcontext([entry]))
        assert follower.take() == []
    path.write_bytes(b"0\n")
    assert follower.take() == [b"0\n"]
    assert not caplog.messages


def test_a_last_line_without_newline_is_taken_once_it_is_still(follow: Follow, directory: Path) -> None:
    (directory / "a.jsonl").write_bytes(b"1\n2")
    (directory / "b.jsonl").write_bytes(b"3\n")
    (directory / "c.jsonl").write_bytes(b"{}\n" + bytes(5000))  # a NUL tail is a line too
    follower = follow()
    assert follower.take(0.1) == [b"1\n", b"3\n", b"{}\n"]
    assert follower.take(0.5) == []
    assert follower.take(0.6) == [b"2", bytes(5000)]
    assert follower.take() == []


def test_a_file_written_under_its_name_is_told_and_its_rest_taken_by_idle(follow: Follow, path: Path) -> None:
    for torn in (b"", b"2"):
        path.write_bytes(b"1\n" + torn)
        follower = follow()
        assert follower.take(0.1) == [b"1\n"]
        follower.publish()
        append(path, b"2\n")
        error = refusal(follower.take, 0.5)
        assert (error.file, error.expected) == (str(path), f"{2 + len(torn)} bytes")
        follower.publish()
        follower.close()
        again = follow(finished_by="idle")
        again.position = follower.position
        again.kill()
        assert again.take() == [torn + b"2\n"]
        path.unlink()


def test_growing_files_take_turns_line_by_line(follow: Follow, directory: Path) -> None:
    follower = follow(finished_by="marker")
    a, b = directory / "a.jsonl", directory / "b.jsonl"
    a.write_bytes(b"1\n2\n3")
    b.write_bytes(b"x\n")
    assert follower.take() == [b"1\n", b"2\n", b"x\n"]
    append(a, b"3")
    assert follower.take() == []
    append(a, b"3\n4")
    append(b, b"y\n")
    assert set(follower.take()) == {b"333\n", b"y\n"}
    (directory / "a.jsonl.done").touch()
    assert follower.take() == [b"4"]
    assert f"{directory}/*.jsonl (1 file unfinished)" in follower.source.waits_for()
    # A marked file must not grow.
    append(a, b"5\n")
    error = refusal(follower.take)
    assert (error.file, error.expected, error.actual) == (str(a), "9 bytes", "11 bytes")


def test_one_marker_for_all_files(follow: Follow, directory: Path) -> None:
    follower = follow(finished_by="marker", marker="_SUCCESS", pattern="*")
    (directory / "a").write_bytes(b"1\n2")
    (directory / "b.gz").write_bytes(gzip.compress(b"3\n"))
    (directory / "c.zst").write_bytes(zstandard.compress(b"4\n"))
    assert follower.take() == [b"1\n"]
    (directory / "_SUCCESS").touch()
    assert set(follower.take()) == {b"2", b"3\n", b"4\n"}


@pytest.mark.parametrize(("finished_by", "seconds"), [("marker", 1000.0), ("idle", 59.0)])
def test_compressed_files_wait_to_be_whole(finished_by: str, seconds: float, follow: Follow, directory: Path) -> None:
    follower = follow(finished_by=finished_by)
    path = directory / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"1\n")[:-3])
    assert follower.take() == []
    assert follower.take(seconds) == []
    path.write_bytes(gzip.compress(b"1\n"))
    assert follower.take() == []
    (directory / "a.jsonl.gz.done").touch()
    assert follower.take(60.0) == [b"1\n"]


def test_idle_files_are_taken_to_the_end_and_may_grow_again(follow: Follow, path: Path) -> None:
    follower = follow(finished_by="idle", idle_s=10.0)
    path.write_bytes(b"1\n2")
    assert follower.take(0) == [b"1\n"]
    assert follower.take(9.9) == []
    append(path, b"2")
    assert follower.take(9.9) == []
    assert follower.take(9.9) == []
    assert follower.take(2) == [b"22"]
    assert "(0 files unfinished)" in follower.source.waits_for()
    follower.publish()
    for newline in (b"\n", b"\r\n"):
        append(path, newline + b"3\n4")
        assert follower.take() == [b"3\n"]
        assert follower.take(10) == [b"4"]
    assert [place.line for place in follower.places] == [1, 2, 3, 4, 5, 6]
    append(path, b"4\n")
    error = refusal(follower.take)
    assert (error.file, error.expected) == (str(path), "a line end")


def test_the_end_marker_completes_what_is_there(follow: Follow, directory: Path) -> None:
    follower = follow(finished_by="idle")
    (directory / "a.jsonl").write_bytes(b"1\n2")
    (directory / "b.jsonl.gz").write_bytes(gzip.compress(b"3"))
    assert follower.take() == [b"1\n"]
    (directory / "c.jsonl").write_bytes(b"4")
    (directory / "_END").touch()
    assert set(follower.take()) == {b"2", b"3", b"4"}
    assert follower.ended


def test_asked_to_end_gives_what_is_complete(follow: Follow, directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    follower = follow(finished_by="marker")
    (directory / "a.jsonl").write_bytes(b'{"a":1}\n{"a":')
    (directory / "b.jsonl").write_bytes(b'{"b":1}\n{"b":2}')
    (directory / "c.jsonl.gz").write_bytes(gzip.compress(b"3")[:9])
    assert follower.take() == [b'{"a":1}\n', b'{"b":1}\n']
    (directory / "d.jsonl").write_bytes(b'{"d":1}\n')
    follower.source.end()
    with caplog.at_level(logging.WARNING, "lazyshard"):
        assert set(follower.take(0)) == {b'{"b":2}', b'{"d":1}\n'}
    assert follower.ended
    assert sorted(message.rpartition("/")[2][:7] for message in caplog.messages) == ["a.jsonl", "c.jsonl"]


def test_names_that_are_no_utf8_are_read_and_known_again(follow: Follow, directory: Path) -> None:
    follower = follow(finished_by="marker")
    with open(os.fsencode(directory) + b"/\xff\xfe.jsonl", "wb") as file:
        file.write(b"1\n2\n")
    assert follower.take() == [b"1\n", b"2\n"]
    assert follower.places[0].file == f"{directory}/\\udcff\\udcfe.jsonl"
    follower.publish(1)
    follower.kill()
    assert follower.take() == [b"2\n"]
    follower.publish()
    (directory / "_END").touch()
    assert follower.take() == []
    follower.publish()
    follower.kill()
    assert follower.take() == []


def test_a_pipe_for_a_file_and_a_directory_that_goes_are_refused(follow: Follow, path: Path, directory: Path) -> None:
    follower = follow(finished_by="marker")
    path.write_bytes(b"1\n")
    assert follower.take() == [b"1\n"]
    path.unlink()
    os.mkfifo(path)
    error = refusal(follower.take)
    assert (error.file, error.expected) == (str(path), "the plain file from before")
    path.unlink()
    directory.rmdir()
    assert refusal(follow().take).file == str(directory)


def test_waiting_ends_when_a_file_appears(follow: Follow, directory: Path, tmp_path: Path) -> None:
    follower = follow()
    with contextlib.closing(FollowedDirectory(follower.settings, None, follower.context)) as source:
        rows = source.read()
        source.wait(0.001)  # begins to watch
        (tmp_path / "a.jsonl").write_bytes(b"1\n")
        thread = threading.Thread(target=lambda: (tmp_path / "a.jsonl").rename(directory / "a.jsonl"))
        thread.start()
        while rows is not None and not rows.lines:
            source.wait(60)
            rows = source.read()
        thread.join()
        assert rows is not None
        assert rows.lines == [b"1\n"]


@pytest.mark.parametrize(
    ("rules", "data", "others"),
    [
        (LINES, ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.b.jsonl", "\udcff.jsonl", "a\nb.jsonl"], ["_END"]),
        (LINES, [], ["A.JSONL", "a.json", "a.jsonl.bz2", "a.jsonl.xz", ".a.jsonl", ".a.jsonl.x7Yq2", "a.jsonl.done"]),
        (LINES, [], ["a.jsonl.tmp", "a.jsonl.part", "a.jsonl~"]),
        (("*", "ok-{name}", "STOP"), ["a", "a.gz", "ok-"], ["ok-a", "STOP", "a.tmp", ".a"]),
        (("part-[0-9]*.json.gz", "{name}.done", "_END"), ["part-1.json.gz"], ["part-1.json", "part-x.json.gz"]),
        (("*", "_SUCCESS", "_END"), ["a"], ["_SUCCESS"]),
    ],
)
def test_names_of_data(rules: tuple[str, str, str], data: list[str], others: list[str]) -> None:
    assert [name for name in (*data, *others) if NameRules(*rules).is_data(name)] == data


def finished(size: int, line: int, tail: int, open_end: bool) -> FilePosition:
    return FilePosition(size, line, open_end=open_end, seen=size, tail=f"{tail:016x}")


FILES = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0/"), min_size=1, max_size=3),
    st.builds(finished, st.integers(0, 2**62), st.integers(0, 2**40), st.integers(0, 2**64 - 1), st.booleans()),
)


@given(FILES, FILES, FILES, st.integers(1, 5))
def test_finished_files_are_a_dict_in_little_space(
    first: dict[str, FilePosition], second: dict[str, FilePosition], sizes: dict[str, FilePosition], merge: int
) -> None:
    files = FinishedFiles()
    for name, file in first.items():
        files.add(name, file, file.offset)
    copy = FinishedFiles.decode(files.encode())
    shared = copy.copy()
    for at, (name, file) in enumerate(second.items()):
        copy.add(name, file, file.offset)
        if at % merge == 0:
            names = base64.b64decode(copy.encode()["name"])
            assert len(names) == 8 * len(first | dict(list(second.items())[: at + 1]))
    both = first | second
    for name in first | second | sizes:
        assert files.get(name) == shared.get(name) == first.get(name)
        assert copy.get(name) == both.get(name)
    unknown, grown = copy.compare({name: file.offset for name, file in sizes.items()})
    assert unknown == [name for name in sizes if name not in both]
    assert grown == [name for name in sizes if name in both and sizes[name].offset > both[name].offset]


def test_a_restart_sorts_no_file_in_that_it_asks_for_and_takes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    files = FinishedFiles()
    monkeypatch.setattr(FinishedFiles, "_merge", lambda self: pytest.fail("O(all files) for each of them"))
    for number in range(3):
        assert files.get(str(number)) is None
        files.add(str(number), finished(number, 1, 2, False), number)
    assert [files.get(str(number)) for number in range(3)] == [finished(number, 1, 2, False) for number in range(3)]


@pytest.mark.parametrize(
    "value",
    [None, {}, {"name": "", "size": "", "line": ""}, {"name": "AAAAAAAAAAA=", "size": "", "line": "", "tail": ""}, 3]
    + [dict.fromkeys(("name", "size", "line", "tail"), wrong) for wrong in ("x", "AAAA", "A" * 20 + "A=")],
)
def test_finished_files_that_are_none_are_refused(value: Any) -> None:
    refusal_of(ValueError, r"\w", FinishedFiles.decode, value)


def test_looks_become_rarer_while_nothing_changes(tmp_path: Path) -> None:
    now = 0.0
    watch = DirectoryWatch(str(tmp_path), lambda: now)
    looks = []
    for centisecond in range(1000):
        now = centisecond / 100
        if watch.due():
            looks.append(centisecond)
            watch.begin_scan()
            watch.end_scan(changed=now < 0.5)
    pauses = [after - before for before, after in pairwise(looks)]
    assert pauses == pytest.approx([20, 20, 20, 30, 45, 68, 102, 152, 200, 200], abs=1)
