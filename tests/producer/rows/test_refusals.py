"""Refused rows: which of them ends the run, what is kept of them, and what `quarantine` says of those."""

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lazyshard.errors import RowInvalid
from lazyshard.inspection.row_facts import MOST_TOLD_APART
from lazyshard_producer.cli import main
from lazyshard_producer.rows.refusals import (
    Quarantine,
    Refusals,
    read_refused,
    summarize,
    summary_lines,
    warn_of_skipped,
)
from lazyshard_producer.sources.source import RowOrigin
from tests.harness.processes.producing import assert_one_line, refused
from tests.stream.streams import raised

ERROR = RowInvalid("not a row: odd", reason="odd", byte=3)
TORN = RowInvalid("not a row: torn?", reason="torn?", byte=3)
MADE = RowInvalid("not a row: --pack: odd", reason="--pack: odd")
PLACE = RowOrigin("a.jsonl", 2, 10)


def workplace(out: Path) -> Path:
    """A directory to write in, which goes with what is in it when the writer is closed."""
    (out / ".tmp").mkdir(exist_ok=True)
    return out / ".tmp"


def quarantine(out: Path, committed: int = 0) -> Quarantine:
    return Quarantine(out, committed, check_owner=lambda: workplace(out))


def add(file: Quarantine, reason: str) -> None:
    file.add(PLACE, reason, b"1")
    file.sync()


def reasons(out: Path) -> list[str]:
    return [entry["reason"] for entry in refused(out)]


@pytest.mark.parametrize(
    ("error", "place", "line", "byte", "said"),
    [
        (ERROR, PLACE, 2, 13, "a.jsonl:2: byte 13 of the file: odd. Fix that line"),
        (TORN, PLACE, 2, 13, "a.jsonl:2: byte 13 of the file: torn? Fix that line"),
        (ERROR, RowOrigin("-", 7, 10), 7, 13, "standard input:7: byte 13 of the input: odd. Fix that line"),
        # Of a source without bytes, and of what is no fault of the line.
        (ERROR, RowOrigin("rows.parquet", 7, None), 7, None, "rows.parquet:7: odd. Fix the row"),
        (MADE, PLACE, 2, 10, "a.jsonl:2: --pack: odd. Fix the row"),
        (
            RowInvalid("", reason="odd", byte=1),
            PLACE,
            2,
            11,
            "a.jsonl:2: byte 11 of the file: odd. The file ends",
        ),
    ],
)
def test_first_bad_row_ends_run(error: RowInvalid, place: RowOrigin, line: int, byte: int | None, said: str) -> None:
    caught = raised(RowInvalid, Refusals("fail", None, None, 0).take, error, place, b"x")
    assert (caught.file, caught.line, caught.byte) == (place.file, line, byte)
    assert str(caught).startswith(said)


def test_quarantined_rows_carry_place_reason_and_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 5.5)
    refusals = Refusals("quarantine", None, quarantine(tmp_path), 0)
    refusals.take(ERROR, PLACE, b"{broken\r\n")
    refusals.take(ERROR, RowOrigin("b", 1, None), b"\xff")
    refusals.take(ERROR, RowOrigin("c", 1, 0), None)
    refusals.sync()
    assert refusals.kept_bytes == (tmp_path / "quarantine.jsonl").stat().st_size
    refusals.close()
    assert refused(tmp_path) == [
        {"source": "a.jsonl", "line": 2, "byte": 10, "reason": "odd", "row": "{broken", "at": 5},
        {"source": "b", "line": 1, "byte": None, "reason": "odd", "row_base64": "/w==", "at": 5},
        {"source": "c", "line": 1, "byte": 0, "reason": "odd", "row": "", "at": 5},
    ]


def test_first_ten_skipped_rows_are_warned_of_and_then_each_power_of_ten() -> None:
    said: list[str] = []
    tell = warn_of_skipped(said.append)
    for number in range(1, 1002):
        tell(ERROR, RowOrigin("a.jsonl", number, 10), None)
    assert [int(text.split(":")[1]) for text in said] == [*range(1, 11), 100, 1000]
    assert said[1].startswith("a.jsonl:2: byte 13 of the file: odd;")


def test_a_file_that_was_moved_away_begins_anew_and_without_a_bad_row_there_is_none(tmp_path: Path) -> None:
    file = quarantine(tmp_path, committed=1000)
    file.sync()
    assert list(tmp_path.iterdir()) == []
    add(file, "later")
    assert file.size == (tmp_path / "quarantine.jsonl").stat().st_size
    file.close()


