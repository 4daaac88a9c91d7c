"""Opens sources of tables and reads them whole."""

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

from lazyshard.errors import RowInvalid
from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.sources.arrow import open_arrow
from lazyshard_producer.sources.huggingface import open_hugging_face
from lazyshard_producer.sources.parquet import open_parquet
from lazyshard_producer.sources.source import Context, Place
from lazyshard_producer.sources.tables import TableMark, TableSource

OPENERS: Final = {"parquet": open_parquet, "arrow": open_arrow, "huggingface": open_hugging_face}


class Row(NamedTuple):
    value: Any
    mark: TableMark
    place: Place


def open_table_source(
    kind: str, path: Path, position: dict[str, Any] | None = None, max_row_bytes: int = 1 << 20
) -> TableSource:
    context = Context(path.parent / "stream", max_row_bytes)
    return OPENERS[kind](SourceSettings(path=str(path)), position, context)


def read_rows(source: TableSource, most: int = 1 << 60) -> list[Row]:
    """The next rows up to the end, or until there are so many: values parsed, refused ones as their reason."""
    rows: list[Row] = []
    while len(rows) < most and (piece := source.read()) is not None:
        assert piece.lines
        for index, line in enumerate(piece.lines):
            value = f"refused: {line.reason}" if isinstance(line, RowInvalid) else json.loads(line)
            rows.append(Row(value, piece.mark(index), piece.place(index)))
    return rows


def values(source: TableSource) -> list[Any]:
    try:
        return [row.value for row in read_rows(source)]
    finally:
        source.close()
