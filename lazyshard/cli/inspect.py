"""`lazyshard inspect`: what a stream holds, and rows of it."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.highlighter import JSONHighlighter
from rich.text import Text

from lazyshard.cli import exits, output
from lazyshard.cli.output import count, moment, size
from lazyshard.errors import ChunkMissing, ChunkRetired
from lazyshard.inspection import inspection
from lazyshard.inspection.row_facts import Lengths
from lazyshard.inspection.survey import tolerate
from lazyshard.store.urls import stream_path
from lazyshard.stream.consumers import list_consumers
from lazyshard.stream.stream import Stream, open_now

ROWS_OF_CHUNK: Final = 3
BAR_WIDTH: Final = 40
_NOT_ASCII: Final = re.compile(r"[^\x20-\x7e]+")
_SHOWN: Final = 100  # Characters of a fact about the encoding: a system prompt may have pages; --json has all of them
_SHARES: Final = (("p5", 0.05), ("median", 0.5), ("p95", 0.95))
_TOKEN_SHARES: Final = (("median", 0.5), ("p90", 0.9), ("p99", 0.99))

EPILOG: Final = output.epilog(
    [
        "lazyshard inspect /shared/stream",
        "lazyshard inspect /shared/stream 123456",
        "lazyshard inspect /shared/stream 0 --rows 5 --full",
        "lazyshard inspect /shared/stream --chunk 17",
        "lazyshard inspect /shared/stream --all --json | jq .advice",
    ],
    {
        0: "shown",
        2: "usage; there is no such directory, sample or chunk",
        3: "a row is no JSON object, or the names of a directory's files contradict each other",
        5: "there is no stream in it, what is to be shown is damaged or deleted, or it is of a later format",
        7: "the filesystem or store failed: no permission, no answer",
    },
)


def command(
    stream: output.StreamArgument,
    sample: Annotated[int | None, typer.Argument(metavar="N", min=0, help="The sample to show, from 0 on.")] = None,
    chunk: Annotated[
        int | None, typer.Option(metavar="K", min=0, help="Show this chunk: its seal and its first rows.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(metavar="M", min=0, help="How many rows to show. Default: 1 with N, 3 with --chunk.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Shorten nothing.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Look at every chunk for the overview.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on one line; rows are whole.")] = False,
    samples_per_chunk: output.SamplesPerChunkOption = None,
) -> Callable[[], int]:
    """Shows what a stream holds: its facts, how long its rows are, which keys they have; or rows of it.

    Without a number: an overview. Lengths come from the seals, so that no rows are read but the first ones; of a stream
    of many chunks evenly spaced ones are looked at. What to change about chunks, lengths and shuffle stands at the end.
    With a number: that sample.

    Changes nothing, and waits for nothing: of a stream that is being written it shows what is published.
    """
    output.check_stream(stream)
    whole = sample is None and chunk is None
    if sample is not None and chunk is not None:
        raise typer.BadParameter("give either N or --chunk", param_hint="--chunk")
    if rows is not None and whole:
        raise typer.BadParameter("goes with N or --chunk", param_hint="--rows")
    if every and not whole:
        raise typer.BadParameter("goes with neither N nor --chunk", param_hint="--all")
    directory = stream_path(stream)

    def page() -> Iterator[str]:
        if whole:
            return _overview_page(directory, samples_per_chunk, every, as_json)
        opened = open_now(directory, samples_per_chunk)
        if chunk is not None:
            return _chunk_page(opened, chunk, ROWS_OF_CHUNK if rows is None else rows, full, as_json)
        return _row_page(opened, sample or 0, 1 if rows is None else rows, full, as_json)

    return lambda: _show(page())


def _show(lines: Iterable[str]) -> int:
    console, highlight = Console(), JSONHighlighter()
    for line in lines:
        if console.is_terminal and isinstance(line, _Json):
            shown = Text(output.one_line(line))
            highlight.highlight(shown)
            console.print(shown, soft_wrap=True)
        else:
            output.say(line)
    return exits.DONE


class _Json(str):
    """A line of JSON, coloured on a terminal."""

    __slots__ = ()


def _overview_page(directory: Path, samples_per_chunk: int | None, every: bool, as_json: bool) -> Iterator[str]:
    found = inspection.overview(directory, samples_per_chunk, every=every)
    consumers = tolerate(lambda: list_consumers(directory, found.published.chunks), []) or ()
    advice = inspection.advise(found, inspection.training_of(consumers, found.samples_per_chunk))
    if as_json:
        yield json.dumps(_overview_values(found, advice))
        return
    yield from _overview_lines(found)
    yield from _titled("what to change", [line for one in advice for line in (f"  {one.text}", f"    {one.setting}")])


def _chunk_page(stream: Stream, number: int, rows: int, full: bool, as_json: bool) -> Iterator[str]:
    chunks = stream.published().chunks
    if number >= chunks:
        raise typer.BadParameter(f"no chunk {number}: {_published(chunks, 'chunk')}", param_hint="--chunk")
    with _deletion_told(stream, number):
        shown = inspection.describe_chunk(stream, number)
        if as_json:
            texts = ", ".join(map(row_text, inspection.read_rows(stream, number, 0, rows)))
            yield f'{json.dumps(_chunk_values(shown))[:-1]}, "rows": [{texts}]}}'
            return
        yield from _chunk_lines(shown)
        if shown.seal is not None and shown.seal.source is not None:
            yield from _titled("source position after it", _json_lines(output.pretty(shown.seal.source, full=full)))
        for row in inspection.read_rows(stream, number, 0, rows):
            yield ""
            yield from _row_lines(row, full)


def _row_page(stream: Stream, sample: int, rows: int, full: bool, as_json: bool) -> Iterator[str]:
    samples = stream.published().samples
    if sample >= samples:
        raise typer.BadParameter(f"no sample {sample}: {_published(samples, 'sample')}", param_hint="N")
    found = _rows_from(stream, sample, min(sample + rows, samples))
    if as_json:
        yield f'{{"rows": [{", ".join(map(row_text, found))}]}}'
        return
    for row in found:
        if row.sample > sample:
            yield ""
        yield from _row_lines(row, full)


def _published(number: int, noun: str) -> str:
    if not number:
        return "none is published"
    return f"{count(number, noun)} {'is' if number == 1 else 'are'} published, from 0 to {number - 1:,}"


def _rows_from(stream: Stream, sample: int, stop: int) -> Iterator[inspection.ShownRow]:
    while sample < stop:
        number, first = divmod(sample, stream.samples_per_chunk)
        with _deletion_told(stream, number):
            yield from inspection.read_rows(stream, number, first, stop - sample)
        sample = (number + 1) * stream.samples_per_chunk


@contextlib.contextmanager
def _deletion_told(stream: Stream, number: int) -> Iterator[None]:
    """Tells of a published chunk that is not there whether it was deleted by the stream's own rules."""
    try:
        yield
    except (ChunkMissing, ChunkRetired):
        raise
    except FileNotFoundError as error:
        retired = stream.retired()
        if number < retired:
            why = f"was deleted by the stream's producer, as were all chunks below {retired}"
            message, place = f"{stream.directory}: chunk {number} {why}", {"file": error.filename, "chunk": number}
            raise ChunkRetired(message, **place, chunks_before=retired) from error
        why = "is published, but this file of it is not there; on a network filesystem it may still have to appear"
        message = f"{error.filename}: chunk {number} {why}. `lazyshard verify` looks for more"
        raise ChunkMissing(message, file=error.filename, chunk=number) from error


