"""Which keys rows have at their top level, and what kinds of values. No I/O."""

from __future__ import annotations

from typing import Any, Final

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
    """
    kind = _KINDS[type(value)]
    if kind != "array" or not value:
        return kind
    return f"array of {', '.join(dict.fromkeys(_KINDS[type(item)] for item in value[:_LOOKED_AT]))}"
