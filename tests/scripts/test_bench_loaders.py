"""The side by side: its arithmetic, and that a loader that does not do the work is found out."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.benchmarks import bench_loaders, bench_loaders_rounds
from scripts.benchmarks.bench_loaders_cases import Settings
from scripts.benchmarks.bench_loaders_data import Data, make_data
from scripts.benchmarks.bench_loaders_peers import LOADERS, Loader, LoaderFailed, Taken, WrongRows, checked, run_process
from scripts.benchmarks.bench_loaders_process import MODULES, count, count_batches, read
from scripts.benchmarks.bench_loaders_report import case_table, loader_table, ratio_table, ratios, worse
from scripts.benchmarks.bench_loaders_rounds import Found, Key, Rounds
from scripts.benchmarks.bench_loaders_tree import Memory, end, members, memory, processor_s, rollup_memory, stat_fields

OURS = next(loader for loader in LOADERS if loader.name == "lazyshard")
FLOOR = next(loader for loader in LOADERS if loader.name == "orjson")
GRAIN = next(loader for loader in LOADERS if loader.name == "grain")
MINIMAL = next(loader for loader in LOADERS if loader.name == "minimal")


def settings(case: str, which: str = "A", rows: int = 6) -> Settings:
    return Settings("/data", "/native", "/offsets", which, case, rows, 2)


def taken(*seconds: float) -> list[Taken]:
    return [Taken(one, 0.25, one * 2, 100.0, 60.0) for one in seconds]


def test_the_probe_is_a_row_that_is_drawn_and_what_is_random_is_no_more_than_agreed() -> None:
    assert settings("order").drawn() == [0, 1, 2, 3, 4, 5]
    assert settings("order").probe == 4
    assert sorted(settings("random").drawn()) == [0, 1, 2, 3, 4, 5]
    many = settings("random", "B", 1000)
    assert len(set(many.drawn())) == 400
    assert many.probe in many.drawn()


def test_a_window_is_four_chunks_or_all_there_is() -> None:
    assert settings("shuffled", rows=100).window_rows == 8
    assert settings("shuffled", rows=6).window_rows == 6


def test_every_row_is_counted_whether_in_batches_or_not() -> None:
    rows = [{"id": number} for number in range(5)]
    assert count(rows, 3) == (5, 10, {"id": 3})
    assert count_batches([rows[:3], rows[3:]], 3) == (5, 10, {"id": 3})
    assert count(rows, 7) == (5, 10, None)


class BeginsAnew:
    """Its own iterator, which begins anew whenever it is asked for one."""

    def __iter__(self) -> "BeginsAnew":
        self.rows = iter([{"id": number} for number in range(6)])
        return self

    def __next__(self) -> dict[str, int]:
        return next(self.rows)


def test_the_first_row_is_not_read_twice_by_looking_when_it_comes() -> None:
    module = SimpleNamespace(READERS={"x": lambda settings: (BeginsAnew, False)})
    found = read(module, "x", settings("order"))
    assert (found["rows"], found["ids"], found["probe"]) == (6, 15, '{"id":4}')
    assert 0 < found["first_s"] <= found["seconds"]


def test_no_rows_at_all_are_counted_as_none() -> None:
    found = read(SimpleNamespace(READERS={"x": lambda settings: (list, True)}), "x", settings("loader"))
    assert (found["rows"], found["ids"], found["probe"]) == (0, 0, "null")


def report(**changes: Any) -> dict[str, Any]:
    return {"rows": 6, "ids": 15, "probe": '{"id":4}', "seconds": 12.0, "first_s": 0.5, "processor_s": 6.0} | changes


def test_a_run_that_did_the_work_gives_its_figures_by_the_row() -> None:
    found = checked("grain", report(), Memory(80.0, 50.0), settings("order"), 1234, '{"id":4}')
    assert found == Taken(2.0, 0.5, 1.0, 80.0, 50.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 5}, "grain, data A, one process, in order: expected 6 rows, read 5"),
        ({"ids": 14}, "expected 15 as the sum of ids, read 14"),
        ({"probe": "null"}, 'row 4 is not that of the source: expected {"id":4}..., read null...'),
    ],
)
def test_rows_that_did_not_come_or_are_others_fail(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongRows) as caught:
        checked("grain", report(**changes), Memory(80.0, 50.0), settings("order"), 1234, '{"id":4}')
    assert message in str(caught.value)


def test_bytes_that_were_not_read_fail() -> None:
    checked("bytes", report(rows=1234), Memory(1.0, 1.0), settings("order"), 1234, "")
    with pytest.raises(WrongRows, match="expected 1,234 bytes, read 1,233"):
        checked("bytes", report(rows=1233), Memory(1.0, 1.0), settings("order"), 1234, "")


def found_of(figures: dict[tuple[str, str, str], list[Taken]]) -> Found:
    return Found({Key(*key): values for key, values in figures.items()})


def test_a_ratio_is_taken_within_a_round() -> None:
    assert ratios(taken(1.0, 3.0), taken(2.0, 1.5)) == [0.5, 2.0]


def test_what_is_behind_or_below_what_is_asked_for_is_told() -> None:
    found = found_of(
        {
            ("A", "order", "orjson"): taken(1.0, 1.0),
            ("A", "order", "lazyshard"): taken(1.25, 1.25),
            ("A", "order", "minimal"): taken(0.5, 0.5),
            ("A", "order", "grain"): taken(1.0, 1.0),
            ("A", "shuffled", "orjson"): taken(1.0, 1.0),
            ("A", "shuffled", "lazyshard"): taken(2.5, 2.5),
            ("A", "shuffled", "grain"): taken(2.45, 2.45),
        }
    )
    assert worse(found, [FLOOR, OURS, GRAIN, MINIMAL]) == [
        "A, one process, in order: 0.80 of the floor, asked for: 0.85 or more",
        "A, one process, in order: behind grain, 0.80 of its speed",
        "A, one process, shuffled: 0.50 of our speed in order, asked for: 0.8 or more",
    ]


def test_what_holds_is_not_told() -> None:
    found = found_of(
        {
            ("B", "order", "orjson"): taken(1.0),
            ("B", "order", "lazyshard"): taken(1.1),
            ("B", "order", "grain"): taken(0.5),
            ("B", "shuffled", "orjson"): taken(1.0),
            ("B", "shuffled", "lazyshard"): taken(1.2),
            ("B", "loader", "lazyshard"): taken(1.0),
            ("B", "loader", "grain"): taken(1.1),
        }
    )
    assert worse(found, [FLOOR, OURS, GRAIN]) == []
    found.taken[Key("B", "loader", "grain")] = taken(0.5)
    assert worse(found, [FLOOR, OURS, GRAIN]) == ["B, 2 workers, in order: behind grain, 0.50 of its speed"]


def test_tables_leave_out_what_was_not_measured() -> None:
    found = found_of(
        {
            ("A", "order", "orjson"): taken(0.001),
            ("A", "order", "lazyshard"): taken(0.002),
            ("A", "order", "grain"): taken(0.004),
            ("A", "random", "orjson"): taken(0.001),
            ("A", "random", "lazyshard"): taken(0.008),
        }
    )
    assert case_table(found, "A", "order", ["orjson", "grain", "lazyshard", "litdata"])[2:] == [
        "| orjson | 1,000 | 1 (1 to 1) | 250.0 | 2,000.0 | 100 | 60 |",
        "| **lazyshard** | 500 | 0.5 (0.5 to 0.5) | 250.0 | 4,000.0 | 100 | 60 |",
        "| grain | 250 | 0.25 (0.25 to 0.25) | 250.0 | 8,000.0 | 100 | 60 |",
    ]
    assert ratio_table(found, "A", ["order", "random"], ["lazyshard", "grain", "litdata"]) == [
        "| A: ratio to the floor | one process, in order | one process, ds[i] at random |",
        "|---|---|---|",
        "| **lazyshard** | 0.5 | 0.125 |",
        "| grain | 0.25 |  |",
    ]


def test_conversions_are_in_the_table_of_loaders_and_what_was_left_out_is_not() -> None:
    found = Found(conversions={("A", "grain"): (1.25, 400.0)}, left_out={"minimal": "no environment"})
    versions = {"lazyshard": "this release", "grain": "grain 0.2.18"}
    lines = loader_table([OURS, GRAIN, MINIMAL], versions, found)
    assert lines[0] == "| loader | version | settings | conversion of A |"
    assert lines[2].endswith(" | none |")
    assert lines[3].startswith("| grain | grain 0.2.18 | ArrayRecord") and lines[3].endswith(" | 1.2 s, 400 MB |")
    assert len(lines) == 4


def test_a_loader_without_an_environment_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "grain").mkdir()
    (tmp_path / "grain.log").write_text("Collecting grain\nERROR: No matching distribution found for grain\n")
    found, reasons = bench_loaders.available([FLOOR, OURS, GRAIN, MINIMAL], tmp_path)
    assert found == [FLOOR, OURS]
    assert reasons == {
        "grain": "grain is not installed: ERROR: No matching distribution found for grain",
        "minimal": "torchdata is not installed: no environment",
    }


@pytest.mark.parametrize("arguments", [["--rows-a", "1500"], ["--rows-b", "12"], ["--rounds", "0"], ["--rows-b", "0"]])
def test_sizes_that_leave_no_whole_chunks_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_loaders.parse(arguments)
    assert "multiple of" in (said := capsys.readouterr().err) or "at least 1" in said


DATA = Data("A", Path("/data"), Path("/offsets"), 4, 2)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """Loaders and cases that fail; all others do their work in no time."""
    names: set[tuple[str, str]] = set()

    def run(loader: Loader, environments: Path, what: str, settings: Settings, timeout_s: float) -> object:
        if (loader.name, what if what == "convert" else settings.case) in names:
            raise LoaderFailed("it is broken")
        return report(rows=4, ids=6, probe="{}"), Memory(1.0, 1.0)

    monkeypatch.setattr(bench_loaders_rounds, "run_process", run)
    monkeypatch.setattr(Data, "bytes", 10)
    monkeypatch.setattr(Data, "row", lambda self, number: "{}")
    return names


@pytest.mark.parametrize(
    ("what", "reason"),
    [("convert", "conversion of A: it is broken"), ("random", "data A, one process, ds[i] at random: it is broken")],
)
def test_a_loader_that_fails_is_left_out_and_named(
    failing: set[tuple[str, str]], tmp_path: Path, what: str, reason: str
) -> None:
    failing.add(("grain", what))
    found = Rounds([FLOOR, OURS, GRAIN], tmp_path, tmp_path, ["order", "random"], 1.0).run([DATA], 2)
    assert found.left_out == {"grain": reason}
    assert {key.name for key in found.taken} == {"orjson", "lazyshard"}
    assert [len(values) for values in found.taken.values()] == [2, 2, 2, 2]


def test_the_benchmark_fails_where_ours_does(failing: set[tuple[str, str]], tmp_path: Path) -> None:
    failing.add(("lazyshard", "random"))
    with pytest.raises(LoaderFailed, match="it is broken"):
        Rounds([FLOOR, OURS, GRAIN], tmp_path, tmp_path, ["order", "random"], 1.0).run([DATA], 2)


def test_what_the_system_says_is_read_whatever_a_process_is_called() -> None:
    assert stat_fields("7 (a) b) S 1 2 3 0 -1")[:4] == ["S", "1", "2", "3"]
    assert rollup_memory("aa-bb ---p 0 00:00 0 [rollup]\nPss:    2000 kB\nPss_Anon:  1000 kB\n") == Memory(2.048, 1.024)


def test_what_a_process_has_started_counts_and_is_ended_even_where_that_process_has_ended() -> None:
    # The shell ends at once; what it started holds 32 MB, and says so before it waits.
    child = "import sys; data = bytes([1]) * (32 << 20); print(len(data), flush=True); sys.stdin.read()"
    command = ["sh", "-c", '"$0" -c "$1" <&3 & exec 3<&-', sys.executable, child]
    waiting, hold = os.pipe()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, start_new_session=True, preexec_fn=lambda: os.dup2(waiting, 3), close_fds=False
    ) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            process.wait()
            assert process.pid not in members(process.pid)
            assert memory(process.pid).anonymous > 32
        finally:
            end(process.pid, 5.0)
            os.close(waiting)
            os.close(hold)
        assert all(fields[0] == "Z" for fields in members(process.pid).values())


def test_processor_time_of_workers_counts_while_they_run() -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"
    before = processor_s()
    with subprocess.Popen([sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert processor_s() - before >= 0.25
        process.kill()


def test_no_other_loader_reads_with_ours() -> None:
    read = sorted({module for name, module in MODULES.items() if "lazyshard" not in name})
    modules = [f"scripts.benchmarks.bench_loaders_{module}" for module in [*read, "process"]]
    code = f"import sys, {', '.join(modules)}; print('lazyshard' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


def test_a_process_that_hangs_is_given_up(tmp_path: Path) -> None:
    python = tmp_path / "slow" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexec sleep 100\n")
    python.chmod(0o755)
    told = Settings(str(tmp_path / "data"), "", "", "A", "order", 4, 2)
    start = time.monotonic()
    with pytest.raises(LoaderFailed, match=r"not finished within 0\.1 s"):
        run_process(Loader("slow", "slow", ""), tmp_path, "read", told, 0.1)
    assert time.monotonic() - start < 50


def test_the_last_words_of_a_process_are_the_reason(tmp_path: Path) -> None:
    python = tmp_path / "bad" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho 'Traceback' >&2; echo 'ImportError: no such thing' >&2; exit 1\n")
    python.chmod(0o755)
    told = Settings(str(tmp_path / "data"), "", "", "A", "order", 4, 2)
    with pytest.raises(LoaderFailed, match=r"^ImportError: no such thing$"):
        run_process(Loader("bad", "bad", ""), tmp_path, "read", told, 60)


def test_rows_of_both_kinds_are_made_and_found_again(tmp_path: Path) -> None:
    data = make_data(tmp_path, "B", 16)
    assert (data.chunks, data.samples_per_chunk, data.offsets.stat().st_size) == (8, 2, 8 * 3 * 8)
    row = json.loads(data.row(5))
    assert (row["id"], row["text"], len(row["image"])) == (5, "What does image 5 show?", 1_000_000)


def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.json"
    options = f"--rows-a 1000 --data A --case order --only bytes grain --rounds 1 --dir {tmp_path} --json {results}"
    monkeypatch.setattr(sys, "argv", ["bench_loaders.py", *options.split()])
    assert bench_loaders.main() == 0
    said = capsys.readouterr().out
    assert "| **lazyshard** | " in said
    assert "left out: grain: no environments of other loaders were asked for" in said
    line = json.loads(results.read_text())
    assert [(one["data"], one["case"], one["loader"]) for one in line["results"]] == [
        ("A", "order", "orjson"),
        ("A", "order", "lazyshard"),
        ("A", "order", "bytes"),
    ]
    for one in line["results"]:
        assert one["rows_a_second"] > 0 and one["processor_us_a_row"] > 0 and one["pss_mb"] >= one["anonymous_mb"] > 0
