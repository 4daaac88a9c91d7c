"""A followed directory after a restart: what it continues from, and what it refuses."""

import errno
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import xxhash

from lazyshard.errors import FileRefused, ProducerFenced
from lazyshard_producer.following import journal as journals
from tests.producer.following.followed import Follow, Follower, append
from tests.producer.sources.reading import refusal
from tests.stream.streams import raised, raising, refusal_of

digest = xxhash.xxh3_64_hexdigest


def long_lines(first: int, last: int) -> bytes:
    return b"".join(b"%d" % number * 300 + b"\n" for number in range(first, last))


def halfway(follow: Follow, directory: Path, **settings: Any) -> Follower:
    """One that has published the first of two rows of one file."""
    follower = follow(**settings)
    (directory / "a.jsonl").write_bytes(b"1\n2\n")
    follower.take()
    follower.publish(1)
    return follower


@pytest.mark.parametrize("size", [3, 30])
def test_a_file_that_was_truncated_replaced_or_changed_is_refused(size: int, follow: Follow, path: Path) -> None:
    follower = follow(finished_by="marker")
    whole = long_lines(10, 10 + size)
    path.write_bytes(whole + b"rest")
    assert len(follower.take()) == size
    follower.publish()
    for text, expected in (
        (whole[:-1], f"at least the {len(whole)} bytes"),
        (b"", f"at least the {len(whole)} bytes"),
        (b"x" + whole[1:], "XXH3 "),
        (whole[:-2] + b"x\n", "XXH3 "),
    ):
        path.write_bytes(text)
        error = refusal(follower.kill)
        assert error.file == str(path)
        assert str(error.expected).startswith(expected)
    # Growth is fine, and so is another rest, which nobody has seen as a row.
    path.write_bytes(whole + b"other\n")
    follower.kill()
    assert follower.take() == [b"other\n"]


def test_only_an_incomplete_line_may_change_while_a_file_is_read(follow: Follow, path: Path) -> None:
    follower = follow(finished_by="idle")
    for text, rows in ((b"1\n2222", [b"1\n"]), (b"1\n3", []), (b"1\n3\n", [b"3\n"])):
        path.write_bytes(text)
        assert follower.take() == rows
    for text, expected in ((long_lines(30, 41), "XXH3 "), (b"", "at least the 4 bytes")):
        path.write_bytes(text)
        assert str(refusal(follower.take).expected).startswith(expected)


def test_files_that_were_read_to_their_end_may_be_deleted_and_come_back(follow: Follow, directory: Path) -> None:
    follower = follow(finished_by="marker")
    for name, text in (("a.jsonl", b"1\n2\n\n"), ("b.jsonl", b""), ("c.jsonl.gz", gzip.compress(b"3\n\n"))):
        (directory / name).write_bytes(text)
        (directory / f"{name}.done").touch()
    assert follower.take() == [b"1\n", b"2\n", b"3\n"]
    follower.publish()
    names = [path.name for path in directory.iterdir()]
    for name in names:
        (directory / name).unlink()
    follower.kill()
    assert follower.take() == []
    for name in names:
        (directory / name).touch()
    assert follower.take() == []


def test_unread_files_must_stay_or_be_marked(
    follow: Follow, path: Path, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    follower = follow(finished_by="marker")
    path.write_bytes(b"1\n2")
    assert follower.take() == [b"1\n"]
    follower.publish()
    path.unlink()
    for step in (follower.take, follower.kill):
        error = refusal(step)
        assert (error.file, error.expected) == (str(path), "the file that was read up to byte 2")
    (directory / "a.jsonl.done").touch()
    follower.kill()
    assert follower.take() == []
    assert "a.jsonl was deleted" in caplog.text
    # Rows that were read and not published need it all the same.
    follower = halfway(follow, directory)
    path.unlink()
    follower.kill()
    assert str(refusal(follower.take).expected).startswith("the file of which 4 bytes were read")


def test_file_deleted_unread_is_told(follow: Follow, directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    follower = follow()
    for name in ("a", "b"):
        (directory / f"{name}.jsonl").write_bytes((b"x" * 1023 + b"\n") * 2000)
    follower.step()
    (directory / "b.jsonl").unlink()
    assert len(follower.take()) == 2000 - 1024
    assert "b.jsonl was deleted" in caplog.text
    (directory / "b.jsonl").write_bytes(b"2\n")
    assert follower.take() == [b"2\n"]


def test_compressed_files_are_known_by_their_text(follow: Follow, directory: Path) -> None:
    follower = follow()
    path = directory / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"1\n2\n3\n"))
    follower.take()
    follower.publish(1)
    path.write_bytes(gzip.compress(b"1\n2\n3\n", 1))
    follower.kill()
    assert follower.take() == [b"2\n", b"3\n"]
    path.write_bytes(gzip.compress(b"x\n2\n3\n"))
    follower.kill()
    error = refusal(follower.take)
    assert (error.file, str(error.expected)[:5]) == (str(path), "XXH3 ")


