from __future__ import annotations

import re
from typing import Any

import pytest

from lazyshard.errors import RowInvalid
from lazyshard_producer.errors import SettingInvalid
from lazyshard_producer.rows.recipe import MadeOfRow, Maker, Recipe

HERE = "tests.producer.recipes"


def made(recipe: Recipe, line: bytes, index: int = 0) -> MadeOfRow:
    return Maker(recipe).make(line, index)


def refused(recipe: Recipe, line: bytes, index: int = 0) -> str:
    result = made(recipe, line, index)
    assert result.lines == []
    assert result.refused is not None
    assert result.refused.reason is not None
    return result.refused.reason


def test_a_row_that_is_only_filtered_stays_as_it_is_to_the_byte() -> None:
    line = b'{"x" : 1.50, "y":"\\u00e4"}'
    assert made(Recipe(where=f"{HERE}:even"), line + b"\r\n") == MadeOfRow([line + b"\n"])
    assert made(Recipe(where=f"{HERE}:even"), line, 1) == MadeOfRow([])


def test_columns_are_renamed_and_the_others_left_out() -> None:
    assert made(Recipe(columns=(("text", "body"), ("id", "id"))), b'{"id":1,"body":"b","more":2}') == MadeOfRow(
        [b'{"text":"b","id":1}\n']
    )


def test_columns_come_before_the_filter_and_the_filter_before_the_transform() -> None:
    recipe = Recipe(columns=(("id", "n"),), where=f"{HERE}:even", transform=f"{HERE}:fails_on_three")
    assert made(recipe, b'{"n":3}', 1) == MadeOfRow([])
    assert refused(recipe, b'{"n":3}', 2).startswith("--transform raised ValueError: three is too many (recipes.py:")


@pytest.mark.parametrize(
    ("name", "index", "lines"),
    [
        ("twice", 0, [b'{"id":1}\n', b'{"id":1}\n']),
        ("none", 0, []),
        ("some", 2, [b'{"id":1,"copy":0}\n', b'{"id":1,"copy":1}\n']),
    ],
)
def test_a_transform_gives_a_row_none_or_several(name: str, index: int, lines: list[bytes]) -> None:
    assert made(Recipe(transform=f"{HERE}:{name}"), b'{"id":1}', index) == MadeOfRow(lines)


def test_a_key_named_twice_is_noticed() -> None:
    assert made(Recipe(transform=f"{HERE}:none"), b'{"id":1,"id":2}').duplicate


@pytest.mark.parametrize(
    ("recipe", "line", "reason"),
    [
        (Recipe(transform=f"{HERE}:a_number"), b"{}", "expected a row, None or rows, got int"),
        (Recipe(transform=f"{HERE}:fails_on_three"), b"{}", "--transform raised KeyError: 'id'"),
        (Recipe(columns=(("a", "b"),)), b'{"c":1,"d":2}', "--columns: no 'b' among its keys (c, d)"),
        (Recipe(transform=f"{HERE}:twice"), b"[]", "expected a JSON object, found an array"),
        (Recipe(transform=f"{HERE}:twice"), b'{"a":', "unexpected end of data"),
    ],
)
def test_a_row_that_cannot_be_made_is_refused_with_the_reason(recipe: Recipe, line: bytes, reason: str) -> None:
    assert reason in refused(recipe, line)


def test_what_the_source_refused_stays_refused() -> None:
    error = RowInvalid("not a row: too long", reason="too long", byte=0)
    assert Maker(Recipe(transform=f"{HERE}:twice")).make(error, 0).refused is error


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("recipes", "--transform: expected MODULE:FUNCTION, got 'recipes'"),
        ("rows/chat.py:keep", "'rows/chat'; a module is named without .py: is rows.chat:keep meant?"),
        ("./m.py:f", "a module is named without .py: is m:f meant?"),
        ("recipes.py:f", "a module is named without .py: is recipes:f meant?"),
        ("/a/m.py:f", "a module is named without .py"),
        ("no_such_module:f", "importing no_such_module raised ModuleNotFoundError"),
        (f"{HERE}:no_such_function", "tests.producer.recipes has no no_such_function"),
        (f"{HERE}:NOT_CALLABLE", "is no function but a int"),
        (f"{HERE}:twize", "tests.producer.recipes has no twize; is twice meant?"),
    ],
)
def test_a_function_that_cannot_be_had_is_refused_before_anything_is_made(name: str, message: str) -> None:
    with pytest.raises(SettingInvalid, match=re.escape(message)) as error:
        Maker(Recipe(transform=name))
    assert error.value.option == "--transform"


class Awkward:
    """A callable without a signature that can be read, or with more parameters than two."""

    def __call__(self, row: Any, index: int = 0, *more: Any) -> Any:
        return row | {"index": index}


AWKWARD = Awkward()


def test_an_optional_index_is_given() -> None:
    assert made(Recipe(transform=f"{__name__}:AWKWARD"), b"{}", 4) == MadeOfRow([b'{"index":4}\n'])
