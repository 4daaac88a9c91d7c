"""A look at a stream as JSON values, for programs. The fields are described in `docs/status.md`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from lazyshard.cli.status_words import problems, summary
from lazyshard.format.blend_share import BlendShare, given_shares
from lazyshard.format.mixed import MixedSource
from lazyshard.inspection.band import Band
from lazyshard.inspection.outlook import ConsumerOutlook, Outlook

SCHEMA: Final = 1
"""Raised when a field goes or changes its meaning; new fields leave it."""


def status_values(outlook: Outlook) -> dict[str, Any]:
    """Returns the values of a look: what is not known is None."""
    survey, census = outlook.survey, outlook.survey.census
    manifest, quarantine = census.manifest, survey.quarantine
    return {
        "schema": SCHEMA,
        "directory": str(survey.directory),
        "looked_at_s": survey.looked_at,
        "error": None,
        "summary": summary(outlook),
        "kind": "native" if census.native else "foreign",
        "stream_id": None if manifest is None else manifest.stream_id,
        "samples_per_chunk": None if manifest is None else manifest.samples_per_chunk,
        "ended": census.ended,
        "published_chunks": census.chunks,
        "published_samples": census.samples,
        "retired_chunks": census.retired,
        "retired_samples": _samples(outlook, census.retired),
        "present_chunks": census.chunks - census.retired,
        "published_chunks_per_s": outlook.chunk_rate,
        "published_samples_per_s": _samples(outlook, outlook.chunk_rate),
        "used_bytes": survey.disk.size,
        "used_bytes_is_exact": survey.disk.exact,
        "free_bytes": survey.free,
        "growth_bytes_per_s": outlook.byte_rate,
        "full_in_s": outlook.full_in_s,
        "quarantined_rows": 0 if quarantine is None else quarantine.lines,
        "quarantined_rows_is_exact": quarantine is None or quarantine.exact,
        "quarantine_bytes": 0 if quarantine is None else quarantine.size,
        "mixture": [_source(one) for one in survey.mixture],
        "band": _band(outlook.band),
        "producer": _producer(outlook),
        "consumers": [_consumer(outlook, one) for one in outlook.consumers],
        "problems": problems(outlook),
    }


def failure_values(directory: Path, looked_at: float, error: str) -> dict[str, Any]:
    """Returns the values of a look that has failed."""
    return {"schema": SCHEMA, "directory": str(directory), "looked_at_s": looked_at, "error": error}


def _producer(outlook: Outlook) -> dict[str, Any] | None:
    head = outlook.survey.census.head
    if head is None:
        return None
    return {
        "state": outlook.state,
        "said_state": head.state,
        "host": head.host,
        "pid": head.pid,
        "process_is_gone": outlook.survey.gone,
        "process_has_ended": outlook.survey.ended,
        "heartbeat_age_s": outlook.heartbeat_age_s,
        "waits_for": (head.note or None) if head.state != "failed" else None,
        "failure": (head.note or None) if head.state == "failed" else None,
    }


def _source(one: MixedSource) -> dict[str, Any]:
    return {
        "name": one.name,
        "weight": one.weight,
        "share": one.share,
        "drawn_rows": one.rows,
        "finished": one.finished,
    }


def _band(band: Band) -> dict[str, Any]:
    return {
        "stop_chunk": band.stop,
        "stretches": [{"first_chunk": one.first, "stop_chunk": one.stop, "state": one.state} for one in band.stretches],
        "close_up": [
            {
                "chunk": cell.chunk,
                "state": cell.state,
                "readers": [{"consumer": reader.consumer, "rank": reader.rank} for reader in cell.readers],
            }
            for cell in band.cells
        ],
    }


def _consumer(outlook: Outlook, one: ConsumerOutlook) -> dict[str, Any]:
    cursor, reading = one.consumer.cursor, one.consumer.reading
    window = outlook.band.windows.get(one.consumer.name)
    return {
        "name": one.consumer.name,
        "ranks": None if reading is None else reading.dp_size,
        "consumed_samples": None if cursor is None else cursor.consumed,
        "chunks_before": None if cursor is None else cursor.chunks_before,
        "checkpoint_age_s": one.checkpoint_age_s,
        "lag_chunks": one.lag_chunks,
        "lag_samples": one.lag_samples,
        "lag_s": one.lag_s,
        "needs_chunks": None if reading is None else reading.needs_chunks,
        "window_first_chunk": None if window is None else window.first,
        "window_stop_chunk": None if window is None else window.stop,
        "reading_age_s": one.reading_age_s,
        "ahead_chunks": one.ahead_chunks,
        "ahead_samples": _samples(outlook, one.ahead_chunks),
        "read_chunks_per_s": one.chunk_rate,
        "read_samples_per_s": _samples(outlook, one.chunk_rate),
        "blend": [] if cursor is None else _blend(cursor.blend),
        "supply": one.supply,
        "starving_in_s": one.dry_in_s,
        "problem": one.consumer.problem,
    }


def _blend(shares: tuple[BlendShare, ...]) -> list[dict[str, Any]]:
    return [
        {"stream": one.stream, "weight": one.weight, "share": given, "consumed_samples": one.consumed}
        for one, given in zip(shares, given_shares(shares), strict=True)
    ]


def _samples(outlook: Outlook, chunks: float | None) -> float | None:
    per_chunk = outlook.survey.census.manifest
    return None if chunks is None or per_chunk is None else chunks * per_chunk.samples_per_chunk
