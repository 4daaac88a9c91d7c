"""How a stream came to be: when it was published, who trains it, which rows were refused; little is read again."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard import ChunkWriter
from lazyshard.format.cursor import Cursor
from lazyshard.inspection import history, inspection
from lazyshard.inspection.history import (
    MOST_TRAINED,
    OTHERS,
    At,
    History,
    Trained,
    count_refusals,
    published_rows,
    rates,
    read_refusals,
    take_history,
)
from lazyshard.inspection.inspection import ChunkPoint
from lazyshard.stream.cursor import write_cursor
from lazyshard.stream.retire import retire
from tests.stream.streams import foreign

NOW = 1_700_000_000.0


def written(directory: Path, rows: int = 12, first: int = 0) -> ChunkWriter:
    """A stream of chunks of 2, a row every 5 seconds; its rows have their number as tokens."""
    moments = iter(range(10**6))
    writer = ChunkWriter(directory, 2, clock=lambda: NOW + next(moments))
    for number in range(first, first + rows):
        writer.write({"id": number}, tokens=number)
    writer.close(end=False)
    return writer


def refuse(directory: Path, *reasons: str) -> None:
    with (directory / "quarantine.jsonl").open("a") as file:
        file.writelines(json.dumps({"source": "a", "line": 1, "reason": one}) + "\n" for one in reasons)


def nothing(*_: Any, **__: Any) -> Any:
    raise AssertionError("this is not to be read")


def test_rows_are_counted_by_chunk_number_and_a_clock_set_back_is_evened_out() -> None:
    course = published_rows([ChunkPoint(0, 10, 1, 5.0), ChunkPoint(1, 10, 1, 3.0), ChunkPoint(2, 4, 1, 9.0)], 10)
    assert course == [At(5.0, 10), At(5.0, 20), At(9.0, 24)]


@given(
    steps=st.lists(st.tuples(st.floats(0.01, 100), st.integers(0, 1000)), min_size=1, max_size=50),
    most=st.integers(1, 80),
)
def test_rates_times_their_stretches_are_all_that_came(steps: list[tuple[float, int]], most: int) -> None:
    course = [At(0.0, 0)]
    for seconds, amount in steps:
        course.append(At(course[-1].time + seconds, course[-1].amount + amount))
    found = rates(course, most)
    assert len(found) == min(most, len(steps))
    stretch = course[-1].time / len(found)
    assert sum(one.amount * stretch for one in found) == pytest.approx(course[-1].amount)


def test_no_rate_of_one_moment() -> None:
    assert rates([At(1.0, 5), At(1.0, 9)], 10) == rates([At(1.0, 5)], 10) == []


def test_seals_cursors_and_refused_rows_tell_it_and_no_row_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream_id = written(tmp_path).stream_id
    write_cursor(tmp_path, Cursor("b", stream_id, 8, 4, {}, NOW + 9))
    write_cursor(tmp_path, Cursor("a", stream_id, 4, 2, {}, NOW + 7))
    refuse(tmp_path, "torn", "torn", "no answer")
    monkeypatch.setattr(inspection, "read_rows", nothing)
    found = take_history(tmp_path)
    assert [one.amount for one in found.course] == [2, 4, 6, 8, 10, 12]
    assert found.trained == (Trained("a", NOW + 7, 4), Trained("b", NOW + 9, 8))
    assert found.refusals is not None and [one.rows for one in found.refusals.reasons] == [2, 1]
    assert found.found is not None
    assert (found.found.tokens.count, found.found.tokens.largest, found.found.looked_at) == (12, 11, 6)


def test_what_has_not_changed_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    refuse(tmp_path, "torn")
    before = take_history(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(history, "overview", nothing)
        patch.setattr(history, "read_refusals", nothing)
        assert take_history(tmp_path, before) == before
    refuse(tmp_path, "torn")
    with monkeypatch.context() as patch:
        patch.setattr(history, "overview", nothing)
        found = take_history(tmp_path, before)
    assert found.found is before.found and found.refusals is not None
    assert found.refusals.rows == 2
    written(tmp_path, 2, 12)
    assert [one.amount for one in take_history(tmp_path, found).course][-1] == 14


def test_deleted_chunks_are_not_looked_at(tmp_path: Path) -> None:
    written(tmp_path)
    before = take_history(tmp_path)
    retire(tmp_path, 2, 6)
    found = take_history(tmp_path, before)
    assert [one.amount for one in found.course] == [6, 8, 10, 12]
    assert found.found is not None and found.found.unread == 0


def test_of_many_consumers_those_furthest_behind_are_told(tmp_path: Path) -> None:
    stream_id = written(tmp_path).stream_id
    for number in range(MOST_TRAINED + 2):
        write_cursor(tmp_path, Cursor(f"c{number:02d}", stream_id, 12 if number < 2 else 4, 2, {}, NOW))
    assert [one.name for one in take_history(tmp_path).trained] == [f"c{number:02d}" for number in range(2, 22)]


def test_of_a_foreign_directory_no_chunk_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign(tmp_path, b'{"id":0}\n{"id":1}\n')
    monkeypatch.setattr(history, "overview", nothing)
    assert take_history(tmp_path) == History(None)


def refusal(reason: str, number: int = 1, source: str = "a.jsonl", **values: Any) -> bytes:
    entry = {"source": source, "line": number, "byte": 0, "reason": reason, "row": "{", "at": 1.0}
    return json.dumps(entry | values).encode() + b"\n"


def test_reasons_that_differ_by_numbers_are_one() -> None:
    lines = [
        refusal("no answer", 3),
        refusal("byte 7: torn", 4),
        refusal("byte 19: torn", 9, "b.jsonl"),
        b"{",
        b"[]\n",
        b"x\n",
    ]
    found = count_refusals(iter(lines), complete=True)
    assert [(one.reason, one.rows, one.sources, one.first.line) for one in found.reasons] == [
        ("byte 7: torn", 2, 2, 4),
        ("no answer", 1, 1, 3),
    ]
    assert (found.rows, found.unreadable, found.complete) == (3, 2, True)


def test_of_many_reasons_those_met_late_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST_TOLD_APART", 2)
    found = count_refusals((refusal(f"reason {name}") for name in "abcddd"), complete=True)
    assert [(one.reason, one.rows) for one in found.reasons] == [("reason a", 1), ("reason b", 1), (OTHERS, 4)]


def test_a_long_file_of_refused_rows_is_read_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_MOST_BYTES", 250)
    (tmp_path / "quarantine.jsonl").write_bytes(refusal("x") * 100)
    found = read_refusals(tmp_path)
    assert found is not None
    assert found.rows < 5
    assert not found.complete
    assert read_refusals(tmp_path / "elsewhere") is None


def test_a_row_that_is_no_text_has_no_beginning() -> None:
    entry = json.loads(refusal("not UTF-8"))
    del entry["row"]
    entry["row_base64"] = base64.b64encode(b"\xff").decode()
    found = count_refusals(iter([json.dumps(entry).encode() + b"\n"]), complete=True)
    assert found.reasons[0].first.row is None
