"""What the benchmark of waiting counts and compares, and one tiny run of each part."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from lazyshard import ChunkWriter
from scripts.benchmarks.bench_wait_idle import count_calls, make_stream, measure_asking, measure_idle
from scripts.benchmarks.bench_wait_latency import PER_CHUNK, Case, line_of, measure_latency
from scripts.benchmarks.bench_wait_memory import Case as Stream
from scripts.benchmarks.bench_wait_memory import growth, growth_by_rows, measure_memory
from scripts.benchmarks.bench_wait_ranks import Rank, close_all

pytestmark = pytest.mark.full

STRACE = """\
17 99.900000 openat(AT_FDCWD, "/s/head.json", O_RDONLY) = 3
17 100.000000 openat(AT_FDCWD, "/s/head.json", O_RDONLY|O_NONBLOCK) = 3
17 100.100000 openat(AT_FDCWD, "/s/retired.json", O_RDONLY) = -1 ENOENT (No such file or directory)
18 100.200000 newfstatat(AT_FDCWD, "/s", {st_mode=S_IFDIR|0755, ...}, 0) = 0
18 100.300000 openat(AT_FDCWD, "/s/head.json", O_RDONLY <unfinished ...>
18 100.400000 <... openat resumed>) = 3
18 100.500000 openat(AT_FDCWD, "/s2/head.json", O_RDONLY) = 3
18 100.600000 +++ exited with 0 +++
18 101.000000 openat(AT_FDCWD, "/s/head.json", O_RDONLY) = 3
101.500000 inotify_add_watch(3, "/s", IN_MODIFY) = 1
"""


def test_calls_are_counted_by_name_within_the_time_and_the_directory() -> None:
    assert count_calls(STRACE.splitlines(), Path("/s"), 100.0, 101.0) == {"head.json": 2, "retired.json": 1, ".": 1}
    assert count_calls(STRACE.splitlines(), Path("/s"), 101.2, 102.0) == {".": 1}


def test_the_line_of_a_case_has_median_95th_and_highest() -> None:
    assert line_of([float(value) for value in range(101)]) == "      50.0      95.0     100.0"


def test_growth_is_that_from_the_fewest_to_the_most_chunks() -> None:
    medians = {Stream(10, 2): 5.0, Stream(1000, 2): 7.5, Stream(100, 2): 99.0, Stream(10, 3): 4.0, Stream(100, 3): 3.0}
    assert growth(medians) == {2: 2.5, 3: -1.0}
    assert growth_by_rows(medians) == -1.0


def test_latency_has_a_figure_for_each_stripe_and_rank(tmp_path: Path) -> None:
    found = measure_latency(tmp_path, Case(2, False), stripes=2, warm_up=1)
    assert len(found) == 4 and min(found) > 0


def test_a_rank_that_fails_is_told_with_its_words(tmp_path: Path) -> None:
    rank = Rank(
        "latency", {"directory": str(tmp_path), "rank": 3, "ranks": 2, "per_chunk": 1, "stripes": 1, "woken": True}
    )
    with close_all([rank]), pytest.raises(SystemExit, match="a rank has failed"):
        rank.line()


def test_a_rank_that_reads_a_wrong_row_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = ChunkWriter.write
    monkeypatch.setattr(ChunkWriter, "write", lambda writer, row: write(writer, row | {"id": PER_CHUNK}))
    with pytest.raises(SystemExit, match=f"read sample {PER_CHUNK} instead of 0"):
        measure_latency(tmp_path, Case(1, True), stripes=1, warm_up=0)


def test_waiting_takes_some_of_a_core_but_not_all(tmp_path: Path) -> None:
    make_stream(tmp_path / "s")
    shares = measure_idle(tmp_path / "s", 1, 0.1, 0.2)
    assert len(shares) == 1 and 0 <= shares[0] < 1


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_looks_of_a_waiting_rank_are_counted(tmp_path: Path) -> None:
    make_stream(tmp_path / "s")
    found: Counter[str] = measure_asking(tmp_path / "s", 1, 0.1, 0.5, tmp_path)
    assert found["head.json"] > 0


def test_memory_of_rank_and_workers_is_told_after_all_samples_came(tmp_path: Path) -> None:
    found = measure_memory(tmp_path, Stream(10, 100))
    for who in ("rank", "worker"):
        share, anonymous = found[who]
        assert 1 < anonymous <= share < 10_000


def test_a_row_that_is_not_as_it_was_written_fails_the_memory_run(tmp_path: Path) -> None:
    stream = Stream(4, 100)
    Stream(4, 99).make(tmp_path).rename(tmp_path / "memory_4_100")
    with pytest.raises(SystemExit, match="or others"):
        measure_memory(tmp_path, stream)
