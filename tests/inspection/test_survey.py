"""What one look at a stream finds, in whatever condition it is: chunks, sizes, consumers, mixture."""

import errno
import itertools
import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.errors import FileInvalid, StreamMissing
from lazyshard.format.records import Head
from lazyshard.format.seal import MixedSource
from lazyshard.inspection import survey
from lazyshard.stream.listing import names_of, retire
from lazyshard_producer.cli import main
from tests.cli.commands import as_other_user
from tests.harness.processes.producing import rows as made_rows
from tests.stream.damage import checkpoint, edit_head, reads
from tests.stream.streams import foreign, head, needs_root, produce, raised, raising

NOW = 1_700_000_000.0
ROWS = b'{"id":0}\n{"id":1}\n'
CONTRADICTING = Head(2, 3, False, "idle", 0.0, "node", 1, NOW).encode()


def look(directory: Path) -> survey.Survey:
    return survey.take_survey(directory, NOW)


def counted(survey: survey.Survey) -> tuple[int, int | None, bool, int]:
    census = survey.census
    return census.chunks, census.samples, census.ended, census.retired


def used(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("chunk_*"))


def test_live_stream(tmp_path: Path) -> None:
    (produce(tmp_path, 8, end=False) / "quarantine.jsonl").write_bytes(b"{}\n{}\n")
    found = look(tmp_path)
    assert (counted(found), found.problems) == ((4, 8, False, 0), ())
    assert (found.looked_at, found.gone, found.consumers) == (NOW, False, ())
    assert (found.quarantine, found.census.head) == (survey.Lines(2, 6, True), head(tmp_path))
    assert (found.disk.size, found.disk.exact, found.free is not None) == (used(tmp_path), True, True)
    retire(tmp_path, 3, 4)
    found = look(tmp_path)
    assert (counted(found), found.problems) == ((4, 8, False, 3), ())
    assert (found.disk.size, found.disk.exact) == (used(tmp_path), True)


def test_look_at_a_long_stream_lists_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    produce(tmp_path, 2, end=False)
    edit_head(tmp_path, chunks=10**15, samples=2 * 10**15, updated_at=NOW - 60)
    monkeypatch.setattr(survey, "list_chunks", raising(AssertionError("listed")))
    found = look(tmp_path)
    assert found.census.chunks == 10**15
    assert len(found.disk.missing) == survey.SAMPLED_CHUNKS - 1
    (problem,) = found.problems
    assert problem.startswith(f"chunk {found.disk.missing[0]} is published, but") and "126 others" in problem


def test_new_chunks_that_do_not_appear_yet_are_not_lost(tmp_path: Path) -> None:
    produce(tmp_path, 8, end=False)
    os.unlink(tmp_path / "chunk_00002.jsonl")
    os.unlink(tmp_path / "chunk_00003.jsonl.completed")

    def missed(age: float) -> list[str]:
        edit_head(tmp_path, updated_at=NOW - age)
        return [" ".join(problem.split()[:2]) for problem in look(tmp_path).problems]

    assert (missed(59), missed(60)) == ([], ["chunk 2"])
    os.unlink(tmp_path / "chunk_00000.jsonl")
    assert missed(0) == ["chunk 0"]


def test_chunk_that_is_retired_while_it_is_looked_for_is_not_lost(tmp_path: Path) -> None:
    produce(tmp_path, 8, end=False)
    take_census = survey.take_census

    def slow_census(directory: Path, problems: list[str]) -> object:
        try:
            return take_census(directory, problems)
        finally:
            retire(directory, 2, 4)

    with mock.patch.object(survey, "take_census", slow_census):
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


@pytest.mark.parametrize(
    ("samples", "end", "damaged", "expected", "problems"),
    [
        *[(5, False, {"head.json": data}, (2, 4, False, 0), 1) for data in (b"", b"{", b'{"format":1}', None)],
        *[(5, True, {"head.json": data}, (3, 5, True, 0), 1) for data in (b"", None)],
        (5, True, {"stream.end": None, "head.json": None}, (2, 4, False, 0), 1),  # Being ended: partial does not count
        (4, False, {"head.json": None, "chunk_00001.jsonl.completed": b""}, (1, 2, False, 0), 2),
        (4, False, {"head.json": CONTRADICTING}, (2, 4, False, 0), 1),  # Contradicts the manifest, or a gap
        (6, False, {"head.json": None, "chunk_00001.jsonl": None}, (1, 2, False, 0), 2),
    ],
)
def test_damage_is_told_and_chunks_are_listed(
    samples: int, end: bool, damaged: dict[str, bytes | None], expected: Any, problems: int, tmp_path: Path
) -> None:
    produce(tmp_path, samples, end=end)
    for name, data in damaged.items():
        os.unlink(tmp_path / name) if data is None else (tmp_path / name).write_bytes(data)
    found = look(tmp_path)
    assert (counted(found), found.census.head, found.gone) == (expected, None, None)
    assert len(found.problems) == problems
    assert found.problems[0].startswith(f"{tmp_path}/head.json: ")


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