def _row_lines(row: inspection.ShownRow, full: bool) -> Iterator[str]:
    arrays = "" if row.arrays is None else f" and {count(row.arrays, 'byte')} of arrays"
    tokens = "" if row.tokens is None else f", {count(row.tokens, 'token')}"
    where = f"sample {row.sample:,}: chunk {row.chunk:,}, row {row.row:,} (byte {row.byte:,})"
    yield f"{where}, {count(len(row.line), 'byte')}{arrays}{tokens}"
    yield from _json_lines(output.pretty(row.value, row.line, full=full))


def _json_lines(text: str) -> list[_Json]:
    return [_Json(line) for line in text.rstrip("\r\n").split("\n")]


def _titled(title: str, lines: Sequence[str]) -> Iterator[str]:
    """Yields lines under a heading, nothing where there are none."""
    if lines:
        yield from ("", title, *lines)


def _table(facts: Sequence[tuple[str, str]], most: int = 40) -> list[str]:
    width = min(most, max((len(name) for name, _ in facts), default=0))
    return [f"  {name:{width}}  {value}" for name, value in facts]


def _overview_lines(found: inspection.Overview) -> Iterator[str]:
    manifest, keys, tokens = found.manifest, found.keys, found.tokens
    yield str(found.directory)
    yield from _table(list(_facts(found)))
    encoding = {} if manifest is None else manifest.encoding or {}
    facts = [(name, fact if type(fact) is str else json.dumps(fact)) for name, fact in encoding.items()]
    cut = [(name, text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}...") for name, text in facts]
    yield from _titled("encoded with", _table(cut))
    rows = count(found.lengths.count, "row")
    if not found.complete:
        rows += f" in {found.looked_at:,} of {count(found.chunks, 'chunk')}, evenly spaced (--all takes all)"
    yield from _titled(f"row length in bytes, of {rows}", _distribution(found.lengths))
    arrays = found.arrays
    yield from _titled(f"arrays of a row in bytes, of {count(arrays.count, 'row')}", _distribution(arrays))
    title = f"row length in tokens, of {count(tokens.count, 'row')}: {tokens.total:,} tokens in all"
    yield from _titled(title, _distribution(tokens, _TOKEN_SHARES))
    if keys.rows:
        first = "the first row" if keys.rows == 1 else f"the first {keys.rows:,} rows"
        yield from ("", f"keys at the top level, in {first}")
        shown = list(islice(keys.rows_with.items(), output.MAX_KEYS))
        kinds = {key: " or ".join(keys.kinds[key]) for key, _ in shown}
        width = max(map(len, kinds.values()), default=0)
        facts = [(key, f"{kinds[key]:{width}}  {f'{rows:,}' if rows < keys.rows else 'all'}") for key, rows in shown]
        yield from _table(facts)
        if len(keys.rows_with) > output.MAX_KEYS:
            yield f"  and {len(keys.rows_with) - output.MAX_KEYS:,} more; --json lists them all"
    if found.unread:
        yield ""
        yield f"{count(found.unread, 'chunk')} could not be looked at, see `lazyshard verify`: {found.reason}"


def _facts(found: inspection.Overview) -> Iterator[tuple[str, str]]:
    manifest, published, head, rows = found.manifest, found.published, found.published.head, found.source_rows
    yield "stream", "without stream.json: filled by another program" if manifest is None else manifest.stream_id
    yield "samples per chunk", f"{found.samples_per_chunk:,}"
    retired = f", from {found.retired:,} on: those before are deleted" if found.retired else ""
    yield "chunks", f"{found.chunks:,}{retired}"
    yield "samples", f"{found.samples:,}{_packs(found) if found.packs else ''}"
    if rows is not None:
        refused = f", {rows.refused:,} of them refused" if rows.refused else ""
        yield "source rows", f"{'' if rows.exact else 'at least '}{rows.read:,} read{refused}"
    if (made := found.dealt) is not None:
        yield "balance", f"dealt by cost for {count(made.ranks, 'rank')}, micro batches of {made.micro_batch_size:,}"
    if found.lengths.count or not found.chunks:
        yield "bytes", f"{'' if found.complete else 'about '}{size(found.size)}"
    if manifest is not None:
        yield "begun", moment(manifest.created_at)
    if found.last_sealed_at is not None:
        yield "last published", moment(found.last_sealed_at)
    state = "" if head is None else f"; the producer is {head.state}" + (f": {head.note}" if head.note else "")
    yield "ended", "yes" if published.ended else f"no{state}"
    if published.gap is not None:
        yield "gap", f"chunk {published.gap:,} lacks its data or its marker: later ones do not count"


def _packs(found: inspection.Overview) -> str:
    most = found.source_rows.pack if found.source_rows is not None else None
    text = f" packs{f' of at most {most:,} tokens' if most else ''}, with "
    mean = found.packed / found.packs
    if found.packs == found.samples:
        return f"{text}{count(found.packed, 'row')}: {mean:.1f} each"
    return f"{text}about {round(mean * found.samples):,} rows: {mean:.1f} each in the {found.packs:,} looked at"


def _chunk_lines(shown: inspection.ShownChunk) -> Iterator[str]:
    last = shown.first + shown.rows - 1
    facts = [("chunk", f"{shown.number:,}"), ("samples", f"{shown.rows:,}: {shown.first:,} to {last:,}")]
    facts += [("bytes", f"{shown.size:,}")]
    facts += [] if shown.arrays is None else [("bytes of arrays", f"{shown.arrays:,}")]
    unsealed = ("seal", "a marker only, without digests")
    facts += [unsealed if shown.seal is None else ("sealed", moment(shown.seal.sealed_at))]
    yield str(shown.file)
    yield from _table(facts)
    yield from _titled("row length in bytes", _distribution(shown.lengths))
    title = f"row length in tokens, {shown.tokens.total:,} in all"
    yield from _titled(title, _distribution(shown.tokens, _TOKEN_SHARES))


def _distribution(lengths: Lengths, shares: Sequence[tuple[str, float]] = _SHARES) -> list[str]:
    """Returns how lengths are spread: a line of figures, and a bar for each bin; nothing where there are none."""
    if not lengths.count:
        return []
    figures = [("min", lengths.smallest), *((name, lengths.quantile(share)) for name, share in shares)]
    figures += [("max", lengths.largest), ("mean", round(lengths.mean))]
    bins = lengths.histogram()
    most = max(one.count for one in bins)
    labels = [f"{one.low:,}" if one.high == one.low + 1 else f"{one.low:,} to {one.high - 1:,}" for one in bins]
    width, digits = max(map(len, labels)), len(f"{most:,}")
    lines = ["  " + "  ".join(f"{name} {value:,}" for name, value in figures)]
    for label, one in zip(labels, bins, strict=True):
        # A bin that is not empty has a bar, however short.
        bar = "#" * -(-one.count * BAR_WIDTH // most)
        lines.append(f"  {label:>{width}}  {one.count:>{digits},}  {bar}".rstrip())
    return lines


def _overview_values(found: inspection.Overview, advice: Sequence[inspection.Advice]) -> dict[str, Any]:
    manifest, head, rows, dealt, keys = found.manifest, found.published.head, found.source_rows, found.dealt, found.keys
    by_name = {key: {"rows": number, "kinds": keys.kinds[key]} for key, number in keys.rows_with.items()}
    packs = {"tokens": rows and rows.pack, "looked_at": found.packs, "rows": found.packed}
    return {
        "stream": str(found.directory),
        "stream_id": manifest and manifest.stream_id,
        "samples_per_chunk": found.samples_per_chunk,
        "retired": found.retired,
        "chunks": found.published.chunks,
        "samples": found.published.samples,
        "bytes": found.size,
        "bytes_exact": found.complete,
        "begun_at": manifest and manifest.created_at,
        "last_sealed_at": found.last_sealed_at,
        "ended": found.published.ended,
        "state": head and head.state,
        "looked_at": found.looked_at,
        "unread": found.unread,
        "row_bytes": _length_values(found.lengths),
        "row_tokens": _token_values(found.tokens),
        **({"row_arrays_bytes": _length_values(found.arrays)} if found.arrays.count else {}),
        "encoding": None if manifest is None or manifest.encoding is None else dict(manifest.encoding),
        "packs": packs if found.packs else None,
        "source_rows": rows and {"read": rows.read, "refused": rows.refused, "exact": rows.exact},
        "keys": {"rows": keys.rows, "by_name": by_name},
        "dealt": dealt and {"ranks": dealt.ranks, "micro_batch_size": dealt.micro_batch_size},
        "advice": [one._asdict() for one in advice],
    }


def _chunk_values(shown: inspection.ShownChunk) -> dict[str, Any]:
    return {
        "file": str(shown.file),
        "chunk": shown.number,
        "first_sample": shown.first,
        "samples": shown.rows,
        "bytes": shown.size,
        **({} if shown.arrays is None else {"arrays_bytes": shown.arrays}),
        "sealed_at": shown.seal and shown.seal.sealed_at,
        "source": shown.seal and shown.seal.source,
        "row_bytes": _length_values(shown.lengths),
        "row_tokens": _token_values(shown.tokens),
    }


def row_text(row: inspection.ShownRow) -> str:
    """Returns the JSON, in ASCII, of a row and where it is; its own text is not parsed: numbers keep their digits."""
    where = {"sample": row.sample, "chunk": row.chunk, "row": row.row, "byte": row.byte, "bytes": len(row.line)}
    where |= {} if row.arrays is None else {"arrays_bytes": row.arrays}
    # Outside of strings these are nothing but white space, and within them they do not occur.
    text = row.line.decode().strip().translate(dict.fromkeys(b"\t\r\n", " "))
    value = _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text)
    return f'{json.dumps(where | {"tokens": row.tokens})[:-1]}, "value": {value}}}'


def _token_values(lengths: Lengths) -> dict[str, Any] | None:
    values = _length_values(lengths)
    return values and {"sum": lengths.total, "p90": lengths.quantile(0.9), "p99": lengths.quantile(0.99)} | values


def _length_values(lengths: Lengths) -> dict[str, Any] | None:
    if not lengths.count:
        return None
    figures = {name: lengths.quantile(share) for name, share in _SHARES}
    ends = {"max": lengths.largest, "mean": round(lengths.mean, 3)}
    bins = [[one.low, one.high, one.count] for one in lengths.histogram()]
    return {"rows": lengths.count, "min": lengths.smallest} | figures | ends | {"bins": bins}
