"""A followed directory after a restart: what it goes on from, and what it refuses."""

import errno
import gzip
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from lazyshard.errors import FileRefused, ProducerFenced
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.following import journal as journals
from lazyshard_producer.following import ledger
from lazyshard_producer.out_directory import clear_journals
from tests.producer.following.followed import Follower


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


@pytest.fixture
def follow(directory: Path, tmp_path: Path) -> Iterator[Callable[..., Follower]]:
    (tmp_path / "out").mkdir()
    made: list[Follower] = []

    def make(**settings: Any) -> Follower:
        made.append(Follower(directory, tmp_path / "out", **settings))
        return made[-1]

    yield make
    for follower in made:
        follower.close()


def long_lines(first: int, last: int) -> bytes:
    return b"".join(b"%d" % number * 300 + b"\n" for number in range(first, last))


@pytest.mark.parametrize("size", [3, 30])
def test_a_file_that_was_truncated_replaced_or_changed_is_refused(
    size: int, follow: Callable[..., Follower], directory: Path
) -> None:
    follower = follow(finished_by="marker")
    path = directory / "a.jsonl"
    whole = long_lines(10, 10 + size)
    path.write_bytes(whole + b"rest")
    assert len(follower.take()) == size
    follower.publish()
    for text, message in (
        (whole[:-1], f"expected at least the {len(whole)} bytes that were read, found {len(whole) - 1}"),
        (b"", f"expected at least the {len(whole)} bytes that were read, found 0"),
        (b"x" + whole[1:], r"expected XXH3 [0-9a-f]{16} of the first \d+ bytes of the part read"),
        (whole[:-2] + b"x\n", r"expected XXH3 [0-9a-f]{16} of the \w+ \d+ bytes of the part read"),
    ):
        path.write_bytes(text)
        with pytest.raises(SourceRefused, match=message):
            follower.kill()
    # Growth is fine, and so is another rest, which nobody has seen as a row.
    path.write_bytes(whole + b"other\n")
    follower.kill()
    assert follower.take() == [b"other\n"]


def test_a_file_that_is_changed_while_it_is_read_is_refused(follow: Callable[..., Follower], directory: Path) -> None:
    follower = follow(finished_by="idle")
    path = directory / "a.jsonl"
    path.write_bytes(long_lines(10, 20))
    follower.take()
    path.write_bytes(long_lines(30, 41))
    with pytest.raises(SourceRefused, match="expected XXH3"):
        follower.take()
    path.write_bytes(b"")
    with pytest.raises(SourceRefused, match="expected at least the 6010 bytes that were read, found 0"):
        follower.take()


def test_an_incomplete_line_may_change_until_it_is_complete(follow: Callable[..., Follower], directory: Path) -> None:
    follower = follow(finished_by="idle")
    path = directory / "a.jsonl"
    path.write_bytes(b"1\n2222")
    assert follower.take() == [b"1\n"]
    path.write_bytes(b"1\n3")
    assert follower.take() == []
    path.write_bytes(b"1\n3\n")
    assert follower.take() == [b"3\n"]


def test_files_that_were_read_to_their_end_may_be_deleted(follow: Callable[..., Follower], directory: Path) -> None:
    follower = follow(finished_by="marker")
    for name, text in (("a.jsonl", b"1\n2\n\n"), ("b.jsonl", b""), ("c.jsonl.gz", gzip.compress(b"3\n\n"))):
        (directory / name).write_bytes(text)
        (directory / f"{name}.done").touch()
    assert follower.take() == [b"1\n", b"2\n", b"3\n"]
    follower.publish()
    for path in directory.iterdir():
        path.unlink()
    follower.kill()
    assert follower.take() == []
    # With all its files, as after its filesystem was away: nothing of it comes twice.
    for name in ("a.jsonl", "b.jsonl", "c.jsonl.gz"):
        (directory / name).write_bytes(b"")
        (directory / f"{name}.done").touch()
    assert follower.take() == []


