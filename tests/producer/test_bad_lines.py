"""Bad source lines where more than the line counts: several files, restarts, a gigabyte. The list: test_faults_rows."""

import resource
from pathlib import Path

import pytest

from lazyshard_producer.cli import main
from tests.producer.commands import assert_one_line, ids, rows, run, run_arguments


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

    done = run(*run_arguments(out, [source]), preexec_fn=limit)
    assert done.returncode == 3, done.stderr
    at = len(rows(0, 10))
    assert_one_line(done.stderr, f"{source}:11: byte {at} of the file: longer than the 67108864 bytes", "NUL bytes")
    assert ids(out) == list(range(10))


def test_packed_files_are_refused_by_their_first_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    starts = {
        b"BZh9": "bzip2",
        b"\xfd7zXZ\0": "xz",
        b"PK\x03\x04": "zip",
    }
    for start, name in starts.items():
        source = tmp_path / "a.jsonl"
        source.write_bytes(start + bytes(100))
        assert main(run_arguments(tmp_path / "out", [source])) == 4
        assert_one_line(capsys.readouterr().err, str(source), name, "unpack it first")
    assert not (tmp_path / "out").exists()
