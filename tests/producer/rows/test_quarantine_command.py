"""`quarantine`: refused rows counted, and as they came."""

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lazyshard.inspection.row_facts import MOST_TOLD_APART
from lazyshard_producer.cli import main
from lazyshard_producer.rows.refusals import read_refused, summarize, summary_lines
from tests.harness.processes.producing import assert_one_line


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
    assert list(read_refused(stream)) == [
        b"[1]",
        b"\xff\n",
        "\u2028 x".encode(),
        b"",
    ]


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
        "out: 23 rows refused so far, those mended since included",
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


def test_no_quarantine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quarantine", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: no row was refused into quarantine\n"
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
