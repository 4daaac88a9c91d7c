"""Functions of rows of IndexedDatasets, for commands."""

from typing import Any


def with_id(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its first token, or the number of tokens, as an id."""
    tokens = row["input_ids"]
    return row | {"id": tokens[0] if tokens else -1}
