"""What `lazyshard inspect` shows, as lines of text and as values of JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final

from lazyshard.cli.output import MAX_KEYS, count, moment, size
from lazyshard.format.records import Encoding
from lazyshard.format.seal import SourceRows
from lazyshard.inspection.advice import Advice
from lazyshard.inspection.inspection import Overview, ShownChunk, ShownRow
from lazyshard.inspection.row_facts import Bin, Keys, Lengths

BAR_WIDTH: Final = 40

_NOT_ASCII: Final = re.compile(r"[^\x20-\x7e]+")

_SHOWN: Final = 100
"""Characters of a fact about the encoding: a system prompt may have pages; --json has all of them."""

_SHARES: Final = (("p5", 0.05), ("median", 0.5), ("p95", 0.95))
_TOKEN_SHARES: Final = (("median", 0.5), ("p90", 0.9), ("p99", 0.99))


def overview_lines(found: Overview) -> Iterator[str]:
    """Yields the page of a stream."""
    yield str(found.directory)
    facts = list(_facts(found))
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        yield f"  {name:{width}}  {value}"
    if found.manifest is not None and found.manifest.encoding is not None:
        yield ""
        yield "encoded with"
        yield from _encoding_lines(found.manifest.encoding)
    if found.lengths.count:
        yield ""
        yield f"row length in bytes, of {_looked_at(found)}"
        yield from distribution_lines(found.lengths)
    if found.arrays.count:
        yield ""
        yield f"arrays of a row in bytes, of {count(found.arrays.count, 'row')}"
        yield from distribution_lines(found.arrays)
    if found.tokens.count:
        yield ""
        yield f"row length in tokens, of {count(found.tokens.count, 'row')}: {found.tokens.total:,} tokens in all"
        yield from distribution_lines(found.tokens, _TOKEN_SHARES)
    if found.keys.rows:
        yield ""
        first = "the first row" if found.keys.rows == 1 else f"the first {found.keys.rows:,} rows"
        yield f"keys at the top level, in {first}"
        yield from _key_lines(found.keys)
    if found.unread:
        yield ""
        yield f"{count(found.unread, 'chunk')} could not be looked at, see `lazyshard verify`: {found.reason}"


def advice_lines(advice: Sequence[Advice]) -> Iterator[str]:
    """Yields what to change, each with the setting that does it."""
    if advice:
        yield ""
        yield "what to change"
    for one in advice:
        yield f"  {one.text}"
        yield f"    {one.setting}"


def _facts(found: Overview) -> Iterator[tuple[str, str]]:
    manifest, published = found.manifest, found.published
    if manifest is None:
        yield "stream", "without stream.json: filled by another program"
    else:
        yield "stream", manifest.stream_id
    yield "samples per chunk", f"{found.samples_per_chunk:,}"
    chunks = f"{found.chunks:,}"
    if found.retired:
        chunks += f", from {found.retired:,} on: those before are deleted"
    yield "chunks", chunks
    yield "samples", f"{found.samples:,}{_packs(found) if found.packs else ''}"
    if found.source_rows is not None:
        yield "source rows", _source_rows(found.source_rows)
    if found.dealt is not None:
        made = found.dealt
        yield "balance", f"dealt by cost for {count(made.ranks, 'rank')}, micro batches of {made.micro_batch_size:,}"
    if found.lengths.count or not found.chunks:
        yield "bytes", f"{'' if found.complete else 'about '}{size(found.size)}"
    if manifest is not None:
        yield "begun", moment(manifest.created_at)
    if found.last_sealed_at is not None:
        yield "last published", moment(found.last_sealed_at)
    head = published.head
    if published.ended:
        yield "ended", "yes"
    elif head is not None:
        yield "ended", f"no; the producer is {head.state}" + (f": {head.note}" if head.note else "")
    else:
        yield "ended", "no"
    if published.gap is not None:
        yield "gap", f"chunk {published.gap:,} lacks its data or its marker: later ones do not count"


def _packs(found: Overview) -> str:
    """Returns what is told of packs: how many source rows are in them, counted in some of them."""
    most = found.source_rows.pack if found.source_rows is not None else None
    size = f" of at most {most:,} tokens" if most else ""
    looked_at = found.packs
    mean = found.packed / looked_at
    if looked_at == found.samples:
        return f" packs{size}, with {count(found.packed, 'row')}: {mean:.1f} each"
    about = f"about {round(mean * found.samples):,} rows"
    return f" packs{size}, with {about}: {mean:.1f} each in the {looked_at:,} looked at"


def _source_rows(found: SourceRows) -> str:
    refused = f", {found.refused:,} of them refused" if found.refused else ""
    return f"{'' if found.exact else 'at least '}{found.read:,} read{refused}"


def _encoding_lines(encoding: Encoding) -> Iterator[str]:
    width = min(40, max(map(len, encoding)))
    for name, fact in encoding.items():
        text = str(fact) if type(fact) is str else json.dumps(fact)
        yield f"  {name:{width}}  {text if len(text) <= _SHOWN else f'{text[: _SHOWN - 3]}...'}"


def _looked_at(found: Overview) -> str:
    rows = count(found.lengths.count, "row")
    if found.complete:
        return rows
    return f"{rows} in {found.looked_at:,} of {count(found.chunks, 'chunk')}, evenly spaced (--all takes all)"


def chunk_lines(shown: ShownChunk) -> Iterator[str]:
    """Yields the page of a chunk, without its rows."""
    yield str(shown.file)
    facts = [
        ("chunk", f"{shown.number:,}"),
        ("samples", f"{shown.rows:,}: {shown.first:,} to {shown.first + shown.rows - 1:,}"),
        ("bytes", f"{shown.size:,}"),
    ]
    if shown.arrays is not None:
        facts.append(("bytes of arrays", f"{shown.arrays:,}"))
    if shown.seal is None:
        facts.append(("seal", "a marker only, without digests"))
    else:
        facts.append(("sealed", moment(shown.seal.sealed_at)))
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        yield f"  {name:{width}}  {value}"
    if shown.lengths.count:
        yield ""
        yield "row length in bytes"
        yield from distribution_lines(shown.lengths)
    if shown.tokens.count:
        yield ""
        yield f"row length in tokens, {shown.tokens.total:,} in all"
        yield from distribution_lines(shown.tokens, _TOKEN_SHARES)


def row_line(row: ShownRow) -> str:
    """Returns the heading of a row."""
    arrays = "" if row.arrays is None else f" and {count(row.arrays, 'byte')} of arrays"
    tokens = "" if row.tokens is None else f", {count(row.tokens, 'token')}"
    return (
        f"sample {row.sample:,}: chunk {row.chunk:,}, row {row.row:,} (byte {row.byte:,}), "
        f"{count(len(row.line), 'byte')}{arrays}{tokens}"
    )


def distribution_lines(lengths: Lengths, shares: Sequence[tuple[str, float]] = _SHARES) -> Iterator[str]:
    """Yields how lengths are spread: a line of figures, and a bar for each bin.

    Args:
        lengths: the lengths, at least one.
        shares: names of quantiles, and the share of the lengths that is not above each.
    """
    figures = [("min", lengths.smallest), *((name, lengths.quantile(share)) for name, share in shares)]
    figures += [("max", lengths.largest), ("mean", round(lengths.mean))]
    yield "  " + "  ".join(f"{name} {value:,}" for name, value in figures)
    bins = lengths.histogram()
    most = max(one.count for one in bins)
    labels = [_label(one) for one in bins]
    width, number = max(map(len, labels)), len(f"{most:,}")
    for label, one in zip(labels, bins, strict=True):
        # A bin that is not empty has a bar, however short.
        bar = "#" * -(-one.count * BAR_WIDTH // most)
        yield f"  {label:>{width}}  {one.count:>{number},}  {bar}".rstrip()


def _label(one: Bin) -> str:
    return f"{one.low:,}" if one.high == one.low + 1 else f"{one.low:,} to {one.high - 1:,}"


def _key_lines(keys: Keys) -> Iterator[str]:
    shown = islice(keys.rows_with.items(), MAX_KEYS)
    rows = {key: f"{number:,}" if number < keys.rows else "all" for key, number in shown}
    kinds = {key: " or ".join(keys.kinds[key]) for key in rows}
    name_width = min(40, max(map(len, rows), default=0))
    kind_width = max(map(len, kinds.values()), default=0)
    for key, number in rows.items():
        yield f"  {key:{name_width}}  {kinds[key]:{kind_width}}  {number}"
    if len(keys.rows_with) > MAX_KEYS:
        yield f"  and {len(keys.rows_with) - MAX_KEYS:,} more; --json lists them all"


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
