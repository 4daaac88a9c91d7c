"""What is made of a row, and for which reasons one is refused."""

from typing import Any

import pytest

from lazyshard.errors import RowInvalid
from lazyshard.format.batch import EncodedRow
from lazyshard.format.row import encode_row
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.errors import SettingInvalid
from lazyshard_producer.rows.encoding import Measure
from lazyshard_producer.rows.recipe import MadeOfRow, Maker
from tests.producer.rows.draining import making
from tests.stream.streams import raised

HERE = "tests.producer.recipes"
ENCODERS = "tests.producer.recipes"


def made(recipe: Settings, line: bytes, index: int = 0) -> MadeOfRow:
    return Maker(recipe).make(line, index)


def refused(recipe: Settings, line: bytes, index: int = 0) -> str:
    result = made(recipe, line, index)
    assert result.lines == []
    assert result.refused is not None
    assert result.refused.reason is not None
    return result.refused.reason


def encoding(name: str) -> str:
    return f"{ENCODERS}:{name}"


def test_a_row_that_is_only_filtered_stays_as_it_is_to_the_byte() -> None:
    line = b'{"x" : 1.50, "y":"\\u00e4"}'
    assert made(making(where=f"{HERE}:even"), line + b"\r\n") == MadeOfRow([line + b"\n"])
    assert made(making(where=f"{HERE}:even"), line, 1) == MadeOfRow([])


def test_columns_come_before_the_filter_and_the_filter_before_the_transform() -> None:
    columns = making(columns=(("text", "body"), ("id", "id")))
    assert made(columns, b'{"id":1,"body":"b","more":2}') == MadeOfRow([b'{"text":"b","id":1}\n'])
    recipe = making(columns=(("id", "n"),), where=f"{HERE}:even", transform=f"{HERE}:fails_on_three")
    assert made(recipe, b'{"n":3}', 1) == MadeOfRow([])
    assert refused(recipe, b'{"n":3}', 2).startswith("--transform raised ValueError: three is too many (recipes.py:")


def test_a_key_named_twice_is_noticed() -> None:
    assert made(making(transform=f"{HERE}:none"), b'{"id":1,"id":2}').duplicate


PACK = making(pack=10)
DEAL = making(balance=1)
SPLIT = making(split=4)
PAD = making(pad=4)


@pytest.mark.parametrize(
    ("recipe", "line", "reason"),
    [
        (making(transform=f"{HERE}:a_number"), b"{}", "--transform raised TypeError"),
        (making(columns=(("a", "b"),)), b'{"c":1,"d":2}', "--columns: no 'b' among its keys (c, d)"),
        (making(transform=f"{HERE}:twice"), b"[]", "expected a JSON object"),
        (making(transform=f"{HERE}:twice"), b'{"a":', "unexpected end of data"),
        (making(encode=encoding("tokens")), b'{"id":7}', "--encode raised ValueError: seven (recipes.py:"),
        (making(encode=encoding("number")), b'{"id":1}', "--encode returned int 3"),
        (making(encode=encoding("left_over")), b'{"id":1}', "--encode returned an invalid row"),
        (making(encode=encoding("endless")), b'{"id":1}', "--encode returned a length of -1"),
        (making(encode=encoding("too_short")), b'{"id":1}', "--encode returned a length of 2, but 3 input_ids"),
        (
            making(encode=encoding("without_length"), max_row_bytes=8000),
            b'{"id":1001}',
            "--encode returned a row of 8061 bytes, longer than the 8000",
        ),
        (making(pad=100, max_row_bytes=200), b'{"input_ids":[1]}', "--pad returned a row"),
        (PAD, b'{"input_ids":[1,2,3,4,5]}', "--pad: 5 tokens, more than the 4"),
        (PAD, b'{"input_ids":[1],"position_ids":[0]}', "--pad: 'position_ids' "),
    ],
)
def test_a_row_that_cannot_be_made_is_refused_with_the_reason(recipe: Settings, line: bytes, reason: str) -> None:
    assert refused(recipe, line).startswith(reason)


@pytest.mark.parametrize(
    "row",
    [
        {"text": "a"},
        {"input_ids": []},
        {"input_ids": [[1], [2]]},
        {"input_ids": [2**64 - 1]},
        {"input_ids": [1, 2, 2**31]},
        {"input_ids": [1], "labels": [2**31]},
        {"input_ids": [1, 2], "labels": [1]},
        {"input_ids": [1, 2], "attention_mask": [1, 0]},
    ],
)
def test_a_row_without_tokens_is_neither_cut_nor_padded(row: dict[str, Any]) -> None:
    assert refused(SPLIT, encode_row(row)).startswith("--split: ")
    assert refused(PAD, encode_row(row)).startswith("--pad: ")


def test_an_array_that_would_be_lost_is_refused() -> None:
    recipe = making(encode=encoding("tokens"), split=4)
    assert refused(recipe, b'{"id":1,"text":"ab"}').startswith("--split: there is an array under 'mask'")


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
            assert made(recipe, line) == MadeOfRow([line], tokens=[row["length"]])
        else:
            assert refused(recipe, line).startswith(option)


@pytest.mark.parametrize(
    ("recipe", "option", "lengths"),
    [
        (making(encode=encoding("as_told"), pack=10), "--pack: ", [None, [3], 0, 11]),
        (making(encode=encoding("as_told"), balance=1), "--balance: ", [None, "12", 3.0, True, 0]),
    ],
)
def test_lengths_that_encoders_may_not_tell(recipe: Settings, option: str, lengths: list[Any]) -> None:
    for length in lengths:
        assert refused(recipe, encode_row({"id": 1, "length": length})).startswith(option)
    assert made(recipe, b'{"id":1,"length":7}').tokens == [7]


@pytest.mark.parametrize(("levels", "fits"), [(1022, True), (1023, False)])
def test_a_row_is_nested_no_deeper_than_a_pack_can_hold(levels: int, fits: bool) -> None:
    line = b'{"length":1,"x":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}\n"
    measure = Measure(PACK)
    if fits:
        assert measure.of({"length": 1}, line) == 1
    else:
        raised(RowInvalid, measure.of, {"length": 1}, line)


def test_what_the_source_refused_stays_refused() -> None:
    error = RowInvalid("not a row: too long", reason="too long", byte=0)
    assert Maker(making(transform=f"{HERE}:twice")).make(error, 0).refused is error


def test_an_encoded_row() -> None:
    (row,) = made(making(encode=encoding("without_length")), b'{"id":2}').lines
    assert row == EncodedRow(b'{"id":2,"input_ids":{"$array":["int64",[2],0]}}\n', bytes(8) + b"\1" + bytes(7), None)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("recipes", "'recipes'"),
        ("rows/chat.py:keep", "did you mean rows.chat:keep?"),
        ("/a/m.py:f", "without .py"),
        ("no_such_module:f", "ModuleNotFoundError"),
        (f"{HERE}:NOT_CALLABLE", "int"),
        (f"{HERE}:twize", "did you mean twice?"),
    ],
)
def test_a_function_that_cannot_be_had_is_refused_before_anything_is_made(name: str, hint: str) -> None:
    error = raised(SettingInvalid, Maker, making(transform=name))
    assert error.option == "--transform"
    assert hint in str(error)


def test_an_encoder_that_cannot_be_had_is_refused() -> None:
    for name in ("missing", "broken", "takes_our_name", "undescribed"):
        assert raised(SettingInvalid, Maker, making(encode=encoding(name))).option == "--encode"
