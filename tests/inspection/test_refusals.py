"""Refused rows, counted by their reason, of a file that others append to."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from lazyshard.inspection import refusals
from lazyshard.inspection.history import OTHERS, count_refusals, read_refusals


def line(reason: str, number: int = 1, source: str = "a.jsonl", **values: Any) -> bytes:
    entry = {"source": source, "line": number, "byte": 0, "reason": reason, "row": "{", "at": 1.0}
    return json.dumps(entry | values).encode() + b"\n"


def test_reasons_that_differ_by_numbers_are_one() -> None:
    lines = [line("no answer", 3), line("byte 7: torn", 4), line("byte 19: torn", 9, "b.jsonl"), b"{", b"[]\n", b"x\n"]
    found = count_refusals(iter(lines), complete=True)
    assert [(one.reason, one.rows, one.sources, one.first.line) for one in found.reasons] == [
        ("byte 7: torn", 2, 2, 4),
        ("no answer", 1, 1, 3),
    ]
    assert (found.rows, found.unreadable, found.complete) == (3, 2, True)


def test_of_many_reasons_those_met_late_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "MOST_TOLD_APART", 2)
    found = count_refusals((line(f"reason {name}") for name in "abcddd"), complete=True)
    assert [(one.reason, one.rows) for one in found.reasons] == [("reason a", 1), ("reason b", 1), (OTHERS, 4)]


def test_a_long_file_of_refused_rows_is_read_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "_MOST_BYTES", 250)
    (tmp_path / "quarantine.jsonl").write_bytes(line("x") * 100)
    found = read_refusals(tmp_path)
    assert found is not None
    assert found.rows < 5
    assert not found.complete
    assert read_refusals(tmp_path / "elsewhere") is None


def test_a_row_that_is_no_text_has_no_beginning() -> None:
    entry = json.loads(line("not UTF-8"))
    del entry["row"]
    entry["row_base64"] = base64.b64encode(b"\xff").decode()
    found = count_refusals(iter([json.dumps(entry).encode() + b"\n"]), complete=True)
    assert found.reasons[0].first.row is None
