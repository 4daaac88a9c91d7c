"""Directories of chunk files for adoption, and what is in them before and after."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import orjson

from lazyshard.format.names import chunk_name, seal_name
from tests.stream.streams import foreign, produce

FULL: Final = (b'{"id":0}\n{"id":1}\n', b'{"id":2}\n{"id":3}\n', b'{"id":4}\n{"id":5}\n')
SHORT: Final = (*FULL[:2], b'{"id":4}\n')

KEPT: Final = {".producer.lock", "stream.owner"}
"""What taking the writer's lock leaves."""


def bare(directory: Path, *chunks: bytes) -> Path:
    directory.mkdir(exist_ok=True)
    for number, data in enumerate(chunks):
        (directory / chunk_name(number)).write_bytes(data)
    return directory


def marked(directory: Path, *chunks: bytes) -> Path:
    return foreign(directory, *chunks)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def data(directory: Path) -> list[tuple[str, bytes, int]]:
    return [(path.name, path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(directory.glob("*.jsonl"))]


def values(directory: Path, name: str) -> Any:
    return json.loads((directory / name).read_bytes())


def seal_of(directory: Path, chunk: int, /, **changes: Any) -> None:
    """Puts a real seal, with some fields changed, where the chunk's marker goes."""
    produce(directory.with_name("produced"), 6)
    fields = values(directory.with_name("produced"), seal_name(chunk))
    (directory / seal_name(chunk)).write_bytes(orjson.dumps(fields | changes))


def write(name: str, content: bytes = b"") -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_bytes(content)
