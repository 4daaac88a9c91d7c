"""Consumers, damage and looks that the tests of surveys share."""

import json
from pathlib import Path
from typing import Any

from lazyshard.format.cursor import Cursor, ReadingMark
from lazyshard.stream import write_cursor
from lazyshard.stream.consumers import write_reading

PLAN = {"dp_size": 1, "batch_size": 1, "unit": 2, "window": 2, "seed": 0}


def stream_id(directory: Path) -> str | None:
    try:
        found: str = json.loads((directory / "stream.json").read_bytes())["stream_id"]
    except FileNotFoundError:
        return None
    return found


def checkpoint(directory: Path, name: str, consumed: int, chunks_before: int, at: float) -> None:
    write_cursor(directory, Cursor(name, stream_id(directory), consumed, chunks_before, PLAN, at))


def reads(directory: Path, name: str, needs_chunks: int, at: float) -> None:
    assert write_reading(directory, ReadingMark(name, stream_id(directory), 1, 0, needs_chunks, at))


def edit_head(directory: Path, **values: Any) -> None:
    """Changes fields of the head, as another producer would have written it."""
    path = directory / "head.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | values))
