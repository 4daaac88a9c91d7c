"""Keys that an object names twice: JSON allows it, readers keep one of the values, and it is hardly ever meant.

`lazyshard.format.has_duplicate_keys` is exact but walks the text. Here two cheaper tests come first, each of which can
only say "surely none".
"""

from __future__ import annotations

from typing import Any

import orjson

from lazyshard.format import has_duplicate_keys


def names_a_key_twice(line: bytes, row: dict[str, Any]) -> bool:
    """Whether an object of the line names a key twice; `row` is what the line parsed to.

    Not looked into: rows that are nested deeper than Python's own recursion goes.
    """
    try:
        return not _surely_none(line, row) and has_duplicate_keys(line, row)
    except RecursionError:
        return False


def _surely_none(line: bytes, row: dict[str, Any]) -> bool:
    colons = line.count(b":")
    # Every member has a colon; so with no more colons than keys left, no member was dropped.
    if colons <= _keys(row):
        return True
    # Written anew, a row has the colons of its strings and of its keys. Only an escaped colon makes up for a lost one.
    try:
        written = orjson.dumps(row)
    except orjson.JSONEncodeError:  # nested deeper than orjson writes, which is less deep than it reads
        return False
    return colons == written.count(b":") and b"\\u003" not in line


def _keys(value: Any) -> int:
    if type(value) is dict:
        count = len(value)
        for item in value.values():
            if type(item) is dict or type(item) is list:
                count += _keys(item)
        return count
    count = 0
    for item in value:
        if type(item) is dict or type(item) is list:
            count += _keys(item)
    return count