@pytest.mark.parametrize(
    ("text", "end", "packed"),
    [
        *((b"2\n3\n4", b"", False), (b"twenty-two\n3\n4", b"\n", True), (b"22\n22\n3\n4", b"", True)),
        *((b"\n3\n4", b"\n", False), (b"22\n33\n44\n55\n3\n4", b"", False), (b"2", b"\n", True), (b"2", b"", False)),
    ],
)
def test_what_was_mended_or_cut_behind_what_is_published_is_taken_as_it_is(
    text: bytes, end: bytes, packed: bool, follow: Follow, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def write(text: bytes) -> None:
        (directory / name).write_bytes(gzip.compress(text) if packed else text)

    name = "a.jsonl.gz" if packed else "a.jsonl"
    follower = follow()
    write(b"1\n22\n3\n4" + end)
    (directory / "b.jsonl").write_bytes(b"x\n")
    # A last line without newline is taken once the file is still.
    assert {*follower.take(), *follower.take()} == {b"1\n", b"22\n", b"3\n", b"4" + end, b"x\n"}
    follower.publish(1)
    follower.bound = []
    write(b"1\n" + text + end)
    follower.kill()
    taken = [row for row in follower.take() + follower.take() if isinstance(row, bytes)]
    taken.remove(b"x\n")
    assert b"".join(taken) == (text + end).lstrip(b"\n")
    assert f"{name} was changed after its published part" in caplog.text
    follower.publish()
    # And once: the next life has nothing to add, and neither has the end.
    follower.kill()
    assert follower.take() == []
    (directory / "_END").touch()
    assert follower.take() == []
    assert follower.ended


@pytest.mark.parametrize("finished_by", ["rename", "idle", "marker"])
def test_a_last_line_that_became_shorter_is_taken_as_it_is(finished_by: str, follow: Follow, path: Path) -> None:
    follower = follow(finished_by=finished_by, idle_s=60)
    path.write_bytes(b"1\n2222")
    assert follower.take() == [b"1\n"]
    follower.publish()
    path.write_bytes(b"1\n3")
    if finished_by != "rename":
        assert follower.take() == []
    else:
        assert str(refusal(follower.take).actual).startswith("3:")
    follower.kill()
    taken = follower.take()
    path.with_name("a.jsonl.done").touch()
    assert taken + follower.take(61) + follower.take(61) == [b"3"]


def test_a_position_of_another_kind_is_refused(follow: Follow, directory: Path) -> None:
    follower = halfway(follow, directory)
    position = follower.entry
    wrong: dict[str, Any]
    for wrong in (
        *({"kind": "jsonl"}, {"bytes": -1}, {"read": None}, {"digest": 1}, {"at": []}, {"at": {}}),
        *({"journal": "../x"}, {"journal": "x.jsonl", "bytes": 0, "digest": digest(b"")}),
    ):
        follower.position = position | wrong
        assert refusal(follower.kill).file == str(directory)


@pytest.mark.parametrize("damage", ["missing", "cut", "changed", "link", "pipe"])
def test_a_journal_that_is_not_what_it_was_is_refused(damage: str, follow: Follow, directory: Path) -> None:
    follower = halfway(follow, directory)
    follower.publish()
    journal = follower.journal
    data = journal.read_bytes()
    journal.unlink()
    if damage == "link":
        (directory / "elsewhere").write_bytes(data)
        journal.symlink_to(directory / "elsewhere")
    elif damage == "pipe":
        os.mkfifo(journal)
    elif damage != "missing":
        journal.write_bytes(data[:-1] if damage == "cut" else data[:-3] + b"0}\n")
    assert str(journal) in str(refusal(follower.kill).expected)


def test_a_journal_that_names_files_elsewhere_is_refused(follow: Follow, directory: Path) -> None:
    follower = halfway(follow, directory)
    data = b'{"file": "../a.jsonl", "offset": 2}\n'
    follower.journal.write_bytes(data)
    follower.position = follower.entry | {"bytes": len(data), "digest": digest(data)}
    assert refusal(follower.kill).expected == "lines of a journal"
    # The same behind the place that the position names.
    follower.position |= {"bytes": 0, "digest": digest(b"")}
    follower.open()
    assert refusal(follower.take).expected == "a line of a journal"


def test_link_in_place_of_the_journals_is_refused_and_nothing_behind_it_deleted(follow: Follow, tmp_path: Path) -> None:
    kept = tmp_path / "precious" / f"{0:016x}-{0:016x}.jsonl"
    kept.parent.mkdir()
    kept.touch()
    (tmp_path / "out" / ".producer.sources").symlink_to(kept.parent)
    raised(FileRefused, follow)
    raised(FileRefused, journals.list_journals, tmp_path / "out" / ".producer.sources")
    journals.clear_journals(tmp_path / "out")
    assert kept.exists()


def test_a_position_within_a_file_and_its_journal(follow: Follow, directory: Path) -> None:
    follower = follow()
    (directory / "a.jsonl").write_bytes(b"1\n\n2\n3\n")
    (directory / "b.jsonl.gz").write_bytes(gzip.compress(b"4\n"))
    follower.take()
    follower.publish(1)
    data = follower.journal.read_bytes()
    before = data[: data.index(b"\n") + 1]
    part, middle, whole = map(digest, (b"1\n", b"1\n\n2\n", b"1\n\n2\n3\n"))
    assert [json.loads(line) for line in data.splitlines()] == [
        {"finished_files": {"name": "", "size": "", "line": "", "tail": ""}},
        {"file": "a.jsonl", "from": 0, "offset": 7, "line": 4, "blank": 1, "seen": 7, "head": whole, "tail": whole},
        {"file": "a.jsonl", "finished": 7},
        {"file": "b.jsonl.gz", "from": 0, "offset": 2, "line": 1, "digest": digest(b"4\n")},
        {"file": "b.jsonl.gz", "finished": 22},
    ]
    at = {"file": "a.jsonl", "from": 2, "offset": 2, "line": 1, "seen": 7, "head": part, "tail": part}
    named = {"journal": follower.journal.name, "bytes": len(before), "digest": digest(before)}
    assert follower.position == {"kind": "follow", "path": str(directory), "read": 2, "blank": 0, "at": at} | named
    follower.publish(1)
    assert follower.journal.read_bytes() == data
    at = {"file": "a.jsonl", "from": 5, "offset": 5, "line": 3, "blank": 1, "seen": 7, "head": middle, "tail": middle}
    assert (follower.entry["at"], follower.entry["blank"]) == (at, 1)


def test_positions_without_news_write_nothing(follow: Follow, directory: Path) -> None:
    follower = halfway(follow, directory, finished_by="marker")
    journal = follower.journal
    before = (follower.position, journal.read_bytes())
    follower.publish(0)
    assert (follower.position, journal.read_bytes()) == before
    follower.kill()
    follower.publish(0)
    assert (follower.position, journal.read_bytes()) == before
    assert follower.take() == [b"2\n"]
    follower.publish(0)
    assert follower.journal != journal
    assert journal.read_bytes() == before[1]


def test_journals_begin_anew_and_old_ones_go(follow: Follow, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "_LONG_BYTES", 1000)
    follower = follow()
    names = []
    for number in range(100):
        (directory / f"{number:03}.jsonl").write_bytes(b"%d\n" % number)
        follower.take()
        follower.publish()
        names.append(follower.journal.name)
        if number % 10 == 9:
            follower.kill()
    assert len(set(names)) >= 12  # eleven lives, and one where it became long
    assert follower.published == [b"%d\n" % number for number in range(100)]
    follower.publish()
    left = list(follower.journal.parent.iterdir())
    assert names[-1] in [path.name for path in left]
    assert len(left) < 5
    assert sum(map(os.path.getsize, left)) < 20_000


@pytest.mark.parametrize("step", ["write_all", "sync", "sync_directory"])
def test_unwritable_journal(step: str, follow: Follow, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follower = follow(finished_by="marker")
    (directory / "a.jsonl").write_bytes(b"1\n2\n")
    follower.take()
    if step != "sync_directory":
        follower.publish(1)
    append(directory / "a.jsonl", b"3\n")
    follower.take()
    monkeypatch.setattr(journals, step, raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    for _ in range(2):
        refusal_of(OSError, "No space left", follower.source.entry, follower.source.reached)
    monkeypatch.undo()
    if step != "sync_directory":
        refusal_of(OSError, "No space left", follower.source.entry, follower.source.reached)
    follower.kill()
    follower.take()
    follower.publish()
    assert follower.published == [b"1\n", b"2\n", b"3\n"]
    follower.kill()
    assert follower.take() == []


def test_producer_that_wakes_late_deletes_no_journal_of_its_successor(follow: Follow, directory: Path) -> None:
    second = halfway(follow, directory, finished_by="marker")
    # It read the last seal before the second one published.
    first = follow(finished_by="marker")
    first.context = first.context._replace(check_owner=raising(ProducerFenced("another producer has the stream")))
    first.kill()
    first.take()
    raised(ProducerFenced, first.publish, 1)
    second.kill()
    assert second.take() == [b"2\n"]
