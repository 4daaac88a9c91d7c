"""Functions that raise, return nonsense, print, hang, take minutes to import, or take their process with them."""

import signal
from pathlib import Path
from typing import Final

import pytest

from lazyshard_producer.cli import main
from lazyshard_producer.errors import OUT_OF_MEMORY, SettingInvalid
from lazyshard_producer.rows.recipe import Maker
from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import (
    assert_one_line,
    catches,
    ids,
    published,
    refused,
    rows,
    run,
    run_arguments,
    running,
    wait_until,
)
from tests.producer.commands import Running
from tests.producer.rows.draining import making
from tests.stream.streams import raised

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
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_bytes(rows(0, 6))
    return path


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
def test_nonsense_is_quarantined(function: str, workers: int, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(transforming(out, source, function, "--on-bad-row", "quarantine", "--workers", workers)) == 0
    assert ids(out) == [0, 1, 2, 4, 5]
    (entry,) = refused(out)
    assert (entry["line"], entry["row"]) == (4, '{"id":3,"text":"row 3"}')
    assert entry["reason"].startswith(f"--transform {NONSENSE[function]}")


@pytest.mark.parametrize("option", ["--transform", "--where", "--encode"])
def test_no_memory_stops_the_run(option: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    more = (option, f"{HERE}:has_no_memory", "--on-bad-row", "quarantine", "--no-progress")
    assert main(run_arguments(out, [source], 2, *more)) == OUT_OF_MEMORY
    assert_one_line(capsys.readouterr().err, "not enough memory: ", "the image cannot be decoded")
    assert not (out / "quarantine.jsonl").exists()
    assert published(out) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [("exiting", "import sys\nsys.exit(0)\n"), ("raising", "raise KeyError('x')\n"), ("torn", "def f(row: return\n")],
)
def test_module_that_cannot_be_imported(name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert raised(SettingInvalid, Maker, making(transform=f"{name}:f")).option == "--transform"


def test_what_is_printed_disturbs_nothing(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run(*transforming(out, source, "prints", "--workers", 1))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"printed {number}" for number in range(6)]
    assert ids(out) == list(range(6))


def catches_no_more(pid: int) -> bool:
    return not catches(pid, signal.SIGTERM)


def test_a_function_that_hangs_is_left_by_the_second_signal(source: Path, nursery: Commands, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Running(nursery, *transforming(out, source, "hangs")) as run:
        run.wait_until(lambda: (nursery.folder / "hangs").exists() and published(out) == 1)
        run.send(signal.SIGTERM)
        # It is noted, and seen only once the function gives its row.
        run.wait_until(lambda: catches_no_more(run.pid))
        assert run.end(signal.SIGTERM)[0] == -signal.SIGTERM
    assert ids(out) == [0, 1]
    assert main(run_arguments(out, [source], 2)) == 0
    assert ids(out) == list(range(6))


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
            wait_until(lambda: process.poll() is not None or catches_no_more(process.pid), process)
        assert process.wait(60) == -signal.SIGTERM
