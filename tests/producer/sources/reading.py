"""Reads sources by hand, as the command does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from lazyshard.errors import RowInvalid
from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.sources.source import Context, Line, Position, Rows, Source
from tests.stream.streams import raised

BOM: Final = b"\xef\xbb\xbf"
TEXT: Final = BOM + b"\n" + b"\r\n".join(b"%d" % n * (n * 30) for n in range(1, 10)) + b"\n\r\n\nx"
"""Ten rows, with blank lines and line ends of all kinds."""

Kind = Callable[[SourceSettings, dict[str, Any] | None, Context], Source]


def open_kind(
    kind: Kind, path: Path | str, position: dict[str, Any] | None = None, limit: int = 100_000, **settings: Any
) -> Any:
    out = Path(path).parent / "out"
    return kind(SourceSettings(path=str(path), **settings), position, Context(out=out, max_row_bytes=limit))


def take(source: Source, count: int | None = None) -> list[tuple[Line, Rows, int]]:
    """So many rows of a source that has them, or all: each with the rows it came in, and its index there."""
    taken: list[tuple[Line, Rows, int]] = []
    nothing = 0
    while count is None or len(taken) < count:
        rows = source.read()
        if rows is None:
            break
        nothing += not rows.lines
        assert nothing < 1000, f"waits for {source.waits_for()}"
        taken += [(line, rows, index) for index, line in enumerate(rows.lines)]
    return taken[:count]


def lines(source: Source, count: int | None = None) -> list[Line]:
    return [line for line, _, _ in take(source, count)]


def parsed(line: Line) -> Any:
    """A row; of a refused one the reason."""
    if isinstance(line, RowInvalid):
        return line.reason
    assert isinstance(line, bytes)
    return json.loads(line)


def position_after(source: Source, taken: list[tuple[Line, Rows, int]]) -> Position:
    if not taken:
        return source.start
    _, rows, index = taken[-1]
    return rows.position(index)


def refusal(call: Callable[..., object], *arguments: object) -> SourceRefused:
    return raised(SourceRefused, call, *arguments)
