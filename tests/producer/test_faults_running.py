"""What goes wrong while a producer runs; functions that raise, return nonsense, print, hang or take long to import."""

import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard.errors import WaitTimeout
from lazyshard.stream import StreamReader
from lazyshard_producer.cli import main
from lazyshard_producer.errors import OUT_OF_MEMORY, SettingInvalid
from lazyshard_producer.rows.recipe import Maker
from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import (
    assert_one_line,
    catches,
    head,
    ids,
    published,
    refused,
    rows,
    run,
    run_arguments,
    running,
    start,
    wait_until,
)
from tests.producer.commands import Fails, Running, commit
from tests.producer.rows.draining import making
from tests.stream.streams import raised

FAKETIME: Final = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))


def removes(row: dict[str, Any]) -> dict[str, Any]:
    """At the 50th row removes the stream's directory, which is told in the rows."""
    if row["id"] == 50:
        Path("out").rename("away")
        shutil.rmtree("away")
    return row


def test_stream_is_removed(here: Path, fails: Fails) -> None:
    Path("a.jsonl").write_bytes(rows(0, 200))
    arguments = run_arguments(Path("out"), [Path("a.jsonl")], 10, "--no-progress")
    fails([*arguments, "--transform", f"{__name__}:removes"], 7, "error: out: the stream's directory is gone")
    assert not Path("out").exists()
    assert main(arguments) == 0
    assert ids(Path("out")) == list(range(200))


@pytest.mark.skipif(not FAKETIME, reason="needs libfaketime")
def test_clock_jumps_have_no_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, out, clock = tmp_path / "pipe", tmp_path / "out", tmp_path / "clock"
    os.mkfifo(pipe)

    def jump(year: int) -> None:
        """The file is looked at for every call, so it is replaced whole."""
        new = clock.with_suffix(".new")
        new.write_text(f"@{year}-07-01 00:00:00")
        new.replace(clock)

    def published_in(year: int) -> int:
        told = head(out)
        return int(told["chunks"]) if time.gmtime(told["updated_at"]).tm_year == year else -1

    jump(2030)
    with monkeypatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(FAKETIME[0]))
        patch.setenv("FAKETIME_TIMESTAMP_FILE", str(clock))
        patch.setenv("FAKETIME_NO_CACHE", "1")
        patch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        # A pipe is waited for by poll: libfaketime 0.9.10 breaks time.sleep of Python 3.11.
        process = start(*run_arguments(out, [pipe], 10, "--log-every-seconds", "0.1"))
    with process, pipe.open("wb", buffering=0) as writer:
        wait_until((out / "head.json").exists, process)
        for number, year in enumerate((2030, 2001, 2036, 1971)):
            jump(year)
            writer.write(rows(10 * number, 10 * number + 10))
            wait_until(partial(lambda year, chunks: published_in(year) == chunks, year, number + 1), process)
            reader = StreamReader(out, max_wait=0)
            assert reader.read(10 * number)["id"] == 10 * number
            with pytest.raises(WaitTimeout):
                reader.read(10 * number + 10)
        writer.close()
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
    assert [line for line in said.splitlines() if "warning" in line] == []
    assert ids(out) == list(range(40))


HERE: Final = "tests.producer.bad_functions"
MADE: Final = "returned an invalid row: "
JSON: Final = MADE + "cannot be written as JSON: "
NONSENSE: Final = {
    "breaks_off": "raised ValueError: after the first (bad_functions.py:",
    "exits": "raised SystemExit: 0 (bad_functions.py:",
    "cancelled": "raised CancelledError (bad_functions.py:",
    "a_set": JSON,
    "not_a_number": MADE + "NaN",
    "numbers": MADE + "expected a dict, found int",
    "text": "raised TypeError: expected a row, None or rows, got str (recipe.py:",
    "a_surrogate": JSON,
    "huge_number": JSON,
    "deep": JSON,
    "endless": JSON,
    "large": "returned a row of 2009 bytes, longer than the 1000 bytes",
    "recursion": "raised RecursionError: ",
    "raises_digits": "raised KeyError: (not shown: writing it raised ValueError) (bad_functions.py:",
    "raises_a_surrogate": r"raised ValueError: no file \udcff (bad_functions.py:",
    "raises_a_long_text": f"raised ValueError: {'x' * 500}... (bad_functions.py:",
    "raises_what_is_broken": "raised Broken: (not shown: writing it raised RuntimeError) (",
}


@pytest.fixture
def source(source: Path) -> Path:
    source.write_bytes(rows(0, 6))
    return source


def transforming(out: Path, source: Path, function: str, *more: object) -> list[str]:
    return run_arguments(out, [source], 2, "--transform", f"{HERE}:{function}", "--max-row-bytes", 1000, *more)


@pytest.mark.parametrize("function", NONSENSE)
def test_nonsense_is_refused_with_the_reason(function: str) -> None:
    maker = Maker(making(transform=f"{HERE}:{function}", max_row_bytes=1000))
    made = [maker.make(line, 0) for line in rows(2, 5).splitlines(keepends=True)]
    assert [one.refused is None for one in made] == [True, False, True]
    assert made[1].lines == []
    assert made[1].refused is not None
    assert str(made[1].refused.reason).startswith(f"--transform {NONSENSE[function]}")


