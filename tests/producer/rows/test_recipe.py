"""What is made of a row, for which reasons one is refused, which ends the run, and what `quarantine` says of those."""

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lazyshard.errors import RowInvalid
from lazyshard.format.row import encode_row
from lazyshard.inspection.row_facts import MOST_TOLD_APART
from lazyshard_producer.cli import main
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.errors import SettingInvalid
from lazyshard_producer.rows import refusals
from lazyshard_producer.rows.encoding import Measure
from lazyshard_producer.rows.reader import Size
from lazyshard_producer.rows.recipe import MadeOfRow, Maker
from lazyshard_producer.rows.refusals import Quarantine, read_refused, summarize, summary_lines
from lazyshard_producer.sources.source import RowOrigin
from tests.harness.processes.producing import refused
from tests.producer.commands import Fails
from tests.producer.rows.draining import making
from tests.stream.streams import raised

HERE = "tests.producer.recipes"
ERROR = RowInvalid("not a row: odd", reason="odd", byte=3)
PLACE = RowOrigin("a.jsonl", 2, 10)


def made(recipe: Settings, line: bytes, index: int = 0) -> MadeOfRow:
    return Maker(recipe).make(line, index)


def reason_of(recipe: Settings, line: bytes, index: int = 0) -> str:
    result = made(recipe, line, index)
    assert result.rows == []
    assert result.refused is not None
    assert result.refused.reason is not None
    return result.refused.reason


def test_columns_come_before_the_filter_and_the_filter_before_the_transform() -> None:
    line = b'{"x" : 1.50, "y":"\\u00e4"}'
    # A row that is only filtered stays as it is to the byte.
    assert made(making(where=f"{HERE}:even"), line + b"\r\n") == MadeOfRow([(line + b"\n", Size())])
    assert made(making(where=f"{HERE}:even"), line, 1) == MadeOfRow([])
    columns = making(columns=(("text", "body"), ("id", "id")))
    assert made(columns, b'{"id":1,"body":"b","more":2}') == MadeOfRow([(b'{"text":"b","id":1}\n', Size())])
    recipe = making(columns=(("id", "n"),), where=f"{HERE}:even", transform=f"{HERE}:fails_on_three")
    assert made(recipe, b'{"n":3}', 1) == MadeOfRow([])
    assert reason_of(recipe, b'{"n":3}', 2).startswith("--transform raised ValueError: three is too many (recipes.py:")
    assert made(making(transform=f"{HERE}:none"), b'{"id":1,"id":2}').duplicate
    # What the source refused stays refused.
    error = RowInvalid("not a row: too long", reason="too long", byte=0)
    assert Maker(making(transform=f"{HERE}:twice")).make(error, 0).refused is error


PACK = making(pack=10)
DEAL = making(balance=1)
SPLIT = making(split=4)
PAD = making(pad=4)
TOLD_PACK, TOLD_DEAL = (making(encode=f"{HERE}:as_told", **form) for form in ({"pack": 10}, {"balance": 1}))
NO_TOKENS: list[dict[str, Any]] = [
    *({"text": "a"}, {"input_ids": []}, {"input_ids": [[1], [2]]}, {"input_ids": [2**64 - 1]}),
    *({"input_ids": [1, 2, 2**31]}, {"input_ids": [1], "labels": [2**31]}, {"input_ids": [1, 2], "labels": [1]}),
    {"input_ids": [1, 2], "attention_mask": [1, 0]},
]


