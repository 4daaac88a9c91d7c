from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lazyshard.errors import FileRefused, ProducerFenced, RowInvalid
from lazyshard_producer.rows.refusals import Quarantine, Refusals
from lazyshard_producer.sources.source import RowOrigin

ERROR = RowInvalid("not a row: odd", reason="odd", byte=3)
PLACE = RowOrigin("a.jsonl", 2, 10)


def workplace(out: Path) -> Path:
    """A directory to write in, which goes with what is in it when the writer is closed."""
    folder = out / ".tmp"
    folder.mkdir(exist_ok=True)
    return folder


def quarantine(out: Path, committed: int = 0) -> Quarantine:
    return Quarantine(out, committed, check_owner=lambda: workplace(out), clock=lambda: 5.5)


def entries(out: Path) -> list[Any]:
    return [json.loads(line) for line in (out / "quarantine.jsonl").read_bytes().splitlines()]


def test_first_bad_row_ends_the_run_with_its_place() -> None:
    refusals = Refusals("fail", None, None, 0)
    with pytest.raises(RowInvalid, match=r"^a.jsonl:2: byte 13 of the file: odd. Mend that line") as caught:
        refusals.take(ERROR, PLACE, b"x")
    assert (caught.value.file, caught.value.line, caught.value.byte) == ("a.jsonl", 2, 13)


def test_bad_row_of_a_source_without_bytes_has_its_row_only() -> None:
    with pytest.raises(RowInvalid, match=r"^rows.parquet:7: odd. Mend the row, or what refuses it, and run"):
        Refusals("fail", None, None, 0).take(ERROR, RowOrigin("rows.parquet", 7, None), None)


def test_one_row_more_than_allowed_ends_the_run() -> None:
    refusals = Refusals("skip", 3, None, count=1)
    refusals.take(ERROR, PLACE, b"x")
    refusals.take(ERROR, PLACE, b"x")
    message = r"more than 3 bad rows \(--max-bad-rows\), the last one: a.jsonl:2: byte 13 of the file: odd\. Look at"
    with pytest.raises(RowInvalid, match=message):
        refusals.take(ERROR, PLACE, b"x")
    assert refusals.count == 3


def test_one_bad_row_is_counted_as_one() -> None:
    refusals = Refusals("skip", 1, None, count=1)
    with pytest.raises(
        RowInvalid, match=r"^more than 1 bad row \(--max-bad-rows\), .* one: standard input:7: byte 13 of"
    ):
        refusals.take(ERROR, RowOrigin("-", 7, 10), b"x")


def test_a_reason_that_asks_ends_in_no_full_stop_too() -> None:
    torn = RowInvalid("not a row: torn?", reason="torn?", byte=3)
    with pytest.raises(RowInvalid, match=r"^a.jsonl:2: byte 13 of the file: torn\? Mend that line"):
        Refusals("fail", None, None, 0).take(torn, PLACE, b"x")


def test_quarantined_rows_carry_place_reason_and_the_row(tmp_path: Path) -> None:
    file = quarantine(tmp_path)
    refusals = Refusals("quarantine", None, file, 0)
    refusals.take(ERROR, PLACE, b"{broken\r\n")
    refusals.take(ERROR, RowOrigin("b", 1, None), b"\xff")
    refusals.take(ERROR, RowOrigin("c", 1, 0), None)
    refusals.sync()
    assert refusals.quarantine_bytes == (tmp_path / "quarantine.jsonl").stat().st_size
    refusals.close()
    assert entries(tmp_path) == [
        {"source": "a.jsonl", "line": 2, "byte": 10, "reason": "odd", "row": "{broken", "at": 5},
        {"source": "b", "line": 1, "byte": None, "reason": "odd", "row_base64": "/w==", "at": 5},
        {"source": "c", "line": 1, "byte": 0, "reason": "odd", "row": "", "at": 5},
    ]


def test_rows_after_the_last_seal_are_cut_off_and_come_again(tmp_path: Path) -> None:
    file = quarantine(tmp_path)
    file.add(PLACE, "first", b"1")
    committed = file.size
    file.add(PLACE, "second", b"2")
    file.sync()
    file.close()
    again = quarantine(tmp_path, committed)
    again.add(PLACE, "second", b"2")
    again.sync()
    again.close()
    assert [entry["reason"] for entry in entries(tmp_path)] == ["first", "second"]


def test_a_file_that_was_moved_away_begins_anew(tmp_path: Path) -> None:
    file = quarantine(tmp_path, committed=1000)
    file.add(PLACE, "later", b"1")
    file.sync()
    assert file.size == (tmp_path / "quarantine.jsonl").stat().st_size
    file.close()


def test_no_bad_row_makes_no_file(tmp_path: Path) -> None:
    file = quarantine(tmp_path)
    file.sync()
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "quarantine.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileRefused, match="found a link"):
        quarantine(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_who_is_fenced_writes_nothing(tmp_path: Path) -> None:
    def check() -> Path:
        raise ProducerFenced("taken over")

    first = quarantine(tmp_path)
    first.add(PLACE, "first", b"1")
    first.sync()
    before = (tmp_path / "quarantine.jsonl").read_bytes()
    for committed in (0, first.size):
        with pytest.raises(ProducerFenced):
            fenced = Quarantine(tmp_path, committed, check_owner=check)
            fenced.add(PLACE, "second", b"2")
            fenced.sync()
    fenced.close()
    first.close()
    assert (tmp_path / "quarantine.jsonl").read_bytes() == before


def test_one_that_was_fenced_and_wakes_writes_where_nobody_reads(tmp_path: Path) -> None:
    first = quarantine(tmp_path)
    first.add(PLACE, "sealed", b"1")
    first.sync()
    second = quarantine(tmp_path, first.size)
    second.add(PLACE, "in another order", b"2")
    second.sync()
    # It has looked at the owner before that one came.
    first.add(PLACE, "not sealed", b"33")
    first.sync()
    second.add(PLACE, "last", b"4")
    second.sync()
    assert [entry["reason"] for entry in entries(tmp_path)] == ["sealed", "in another order", "last"]
    assert second.size == (tmp_path / "quarantine.jsonl").stat().st_size
    first.close()
    second.close()


def test_one_that_is_fenced_as_it_starts_cuts_nothing_off(tmp_path: Path) -> None:
    before = quarantine(tmp_path)
    for reason in ("sealed", "not sealed"):
        kept = before.size
        before.add(PLACE, reason, b"1")
        before.sync()

    def taken_over() -> Path:
        other = quarantine(tmp_path, kept)
        other.add(PLACE, "later", b"2")
        other.sync()
        other.close()
        return tmp_path / "destroyed"

    with pytest.raises(FileNotFoundError):
        Quarantine(tmp_path, kept, check_owner=taken_over)
    assert [entry["reason"] for entry in entries(tmp_path)] == ["sealed", "later"]
    before.close()


def test_other_policies_keep_the_size_of_what_is_there() -> None:
    assert Refusals("skip", None, None, 0, quarantine_bytes=77).quarantine_bytes == 77


def test_rows_that_no_seal_counts_are_there_after_the_end_of_a_run(tmp_path: Path) -> None:
    file = quarantine(tmp_path)
    file.add(PLACE, "only", b"1")
    file.close()
    assert [entry["reason"] for entry in entries(tmp_path)] == ["only"]
