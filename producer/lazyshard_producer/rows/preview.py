"""The rows that a run would publish next, without publishing anything."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from lazyshard.errors import RowInvalid
from lazyshard.format import EncodedRow, Seal, check_row
from lazyshard.format.names import seal_name
from lazyshard.store.files import read_file
from lazyshard.stream.stream import open_stream
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.opening import source_kind
from lazyshard_producer.rows.pipeline import Pipeline
from lazyshard_producer.rows.refusals import Refusals
from lazyshard_producer.sources.source import Place

PATIENCE_S: Final = 2.0
"""How long to wait for rows of live sources in all."""


@dataclass(frozen=True, slots=True)
class PreviewedRow:
    """A row as it would be published, or refused.

    Attributes:
        place: where it comes from.
        line: the line that would be published; of a refused row what there is of it.
        refused: why it would be refused.
    """

    place: Place
    line: bytes
    refused: str | None = None


def preview(settings: Settings, rows: int, *, clock: Callable[[], float] = time.monotonic) -> list[PreviewedRow]:
    """Returns so many of the rows that a run would publish next, and those refused on the way. Makes nothing.

    Nothing is taken from standard input or pipes, since what is read there is gone: with such a source there are none.

    Args:
        settings: of the run.
        rows: how many.
        clock: returns seconds of a monotonic clock.

    Raises:
        SettingInvalid, SourceRefused: as the run would.
        LazyShardError, OSError: the stream cannot be read.
    """
    if any(source_kind(source) == "stdin" for source in settings.sources):
        return []
    found: list[PreviewedRow] = []

    def refuse(error: RowInvalid, place: Place, line: bytes | None) -> None:
        found.append(PreviewedRow(place, line or b"", error.reason or str(error)))

    committed, samples = _committed(settings)
    pipeline = Pipeline(
        replace(settings, workers=0),
        committed,
        samples=samples,
        warn=lambda text: None,
        refusals=Refusals("skip", None, None, 0, tell=refuse),
    )
    deadline = clock() + PATIENCE_S
    try:
        while len(found) < rows and (batch := pipeline.feed.read()) is not None:
            for index, line in enumerate(batch.lines):
                if len(found) >= rows:
                    break
                try:
                    if isinstance(line, RowInvalid):
                        raise line
                    if isinstance(line, EncodedRow):
                        line = line.line
                    check_row(line)
                except RowInvalid as error:
                    batch.refuse(index, error)
                else:
                    found.append(PreviewedRow(batch.place(index), line))
            if not batch.lines:
                left = deadline - clock()
                if pipeline.book.mixer.wait(max(0.0, left)) and left <= 0:
                    break
    finally:
        pipeline.close()
    return found


def _committed(settings: Settings) -> tuple[Any, int]:
    """Returns the source position of the stream's last seal, None where there is none, and how many rows it holds."""
    out = Path(settings.out)
    stream = open_stream(out, None)
    published = None if stream is None else stream.published()
    if published is None or not published.chunks:
        return None, 0
    path = out / seal_name(published.chunks - 1)
    return Seal.decode(read_file(path), published.chunks - 1, str(path)).source or {}, published.samples
