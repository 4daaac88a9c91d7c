"""Bad rows of every class in plain and in packed files, left out or kept in quarantine, and given again when mended."""

from __future__ import annotations

import gzip
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard_producer.cli import main
from tests.producer.bad_rows import BAD
from tests.producer.commands import assert_one_line, ids, published, rows, run_arguments, start, wait_until

PACKS: Final[dict[str, Callable[[bytes], bytes]]] = {"plain": bytes, "gzip": gzip.compress}

LIMIT: Final = ("--max-row-bytes", 1_000_000)


def write_bad(path: Path, pack: Callable[[bytes], bytes]) -> bytes:
    """A file of good rows with one of every class of bad ones behind each; returns its text."""
    parts = []
    for number, (line, _, _) in enumerate(BAD.values()):
        parts += [rows(number, number + 1), line, b"\n"]
    text = b"".join(parts)
    path.write_bytes(pack(text))
    return text


def refused(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "quarantine.jsonl").read_bytes().splitlines()]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_in_a_packed_file_ends_the_run(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line, byte, reason = BAD[name]
    source, out = tmp_path / "a.jsonl.gz", tmp_path / "out"
    source.write_bytes(gzip.compress(rows(0, 25) + line + b"\n" + rows(26, 40)))
    arguments = run_arguments(out, [source], 10, *LIMIT)
    assert main(arguments) == 3
    where = f"byte {len(rows(0, 25)) + byte} of the file" if byte is not None else "byte "
    assert_one_line(capsys.readouterr().err, f"{source}:26: {where}", reason)
    assert ids(out) == list(range(20))
    source.write_bytes(gzip.compress(rows(0, 40)))
    assert main(arguments) == 0
    assert ids(out) == list(range(40))


@pytest.mark.parametrize("pack", PACKS)
def test_bad_rows_are_left_out_and_counted(pack: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "a", tmp_path / "out"
    write_bad(source, PACKS[pack])
    assert main(run_arguments(out, [source], 4, "--on-bad-row", "skip", *LIMIT)) == 0
    assert ids(out) == list(range(len(BAD)))
    assert f"refused_rows={len(BAD)}\n" in capsys.readouterr().err
    assert not (out / "quarantine.jsonl").exists()


@pytest.mark.parametrize("pack", PACKS)
def test_bad_rows_go_to_quarantine_with_place_reason_and_bytes(pack: str, tmp_path: Path) -> None:
    source, out = tmp_path / "a", tmp_path / "out"
    text = write_bad(source, PACKS[pack])
    assert main(run_arguments(out, [source], 4, "--on-bad-row", "quarantine", *LIMIT)) == 0
    assert ids(out) == list(range(len(BAD)))
    entries = refused(out)
    assert len(entries) == len(BAD)
    for number, (entry, (line, _, reason)) in enumerate(zip(entries, BAD.values(), strict=True)):
        assert (entry["source"], entry["line"]) == (str(source), 2 * number + 2)
        assert reason in entry["reason"]
        at = entry["byte"]
        if "max-row-bytes" in reason:
            # Too long to be kept.
            assert text[at : at + len(line)] == line
            assert entry["row"] == ""
        elif "row" in entry:
            assert text[at : at + len(line)] == line == entry["row"].encode()


@pytest.mark.parametrize("policy", ["skip", "quarantine"])
def test_one_bad_row_more_than_the_cap_ends_the_run_over_all_runs(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(rows(0, 3) + b"bad1\n" + rows(3, 7) + b"bad2\n" + rows(7, 9) + b"bad3\n" + rows(9, 12))

    def run(most: object) -> int:
        return main(run_arguments(out, [source], 4, "--on-bad-row", policy, "--max-bad-rows", most))

    for _ in range(2):
        assert run(2) == 3
        assert_one_line(capsys.readouterr().err, "more than 2 bad rows (--max-bad-rows)", f"{source}:12")
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
