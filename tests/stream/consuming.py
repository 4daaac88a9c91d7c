"""Cursors and reading hints as a training run writes them."""

from pathlib import Path

from lazyshard.format.records import Manifest
from lazyshard.format.state import Cursor, ReadingHint
from lazyshard.stream import write_cursor, write_reading

_OWN = "own"


def _stream_id(directory: Path) -> str:
    return Manifest.decode((directory / "stream.json").read_bytes()).stream_id


def cursor(directory: Path, consumer: str, *, consumed: int, chunks_before: int, stream_id: str | None = _OWN) -> None:
    stream_id = _stream_id(directory) if stream_id == _OWN else stream_id
    write_cursor(directory, Cursor(consumer, stream_id, consumed, chunks_before, {"dp_size": 1}, 1700000000.0))


def reading(directory: Path, consumer: str, *, needs_chunks: int, stream_id: str | None = _OWN) -> None:
    stream_id = _stream_id(directory) if stream_id == _OWN else stream_id
    write_reading(directory, ReadingHint(consumer, stream_id, 1, 0, needs_chunks, 1700000000.0))
