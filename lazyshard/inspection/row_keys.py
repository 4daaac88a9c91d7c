"""Which keys rows have at their top level, and what kinds of values. No I/O."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from lazyshard.format.arrays import DTYPES

_KINDS: Final[dict[type, str]] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "true or false",
    dict: "object",
    list: "array",
    type(None): "null",
}

_LOOKED_AT: Final = 100
"""Values of an array whose kinds are told apart; a list of tokens has thousands, of one kind."""


class Keys:
    """The keys of some rows.

    Attributes:
        rows: how many rows.
        rows_with: by key, how many rows have it, in the order in which they were met.
        kinds: by key, what kinds of values it has, in that order too.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.rows_with: dict[str, int] = {}
        self.kinds: dict[str, list[str]] = {}

    def add(self, row: dict[str, Any]) -> None:
        """Counts the keys of a row."""
        self.rows += 1
        for key, value in row.items():
            self.rows_with[key] = self.rows_with.get(key, 0) + 1
            kinds = self.kinds.setdefault(key, [])
            if (kind := kind_of(value)) not in kinds:
                kinds.append(kind)


def kind_of(value: Any) -> str:
    """Returns what a value of JSON is.

    >>> kind_of(1), kind_of([{}, "x"]), kind_of([])
    ('integer', 'array of object, string', 'array')

    Of a numpy array, which a row of a stream with arrays may hold, its dtype too.
    """
    if type(value) is not list or not value:
        return _simple_kind(value)
    return f"array of {', '.join(dict.fromkeys(_simple_kind(item) for item in value[:_LOOKED_AT]))}"


def _simple_kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{next((name for name, dtype in DTYPES.items() if dtype == value.dtype), value.dtype)} array"
    return _KINDS[type(value)]
