"""Keys that an object names twice: JSON allows it, readers keep one of the values, and it is hardly ever meant.

Whatever walks a row does so without recursion: orjson reads objects nested deeper than Python may recurse.
"""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

from lazyshard.memory import dumps

_QUOTES_AND_BRACES: Final = re.compile(rb'(?s:\\.)|"([ \t\r\n]*:)?|[{}]')
"""Tokens of a valid row: an escape, a quote and whether a colon follows, a brace."""


def has_duplicate_keys(line: bytes, row: dict[str, Any]) -> bool:
    """Whether an object of the line names a key twice; `row` is what it parsed to (the last one counts)."""
    return not _surely_none(line, row) and _names_one_twice(line)


def count_keys(row: dict[str, Any]) -> int:
    """Returns how many keys there are in an object and all that it holds."""
    count = len(row)
    pending: list[Any] = [*row.values()]
    while pending:
        value = pending.pop()
        kind = type(value)
        if kind is dict:
            count += len(value)
            pending.extend(value.values())
        elif kind is list:
            pending.extend(value)
    return count


def _surely_none(line: bytes, row: dict[str, Any]) -> bool:
    colons = line.count(b":")
    # Every member has a colon; so with no more colons than keys left, no member was dropped.
    if colons <= count_keys(row):
        return True
    # Written anew, a row has the colons of its strings and of its keys. Only an escaped colon makes up for a lost one.
    try:
        written = dumps(row)
    except (orjson.JSONEncodeError, MemoryError):  # nested deeper than orjson writes, or too large to be copied
        return False
    return colons == written.count(b":") and b"\\u003" not in line


def _names_one_twice(line: bytes) -> bool:
    objects: list[set[str]] = []
    start = -1  # of the string that the token is in
    for token in _QUOTES_AND_BRACES.finditer(line):
        if token[0].startswith(b'"'):
            if start < 0:
                start = token.start()
                continue
            if token[1]:
                key = orjson.loads(line[start : token.start() + 1])
                if key in objects[-1]:
                    return True
                objects[-1].add(key)
            start = -1
        elif start < 0 and token[0] == b"{":
            objects.append(set())
        elif start < 0 and token[0] == b"}":
            objects.pop()
    return False
