"""A generator for a source that is live."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any


def seven(position: int | None) -> Iterator[tuple[dict[str, Any], int]]:
    """Rows 0 to 6; then it waits for rows that never come."""
    for number in range(position or 0, 7):
        yield {"id": number}, number + 1
    time.sleep(3600)


def same(row: dict[str, Any]) -> dict[str, Any]:
    """Changes nothing."""
    return row
