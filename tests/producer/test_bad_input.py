"""Bad rows that are left out or kept in quarantine, and bad lines where more than the line counts.

How many may be, through restarts, and given again when mended; several files, a gigabyte. The list: test_faults_rows.
"""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from lazyshard_producer.cli import main
from tests.harness.processes.environment import DEADLINE_S
from tests.harness.processes.producing import assert_one_line, ids, published, rows, run_arguments, start, wait_until


def refused(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "quarantine.jsonl").read_bytes().splitlines()]


@pytest.mark.parametrize("policy", ["skip", "quarantine"])
def test_one_bad_row_more_than_the_cap_ends_the_run_over_all_runs(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(rows(0, 3) + b"bad1\n" + rows(3, 7) + b"bad2\n" + rows(7, 9) + b"bad3\n" + rows(9, 12))

    def run(most: object) -> int:
        return main(run_arguments(out, [source], 4, "--on-bad-row", policy, "--max-bad-rows", most))

    byte = len(rows(0, 9)) + 10
    said = (
        f"more than 2 bad rows (--max-bad-rows), the last one: {source}:12: byte {byte} of the file: unexpected "
        "character, expected a JSON value. Look at what they have in common, or allow more; nothing is lost"
    )
    for _ in range(2):
        assert run(2) == 3
        assert_one_line(capsys.readouterr().err, said)
        assert ids(out) == list(range(8))
        if policy == "quarantine":
            # What no seal counts yet is kept as well: somebody wants to know why the run has ended.
            assert [entry["row"] for entry in refused(out)] == ["bad1", "bad2"]
    assert run("none") == 0
    assert ids(out) == list(range(12))
    if policy == "quarantine":
        assert [entry["row"] for entry in refused(out)] == ["bad1", "bad2", "bad3"]


def test_a_cap_reached_before_any_chunk_leaves_the_rows_to_be_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(b"bad\n" * 10)
    assert main(run_arguments(out, [source], 4, "--on-bad-row", "quarantine", "--max-bad-rows", 5)) == 3
    assert main(["quarantine", str(out)]) == 0
    assert "5 rows refused so far" in capsys.readouterr().out


def test_rows_in_quarantine_outlast_runs_of_another_policy(tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"

    def run(data: bytes, policy: str) -> int:
        source.write_bytes(data)
        return main(run_arguments(out, [source], 2, "--on-bad-row", policy))

    # Each run but the last is ended by a bad row, or its stream would end.
    first = rows(0, 2) + b"bad1\n" + rows(2, 4)
    assert (
        main(
            run_arguments(
                out, [_written(source, first + b"x\n")], 2, *("--on-bad-row", "quarantine", "--max-bad-rows", 1)
            )
        )
        == 3
    )
    assert run(first + b"skipped\n" + rows(4, 6), "fail") == 3
    second = first + rows(4, 6) + b"bad\n"
    assert run(second, "fail") == 3
    third = first + rows(4, 6) + b"bad2\n" + rows(6, 8)
    assert run(third, "quarantine") == 0
    assert ids(out) == list(range(8))
    assert [entry["row"] for entry in refused(out)] == ["bad1", "bad2"]


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("more", [(), ("--shuffle", 4)])
def test_mended_rows_are_a_further_source_of_the_same_run(
    more: tuple[object, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, mended, out = tmp_path / "a.jsonl", tmp_path / "mended.jsonl", tmp_path / "out"
    source.write_bytes(rows(0, 10) + b'{"id":10\n' + rows(11, 30) + b'{"id":30\n' + rows(31, 50))
    options = ("--on-bad-row", "quarantine", *more)
    process = start(*run_arguments(out, [source], 5, *options, "--rate", 100))
    wait_until(lambda: published(out) >= 6, process)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 0
    capfd.readouterr()
    assert main(["quarantine", str(out), "--rows"]) == 0
    broken = capfd.readouterr().out
    assert broken.startswith('{"id":10\n')
    mended.write_text(broken.replace("\n", "}\n"))
    assert main(run_arguments(out, [source, mended], 5, *options)) == 0
    expected = {*range(50), 30} - ({30} if broken.count("\n") == 1 else set())
    assert sorted(ids(out)) == sorted(expected)
    assert [entry["line"] for entry in refused(out)] == [11, 31]


def test_bad_line_of_the_second_file_in_the_first_chunk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(rows(0, 3))
    b.write_bytes(b"\n" + rows(3, 4) + b"oops\n")
    assert main(run_arguments(tmp_path / "out", [a, b])) == 3
    assert_one_line(capsys.readouterr().err, f"{b}:3: byte {1 + len(rows(3, 4))} of the file")
    assert ids(tmp_path / "out") == []


def test_duplicate_keys_are_warned_of_once_a_file_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    twice = b'{"id":0,"x":{"y":1,"y":2}}\n'
    a.write_bytes(rows(0, 1) + twice * 3)
    b.write_bytes(twice)
    assert main(run_arguments(tmp_path / "out", [a, b], 2)) == 0
    err = capsys.readouterr().err
    assert [line.split(": a key")[0] for line in err.splitlines() if "warning" in line] == [
        f"lazyshard-producer: warning: {a}:2",
        f"lazyshard-producer: warning: {b}:1",
    ]
    assert "duplicate_key_rows=4" in err


def test_duplicate_keys_and_blanks_count_once_through_a_restart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    twice = b'\n{"id":0,"id":0}\n'
    source.write_bytes(twice * 5 + b"bad\n")
    arguments = run_arguments(out, [source], 2)
    assert main(arguments) == 3
    source.write_bytes(twice * 6)
    assert main(arguments) == 0
    err = capsys.readouterr().err
    assert err.count("warning") == 2  # once a run
    assert "blank_lines=6 duplicate_key_rows=6" in err


def test_a_line_of_a_gigabyte_needs_bounded_memory(tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    with source.open("wb") as file:
        file.write(rows(0, 10))
        file.truncate(1 << 30)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (700 << 20, 700 << 20))

    with start(*run_arguments(out, [source]), preexec_fn=limit) as process:
        _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 3, said
    at = len(rows(0, 10))
    assert_one_line(said, f"{source}:11: byte {at} of the file: longer than the 67108864 bytes", "NUL bytes")
    assert ids(out) == list(range(10))


def test_packed_files_are_refused_by_their_first_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    starts = {
        b"BZh9": "bzip2",
        b"\xfd7zXZ\0": "xz",
        b"PK\x03\x04": "zip",
    }
    for begin, name in starts.items():
        source = tmp_path / "a.jsonl"
        source.write_bytes(begin + bytes(100))
        assert main(run_arguments(tmp_path / "out", [source])) == 4
        assert_one_line(capsys.readouterr().err, str(source), name, "unpack it first")
    assert not (tmp_path / "out").exists()
