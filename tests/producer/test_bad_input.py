"""Bad rows that are left out or kept in quarantine, and bad lines where more than the line counts.

How many may be, through restarts, and given again when mended; several files. The list: test_faults_rows.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lazyshard_producer.cli import main
from tests.harness.processes.producing import assert_one_line, ids, refused, rows, run_arguments


@pytest.mark.parametrize("policy", ["skip", "quarantine"])
def test_one_bad_row_more_than_the_cap_ends_the_run_over_all_runs(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(rows(0, 3) + b"bad1\n" + rows(3, 7) + b"bad2\n" + rows(7, 9) + b"bad3\n" + rows(9, 12))

    def run(most: object) -> int:
        return main(run_arguments(out, [source], 4, "--on-bad-row", policy, "--max-bad-rows", most))

    byte = len(rows(0, 9)) + 10
    for _ in range(2):
        assert run(2) == 3
        assert_one_line(capsys.readouterr().err, "more than 2 bad rows", f"{source}:12: byte {byte} of the file: ")
        assert ids(out) == list(range(8))
        if policy == "quarantine":
            # What no seal counts yet is kept as well: somebody wants to know why the run has ended.
            assert [entry["row"] for entry in refused(out)] == ["bad1", "bad2"]
    assert run("none") == 0
    assert ids(out) == list(range(12))
    if policy == "quarantine":
        assert [entry["row"] for entry in refused(out)] == ["bad1", "bad2", "bad3"]


def test_rows_in_quarantine_outlast_runs_of_another_policy(tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    first = rows(0, 2) + b"bad1\n" + rows(2, 4)
    second = first + rows(4, 6)
    # Each run but the last is ended by a bad row, or its stream would end.
    for data, options, code in (
        (first + b"x\n", ("quarantine", "--max-bad-rows", 1), 3),
        (first + b"skipped\n" + rows(4, 6), ("fail",), 3),
        (second + b"bad\n", ("fail",), 3),
        (second + b"bad2\n" + rows(6, 8), ("quarantine",), 0),
    ):
        source.write_bytes(data)
        assert main(run_arguments(out, [source], 2, "--on-bad-row", *options)) == code
    assert ids(out) == list(range(8))
    assert [entry["row"] for entry in refused(out)] == ["bad1", "bad2"]


@pytest.mark.parametrize("more", [(), ("--shuffle", 4)])
def test_mended_rows_are_a_further_source_of_the_same_run(
    more: tuple[object, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, mended, out = tmp_path / "a.jsonl", tmp_path / "mended.jsonl", tmp_path / "out"
    source.write_bytes(rows(0, 10) + b'{"id":10\n' + rows(11, 30) + b'{"id":30\n' + rows(31, 40) + b"worse\n")
    options = ("--on-bad-row", "quarantine", *more)
    assert main(run_arguments(out, [source], 5, *options, "--max-bad-rows", 2)) == 3
    capfd.readouterr()
    assert main(["quarantine", str(out), "--rows"]) == 0
    assert capfd.readouterr().out == '{"id":10\n{"id":30\n'
    source.write_bytes(source.read_bytes().removesuffix(b"worse\n") + rows(40, 50))
    mended.write_bytes(b'{"id":10}\n{"id":30}\n')
    assert main(run_arguments(out, [source, mended], 5, *options)) == 0
    assert sorted(ids(out)) == list(range(50))
    assert [entry["line"] for entry in refused(out)] == [11, 31]


def test_bad_line_of_the_second_file_in_the_first_chunk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(rows(0, 3))
    b.write_bytes(b"\n" + rows(3, 4) + b"oops\n")
    assert main(run_arguments(tmp_path / "out", [a, b])) == 3
    assert_one_line(capsys.readouterr().err, f"{b}:3: byte {1 + len(rows(3, 4))} of the file")
    assert ids(tmp_path / "out") == []


def test_duplicate_keys_and_blanks_are_warned_of_once_a_file_and_counted_through_a_restart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, out = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "out"
    twice = b'\n{"id":0,"x":{"y":1,"y":2}}\n'
    a.write_bytes(rows(0, 1) + twice * 3)
    b.write_bytes(twice * 2 + b"bad\n")
    for code, last in ((3, b"bad\n"), (0, twice)):
        b.write_bytes(twice * 2 + last)
        assert main(run_arguments(out, [a, b], 5)) == code
        err = capsys.readouterr().err
        warned = [line for line in err.splitlines() if "warning" in line]
        files = [a, b] if code else [b]
        assert [f" {path}:" in line for path, line in zip(files, warned, strict=True)] == [True] * len(files)
    assert "blank_lines=6 duplicate_key_rows=6" in err


@pytest.mark.parametrize(
    ("begin", "name"), [(b"BZh9", "bzip2"), (b"\xfd7zXZ\0", "xz"), (b"PK\x03\x04", "zip")], ids=["bzip2", "xz", "zip"]
)
def test_packed_files_are_refused_by_their_first_bytes(
    begin: bytes, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(begin + bytes(100))
    assert main(run_arguments(tmp_path / "out", [source])) == 4
    assert_one_line(capsys.readouterr().err, str(source), name)
    assert not (tmp_path / "out").exists()