@pytest.mark.parametrize(("function", "workers"), [("exits", 0), ("deep", 0), ("raises_digits", 1), ("exits", 1)])
def test_nonsense_is_quarantined(function: str, workers: int, source: Path, out: Path) -> None:
    assert main(transforming(out, source, function, "--on-bad-row", "quarantine", "--workers", workers)) == 0
    assert ids(out) == [0, 1, 2, 4, 5]
    (entry,) = refused(out)
    assert (entry["line"], entry["row"]) == (4, '{"id":3,"text":"row 3"}')
    assert entry["reason"].startswith(f"--transform {NONSENSE[function]}")


@pytest.mark.parametrize("option", ["--transform", "--where", "--encode"])
def test_no_memory_stops_the_run(option: str, source: Path, out: Path, fails: Fails) -> None:
    more = (option, f"{HERE}:has_no_memory", "--on-bad-row", "quarantine", "--no-progress")
    fails(run_arguments(out, [source], 2, *more), OUT_OF_MEMORY, "not enough memory: ", "the image cannot be decoded")
    assert not (out / "quarantine.jsonl").exists()
    assert published(out) == 1


def test_module_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in {
        "exits": "import sys\nsys.exit(0)",
        "raises": "raise KeyError('x')",
        "torn": "def f(row: ",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
        assert raised(SettingInvalid, Maker, making(transform=f"{name}:f")).option == "--transform"


def test_what_is_printed_disturbs_nothing(source: Path, out: Path) -> None:
    done = run(*transforming(out, source, "prints", "--workers", 1))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"printed {number}" for number in range(6)]
    assert ids(out) == list(range(6))


def test_a_function_that_hangs_is_left_by_the_second_signal(source: Path, nursery: Commands, out: Path) -> None:
    with Running(nursery, *transforming(out, source, "hangs")) as run:
        run.wait_until(lambda: (nursery.folder / "hangs").exists() and published(out) == 1)
        run.send(signal.SIGTERM)
        # It is noted, and seen only once the function gives its row.
        run.wait_until(lambda: not catches(run.pid, signal.SIGTERM))
        assert run.end(signal.SIGTERM)[0] == -signal.SIGTERM
    assert ids(out) == [0, 1]
    assert main(run_arguments(out, [source], 2)) == 0
    assert ids(out) == list(range(6))


def test_a_signal_while_the_command_is_loaded(source: Path, out: Path) -> None:
    # The first thing that the command does is to note signals; the slow imports come after.
    process = start(*run_arguments(out, [source], 10, "--rate", 0.01))
    wait_until(lambda: catches(process.pid, signal.SIGTERM), process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "Traceback" not in err


def test_workers_that_hang_are_left_by_the_first_signal(source: Path, tmp_path: Path) -> None:
    with running(*transforming(tmp_path / "out", source, "hangs", "--workers", 2), cwd=tmp_path) as process:
        wait_until((tmp_path / "hangs").exists, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_module_that_takes_minutes_to_import_is_left_by_the_second_signal(source: Path, tmp_path: Path) -> None:
    (tmp_path / "users.py").write_text("import pathlib, time\npathlib.Path('imports').touch()\ntime.sleep(600)\n")
    with running(*run_arguments(tmp_path / "out", [source], 2, "--transform", "users:made"), cwd=tmp_path) as process:
        wait_until((tmp_path / "imports").exists, process)
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: process.poll() is not None or not catches(process.pid, signal.SIGTERM), process)
        assert process.wait(60) == -signal.SIGTERM


def snapshot(out: Path) -> dict[str, bytes]:
    """All files; of the lock's nothing but its name is of interest."""
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.mark.full
def test_one_that_wakes_deletes_nothing(nursery: Commands, source: Path, out: Path) -> None:
    source.write_bytes(rows(0, 60))
    limits = ("--max-ahead", 2, "--retain", "consumed", "--consumers", "trainer")
    with Running(nursery, *run_arguments(out, [source], 10, *limits)) as old:
        old.wait_until(lambda: published(out) == 2)
        old.send(signal.SIGSTOP)
        # Lets another producer in, as on a machine where the lock of this one does not hold.
        (out / ".producer.lock").unlink()
        assert nursery.run(*run_arguments(out, [source], 10))[0] == 0
        commit(out, 4, 10)
        before = snapshot(out)
        status, err = old.end(signal.SIGCONT)
        assert status == 6
        assert_one_line(err, "has taken this stream over")
    assert snapshot(out) == before
    assert ids(out) == list(range(60))


@pytest.mark.full
def test_the_second_one_changes_nothing_of_the_first(nursery: Commands, source: Path, out: Path, fails: Fails) -> None:
    source.write_bytes(rows(0, 12) + b"bad\n" + rows(12, 100))
    # The bad row is in the quarantine's file, and no seal counts it yet: a start would cut it off.
    arguments = run_arguments(out, [source], 10, "--on-bad-row", "quarantine", "--max-ahead", 2)
    with Running(nursery, *arguments) as first:
        first.wait_until(lambda: published(out) == 2)
        before = snapshot(out)
        fails(arguments, 6, f"process {first.pid} on ", "already producing into this stream")
        after = snapshot(out)
        for names in (before, after):
            names.pop("head.json")  # which tells that the first one is alive
        assert after == before
        assert first.end(signal.SIGTERM)[0] == 0
