"""Functions for steps, by name and as they are. Kept light, since spawned workers import it."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def to_messages(row: Row) -> Row:
    return {"id": row["id"], "messages": [{"role": "user", "content": f"row {row['id']}"}]}


def even(row: Row) -> bool:
    return bool(row["id"] % 2 == 0)


def even_index(row: Row, index: int) -> bool:
    assert row["id"] == index
    return index % 2 == 0


def uneven(row: Row) -> bool:
    """Of chunks of three, all of every other one, and of the rest the first row."""
    return bool(row["id"] // 3 % 2 == 0 or row["id"] % 3 == 0)


def nothing(row: Row) -> bool:
    return False


def no_answer(row: Row) -> None:
    return None


def add_square(row: Row) -> Row:
    return {"square": row["id"] ** 2}


def add_index(row: Row, index: int) -> Row:
    return {"index": index}


def fail_on_two(row: Row) -> Row:
    if row["id"] == 2:
        raise KeyError("text")
    return {}


def encode(row: Row) -> Row:
    return {"id": row["id"], "input_ids": [row["id"]] * 3}


no_function = 3


def count(rows: list[Row]) -> int:
    return len(rows)
