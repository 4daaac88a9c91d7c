"""Functions by their names: what is said to who names a file where a module is meant."""

from __future__ import annotations

import pytest

from lazyshard.config.named_function import FunctionMissing, named_function


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./rows/chat.py:Keep.one", 'expected "package.module:function"; is rows.chat:Keep.one meant?'),
        ("rows.py", 'expected "package.module:function"; is rows:function meant?'),
        ("/data/rows.py:keep", 'expected "package.module:function"'),
        ("my-rows.py:keep", 'expected "package.module:function"'),
        ("rows.keep", 'expected "package.module:function"'),
        # This has the form of a name, and could be the module py of a package rows.
        ("rows.py:keep", "importing rows.py raised ModuleNotFoundError: No module named 'rows'; is rows:keep meant?"),
    ],
)
def test_file_in_the_place_of_a_module_is_told_how_it_is_named(name: str, message: str) -> None:
    with pytest.raises(FunctionMissing) as caught:
        named_function(name)
    assert str(caught.value) == message
