"""Regular expressions on hostile texts: none of the product's can take exponential time."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from typing import Any, Final

from lazyshard.cli.shortening import shorten
from lazyshard_producer.following.names import NameRules
from tests.security.test_code import ROOT, sources

patterns: Final[Any] = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")

HARMLESS: Final = {r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*"}
"""Each round begins with a dot, which nothing else in it matches; and the text is a setting of the user's own."""


def expressions() -> Iterator[tuple[str, str | bytes]]:
    for file in sources():
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re.") and node.args:
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str | bytes):
                    yield str(file.relative_to(ROOT)), first.value


def nests_repeats(expression: str | bytes) -> bool:
    """Whether it repeats without bound what repeats without bound: so matching can take exponential time."""

    def look(items: Any, within: bool) -> bool:
        for kind, value in items:
            inside = within
            parts: list[Any] = []
            if kind in (patterns.MAX_REPEAT, patterns.MIN_REPEAT):
                unbounded = value[1] is patterns.MAXREPEAT
                if unbounded and within:
                    return True
                inside, parts = within or unbounded, [value[2]]
            elif kind is patterns.SUBPATTERN:
                parts = [value[3]]
            elif kind is patterns.BRANCH:
                parts = value[1]
            elif kind in (patterns.ASSERT, patterns.ASSERT_NOT):
                parts = [value[1]]
            if any(look(part, inside) for part in parts):
                return True
        return False

    return look(patterns.parse(expression), False)


def test_no_expression_takes_exponential_time_on_a_hostile_text() -> None:
    found = list(expressions())
    assert len(found) > 15
    assert {expression for _, expression in found if nests_repeats(expression)} == HARMLESS
    assert nests_repeats(r"(a+)+b") and nests_repeats(r"(?:x*|y)*") and not nests_repeats(r"a+b+(c{1,5})+")


def test_texts_that_make_expressions_slow_are_read_in_one_go() -> None:
    for text in ("data:" * 50_000, "data:;" + "base64," * 50_000, "A" * 500_000 + "!", "a=" * 200_000):
        assert len(shorten(text)) < 300
    rules = NameRules("*a*a*a*a*a*b", "{name}.done", "END")
    assert not rules.is_data("a" * 250)
