"""What the attacks of somebody who can write into a stream's directory share."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from lazyshard.cli.main import main as lazyshard_main
from lazyshard_producer.cli import main as producer_main
from tests.stream.streams import publish_rows

NAMES: Final = (  # Names that lead elsewhere, or that no file can have; a consumer must have none of them
    *("", ".", "..", "../x", "../../etc/passwd", "/etc/passwd", "a/b", "a\0b", "a\nb", "a\x1b[2Jb", "a\x9bb"),
    *("a" * 300, "\ud800"),
)

ESCAPES: Final = "\x1b]0;owned\x07\x1b[2J\x9b31m\x08\r\n\u202egnp.exe\u2028"
"""Sets a title, clears the screen, colours, overwrites, begins a line, turns the direction of writing."""

SECRET: Final = b'{"password": "kept to myself"}\n'


def write_stream(directory: Path, rows: int = 4, per_chunk: int = 2, *, end: bool = True, row: Any = None) -> Path:
    return publish_rows(directory, per_chunk, (row or {"id": number} for number in range(rows)), end=end)


def edit(file: Path, **values: Any) -> None:
    file.write_bytes(json.dumps(json.loads(file.read_bytes()) | values).encode("utf-8", "surrogatepass"))


def outside(place: Path) -> Path:
    """Makes a folder that has nothing to do with any stream, with a file that is nobody else's affair."""
    place.mkdir()
    (place / "secret").write_bytes(SECRET)
    return place


def unchanged(place: Path) -> bool:
    return sorted(path.name for path in place.iterdir()) == ["secret"] and (place / "secret").read_bytes() == SECRET


def link_to(target: Path) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def second_name_of(target: Path) -> Callable[[Path], None]:
    return lambda path: os.link(target, path)


def command(*arguments: object) -> int:
    return lazyshard_main([str(one) for one in arguments])


def producer(*arguments: object) -> int:
    return producer_main([str(one) for one in arguments])


def shown(text: str) -> str:
    return "".join(char for char in text if not char.isprintable() and char != "\n")
