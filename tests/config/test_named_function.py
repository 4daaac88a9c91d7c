"""Functions by their names: what is said to who names a file where a module is meant."""

from __future__ import annotations

import re

import pytest

from lazyshard.config.named_function import FunctionMissing, named_function


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("rows.py:keep", "; is rows:keep meant?"),
        ("./rows/chat.py:Keep.one", "; is rows.chat:Keep.one meant?"),
        ("rows.py", "; is rows:function meant?"),
        ("/data/rows.py:keep", ""),
        ("my-rows.py:keep", ""),
        ("rows.keep", ""),
    ],
)
def test_file_in_the_place_of_a_module_is_told_how_it_is_named(name: str, hint: str) -> None:
    with pytest.raises(FunctionMissing, match=re.escape(f'expected "package.module:function"{hint}') + "$"):
        named_function(name)