@pytest.mark.parametrize(
    ("end", "extra", "ended", "problems"),
    [
        (False, None, False, 0),
        (True, None, True, 0),
        (False, "chunk_00002.jsonl", False, 0),
        (True, "chunk_00002.jsonl", False, 1),
        (False, "chunk_00003.jsonl.completed", False, 1),
    ],
)
def test_foreign_directory(end: bool, extra: str | None, ended: bool, problems: int, tmp_path: Path) -> None:
    foreign(tmp_path, ROWS, ROWS, end=end)
    for ending in ("", ".completed"):  # Names are taken as they are
        (tmp_path / f"chunk_00001.jsonl{ending}").rename(tmp_path / f"chunk_001.jsonl{ending}")
    os.utime(tmp_path / "chunk_001.jsonl.completed", (NOW, NOW - 7))
    checkpoint(tmp_path, "sft", 2, 1, NOW)
    if extra is not None:
        (tmp_path / extra).touch()
    found = look(tmp_path)
    assert (counted(found), found.census.native, found.disk.size) == ((2, None, ended, 0), False, 2 * len(ROWS))
    assert (found.disk.missing, found.unread_since, len(found.problems)) == ((), {"sft": NOW - 7}, problems)


def test_no_stream(tmp_path: Path) -> None:
    (tmp_path / "stream.owner").touch()
    for nothing in (tmp_path / "nowhere", tmp_path, tmp_path / "stream.owner"):
        raised(StreamMissing, look, nothing)
    (tmp_path / "stream.owner").unlink()
    (tmp_path / "chunk_00000.jsonl").write_bytes(ROWS)
    raised(FileInvalid, look, tmp_path)


@needs_root
def test_stream_that_may_not_be_listed_can_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    produce(tmp_path, 4, end=False)

    def work() -> None:
        raised(PermissionError, os.listdir, ".")
        assert counted(look(Path("."))) == (2, 4, False, 0)

    as_other_user(tmp_path, monkeypatch, work, mode=0o711)


def chunk(directory: Path, number: int, data: int, seal: int) -> None:
    (directory / f"chunk_{number:05d}.jsonl").write_bytes(b"d" * data)
    (directory / f"chunk_{number:05d}.jsonl.completed").write_bytes(b"s" * seal)


@given(first=st.integers(0, 10**15), count=st.integers(0, 10**6), most=st.integers(2, 200))
def test_sampled_chunks_are_spread_over_all(first: int, count: int, most: int) -> None:
    chosen = survey.sampled_chunks(first, first + count, most)
    assert len(chosen) == min(count, most)
    assert chosen == sorted(set(chosen))
    if count:
        assert (chosen[0], chosen[-1]) == (first, first + count - 1)
    pauses = {later - earlier for earlier, later in itertools.pairwise(chosen)}
    assert not pauses or max(pauses) - min(pauses) <= 1


@pytest.mark.parametrize(
    ("chunks", "sizes", "last", "size"),
    [
        (3, {0: 10, 1: 20, 2: 1}, 2, 31),
        (101, {0: 10, 50: 20, 100: 1}, 100, 15 * 100 + 1),  # The last one may be partial: it does not count for others
        (4, {3: 5}, 3, 20),
        (10**6, {0: 7, 500_000: 7, 999_999: 7}, 999_999, 7 * 10**6),
        (5, {}, 4, 0),
        (5, {0: 0}, 4, 0),
    ],
)
def test_size_is_estimated_from_some_chunks(chunks: int, sizes: dict[int, int], last: int, size: int) -> None:
    assert survey.estimate_size(chunks, sizes, last) == size


def test_few_chunks_are_all_measured(tmp_path: Path) -> None:
    chunk(tmp_path, 3, 100, 10)
    chunk(tmp_path, 4, 50, 10)
    (tmp_path / "head.json").write_bytes(b"not counted")
    assert survey.measure_disk(tmp_path, 3, 5) == survey.DiskUse(size=170, exact=True, chunk_size=85.0, missing=())
    assert survey.measure_disk(tmp_path, 0, 0) == survey.DiskUse(size=0, exact=True, chunk_size=None, missing=())
    workplace = tmp_path / ".tmp" / "1.0123456789abcdef"  # What is being written counts
    workplace.mkdir(parents=True)
    (workplace / "chunk_00001.jsonl").write_bytes(b"d" * 7)
    os.unlink(tmp_path / "chunk_00004.jsonl.completed")
    assert survey.measure_disk(tmp_path, 3, 5) == survey.DiskUse(size=117, exact=True, chunk_size=110.0, missing=(4,))
    assert isinstance(survey.free_bytes(tmp_path), int) and survey.free_bytes(tmp_path / "nowhere") is None