@pytest.mark.parametrize(
    ("recipe", "line", "reason"),
    [
        (making(transform=f"{HERE}:number"), b"{}", "--transform raised TypeError"),
        (making(columns=(("a", "b"),)), b'{"c":1,"d":2}', "--columns: no 'b' among its keys (c, d)"),
        (making(transform=f"{HERE}:twice"), b"[]", "expected a JSON object"),
        (making(transform=f"{HERE}:twice"), b'{"a":', "unexpected end of data"),
        (making(encode=f"{HERE}:tokens"), b'{"id":7}', "--encode raised ValueError: seven (recipes.py:"),
        (making(encode=f"{HERE}:number"), b'{"id":1}', "--encode returned int 3"),
        (making(encode=f"{HERE}:left_over"), b'{"id":1}', "--encode returned an invalid row"),
        (making(encode=f"{HERE}:endless"), b'{"id":1}', "--encode returned a length of -1"),
        (making(encode=f"{HERE}:too_short"), b'{"id":1}', "--encode returned a length of 2, but 3 input_ids"),
        (
            making(encode=f"{HERE}:without_length", max_row_bytes=8000),
            b'{"id":1001}',
            "--encode returned a row of 8061 bytes, longer than the 8000",
        ),
        (making(pad=100, max_row_bytes=200), b'{"input_ids":[1]}', "--pad returned a row"),
        (PAD, b'{"input_ids":[1,2,3,4,5]}', "--pad: 5 tokens, more than the 4"),
        (PAD, b'{"input_ids":[1],"position_ids":[0]}', "--pad: 'position_ids' "),
        (making(encode=f"{HERE}:tokens", split=4), b'{"id":1,"text":"ab"}', "--split: there is an array under 'mask'"),
        *((SPLIT, encode_row(row), "--split: ") for row in NO_TOKENS),
        *((PAD, encode_row(row), "--pad: ") for row in NO_TOKENS),
        *((TOLD_PACK, encode_row({"id": 1, "length": told}), "--pack: ") for told in (None, [3], 0, 11)),
        *((TOLD_DEAL, encode_row({"id": 1, "length": told}), "--balance: ") for told in (None, "12", 3.0, True, 0)),
    ],
)
def test_a_row_that_cannot_be_made_is_refused_with_the_reason(recipe: Settings, line: bytes, reason: str) -> None:
    assert reason_of(recipe, line).startswith(reason)


@pytest.mark.parametrize(
    ("row", "packs", "dealt"),
    [
        ({}, False, False),
        ({"length": 7.0}, False, False),
        ({"length": True}, False, False),
        ({"length": 0}, False, False),
        ({"length": 2, "input_ids": [1, 2, 3]}, False, False),
        ({"length": 11}, False, True),
        ({"length": 2**32 - 1}, False, True),
        ({"length": 2**32}, False, False),
        ({"length": 1}, True, True),
        # There are images where token ids are fewer.
        ({"length": 9, "input_ids": [1, 2, 3]}, True, True),
    ],
)
def test_lengths_that_rows_of_packs_and_stripes_may_tell(row: dict[str, Any], packs: bool, dealt: bool) -> None:
    line = encode_row(row)
    for recipe, option, fits in ((PACK, "--pack: ", packs), (DEAL, ("--length-field length: ", "--balance: "), dealt)):
        if fits:
            assert made(recipe, line) == MadeOfRow([(line, Size(row["length"]))])
        else:
            assert reason_of(recipe, line).startswith(option)


@pytest.mark.parametrize(("levels", "fits"), [(1022, True), (1023, False)])
def test_a_row_is_nested_no_deeper_than_a_pack_can_hold(levels: int, fits: bool) -> None:
    line = b'{"length":1,"x":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}\n"
    measure = Measure(PACK)
    if fits:
        assert measure.of({"length": 1}, line) == Size(1)
    else:
        raised(RowInvalid, measure.of, {"length": 1}, line)


@pytest.mark.parametrize(
    ("option", "name", "hint"),
    [
        ("transform", "recipes", "'recipes'"),
        ("transform", "rows/chat.py:keep", "did you mean rows.chat:keep?"),
        ("transform", "/a/m.py:f", "without .py"),
        ("transform", "no_such_module:f", "ModuleNotFoundError"),
        ("transform", f"{HERE}:NOT_CALLABLE", "int"),
        ("transform", f"{HERE}:twize", "did you mean twice?"),
        *(("encode", f"{HERE}:{name}", "") for name in ("missing", "broken", "takes_our_name", "undescribed")),
    ],
)
def test_a_function_that_cannot_be_had_is_refused_before_anything_is_made(option: str, name: str, hint: str) -> None:
    error = raised(SettingInvalid, Maker, making(**{option: name}))
    assert error.option == f"--{option}"
    assert hint in str(error)


def workplace(out: Path) -> Path:
    """A directory to write in, which goes with what is in it when the writer is closed."""
    (out / ".tmp").mkdir(exist_ok=True)
    return out / ".tmp"


def quarantine(out: Path, committed: int = 0) -> Quarantine:
    return Quarantine(out, committed, check_owner=lambda: workplace(out))


def add(file: Quarantine, reason: str) -> None:
    file.add(PLACE, reason, b"1")
    file.sync()


