"""Consumers and heads of streams, as the tests of surveys have them."""

import json
from pathlib import Path
from typing import Any

from lazyshard.format.state import Cursor, ReadingHint
from lazyshard.stream import write_cursor
from lazyshard.stream.cursor import write_reading
from tests.stream.damage import edit

PLAN = {"dp_size": 1, "batch_size": 1, "unit": 2, "window": 2, "seed": 0}


def stream_id(directory: Path) -> str | None:
    file = directory / "stream.json"
    return str(json.loads(file.read_bytes())["stream_id"]) if file.exists() else None


def checkpoint(directory: Path, name: str, consumed: int, chunks_before: int, at: float) -> None:
    write_cursor(directory, Cursor(name, stream_id(directory), consumed, chunks_before, PLAN, at))


def reads(directory: Path, name: str, needs_chunks: int, at: float) -> None:
    assert write_reading(directory, ReadingHint(name, stream_id(directory), 1, 0, needs_chunks, at))


def edit_head(directory: Path, **values: Any) -> None:
    edit("head.json", **values)(directory)
