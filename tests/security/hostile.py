"""What somebody may write who can write into a stream's directory: names, texts, numbers, things that are no files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from lazyshard import ChunkWriter
from lazyshard.cli.main import main as lazyshard_main
from lazyshard_producer.cli import main as producer_main

NAMES: Final = (
    "",
    ".",
    "..",
    "../x",
    "../../etc/passwd",
    "/etc/passwd",
    "a/b",
    "a\0b",
    "a\nb",
    "a\x1b[2Jb",
    "a\x9bb",
    "a" * 300,
    "\ud800",
)
"""Names that lead elsewhere, or that no file can have; a consumer must have none of them."""

ESCAPES: Final = "\x1b]0;owned\x07\x1b[2J\x9b31m\x08\r\n\u202egnp.exe\u2028"
"""Sets a title, clears the screen, colours, overwrites, begins a line, turns the direction of writing."""

NUMBERS: Final[tuple[Any, ...]] = (-1, 2**62, 2**63, 2**64, 1e308, True, None, "1", [], {})
"""None of them can be a count of anything."""

SECRET: Final = b'{"password": "kept to myself"}\n'


def write_stream(directory: Path, rows: int = 4, per_chunk: int = 2, *, end: bool = True, row: Any = None) -> Path:
    writer = ChunkWriter(directory, per_chunk)
    for number in range(rows):
        writer.write(row or {"id": number})
    writer.close(end)
    return directory


def edit(file: Path, **values: Any) -> None:
    """Changes fields of a JSON file."""
    file.write_bytes(json.dumps(json.loads(file.read_bytes()) | values).encode("utf-8", "surrogatepass"))


def outside(place: Path) -> Path:
    """Makes a folder that has nothing to do with any stream, with a file that is nobody else's affair."""
    place.mkdir()
    (place / "secret").write_bytes(SECRET)
    return place


def unchanged(place: Path) -> bool:
    """Whether such a folder holds what it held."""
    return sorted(path.name for path in place.iterdir()) == ["secret"] and (place / "secret").read_bytes() == SECRET


def link_to(target: Path) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def second_name_of(target: Path) -> Callable[[Path], None]:
    return lambda path: os.link(target, path)


def command(*arguments: object) -> int:
    """Runs `lazyshard` in this process."""
    return lazyshard_main([str(one) for one in arguments])


def producer(*arguments: object) -> int:
    """Runs `lazyshard-producer` in this process."""
    return producer_main([str(one) for one in arguments])


def shown(text: str) -> str:
    """Returns the characters of an output that do something to a terminal, line ends left out."""
    return "".join(char for char in text if not char.isprintable() and char != "\n")
