"""What seals say of source rows: read where it can be, and never an error."""

from typing import Any

import pytest

from lazyshard.format.source_facts import SourceRows

SOURCE: dict[str, Any] = {"version": 1, "sources": [], "rows": 24, "refused": 3, "skip": 0, "recipe": {}}


def test_what_was_read_is_told() -> None:
    assert SourceRows.read_source(SOURCE) == SourceRows(24, 3, True)
    assert SourceRows.read_source(SOURCE | {"skip": 2, "recipe": {"pack": 8192}}) == SourceRows(24, 3, False, 8192)


@pytest.mark.parametrize("source", [None, 3, [], {}, {"sources": 3}, {"in.jsonl": 5}])
def test_other_streams_say_nothing_of_it(source: Any) -> None:
    assert SourceRows.read_source(source) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in ("rows", "refused", "skip") for value in (None, -1, 1.5, "3", True, 2**70)]
    + [("refused", 25)],
)
def test_what_cannot_be_says_nothing(name: str, value: Any) -> None:
    assert SourceRows.read_source(SOURCE | {name: value}) is None


@pytest.mark.parametrize("recipe", [None, [], {"pack": "8192"}, {"pack": -1}, {"pack": True}, {"pack": 2**70}])
def test_pack_that_cannot_be_is_none(recipe: Any) -> None:
    assert SourceRows.read_source(SOURCE | {"recipe": recipe}) == SourceRows(24, 3, True, None)