def test_many_chunks_are_estimated_and_one_that_is_not_looked_at_is_missed_all_the_same(tmp_path: Path) -> None:
    first, stop = 99_900, 99_900 + 2 * survey.SAMPLED_CHUNKS
    for number in range(first, stop):
        chunk(tmp_path, number, 80, 10)
        (tmp_path / f"chunk_{number:05d}.arrays").write_bytes(b"a" * 10)
    measure = partial(survey.measure_disk, tmp_path, first, stop, partial(names_of, arrays=True))
    whole = survey.DiskUse(100 * 2 * survey.SAMPLED_CHUNKS, False, 100.0, ())
    assert measure(survey.LostChunks()) == measure() == whole
    looked_at = survey.sampled_chunks(first, stop)
    for number, kind in ((first + 101, "jsonl"), (first + 103, "jsonl.completed"), (first + 105, "arrays")):
        assert number not in looked_at
        file = tmp_path / f"chunk_{number:05d}.{kind}"
        file.rename(tmp_path / "kept")
        assert measure(survey.LostChunks()).missing == (number,)
        (tmp_path / "kept").rename(file)
    os.unlink(tmp_path / f"chunk_{looked_at[5]:05d}.jsonl")  # One that is not listed is looked up
    assert measure() == whole._replace(missing=(looked_at[5],))
    with mock.patch.object(survey, "unlisted_chunks", return_value=[looked_at[5] + 1, looked_at[5]]):
        assert measure(survey.LostChunks()).missing == (looked_at[5],)


def test_listings_take_a_twentieth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, listed = [0.0], []

    def list_for_two_seconds(directory: Path, first: int, stop: int, *, arrays: bool) -> list[int]:
        listed.append(clock[0])
        clock[0] += 2.0
        return [7, 9]

    monkeypatch.setattr(survey, "unlisted_chunks", list_for_two_seconds)
    monkeypatch.setattr("lazyshard.inspection.survey.time.monotonic", lambda: clock[0])
    lost = survey.LostChunks()
    with mock.patch.object(survey, "unlisted_chunks", side_effect=[OSError(errno.ESTALE, "stale"), [7]]):
        assert survey.LostChunks().unlisted(tmp_path, 0, 1000, arrays=False) == [7]  # a stale directory, listed anew
    for _ in range(50):
        first = 8 if clock[0] >= 10 else 0  # What is retired meanwhile is not missed
        assert lost.unlisted(tmp_path, first, 1000, arrays=False) == ([7, 9] if first == 0 else [9])
        clock[0] += 1.0
    assert listed == [0.0, 42.0]


def test_lines_are_counted_and_those_of_a_long_file_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "_COUNTED_BYTES", 40)
    path = tmp_path / "q"
    for data, lines in (
        (b"1\n22\n333\n", survey.Lines(3, 9, True)),
        (b"", survey.Lines(0, 0, True)),
        (b"123456789\n" * 4, survey.Lines(4, 40, True)),
        (b"123456789\n" * 100, survey.Lines(100, 1000, False)),
    ):
        path.write_bytes(data)
        assert survey.count_lines(path) == lines
    os.mkfifo(tmp_path / "pipe")
    os.symlink("/etc/passwd", tmp_path / "link")
    assert [survey.count_lines(tmp_path / name) for name in ("pipe", "link", ".", "none")] == [None] * 4


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A stream of 30 made_rows, 3 of web to 1 of code until code, of 5 made_rows, is finished."""
    (tmp_path / "web.jsonl").write_bytes(made_rows(0, 25))
    (tmp_path / "code.jsonl").write_bytes(made_rows(100, 105))
    sources = ("--source", "web.jsonl", "--weight", "3", "--source", "code.jsonl", "--weight", "1")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert main(["run", *sources, "--out", "stream", "--samples-per-chunk", "4", "--no-progress"]) == 0
    return tmp_path / "stream"


def test_shares_are_those_of_the_rows_published_so_far_and_at_the_end_both_are_finished(mixed: Path) -> None:
    assert [(one.finished, one.weight) for one in survey.take_survey(mixed, 0.0).mixture] == [(True, 0.0), (True, 0.0)]
    for number in range(3, 8):  # As if chunk 2 were the newest
        (mixed / f"chunk_{number:05d}.jsonl.completed").unlink()
    (mixed / "head.json").unlink()
    (mixed / "stream.end").unlink()
    shares = (MixedSource("web.jsonl", 0.75, 0.75, 9, False), MixedSource("code.jsonl", 0.25, 0.25, 3, False))
    assert survey.take_survey(mixed, 0.0).mixture == shares


def test_large_damaged_and_other_seals_tell_nothing(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "_MAX_SEAL_BYTES", 100)
    found = survey.take_survey(mixed, 0.0)
    assert (found.mixture, found.problems) == ((), ())
    monkeypatch.undo()
    (mixed / "chunk_00007.jsonl.completed").write_bytes(b"{}")
    others = (produce(mixed.parent / "plain", 4, end=False), foreign(mixed.parent / "foreign", ROWS))
    assert [survey.take_survey(one, 0.0).mixture for one in (mixed, *others)] == [()] * 3
