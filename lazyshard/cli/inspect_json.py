"""What `lazyshard inspect --json` prints."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from lazyshard.inspection.advice import Advice
from lazyshard.inspection.inspection import Overview, ShownChunk, ShownRow
from lazyshard.inspection.row_facts import Lengths

_NOT_ASCII: Final = re.compile(r"[^\x20-\x7e]+")


def overview_values(found: Overview, advice: Sequence[Advice]) -> dict[str, Any]:
    """Returns what is told of a stream, and what to change about it."""
    manifest, head = found.manifest, found.published.head
    return {
        "stream": str(found.directory),
        "stream_id": None if manifest is None else manifest.stream_id,
        "samples_per_chunk": found.samples_per_chunk,
        "retired": found.retired,
        "chunks": found.published.chunks,
        "samples": found.published.samples,
        "bytes": found.size,
        "bytes_exact": found.complete,
        "begun_at": None if manifest is None else manifest.created_at,
        "last_sealed_at": found.last_sealed_at,
        "ended": found.published.ended,
        "state": None if head is None else head.state,
        "looked_at": found.looked_at,
        "unread": found.unread,
        "row_bytes": distribution_values(found.lengths),
        "row_tokens": token_values(found.tokens),
        **({"row_arrays_bytes": distribution_values(found.arrays)} if found.arrays.count else {}),
        "encoding": None if manifest is None or manifest.encoding is None else dict(manifest.encoding),
        "packs": None
        if not found.packs
        else {
            "tokens": None if found.source_rows is None else found.source_rows.pack,
            "looked_at": found.packs,
            "rows": found.packed,
        },
        "source_rows": None
        if found.source_rows is None
        else {
            "read": found.source_rows.read,
            "refused": found.source_rows.refused,
            "exact": found.source_rows.exact,
        },
        "keys": {
            "rows": found.keys.rows,
            "by_name": {
                key: {"rows": number, "kinds": found.keys.kinds[key]} for key, number in found.keys.rows_with.items()
            },
        },
        "dealt": None
        if found.dealt is None
        else {"ranks": found.dealt.ranks, "micro_batch_size": found.dealt.micro_batch_size},
        "advice": [{"text": one.text, "setting": one.setting} for one in advice],
    }


def chunk_values(shown: ShownChunk) -> dict[str, Any]:
    """Returns what is told of a chunk, but for its rows."""
    return {
        "file": str(shown.file),
        "chunk": shown.number,
        "first_sample": shown.first,
        "samples": shown.rows,
        "bytes": shown.size,
        **({} if shown.arrays is None else {"arrays_bytes": shown.arrays}),
        "sealed_at": None if shown.seal is None else shown.seal.sealed_at,
        "source": None if shown.seal is None else shown.seal.source,
        "row_bytes": distribution_values(shown.lengths),
        "row_tokens": token_values(shown.tokens),
    }


def row_text(row: ShownRow) -> str:
    """Returns the JSON, in ASCII, of a row and where it is; the row's own text is not parsed and written anew.

    So numbers keep their digits, and no nesting is too deep.
    """
    where = {
        "sample": row.sample,
        "chunk": row.chunk,
        "row": row.row,
        "byte": row.byte,
        "bytes": len(row.line),
        **({} if row.arrays is None else {"arrays_bytes": row.arrays}),
        "tokens": row.tokens,
    }
    # Outside of strings these are nothing but white space, and within them they do not occur.
    text = row.line.decode().strip().translate(dict.fromkeys(b"\t\r\n", " "))
    return f'{json.dumps(where)[:-1]}, "value": {_NOT_ASCII.sub(_escaped, text)}}}'


def _escaped(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]


def token_values(lengths: Lengths) -> dict[str, Any] | None:
    """Returns how lengths in tokens are spread, None where they are not known."""
    values = distribution_values(lengths)
    if values is None:
        return None
    return {"sum": lengths.total, "p90": lengths.quantile(0.9), "p99": lengths.quantile(0.99)} | values


def distribution_values(lengths: Lengths) -> dict[str, Any] | None:
    """Returns how lengths are spread, None where there are none."""
    if not lengths.count:
        return None
    return {
        "rows": lengths.count,
        "min": lengths.smallest,
        "p5": lengths.quantile(0.05),
        "median": lengths.quantile(0.5),
        "p95": lengths.quantile(0.95),
        "max": lengths.largest,
        "mean": round(lengths.mean, 3),
        "bins": [[one.low, one.high, one.count] for one in lengths.histogram()],
    }
