"""What one look at a stream finds, in whatever condition it is."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lazyshard.errors import StreamInvalid, StreamMissing, StreamUnsealed, VersionUnsupported
from lazyshard.storage import census as census_module
from lazyshard.storage.disk_use import SAMPLED_CHUNKS, Lines
from lazyshard.storage.retire import retire
from lazyshard.storage.survey import Survey, take_survey
from tests.storage.streams import foreign, forked, head, needs_root, produce
from tests.storage.surveyed import checkpoint, edit_head, reads

NOW = 1_700_000_000.0
ROWS = b'{"id":0}\n{"id":1}\n'


def look(directory: Path) -> Survey:
    return take_survey(directory, NOW)


def counted(survey: Survey) -> tuple[int, int | None, bool, int]:
    census = survey.census
    return census.chunks, census.samples, census.ended, census.retired


def test_live_stream(tmp_path: Path) -> None:
    found = look(produce(tmp_path, 5, end=False))
    assert (counted(found), found.problems) == ((2, 4, False, 0), ())
    assert (found.looked_at, found.gone, found.quarantine, found.consumers) == (NOW, False, None, ())
    assert found.census.head == head(tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.glob("chunk_*"))
    assert (found.disk.size, found.disk.exact) == (size, True)
    assert found.free is not None


def test_ended_stream(tmp_path: Path) -> None:
    found = look(produce(tmp_path, 5))
    assert (counted(found), found.problems) == ((3, 5, True, 0), ())


def test_retired_chunks(tmp_path: Path) -> None:
    produce(tmp_path, 8, end=False)
    retire(tmp_path, 3, 4)
    found = look(tmp_path)
    assert (counted(found), found.problems, found.disk.exact) == ((4, 8, False, 3), (), True)
    assert found.disk.size == sum(path.stat().st_size for path in tmp_path.glob("chunk_*"))


def test_look_at_a_long_stream_lists_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("listed")

    produce(tmp_path, 2, end=False)
    edit_head(tmp_path, chunks=10**15, samples=2 * 10**15, updated_at=NOW - 60)
    monkeypatch.setattr(census_module, "list_chunks", refuse)
    found = look(tmp_path)
    assert found.census.chunks == 10**15
    assert len(found.disk.missing) == SAMPLED_CHUNKS - 1
    assert found.problems == (
        f"chunk {found.disk.missing[0]} is published, but its files are not all there, nor are those of 126 others: "
        f"run `lazyshard verify {tmp_path}`",
    )


def test_torn_end_behind_a_sound_head_is_a_problem(tmp_path: Path) -> None:
    produce(tmp_path, 4)
    (tmp_path / "stream.end").write_bytes(b"{")
    found = look(tmp_path)
    assert counted(found)[2]
    (problem,) = found.problems
    assert problem.startswith(f"{tmp_path}/stream.end: expected a JSON object, found b'{{'")


def test_new_chunks_that_do_not_appear_yet_are_not_lost(tmp_path: Path) -> None:
    """A network filesystem may show the head before the chunks that it names."""
    produce(tmp_path, 8, end=False)
    os.unlink(tmp_path / "chunk_00002.jsonl")
    os.unlink(tmp_path / "chunk_00003.jsonl.completed")
    edit_head(tmp_path, updated_at=NOW - 59)
    assert look(tmp_path).problems == ()
    edit_head(tmp_path, updated_at=NOW - 60)
    assert [problem.startswith("chunk 2 is published, but") for problem in look(tmp_path).problems] == [True]
    edit_head(tmp_path, updated_at=NOW)
    os.unlink(tmp_path / "chunk_00000.jsonl")
    assert [problem.startswith("chunk 0 is published, but") for problem in look(tmp_path).problems] == [True]


def test_chunk_that_is_retired_while_it_is_looked_for_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(tmp_path, 8, end=False)

    def slow_census(directory: Path, problems: list[str]) -> object:
        found = census_module.take_census(directory, problems)
        retire(directory, 2, 4)
        return found

    monkeypatch.setattr("lazyshard.storage.survey.take_census", slow_census)
    found = look(tmp_path)
    assert (found.disk.missing, found.problems) == ((0, 1), ())


def test_consumers(tmp_path: Path) -> None:
    produce(tmp_path, 8, end=False)
    for number in range(4):
        os.utime(tmp_path / f"chunk_{number:05d}.jsonl.completed", (NOW, NOW - 100 + number))
    checkpoint(tmp_path, "done", 8, 4, NOW)
    checkpoint(tmp_path, "half", 5, 2, NOW)
    reads(tmp_path, "new", 1, NOW)
    found = look(tmp_path)
    assert [one.name for one in found.consumers] == ["done", "half", "new"]
    assert found.unread_since == {"half": NOW - 98, "new": NOW - 100}


def test_torn_cursor_is_its_consumers_problem(tmp_path: Path) -> None:
    produce(tmp_path, 4)
    (tmp_path / "cursors").mkdir()
    (tmp_path / "cursors" / "sft.json").write_bytes(b"")
    found = look(tmp_path)
    assert found.problems == ()
    assert [(one.name, one.cursor, one.problem is None) for one in found.consumers] == [("sft", None, False)]


def test_cursor_ahead_of_the_stream_is_its_consumers_problem(tmp_path: Path) -> None:
    produce(tmp_path, 4)
    checkpoint(tmp_path, "sft", 20, 10, NOW)
    assert "of which only 2 are published" in str(look(tmp_path).consumers[0].problem)


def test_quarantine(tmp_path: Path) -> None:
    produce(tmp_path, 2)
    (tmp_path / "quarantine.jsonl").write_bytes(b"{}\n{}\n")
    assert look(tmp_path).quarantine == Lines(2, 6, True)


@pytest.mark.parametrize("damage", [b"", b"{", b'{"format":1}', None])
@pytest.mark.parametrize("end", [False, True])
def test_damaged_head_is_told_and_chunks_are_listed(damage: bytes | None, end: bool, tmp_path: Path) -> None:
    produce(tmp_path, 5, end=end)
    path = tmp_path / "head.json"
    os.unlink(path) if damage is None else path.write_bytes(damage)
    found = look(tmp_path)
    assert counted(found) == ((3, 5, True, 0) if end else (2, 4, False, 0))
    assert (found.census.head, found.gone) == (None, None)
    assert [problem.startswith(f"{path}: ") for problem in found.problems] == [True]


def test_head_that_contradicts_the_manifest_is_told(tmp_path: Path) -> None:
    produce(tmp_path, 4, end=False)
    edit_head(tmp_path, samples=3)
    found = look(tmp_path)
    assert counted(found) == (2, 4, False, 0)
    assert found.problems == (f"{tmp_path}/head.json: expected 2 chunks of 2 samples, found 3 samples in all",)


def test_lost_head_of_a_stream_with_retired_chunks(tmp_path: Path) -> None:
    produce(tmp_path, 8, end=False)
    retire(tmp_path, 3, 4)
    os.unlink(tmp_path / "head.json")
    found = look(tmp_path)
    assert (counted(found), len(found.problems)) == ((4, 8, False, 3), 1)


def test_partial_chunk_of_a_stream_that_is_being_ended_does_not_count(tmp_path: Path) -> None:
    produce(tmp_path, 5)
    os.unlink(tmp_path / "stream.end")
    os.unlink(tmp_path / "head.json")
    assert counted(look(tmp_path)) == (2, 4, False, 0)


def test_damaged_last_seal_without_a_head_is_told(tmp_path: Path) -> None:
    produce(tmp_path, 4, end=False)
    os.unlink(tmp_path / "head.json")
    (tmp_path / "chunk_00001.jsonl.completed").write_bytes(b"")
    found = look(tmp_path)
    assert counted(found) == (1, 2, False, 0)
    assert len(found.problems) == 2


def test_gap_is_told_where_chunks_are_listed(tmp_path: Path) -> None:
    produce(tmp_path, 6, end=False)
    os.unlink(tmp_path / "head.json")
    os.unlink(tmp_path / "chunk_00001.jsonl")
    found = look(tmp_path)
    assert counted(found) == (1, 2, False, 0)
    assert found.problems[1] == "chunk 1 lacks its data or its marker, so it and those after it do not count"


@pytest.mark.parametrize("damage", [b"{}", None])
def test_damaged_manifest_is_told_once(damage: bytes | None, tmp_path: Path) -> None:
    produce(tmp_path, 8, end=False)
    retire(tmp_path, 3, 4)
    path = tmp_path / "stream.json"
    os.unlink(path) if damage is None else path.write_bytes(damage)
    found = look(tmp_path)
    assert (counted(found), found.census.manifest, found.census.native) == ((4, 8, False, 3), None, True)
    assert [problem.startswith(f"{path}: ") for problem in found.problems] == [True]
    os.unlink(tmp_path / "head.json")
    assert counted(look(tmp_path)) == (4, None, False, 3)


def test_damaged_mark_of_retired_chunks_is_told(tmp_path: Path) -> None:
    produce(tmp_path, 4, end=False)
    (tmp_path / "retired.json").write_bytes(b"")
    found = look(tmp_path)
    assert (counted(found), len(found.problems)) == ((2, 4, False, 0), 1)


@pytest.mark.parametrize("name", ["stream.json", "head.json"])
def test_later_format_is_refused(name: str, tmp_path: Path) -> None:
    produce(tmp_path, 4)
    path = tmp_path / name
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"format": 3}))
    with pytest.raises(VersionUnsupported):
        look(tmp_path)


@pytest.mark.parametrize(
    ("end", "extra", "expected", "problems"),
    [
        (False, None, (2, None, False, 0), 0),
        (True, None, (2, None, True, 0), 0),
        (False, "chunk_00002.jsonl", (2, None, False, 0), 0),
        (True, "chunk_00002.jsonl", (2, None, False, 0), 1),
        (False, "chunk_00003.jsonl.completed", (2, None, False, 0), 1),
    ],
)
def test_foreign_directory(
    end: bool, extra: str | None, expected: tuple[Any, ...], problems: int, tmp_path: Path
) -> None:
    foreign(tmp_path, ROWS, ROWS, end=end)
    if extra is not None:
        (tmp_path / extra).touch()
    found = look(tmp_path)
    assert (counted(found), found.census.native, found.disk.size) == (expected, False, 2 * len(ROWS))
    assert len(found.problems) == problems


def test_foreign_names_are_taken_as_they_are(tmp_path: Path) -> None:
    for name in ("chunk_0.jsonl", "chunk_001.jsonl"):
        (tmp_path / name).write_bytes(ROWS)
        (tmp_path / f"{name}.completed").touch()
    os.utime(tmp_path / "chunk_001.jsonl.completed", (NOW, NOW - 7))
    checkpoint(tmp_path, "sft", 2, 1, NOW)
    found = look(tmp_path)
    assert (found.disk.size, found.disk.missing, found.unread_since) == (2 * len(ROWS), (), {"sft": NOW - 7})


def test_chunks_without_any_marker_are_refused(tmp_path: Path) -> None:
    (tmp_path / "chunk_00000.jsonl").write_bytes(ROWS)
    with pytest.raises(StreamUnsealed, match=r"1 chunk files, but no .completed marker.*lazyshard adopt"):
        look(tmp_path)


def test_two_files_of_one_chunk_are_refused(tmp_path: Path) -> None:
    foreign(tmp_path, ROWS)
    (tmp_path / "chunk_0.jsonl").write_bytes(ROWS)
    with pytest.raises(StreamInvalid, match="are both chunk 0"):
        look(tmp_path)


def nowhere(directory: Path) -> Path:
    return directory / "nowhere"


def a_file(directory: Path) -> Path:
    (directory / "file").touch()
    return directory / "file"


def only_an_owner(directory: Path) -> Path:
    (directory / "stream.owner").touch()
    return directory


@pytest.mark.parametrize("make", [nowhere, a_file, only_an_owner, lambda directory: directory])
def test_no_stream(make: Callable[[Path], Path], tmp_path: Path) -> None:
    with pytest.raises(StreamMissing):
        look(make(tmp_path))


@needs_root
def test_stream_that_may_not_be_listed_can_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a look needs are known names."""
    produce(tmp_path, 4, end=False)
    tmp_path.chmod(0o711)
    # A relative path, as the directories above are closed to the other user.
    monkeypatch.chdir(tmp_path)

    def other_user() -> None:
        os.setgid(65534)
        os.setuid(65534)
        with pytest.raises(PermissionError):
            os.listdir(".")
        assert counted(look(Path("."))) == (2, 4, False, 0)

    assert forked(other_user) == 0