def test_one_that_was_fenced_and_wakes_writes_where_nobody_reads(tmp_path: Path) -> None:
    first = quarantine(tmp_path)
    add(first, "sealed")
    second = quarantine(tmp_path, first.size)
    add(second, "in another order")
    # It has looked at the owner before that one came.
    add(first, "not sealed")
    add(second, "last")
    assert reasons(tmp_path) == ["sealed", "in another order", "last"]
    assert second.size == (tmp_path / "quarantine.jsonl").stat().st_size
    first.close()
    second.close()


def entry(number: int, reason: str = "no object", source: str = "a.jsonl", **more: Any) -> dict[str, Any]:
    row = {} if "row_base64" in more else {"row": f"[{number}]"}
    return {"source": source, "line": number, "byte": number * 10, "reason": reason, "at": 0.5} | row | more


def write(out: Path, *entries: Any) -> str:
    lines = (one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in entries)
    (out / "quarantine.jsonl").write_bytes(b"".join(lines))
    return str(out)


def test_rows_are_read_as_they_were(tmp_path: Path) -> None:
    stream = write(
        tmp_path,
        entry(1),
        entry(2, row_base64=base64.b64encode(b"\xff\n").decode()),
        entry(3, byte=None, row="\u2028 x"),
        entry(4, row=""),
        # Being written.
        json.dumps(entry(5)).encode(),
    )
    assert list(read_refused(stream)) == [b"[1]", b"\xff\n", "\u2028 x".encode(), b""]


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"[]\n",
        b'{"source":"a","line":1,"reason":"r"}\n',
        b'{"source":"a","line":"1","reason":"r","row":""}\n',
        b'{"source":"a","line":1,"reason":"r","row":5}\n',
        b'{"source":"a","line":1,"reason":"r","row_base64":"*"}\n',
    ],
)
def test_a_line_that_is_none_of_ours_is_counted(line: bytes, tmp_path: Path) -> None:
    stream = write(tmp_path, line, entry(1))
    assert [refused is None for refused in read_refused(stream)] == [True, False]


def test_a_summary_for_people(tmp_path: Path) -> None:
    others = (entry(2, source=f"{number}.jsonl") for number in range(19))
    stream = write(tmp_path, entry(7, "too long", "b\n.jsonl"), entry(1), entry(3), entry(9), *others, b"x\n")
    assert list(summary_lines("out", summarize(stream))) == [
        "out: 23 rows refused so far, including rows fixed since",
        "         22  no object; first at a.jsonl:1, in 20 sources",
        "          1  too long; at b\\n.jsonl:7",
        "  1 line of quarantine.jsonl could not be read",
    ]


def test_memory_grows_neither_with_the_reasons_nor_with_the_sources(tmp_path: Path) -> None:
    reasons = (entry(1, "x" * (number + 1)) for number in range(MOST_TOLD_APART + 5))
    sources = (entry(1, source=f"{number}.jsonl") for number in range(MOST_TOLD_APART + 5))
    summary = summarize(write(tmp_path, *sources, *reasons))
    assert len(summary.reasons) == MOST_TOLD_APART + 1
    assert (summary.rows, summary.reasons[0].rows) == (2 * (MOST_TOLD_APART + 5), MOST_TOLD_APART + 5)
    assert "in 200 or more sources" in list(summary_lines("out", summary))[1]


def test_a_summary_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream = write(tmp_path, entry(1), entry(3, source="b.jsonl"))
    assert main(["quarantine", stream, "--json"]) == 0
    reason = {"reason": "no object", "rows": 2, "sources": 2, "source": "a.jsonl", "line": 1}
    assert json.loads(capsys.readouterr().out) == {"rows": 2, "reasons": [reason], "unreadable_lines": 0}


def test_no_quarantine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quarantine", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: no rows in quarantine\n"
    assert main(["quarantine", str(tmp_path), "--rows"]) == 0
    assert capsys.readouterr().out == ""


def test_no_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("quarantine.jsonl")
    for arguments, code, said in (
        ([""], 2, "STREAM: "),
        (["nowhere"], 2, "STREAM: "),
        ([".", "--rows", "--json"], 2, "--json"),
        # It is not waited for a writer of the pipe.
        (["."], 5, "quarantine.jsonl"),
    ):
        assert main(["quarantine", *arguments]) == code
        assert_one_line(capsys.readouterr().err, said)


def test_rows_as_they_came(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    stream = write(
        tmp_path, entry(1), entry(2, row_base64=base64.b64encode(b"\xff").decode()), entry(3, row=""), b"x\n"
    )
    assert main(["quarantine", stream, "--rows"]) == 0
    captured = capfdbinary.readouterr()
    assert captured.out == b"[1]\n\xff\n"
    assert b"warning: 2 rows could not be printed" in captured.err