def test_quarantined_rows_carry_place_reason_and_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 5.5)
    taker = refusals.Refusals("quarantine", None, quarantine(tmp_path), 0)
    taker.take(ERROR, PLACE, b"{broken\r\n")
    taker.take(ERROR, RowOrigin("b", 1, None), b"\xff")
    taker.take(ERROR, RowOrigin("c", 1, 0), None)
    taker.sync()
    assert taker.kept_bytes == (tmp_path / "quarantine.jsonl").stat().st_size
    taker.close()
    assert refused(tmp_path) == [
        {"source": "a.jsonl", "line": 2, "byte": 10, "reason": "odd", "row": "{broken", "at": 5},
        {"source": "b", "line": 1, "byte": None, "reason": "odd", "row_base64": "/w==", "at": 5},
        {"source": "c", "line": 1, "byte": 0, "reason": "odd", "row": "", "at": 5},
    ]


def test_first_ten_skipped_rows_are_warned_of_and_then_each_power_of_ten() -> None:
    said: list[str] = []
    tell = refusals.warn_of_refused(said.append, "skipped")
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
    assert [entry["reason"] for entry in refused(tmp_path)] == ["sealed", "in another order", "last"]
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


def test_lines_that_are_none_of_ours_are_counted(tmp_path: Path) -> None:
    others = (
        b"\n",
        b"[]\n",
        b'{"source":"a","line":1,"reason":"r"}\n',
        b'{"source":"a","line":"1","reason":"r","row":""}\n',
        b'{"source":"a","line":1,"reason":"r","row":5}\n',
        b'{"source":"a","line":1,"reason":"r","row_base64":"*"}\n',
    )
    stream = write(tmp_path, *others, entry(1))
    assert [refused is None for refused in read_refused(stream)] == [True] * len(others) + [False]


def test_a_summary_for_people_and_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others = (entry(2, source=f"{number}.jsonl") for number in range(19))
    stream = write(tmp_path, entry(7, "too long", "b\n.jsonl"), entry(1), entry(3), entry(9), *others, b"x\n")
    assert [len(line.splitlines()) for line in summary_lines("out", summarize(stream))] == [1] * 4
    assert main(["quarantine", stream, "--json"]) == 0
    reasons = [
        {"reason": "no object", "rows": 22, "sources": 20, "source": "a.jsonl", "line": 1},
        {"reason": "too long", "rows": 1, "sources": 1, "source": "b\n.jsonl", "line": 7},
    ]
    assert json.loads(capsys.readouterr().out) == {"rows": 23, "reasons": reasons, "unreadable_lines": 1}


def test_memory_grows_neither_with_the_reasons_nor_with_the_sources(tmp_path: Path) -> None:
    reasons = (entry(1, "x" * (number + 1)) for number in range(MOST_TOLD_APART + 5))
    sources = (entry(1, source=f"{number}.jsonl") for number in range(MOST_TOLD_APART + 5))
    summary = summarize(write(tmp_path, *sources, *reasons))
    assert len(summary.reasons) == MOST_TOLD_APART + 1
    assert (summary.rows, summary.reasons[0].rows) == (2 * (MOST_TOLD_APART + 5), MOST_TOLD_APART + 5)
    assert "in 200 or more sources" in list(summary_lines("out", summary))[1]


def test_no_quarantine_and_no_stream(here: Path, fails: Fails, capsys: pytest.CaptureFixture[str]) -> None:
    for more, printed in (((), ".: no rows in quarantine\n"), (("--rows",), "")):
        assert main(["quarantine", ".", *more]) == 0
        assert capsys.readouterr().out == printed
    os.mkfifo("quarantine.jsonl")
    for arguments, code, said in (
        ([""], 2, "STREAM: "),
        (["nowhere"], 2, "STREAM: "),
        ([".", "--rows", "--json"], 2, "--json"),
        # It is not waited for a writer of the pipe.
        (["."], 5, "quarantine.jsonl"),
    ):
        fails(["quarantine", *arguments], code, said)


def test_rows_as_they_came(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    in_bytes = entry(2, row_base64=base64.b64encode(b"\xff").decode())
    begun = json.dumps(entry(5)).encode()
    stream = write(tmp_path, entry(1), in_bytes, entry(3, byte=None, row="\u2028 x"), entry(4, row=""), b"x\n", begun)
    assert list(read_refused(stream)) == [b"[1]", b"\xff", "\u2028 x".encode(), b"", None]
    assert main(["quarantine", stream, "--rows"]) == 0
    captured = capfdbinary.readouterr()
    assert captured.out == b"[1]\n\xff\n\xe2\x80\xa8 x\n"
    assert b"warning: 2 rows could not be printed" in captured.err
