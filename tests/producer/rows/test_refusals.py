"""Refused rows: which of them ends the run, and what is kept of them."""

from pathlib import Path

import pytest

from lazyshard.errors import FileRefused, ProducerFenced, RowInvalid
from lazyshard_producer.rows.refusals import Quarantine, Refusals
from lazyshard_producer.sources.source import RowOrigin
from tests.harness.processes.producing import refused

ERROR = RowInvalid("not a row: odd", reason="odd", byte=3)
TORN = RowInvalid("not a row: torn?", reason="torn?", byte=3)
MADE = RowInvalid("not a row: --pack: odd", reason="--pack: odd")
PLACE = RowOrigin("a.jsonl", 2, 10)


def workplace(out: Path) -> Path:
    """A directory to write in, which goes with what is in it when the writer is closed."""
    (out / ".tmp").mkdir(exist_ok=True)
    return out / ".tmp"


def quarantine(out: Path, committed: int = 0) -> Quarantine:
    return Quarantine(out, committed, check_owner=lambda: workplace(out), clock=lambda: 5.5)


def add(file: Quarantine, reason: str) -> None:
    file.add(PLACE, reason, b"1")
    file.sync()


def reasons(out: Path) -> list[str]:
    return [entry["reason"] for entry in refused(out)]


@pytest.mark.parametrize(
    ("error", "place", "line", "byte", "said"),
    [
        (ERROR, PLACE, 2, 13, "a.jsonl:2: byte 13 of the file: odd. Mend that line"),
        (TORN, PLACE, 2, 13, "a.jsonl:2: byte 13 of the file: torn? Mend that line"),
        (ERROR, RowOrigin("-", 7, 10), 7, 13, "standard input:7: byte 13 of the input: odd. Mend that line"),
        # Of a source without bytes, and of what is no fault of the line.
        (ERROR, RowOrigin("rows.parquet", 7, None), 7, None, "rows.parquet:7: odd. Mend the row"),
        (MADE, PLACE, 2, 10, "a.jsonl:2: --pack: odd. Mend the row"),
    ],
)
def test_first_bad_row_ends_the_run_with_its_place(
    error: RowInvalid, place: RowOrigin, line: int, byte: int | None, said: str
) -> None:
    with pytest.raises(RowInvalid) as caught:
        Refusals("fail", None, None, 0).take(error, place, b"x")
    assert (caught.value.file, caught.value.line, caught.value.byte) == (place.file, line, byte)
    assert str(caught.value).startswith(said)


def test_quarantined_rows_carry_place_reason_and_the_row(tmp_path: Path) -> None:
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


def test_a_file_that_was_moved_away_begins_anew_and_without_a_bad_row_there_is_none(tmp_path: Path) -> None:
    file = quarantine(tmp_path, committed=1000)
    file.sync()
    assert list(tmp_path.iterdir()) == []
    add(file, "later")
    assert file.size == (tmp_path / "quarantine.jsonl").stat().st_size
    file.close()


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "quarantine.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileRefused):
        quarantine(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_who_is_fenced_writes_nothing(tmp_path: Path) -> None:
    def check() -> Path:
        raise ProducerFenced("taken over")

    first = quarantine(tmp_path)
    add(first, "first")
    before = (tmp_path / "quarantine.jsonl").read_bytes()
    for committed in (0, first.size):
        with pytest.raises(ProducerFenced):
            fenced = Quarantine(tmp_path, committed, check_owner=check)
            add(fenced, "second")
    fenced.close()
    first.close()
    assert (tmp_path / "quarantine.jsonl").read_bytes() == before


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