def test_files_that_were_not_read_to_their_end_must_stay(
    follow: Callable[..., Follower], directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    follower = follow(finished_by="marker")
    path = directory / "a.jsonl"
    path.write_bytes(b"1\n2")
    assert follower.take() == [b"1\n"]
    follower.publish()
    path.unlink()
    message = r"in/a.jsonl: expected the file that was read up to byte 2, found none of this name: .*put it back"
    with pytest.raises(SourceRefused, match=message):
        follower.take()
    with pytest.raises(SourceRefused, match=message):
        follower.kill()
    (directory / "a.jsonl.done").touch()
    follower.kill()
    assert follower.take() == []
    assert "a.jsonl was deleted; what was there of it is taken, up to byte 2" in caplog.text


def test_a_growing_file_of_which_all_was_taken_may_be_deleted(
    follow: Callable[..., Follower], directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    follower = follow(finished_by="idle")
    path = directory / "a.jsonl"
    path.write_bytes(b"1\n")
    assert follower.take() == [b"1\n"]
    follower.publish()
    path.unlink()
    assert follower.take() == []
    assert caplog.text.count("was deleted") == 1
    follower.kill()
    assert follower.take() == []
    path.write_bytes(b"1\n")
    assert follower.take() == []


def test_a_file_deleted_before_it_was_begun_is_told(
    follow: Callable[..., Follower], directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    follower = follow()
    for name in ("a", "b"):
        (directory / f"{name}.jsonl").write_bytes((b"x" * 1023 + b"\n") * 2000)
    follower.step()
    (directory / "b.jsonl").unlink()
    assert len(follower.take()) == 2000 - 1024
    assert "b.jsonl was deleted before anything of it was read" in caplog.text
    (directory / "b.jsonl").write_bytes(b"2\n")
    assert follower.take() == [b"2\n"]


def test_rows_that_were_read_and_not_published_need_their_file(
    follow: Callable[..., Follower], directory: Path
) -> None:
    follower = follow()
    path = directory / "a.jsonl"
    path.write_bytes(b"1\n2\n")
    follower.take()
    follower.publish(1)
    path.rename(directory / "moved")
    with pytest.raises(SourceRefused, match=r"a.jsonl: expected the file that was read up to byte 2, found none"):
        follower.kill()
    (directory / "a.jsonl.done").touch()
    follower.kill()
    with pytest.raises(SourceRefused, match=r"a.jsonl: expected the file of which 4 bytes were read, and not all is"):
        follower.take()


def test_compressed_files_are_known_by_their_text(follow: Callable[..., Follower], directory: Path) -> None:
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
    with pytest.raises(SourceRefused, match=r"a.jsonl.gz: not the text whose rows are published: expected XXH3"):
        follower.take()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("mended", [b"2", b"twenty-two", b"22\n22", b"", b"22\n33\n44\n55"])
def test_a_line_that_was_mended_behind_what_is_published_is_taken_as_it_is(
    mended: bytes, end: bytes, packed: bool, follow: Callable[..., Follower], directory: Path, caplog: Any
) -> None:
    def write(text: bytes) -> None:
        (directory / name).write_bytes(gzip.compress(text) if packed else text)

    name = "a.jsonl.gz" if packed else "a.jsonl"
    follower = follow()
    write(b"1\n22\n3\n4" + end)
    # A last line without newline is taken once the file is still.
    assert follower.take() + follower.take() == [b"1\n", b"22\n", b"3\n", b"4" + end]
    follower.publish(1)
    follower.bound = []
    write(b"1\n" + mended + b"\n3\n4" + end)
    follower.kill()
    taken = [row for row in follower.take() + follower.take() if isinstance(row, bytes)]
    assert b"".join(taken) == b"".join(line + b"\n" for line in mended.split(b"\n") if line) + b"3\n4" + end
    assert f"{name} was changed behind what is published of it; it is taken as it is now" in caplog.text
    follower.publish()
    # And once: the next life has nothing to add, and neither has the end.
    follower.kill()
    assert follower.take() == []
    (directory / "_END").touch()
    assert follower.take() == []
    assert follower.ended


@pytest.mark.parametrize("finished_by", ["rename", "idle", "marker"])
def test_a_last_line_that_became_shorter_is_taken_as_it_is(
    finished_by: str, follow: Callable[..., Follower], directory: Path
) -> None:
    follower = follow(finished_by=finished_by, idle_s=60)
    path = directory / "a.jsonl"
    path.write_bytes(b"1\n2222")
    assert follower.take() == [b"1\n"]
    follower.publish()
    path.write_bytes(b"1\n3")
    if finished_by != "rename":
        assert follower.take() == []
    else:
        with pytest.raises(SourceRefused, match="expected at least the 6 bytes that were read, found 3: "):
            follower.take()
    follower.kill()
    taken = follower.take()
    path.with_name("a.jsonl.done").touch()
    assert taken + follower.take(61) + follower.take(61) == [b"3"]


def test_a_file_that_was_cut_behind_what_is_published_goes_on_with_the_others(
    follow: Callable[..., Follower], directory: Path
) -> None:
    follower = follow()
    (directory / "a.jsonl").write_bytes(b"1\n2\n3\n")
    (directory / "b.jsonl").write_bytes(b"4\n5\n")
    follower.take()
    follower.publish(1)
    follower.bound = []
    (directory / "a.jsonl").write_bytes(b"1\n2")
    follower.kill()
    assert follower.take() + follower.take() == [b"4\n", b"5\n", b"2"]
    follower.publish()
    (directory / "_END").touch()
    follower.kill()
    assert follower.take() == []
    assert follower.ended


@pytest.mark.parametrize("name", ["..", ".", "../x", "/etc/passwd", "a\0b", "x" * 300, "x.jsonl", f"{0:016x}.jsonl"])
def test_a_journal_of_another_name_is_refused_and_neither_read_nor_deleted(
    name: str, follow: Callable[..., Follower], directory: Path, tmp_path: Path
) -> None:
    follower = follow()
    (directory / "a.jsonl").write_bytes(b"1\n2\n")
    follower.take()
    follower.publish(1)
    (tmp_path / "out" / "x").write_bytes(b"precious")
    assert follower.position is not None
    follower.position = follower.position | {"journal": name, "bytes": 0, "digest": xxhash.xxh3_64_hexdigest(b"")}
    with pytest.raises(SourceRefused, match="expected journal: the name of one, or none, found"):
        follower.kill()
    assert (tmp_path / "out" / "x").read_bytes() == b"precious"


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_something_else_in_place_of_a_journal_is_refused(
    kind: str, follow: Callable[..., Follower], directory: Path, tmp_path: Path
) -> None:
    follower = follow()
    (directory / "a.jsonl").write_bytes(b"1\n2\n")
    follower.take()
    follower.publish(1)
    journal = follower.journal()
    assert journal is not None
    if kind == "link":
        journal.rename(tmp_path / "elsewhere")
        journal.symlink_to(tmp_path / "elsewhere")
    else:
        journal.unlink()
        os.mkfifo(journal)
    with pytest.raises(SourceRefused, match=r"no position to go on from: expected the journal .*, found "):
        follower.kill()


@pytest.mark.parametrize("file", ["../a.jsonl", "/etc/passwd", "..", "\0" + b"../a.jsonl".hex()])
def test_a_journal_that_names_files_elsewhere_is_refused(
    file: str, follow: Callable[..., Follower], directory: Path
) -> None:
    follower = follow()
    (directory / "a.jsonl").write_bytes(b"1\n2\n")
    follower.take()
    follower.publish(1)
    journal = follower.journal()
    assert journal is not None and follower.position is not None
    journal.write_bytes(json.dumps({"file": file, "offset": 2}).encode() + b"\n")
    data = journal.read_bytes()
    follower.position |= {"bytes": len(data), "digest": xxhash.xxh3_64_hexdigest(data)}
    with pytest.raises(SourceRefused, match="expected lines of a journal"):
        follower.kill()
    # The same behind the place that the position names.
    follower.position |= {"bytes": 0, "digest": xxhash.xxh3_64_hexdigest(b"")}
    follower.open()
    with pytest.raises(SourceRefused, match="expected a line of a journal"):
        follower.take()


def test_a_link_in_place_of_the_journals_is_refused_and_nothing_behind_it_deleted(
    follow: Callable[..., Follower], directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "precious").mkdir()
    kept = tmp_path / "precious" / f"{0:016x}-{0:016x}.jsonl"
    kept.touch()
    (tmp_path / "out" / ".producer.sources").symlink_to(tmp_path / "precious")
    with pytest.raises(FileRefused, match=r"\.producer\.sources: expected a directory, found a link"):
        follow()
    with pytest.raises(FileRefused):
        journals.remove_journals(tmp_path / "out" / ".producer.sources")
    clear_journals(str(tmp_path / "out"))
    assert kept.exists()


def test_position_at_the_start_makes_no_journal(follow: Callable[..., Follower], tmp_path: Path) -> None:
    follower = follow()
    follower.take()
    follower.publish()
    assert follower.position == {
        "kind": "follow",
        "path": str(tmp_path / "in"),
        "journal": "",
        "bytes": 0,
        "digest": "",
        "read": 0,
        "blank": 0,
    }
    assert list((tmp_path / "out").iterdir()) == []
    follower.kill()


def test_a_position_within_a_file_and_its_journal(follow: Callable[..., Follower], directory: Path) -> None:
    follower = follow()
    (directory / "a.jsonl").write_bytes(b"1\n\n2\n3\n")
    (directory / "b.jsonl.gz").write_bytes(gzip.compress(b"4\n"))
    follower.take()
    follower.publish(1)
    journal = follower.journal()
    assert journal is not None
    part, whole = xxhash.xxh3_64_hexdigest(b"1\n"), xxhash.xxh3_64_hexdigest(b"1\n\n2\n3\n")
    data = journal.read_bytes()
    before = data[: data.index(b"\n") + 1]
    assert [json.loads(line) for line in data.splitlines()] == [
        {"finished_files": {"name": "", "size": "", "line": "", "tail": ""}},
        {"file": "a.jsonl", "from": 0, "offset": 7, "line": 4, "blank": 1, "seen": 7, "head": whole, "tail": whole},
        {"file": "a.jsonl", "finished": 7},
        {"file": "b.jsonl.gz", "from": 0, "offset": 2, "line": 1, "digest": xxhash.xxh3_64_hexdigest(b"4\n")},
        {"file": "b.jsonl.gz", "finished": 22},
    ]
    assert follower.position == {
        "kind": "follow",
        "path": str(directory),
        "journal": journal.name,
        "bytes": len(before),
        "digest": xxhash.xxh3_64_hexdigest(before),
        "read": 2,
        "blank": 0,
        "at": {"file": "a.jsonl", "from": 2, "offset": 2, "line": 1, "seen": 7, "head": part, "tail": part},
    }
    follower.publish(1)
    assert journal.read_bytes() == data
    assert follower.position is not None
    middle = xxhash.xxh3_64_hexdigest(b"1\n\n2\n")
    at = {"file": "a.jsonl", "from": 5, "offset": 5, "line": 3, "blank": 1, "seen": 7, "head": middle, "tail": middle}
    assert follower.position["at"] == at
    assert follower.position["blank"] == 1


def test_positions_without_news_write_nothing(follow: Callable[..., Follower], directory: Path) -> None:
    follower = follow(finished_by="marker")
    (directory / "a.jsonl").write_bytes(b"1\n2\n")
    follower.take()
    follower.publish(1)
    journal = follower.journal()
    assert journal is not None
    before = (follower.position, journal.read_bytes())
    follower.publish(0)
    assert (follower.position, journal.read_bytes()) == before
    follower.kill()
    follower.publish(0)
    assert (follower.position, journal.read_bytes()) == before
    assert follower.take() == [b"2\n"]
    follower.publish(0)
    assert follower.position is not None
    assert follower.position["journal"] != journal.name
    assert journal.read_bytes() == before[1]


def test_consecutive_blocks_of_a_file_are_one_line(follow: Callable[..., Follower], directory: Path) -> None:
    follower = follow(finished_by="marker")
    for name in "ab":
        (directory / f"{name}.jsonl").write_bytes(b"x" * 1023 + b"\n")
    (directory / "c.jsonl").write_bytes((b"x" * 1023 + b"\n") * 5000)
    follower.take()
    follower.publish(0)
    journal = follower.journal()
    assert journal is not None
    lines = [json.loads(line) for line in journal.read_bytes().splitlines()[1:]]
    assert sorted((line["file"], line["from"], line["offset"]) for line in lines) == [
        ("a.jsonl", 0, 1024),
        ("b.jsonl", 0, 1024),
        ("c.jsonl", 0, 5_120_000),
    ]


def test_journals_are_begun_anew_and_the_old_ones_deleted(
    follow: Callable[..., Follower], directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "_LONG_BYTES", 1000)
    follower = follow()
    names = []
    for number in range(100):
        (directory / f"{number:03}.jsonl").write_bytes(b"%d\n" % number)
        follower.take()
        follower.publish()
        assert follower.position is not None
        names.append(follower.position["journal"])
        if number % 10 == 9:
            follower.kill()
    assert len(set(names)) >= 12  # eleven lives, and one where it became long
    assert follower.published == [b"%d\n" % number for number in range(100)]
    follower.publish()
    left = [path.name for path in (tmp_path / "out" / ".producer.sources").iterdir()]
    assert names[-1] in left
    assert len(left) < 5
    assert sum(map(os.path.getsize, (tmp_path / "out" / ".producer.sources").iterdir())) < 20_000


@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
def test_a_journal_that_is_not_what_it_was_is_refused(
    damage: str, follow: Callable[..., Follower], directory: Path
) -> None:
    follower = follow()
    (directory / "a.jsonl").write_bytes(b"1\n2\n")
    follower.take()
    follower.publish(2)
    journal = follower.journal()
    assert journal is not None
    data = journal.read_bytes()
    journal.unlink()
    if damage != "missing":
        journal.write_bytes(data[:-1] if damage == "cut" else data[:-3] + b"0}\n")
    with pytest.raises(SourceRefused, match=r"no position to go on from: expected .*the journal"):
        follower.kill()


@pytest.mark.parametrize("step", ["write_all", "sync", "sync_directory"])
def test_a_journal_that_cannot_be_written_is_not_written_to_again(
    step: str, follow: Callable[..., Follower], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = follow(finished_by="marker")
    (directory / "a.jsonl").write_bytes(b"1\n2\n")
    follower.take()
    if step != "sync_directory":
        follower.publish(1)
    with (directory / "a.jsonl").open("ab") as file:
        file.write(b"3\n")
    follower.take()

    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(journals, step, fail)
        with pytest.raises(OSError, match="No space left on device"):
            follower.source.entry(follower.source.reached)
        with pytest.raises(OSError, match="No space left on device"):
            follower.source.entry(follower.source.reached)
    if step != "sync_directory":
        with pytest.raises(OSError, match="No space left on device"):
            follower.source.entry(follower.source.reached)
    follower.kill()
    follower.take()
    follower.publish()
    assert follower.published == [b"1\n", b"2\n", b"3\n"]
    follower.kill()
    assert follower.take() == []


def test_a_producer_that_wakes_too_late_spoils_nothing(follow: Callable[..., Follower], directory: Path) -> None:
    first = follow(finished_by="marker")
    path = directory / "a.jsonl"
    path.write_bytes(b"1\n2\n3\n")
    first.take()
    first.publish(1)
    second = follow(finished_by="marker")
    second.position = first.position
    second.kill()
    assert second.take() == [b"2\n", b"3\n"]
    second.publish(1)
    with path.open("ab") as file:
        file.write(b"4\n")
    for _ in range(40):
        first.take()
        first.source.entry(first.source.reached)
    second.kill()
    assert second.take() == [b"3\n", b"4\n"]


def test_a_producer_that_wakes_behind_its_opening_deletes_no_journal_of_its_successor(
    follow: Callable[..., Follower], directory: Path
) -> None:
    def check_owner() -> None:
        raise ProducerFenced("another producer has the stream")

    (directory / "a.jsonl").write_bytes(b"1\n2\n")
    second = follow(finished_by="marker")
    second.take()
    second.publish(1)
    # It read the last seal before the second one published.
    first = follow(finished_by="marker")
    first.context = first.context._replace(check_owner=check_owner)
    first.kill()
    first.take()
    with pytest.raises(ProducerFenced):
        first.publish(1)
    second.kill()
    assert second.take() == [b"2\n"]


@pytest.mark.parametrize(
    "wrong",
    [{"kind": "jsonl"}, {"bytes": -1}, {"read": None}, {"journal": "../x"}, {"digest": 1}, {"at": []}, {"at": {}}],
)
def test_a_position_of_another_kind_is_refused(
    wrong: dict[str, Any], follow: Callable[..., Follower], directory: Path
) -> None:
    follower = follow()
    (directory / "a.jsonl").write_bytes(b"1\n2\n")
    follower.take()
    follower.publish(1)
    assert follower.position is not None
    follower.position = follower.position | wrong
    with pytest.raises(SourceRefused, match="no position to go on from"):
        follower.kill()
