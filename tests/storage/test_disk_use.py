import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.storage import disk_use
from lazyshard.storage.disk_use import (
    LISTED_CHUNKS,
    SAMPLED_CHUNKS,
    DiskUse,
    Lines,
    count_lines,
    estimate_size,
    free_bytes,
    measure_disk,
    sampled_chunks,
)


def chunk(directory: Path, number: int, data: int, seal: int) -> None:
    (directory / f"chunk_{number:05d}.jsonl").write_bytes(b"d" * data)
    (directory / f"chunk_{number:05d}.jsonl.completed").write_bytes(b"s" * seal)


@given(first=st.integers(0, 10**15), count=st.integers(0, 10**6), most=st.integers(2, 200))
def test_sampled_chunks_are_spread_over_all(first: int, count: int, most: int) -> None:
    chosen = sampled_chunks(first, first + count, most)
    assert len(chosen) == min(count, most)
    assert chosen == sorted(set(chosen))
    if count:
        assert (chosen[0], chosen[-1]) == (first, first + count - 1)
    pauses = {later - earlier for earlier, later in itertools.pairwise(chosen)}
    assert not pauses or max(pauses) - min(pauses) <= 1


def test_sampled_chunks_are_pinned() -> None:
    assert sampled_chunks(0, 3) == [0, 1, 2]
    assert sampled_chunks(10, 110, 4) == [10, 43, 76, 109]
    assert sampled_chunks(7, 7) == []


def test_size_of_all_chunks_is_exact() -> None:
    assert estimate_size(3, {0: 10, 1: 20, 2: 1}, 2) == 31


def test_partial_last_chunk_does_not_count_for_others() -> None:
    assert estimate_size(101, {0: 10, 50: 20, 100: 1}, 100) == 15 * 100 + 1


def test_size_of_chunks_of_which_only_the_last_is_known() -> None:
    assert estimate_size(4, {3: 5}, 3) == 20


@pytest.mark.parametrize("sizes", [{}, {0: 0}])
def test_nothing_is_known_of_the_sizes(sizes: dict[int, int]) -> None:
    assert estimate_size(5, sizes, 4) == 0


@given(size=st.integers(0, 10**9), count=st.integers(1, 10**6))
def test_equal_chunks_are_estimated_exactly(size: int, count: int) -> None:
    sizes = dict.fromkeys(sampled_chunks(0, count), size)
    assert estimate_size(count, sizes, count - 1) == size * count


def test_few_chunks_are_all_measured(tmp_path: Path) -> None:
    chunk(tmp_path, 3, 100, 10)
    chunk(tmp_path, 4, 50, 10)
    (tmp_path / "head.json").write_bytes(b"not counted")
    assert measure_disk(tmp_path, 3, 5) == DiskUse(size=170, exact=True, chunk_size=85.0, missing=())


def test_what_is_being_written_counts(tmp_path: Path) -> None:
    chunk(tmp_path, 0, 100, 10)
    workplace = tmp_path / ".tmp" / "1.0123456789abcdef"
    workplace.mkdir(parents=True)
    (workplace / "chunk_00001.jsonl").write_bytes(b"d" * 7)
    assert measure_disk(tmp_path, 0, 1).size == 117


def test_many_chunks_are_estimated_from_some(tmp_path: Path) -> None:
    stop = LISTED_CHUNKS + 1
    looked_at = sampled_chunks(0, stop)
    for number in looked_at:
        chunk(tmp_path, number, 90, 10)
    found = measure_disk(tmp_path, 0, stop)
    assert found == DiskUse(size=100 * stop, exact=False, chunk_size=100.0, missing=())
    os.unlink(tmp_path / f"chunk_{looked_at[5]:05d}.jsonl")
    assert measure_disk(tmp_path, 0, stop) == DiskUse(100 * stop, False, 100.0, (looked_at[5],))


def test_a_chunk_that_is_not_looked_at_is_missed_all_the_same(tmp_path: Path) -> None:
    stop = 2 * SAMPLED_CHUNKS
    for number in range(stop):
        chunk(tmp_path, number, 90, 10)
    (gone,) = set(range(101, 103)) - set(sampled_chunks(0, stop))
    os.unlink(tmp_path / f"chunk_{gone:05d}.jsonl")
    assert measure_disk(tmp_path, 0, stop) == DiskUse(100 * stop, False, 100.0, (gone,))


def test_no_chunk(tmp_path: Path) -> None:
    assert measure_disk(tmp_path, 0, 0) == DiskUse(size=0, exact=True, chunk_size=None, missing=())


def test_chunk_without_a_file_takes_nothing(tmp_path: Path) -> None:
    chunk(tmp_path, 0, 100, 10)
    chunk(tmp_path, 1, 100, 10)
    os.unlink(tmp_path / "chunk_00001.jsonl.completed")
    assert measure_disk(tmp_path, 0, 2) == DiskUse(size=110, exact=True, chunk_size=110.0, missing=(1,))


def test_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "q"
    path.write_bytes(b"1\n22\n333\n")
    assert count_lines(path) == Lines(3, 9, True)
    path.write_bytes(b"")
    assert count_lines(path) == Lines(0, 0, True)


def test_lines_of_a_long_file_are_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_use, "_COUNTED_BYTES", 40)
    monkeypatch.setattr(disk_use, "_READ_BYTES", 20)
    path = tmp_path / "q"
    path.write_bytes(b"123456789\n" * 100)
    assert count_lines(path) == Lines(100, 1000, False)
    path.write_bytes(b"123456789\n" * 4)
    assert count_lines(path) == Lines(4, 40, True)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("/etc/passwd", path), lambda path: None])
def test_what_is_no_plain_file_has_no_lines(make: object, tmp_path: Path) -> None:
    assert callable(make)
    make(tmp_path / "q")
    assert count_lines(tmp_path / "q") is None


def test_free_bytes(tmp_path: Path) -> None:
    assert isinstance(free_bytes(tmp_path), int)
    assert free_bytes(tmp_path / "nowhere") is None
