"""Rows and the positions after them, as a run would write them, without a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lazyshard.errors import RowInvalid
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.rows.pipeline import Pipeline


def drain(settings: Settings, start: Any = None, warnings: list[str] | None = None) -> Iterator[tuple[Any, Any]]:
    """Yields (row, position after it), refusing what is no row."""
    pipeline = Pipeline(settings, start, warn=(lambda text: None) if warnings is None else warnings.append)
    try:
        while (batch := pipeline.reader.read()) is not None:
            if not batch.lines:
                pipeline.stats.mixer.wait(1.0)
            for index, line in enumerate(batch.lines):
                try:
                    row = json.loads(line) if isinstance(line, bytes) else None
                except ValueError as error:
                    batch.refuse(index, RowInvalid("no row", reason=str(error)))
                else:
                    yield row, json.loads(json.dumps(batch.position(index).encode(pipeline.names)))
    finally:
        pipeline.close()
