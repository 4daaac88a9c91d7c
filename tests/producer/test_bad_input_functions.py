"""Functions that raise, return nonsense, print, hang, take minutes to import, or take their process with them."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard_producer.cli import main
from lazyshard_producer.errors import OUT_OF_MEMORY
from tests.harness.processes.environment import DEADLINE_S, ROOT
from tests.harness.processes.producing import (
    assert_one_line,
    ids,
    published,
    rows,
    run,
    run_arguments,
    start,
    wait_until,
)

HERE: Final = "tests.producer.bad_functions"

MADE: Final = "--transform made what is no row: "

NONSENSE: Final = {
    "breaks_off": "--transform raised ValueError: after the first (bad_functions.py:",
    "exits": "--transform raised SystemExit: 0 (bad_functions.py:",
    "a_set": MADE + "cannot be written as JSON: ",
    "some_bytes": MADE + "cannot be written as JSON: ",
    "not_a_number": MADE + "NaN and infinities are not JSON; write null or a string",
    "infinite": MADE + "NaN and infinities are not JSON; write null or a string",
    "numbers": MADE + "expected a dict, found int",
    "text": "--transform raised TypeError: expected a row, None or rows, got str (recipe.py:",
    "a_surrogate": MADE + "cannot be written as JSON: str is not valid UTF-8: surrogates not allowed",
    "number_keys": MADE + "cannot be written as JSON: ",
    "huge_number": MADE + "cannot be written as JSON: Integer exceeds 64-bit range",
    "many_digits": MADE + "cannot be written as JSON: Integer exceeds 64-bit range",
    "deep": MADE + "cannot be written as JSON: ",
    "endless": MADE + "cannot be written as JSON: ",
    "large": "--transform made a row of 2009 bytes, longer than the 1000 bytes of --max-row-bytes",
    "recursion": "--transform raised RecursionError: maximum recursion depth exceeded",
    "raises_digits": "--transform raised KeyError: (not shown: writing it raised ValueError) (bad_functions.py:",
    "raises_a_surrogate": r"--transform raised ValueError: no file \udcff (bad_functions.py:",
    "raises_a_long_text": f"--transform raised ValueError: {'x' * 500}... (bad_functions.py:",
    "raises_nothing_to_say": "--transform raised LookupError (bad_functions.py:",
    "raises_what_is_broken": "--transform raised Broken: (not shown: writing it raised RuntimeError) (",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_bytes(rows(0, 6))
    return path


def transforming(out: Path, source: Path, function: str, *more: object) -> list[str]:
    return run_arguments(out, [source], 2, "--transform", f"{HERE}:{function}", "--max-row-bytes", 1000, *more)


@pytest.mark.parametrize("workers", [0, 1])
def test_nonsense_is_refused_with_the_reason(workers: int, source: Path, tmp_path: Path) -> None:
    for function, reason in NONSENSE.items():
        if workers and function not in ("exits", "a_set", "deep", "raises_digits", "raises_a_surrogate"):
            continue
        out = tmp_path / function
        more = ("--on-bad-row", "quarantine", "--workers", workers)
        assert main(transforming(out, source, function, *more)) == 0
        assert ids(out) == [0, 1, 2, 4, 5]
        (entry,) = map(json.loads, (out / "quarantine.jsonl").read_bytes().splitlines())
        assert (entry["line"], entry["row"]) == (4, '{"id":3,"text":"row 3"}')
        assert entry["reason"].startswith(reason)


def test_what_is_wrong_with_a_made_row_is_not_told_of_the_line(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(transforming(tmp_path / "out", source, "many_digits")) == 3
    assert_one_line(
        capsys.readouterr().err,
        f"error: {source}:4: --transform made what is no row: cannot be written as JSON: Integer exceeds 64-bit "
        "range. Mend the row, or what refuses it, and run the same command again; nothing is lost",
    )


def test_a_row_that_can_be_read_and_not_written_is_no_fault_of_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 900 levels can be read, and are published as they are; 254 can be written.
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"id":' * 900 + b"1" + b"}" * 900 + b"\n")
    assert main(run_arguments(tmp_path / "out", [source], 2)) == 0
    capsys.readouterr()
    assert main(run_arguments(tmp_path / "out2", [source], 2, "--columns", "id")) == 3
    assert_one_line(capsys.readouterr().err, f"{source}:1: --columns made what is no row: cannot be written as JSON: ")


def test_a_row_that_is_refused_ends_the_run_and_goes_on_when_the_function_is_mended(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(transforming(out, source, "cancelled")) == 3
    assert_one_line(capsys.readouterr().err, f"{source}:1: --transform raised CancelledError")
    assert main(transforming(out, source, "exits")) == 3
    assert ids(out) == [0, 1]
    assert main(transforming(out, source, "prints")) == 0
    err = capsys.readouterr().err
    assert f"another way than before: transform (was '{HERE}:exits', now '{HERE}:prints')" in err
    assert ids(out) == list(range(6))


@pytest.mark.parametrize("option", ["--transform", "--where", "--encode"])
def test_a_function_without_memory_stops_the_run(option: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    function = f"{HERE}:has_no_memory"
    done = run(*run_arguments(out, [source], 2, option, function, "--on-bad-row", "quarantine"))
    assert_one_line(done.stderr.splitlines(keepends=True)[-1], "not enough memory: ", "the image cannot be decoded")
    assert done.returncode == OUT_OF_MEMORY
    assert not (out / "quarantine.jsonl").exists()
    assert published(out) == 1


@pytest.mark.parametrize("text", ["import sys\nsys.exit(0)\n", "raise KeyError('x')\n", "def made(row: return row\n"])
def test_a_module_that_cannot_be_imported_is_a_setting_that_cannot_be(text: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "users.py").write_text(text)
    done = run(*run_arguments(tmp_path / "out", [source], 2, "--transform", "users:made"), cwd=tmp_path)
    assert done.returncode == 2
    assert_one_line(done.stderr, "--transform: importing users raised ")


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_printed_disturbs_nothing(workers: int, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run(*transforming(out, source, "prints", "--workers", workers))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"printed {number}" for number in range(6)]
    assert ids(out) == list(range(6))


@contextmanager
def running(*arguments: object, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that leaves no process behind; in a session of its own, so that they can be found."""
    with start(*arguments, cwd=cwd, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()
            process.communicate()
    # The one that clears away semaphores ends a moment after its parent.
    deadline = time.monotonic() + DEADLINE_S
    while left := members(process.pid):
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def members(session: int) -> list[int]:
    """Processes of a session that are not over."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of = path.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(of) == session and state != "Z":
            found.append(int(path.parent.name))
    return found


def test_a_function_that_hangs_is_left_by_the_second_signal(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with running(*transforming(out, source, "hangs"), cwd=tmp_path) as process:
        wait_until(lambda: (tmp_path / "hangs").exists() and published(out) == 1, process)
        process.send_signal(signal.SIGTERM)
        # It is noted, and seen only once the function gives its row.
        wait_until(lambda: not catches(process.pid, signal.SIGTERM), process)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
    assert ids(out) == [0, 1]
    assert main(run_arguments(out, [source], 2)) == 0
    assert ids(out) == list(range(6))


def test_workers_that_hang_are_left_at_the_first_signal(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with running(*transforming(out, source, "hangs", "--workers", 2), cwd=tmp_path) as process:
        wait_until((tmp_path / "hangs").exists, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert main(run_arguments(out, [source], 2)) == 0
    assert ids(out) == list(range(6))


def test_a_module_that_takes_minutes_to_import_is_left_by_the_second_signal(source: Path, tmp_path: Path) -> None:
    (tmp_path / "users.py").write_text("import pathlib, time\npathlib.Path('imports').touch()\ntime.sleep(600)\n")
    with running(*run_arguments(tmp_path / "out", [source], 2, "--transform", "users:made"), cwd=tmp_path) as process:
        wait_until((tmp_path / "imports").exists, process)
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: process.poll() is not None or not catches(process.pid, signal.SIGTERM), process)
        assert process.wait(60) == -signal.SIGTERM


def catches(pid: int, number: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def test_a_worker_that_is_killed_ends_the_run_which_goes_on_later(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "memory-is-short").touch()
    arguments = transforming(out, source, "dies", "--workers", 2)
    with running(*arguments, cwd=tmp_path) as process:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 8
        assert_one_line(err, "a worker process has ended in the middle of its work: killed (out of memory?)")
    assert json.loads((out / "head.json").read_bytes())["state"] == "failed"
    (tmp_path / "memory-is-short").unlink()
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ids(out) == list(range(6))


def test_a_generator_that_never_gives_another_row_is_left_at_the_first_signal(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = run_arguments(out, [Path(f"python:{HERE}:never_gives")], 2)
    with running(*arguments, cwd=ROOT) as process:
        wait_until(lambda: "next row of python:" in note(out), process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert ids(out) == [0, 1]


def note(out: Path) -> str:
    try:
        found: Any = json.loads((out / "head.json").read_bytes()).get("note", "")
    except FileNotFoundError:
        return ""
    return str(found)
