"""Opens sources of tables and reads them whole."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from lazyshard.errors import RowInvalid
from lazyshard_producer.sources.arrow import open_tables
from lazyshard_producer.sources.source import Context, RowOrigin
from lazyshard_producer.sources.tables import TablePosition, TableSource


class Row(NamedTuple):
    value: Any
    position: TablePosition
    place: RowOrigin


def open_table_source(
    kind: str, path: Path, position: dict[str, Any] | None = None, max_row_bytes: int = 1 << 20
) -> TableSource:
    context = Context(path.parent / "stream", max_row_bytes)
    return open_tables(kind, str(path), position, context)


def read_rows(source: TableSource, most: int = 1 << 60) -> list[Row]:
    """The next rows up to the end, or until there are so many: values parsed, refused ones as their reason."""
    rows: list[Row] = []
    while len(rows) < most and (piece := source.read()) is not None:
        assert piece.lines
        for index, line in enumerate(piece.lines):
            assert isinstance(line, bytes | RowInvalid)
            value = json.loads(line) if isinstance(line, bytes) else f"refused: {line.reason}"
            rows.append(Row(value, piece.position(index), piece.place(index)))
    return rows


def values(source: TableSource) -> list[Any]:
    try:
        return [row.value for row in read_rows(source)]
    finally:
        source.close()
